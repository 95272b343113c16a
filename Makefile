# Two commands for a fresh machine: `make demo` sets up and trains the example, `make test` sets up and runs the tests.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: demo demo-pipeline test nightly cuda bench overhead coverage lint types format clean

demo: $(STAMP)
	OMP_NUM_THREADS=1 $(RUN) -m torch.distributed.run --standalone --nproc-per-node 4 examples/train_llama.py

demo-pipeline: $(STAMP)
	OMP_NUM_THREADS=1 PYTHONPATH=. $(RUN) -m torch.distributed.run --standalone --nproc-per-node 4 examples/pipeline.py

# The fast tests; CI also runs those that are marked long, by TESTS="not slow".
TESTS ?= not slow and not long
test: $(STAMP)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n 3 --dist worksteal --durations=15 -m "$(TESTS)"

nightly: $(STAMP)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n 2 --dist worksteal --durations=30 -m "slow or not slow"

cuda: $(STAMP)
	$(RUN) -m pytest -q tests/autopar/cuda

bench: $(STAMP)
	$(RUN) benchmarks/planning.py

overhead: $(STAMP)
	OMP_NUM_THREADS=1 $(RUN) benchmarks/overhead.py

coverage: $(STAMP)
	OMP_NUM_THREADS=1 $(RUN) benchmarks/coverage.py

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(STAMP)
	$(RUN) -m mypy

format: $(STAMP)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# torch comes first and pinned: what an unpinned one pulls may be gigabytes.
$(STAMP): pyproject.toml
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet "$(TORCH)"
	$(RUN) -m pip install --quiet -e ".[dev]"
# Without what it depends on: torchvision would bring another torch.
	$(RUN) -m pip install --quiet --no-deps "vit-pytorch>=1.20"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
