"""One host that updates on a stored batch and answers questions greedily.

    python -m tests.training.stored_batch_host OUT ADDRESS COUNT INDEX

The first host writes losses and gradients of one update to OUT/update.npz;
every host writes the greedy dialogues of its evaluation questions.
"""

import json
import pathlib
import sys

import jax
from jax.experimental import multihost_utils
import numpy as np

from stppo_jax.parallel import distributed
from stppo_jax.parallel import hosts as hosts_lib
from stppo_jax.rollout import evaluation
from stppo_jax.training import components as components_lib
from stppo_jax.training import engines
from tests.training import runs

_ROWS = 8


def main(out: str, address: str, count: str, index: str) -> None:
  place = distributed.place(address, int(count), int(index))
  with distributed.joined(place) as hosts:
    _update_and_answer(pathlib.Path(out), hosts)


def _update_and_answer(out: pathlib.Path, hosts: hosts_lib.Hosts) -> None:
  config = runs.config(mesh__fsdp=2)
  components = components_lib.build(config)
  learner = components.learner
  state = learner.start()
  with components_lib.build_services(config, components.questions) as services:
    parts = config, services, components.tokenizer
    engine = engines.build(*parts, learner.decoded, components.placement)
    engines.publish(engine, learner, state.params, 0)
    collector = engines.build_collector(*parts, engine)
    evaluator = evaluation.Evaluator(config, services, collector, hosts=hosts)
    _, trajectories = evaluator.run(greedy=True)
  dialogues = [
    [[int(i) for i in turn.token_ids] for turn in t.turns] for t in trajectories
  ]
  path = out / f'dialogues-{hosts.index}.json'
  path.write_text(json.dumps(dialogues), 'utf-8')

  packed = jax.tree.map(lambda x: x[:_ROWS][hosts.share(_ROWS)], runs.packed())
  batch, _ = learner.annotate(state, packed, reference=learner.reference())
  state, outputs = learner.update(state, batch, np.arange(_ROWS), 0)
  # The first moment is a tenth of the gradient, clipped.
  moments = {
    f'{name}{jax.tree_util.keystr(path)}': x
    for name, model in (('policy', state.policy), ('value', state.value))
    for path, x in jax.tree_util.tree_leaves_with_path(model.optimizer)
    if '.mu' in jax.tree_util.keystr(path)
  }
  moments = multihost_utils.process_allgather(moments, tiled=True)
  losses = {
    name: np.asarray(x)
    for name, x in jax.device_get(outputs.metrics).items()
    if name.endswith('loss')
  }
  if hosts.is_first:
    gradients = {f'gradient {name}': 10 * x for name, x in moments.items()}
    np.savez(out / 'update.npz', allow_pickle=False, **losses, **gradients)


if __name__ == '__main__':
  main(*sys.argv[1:])
