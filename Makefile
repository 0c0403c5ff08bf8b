# Everything a newcomer or the CI runs. `make help` lists it.

PYTHON ?= python3
VENV ?= .venv
# ROW is the name that version 0.1 had for it.
ROW ?= st_ppo
ALGORITHM ?= $(ROW)
SEED ?= 0
CONFIG ?= configs/quickstart.py
WORKDIR ?= runs/quickstart-$(ALGORITHM)-seed$(SEED)
JOBS ?= 2
ARGS ?=
FAST_TESTS ?= tests/rl tests/envs tests/configs
# These compile many programs of their own; `make test` runs them.
NOT_FAST := $(addprefix --ignore=tests/rl/, \
  properties_test.py golden_test.py hlo_test.py diagnostics_test.py \
  mismatch_diagnostics_test.py segments_test.py group_advantages_test.py)
BENCH ?= .cache/bench
SITE ?= .cache/mkdocs
SITE_PAGES := README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md LICENSE \
  assets configs docs launch studies

# One order of the operations, whatever stands beside them: for comparing two
# programs that differ in little. A run is faster without.
XLA := XLA_FLAGS="$(XLA_FLAGS) \
  --xla_cpu_enable_concurrency_optimized_scheduler=false"

# Huge pages on Linux spare a page fault every 4 KiB of a large CPU buffer.
PAGES := GLIBC_TUNABLES=glibc.malloc.hugetlb=1
# What a step frees waits in the process for the next one, which else would have
# the system clear it again; for comparing, not for long runs.
KEPT := $(PAGES):glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184
# One heap for all threads: the others cannot grow beyond 64 MiB. Threads that
# work side by side would wait for one another at it.
ONE_HEAP := $(KEPT):glibc.malloc.arena_max=1

BIN := $(VENV)/bin
UV := $(BIN)/uv
INSTALL := $(UV) pip install --quiet --python $(BIN)/python
# The stamps name what was installed: unchanged files install nothing.
RUNTIME := $(VENV)/.installed-runtime
TESTING := $(VENV)/.installed-testing

# Python keeps the bytecode of modules unless it is told not to: then each of the
# hundreds of processes that tests start would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help quickstart compare check test test-fast test-slow test-torch test-torch-slow
.PHONY: lint types docs site bench chaos lock

help:  ## list these targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) \
	  | sed -E 's/:[^#]*## */\t/' | expand -t 17

quickstart: $(RUNTIME)  ## train on a synthetic wiki (ALGORITHM=token_ppo SEED=1)
	$(PAGES) $(BIN)/python -m stppo_jax train --config=$(CONFIG):$(ALGORITHM) \
	  --config.seed=$(SEED) --workdir=$(WORKDIR) $(ARGS)

compare: $(RUNTIME)  ## compare token and turn ratios, with paired seeds
	$(PAGES) $(BIN)/python -m stppo_jax ablate \
	  --config=studies/token_or_turn.py --workdir=runs/token_or_turn $(ARGS)

check: $(TESTING)  ## lint, types and the fast tests: before every commit
	$(MAKE) lint
	$(MAKE) -j2 types test-fast

# Each worker begins with half of the list, so what a module makes for its tests
# and the programs that they share are made once.
test: $(TESTING)  ## all tests but the slow ones
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal \
	  -m 'not slow' tests $(ARGS)

test-fast: $(TESTING)  ## the tests of the folders that answer in seconds
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal \
	  -m 'not slow' $(NOT_FAST) $(FAST_TESTS) $(ARGS)

test-slow: $(TESTING)  ## the slow tests
	$(BIN)/python -m pytest -q -m slow tests

# Without torch its tests would be skipped: then this fails.
test-torch: $(BENCH)/.installed  ## the tests that compare with torch
	$(BENCH)/bin/python -c 'import torch'
	$(BENCH)/bin/python -m pytest -q -n $(JOBS) --dist worksteal \
	  -m 'torch and not slow' \
	  tests $(ARGS)

