PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test parity multidevice dryrun-check lint clean

# The main job on the packaged tiny model, in a new directory each time.
demo: $(STAMP)-base
	$(BIN)/python -m sage_jax.main --config=configs/tiny.py --workdir=runs/demo-$$(date +%Y%m%d-%H%M%S)

# Everything a commit must pass that needs neither torch nor a second process.
test: $(STAMP)-dev lint
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not parity and not multidevice and not tpu_compiler" --durations=10

lint: $(STAMP)-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# Live comparison with torch and transformers.
parity: $(STAMP)-dev $(STAMP)-parity
	$(BIN)/python -m pytest -m parity --durations=5

# Eight fake CPU devices, and two processes of four.
multidevice: $(STAMP)-dev
	$(BIN)/python -m pytest -m multidevice --durations=5

# Programs of a step compiled for TPUs by libtpu, on any Linux machine.
dryrun-check: $(STAMP)-dev $(STAMP)-dryrun
	$(BIN)/python -m pytest -m tpu_compiler --durations=5

$(STAMP)-%: requirements.txt setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e "$(if $(filter base,$*),.,.[$*])"
	touch $@

clean:
	rm -rf $(VENV) .jax_cache runs build *.egg-info
