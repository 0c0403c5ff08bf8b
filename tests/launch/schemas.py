"""Checks manifests by the public schemas of Kubernetes and of JobSet."""

import base64
from collections.abc import Iterable
import itertools
from typing import Any

from kubeflow_trainer_api import models


def lost(document: Any, known: Any, path: str = ''):
  """Yields the path of each value that a schema's object does not have."""
  if isinstance(document, dict) and isinstance(known, dict):
    for key, value in document.items():
      yield from lost(value, known.get(key), f'{path}.{key}')
  elif isinstance(document, list) and isinstance(known, list):
    for value, other in itertools.zip_longest(document, known):
      yield from lost(value, other, path)
  elif document != known:
    yield path


def check(documents: Iterable[Any]) -> None:
  """Asserts that required fields are there with their types, and no others."""
  for document in documents:
    kind = document['kind']
    if kind == 'JobSet':
      model = models.JobsetV1alpha2JobSet
    elif kind == 'Deployment':
      model, document = (
        models.IoK8sApiCoreV1PodTemplateSpec,
        document['spec']['template'],
      )
    else:  # the package has no others
      assert kind in ('ConfigMap', 'Service')
      assert document['apiVersion'] == 'v1' and document['metadata']['name']
      continue
    # It drops what the schema does not have, and adds defaults.
    known = model.from_dict(document)
    if known is None or (found := list(lost(document, known.to_dict()))):
      raise AssertionError(found if known else 'no object')


def archive(config_map: Any) -> bytes:
  """Returns the archive of a ConfigMap."""
  assert set(config_map) == {'apiVersion', 'kind', 'metadata', 'binaryData'}
  (text,) = config_map['binaryData'].values()
  return base64.b64decode(text, validate=True)