test-torch-slow: $(BENCH)/.installed  ## the slow tests that compare with torch
	$(BENCH)/bin/python -c 'import torch'
	$(BENCH)/bin/python -m pytest -q -m 'torch and slow' tests

lint: $(TESTING)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TESTING)  ## pyright
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(RUNTIME)  ## write the generated pages and tables
	PYTHONPATH=. $(BIN)/python docs/make_algorithms.py
	PYTHONPATH=. $(BIN)/python docs/make_collapse.py

# The pages stand at their paths in the repository, so that links to files beside
# docs/ lead somewhere on the site, too.
site: $(SITE)/.installed  ## build the documentation as a site in .cache/site/html
	rm -rf .cache/site/pages
	mkdir -p .cache/site/pages
	ln -s $(addprefix $(CURDIR)/,$(SITE_PAGES)) .cache/site/pages
	$(SITE)/bin/mkdocs build --quiet

chaos: $(TESTING)  ## inject faults into a run of two processes (ARGS=--faults=8)
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.chaos \
	  --seed=$(SEED) $(ARGS)

bench: $(BENCH)/.installed  ## measure updates, collecting, search, reports, games, saves, commands, the first comparison
	$(XLA) $(BENCH)/bin/python -m benchmarks.update $(ARGS)
	$(PAGES) $(BENCH)/bin/python -m benchmarks.torch_update $(ARGS)
	$(BENCH)/bin/python -m benchmarks.waste $(ARGS)
	$(BENCH)/bin/python -m benchmarks.schedule $(ARGS)
	$(ONE_HEAP) $(BENCH)/bin/python -m benchmarks.vocabulary $(ARGS)
	$(KEPT) $(BENCH)/bin/python -m benchmarks.collect $(ARGS)
	$(BENCH)/bin/python -m benchmarks.retrieval $(ARGS)
	$(BENCH)/bin/python -m benchmarks.report $(ARGS)
	$(BENCH)/bin/python -m benchmarks.text_games $(ARGS)
	$(BENCH)/bin/python -m benchmarks.checkpoints $(ARGS)
	$(BENCH)/bin/python -m benchmarks.commands $(ARGS)
	$(BENCH)/bin/python -m benchmarks.first_comparison $(ARGS)

# An environment of its own: with torch beside it, transformers is another.
$(BENCH)/.installed: requirements-test.txt benchmarks/requirements.txt
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install --quiet \
	  --requirement requirements-test.txt \
	  --requirement benchmarks/requirements.txt
	@touch $@

$(SITE)/.installed: docs/requirements.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --requirement docs/requirements.txt
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Some tools make environments without pip.
$(BIN)/pip: | $(BIN)/python
	$(BIN)/python -m ensurepip --default-pip

# It installs the same packages faster than pip.
$(UV): | $(BIN)/pip
	$(BIN)/python -m pip install --quiet uv

$(RUNTIME): requirements.txt | $(UV)
	$(INSTALL) --requirement requirements.txt
	@touch $@

# Holds the runtime's pins too, so testing needs no second install.
$(TESTING): requirements-test.txt | $(UV)
	$(INSTALL) --requirement requirements-test.txt
	@touch $@ $(RUNTIME)

# The reason of each direct dependency, from the .in files, behind its pin.
REASONS := awk ' \
  function name(s) { sub(/[<>=!~; \[].*/, "", s); return tolower(s) } \
  FILENAME ~ /[.]in$$/ { \
    if ((i = index($$0, "  \#"))) reason[name($$0)] = substr($$0, i); next } \
  { print $$0 reason[name($$0)] }'
COMPILE := $(UV) pip compile --quiet --upgrade --universal \
  --python-version 3.11 --no-annotate --no-header

# Never a prerequisite: a fresh clone has no meaningful file times.
lock: $(UV)  ## pin the newest allowed requirements
	$(COMPILE) requirements.in > .lock.new
	@$(REASONS) requirements.in .lock.new > requirements.txt
	$(COMPILE) --constraint requirements.txt requirements-test.in > .lock.new
	@$(REASONS) requirements.in requirements-test.in .lock.new \
	  > requirements-test.txt
	@rm .lock.new
