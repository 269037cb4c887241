# make demo   pretrain a tiny GPST on the embedded text, save it, load it back as a user would, parse and generate
# make test   the test suite            make lint   style, types, docstrings, exported code
# make checkpoints   train the tiny models of model_cards/ anew, measure them, write cards, and archives in dist/checkpoints
# make versions   the short suite (tests/versions) on the transformers of newest.txt, or on another one: VERSION=5.20.0
# make newest   look for the newest transformers, write it to newest.txt, and run the short suite on it
# make gpu    everything that only a GPU can tell: tests, gradients, speed; see docs/speed.md
# make docs   the documentation site in site/; warnings are errors
# make transformers_tests   fetch the tests of transformers that `make test` runs on our models
# Everything runs in .venv, which is made and filled when needed. Only `make gpu` uses a GPU; no network beyond pip is used.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
PYTEST_ARGS ?=
TRANSFORMERS := $(shell grep '^transformers==' constraints.txt)
SHORT := tests/versions tests/models/tree_lm/test_adapter.py::test_an_adapter_loads_as_an_ordinary_model
VERSION ?= $(shell sed s/transformers==// newest.txt)
OTHER := $(VENV)/transformers-$(VERSION)
# Two workers with one thread each are faster on small tests than one worker with two threads.
NUM_WORKERS ?= 2

.PHONY: demo test gpu lint docs clean checkpoints transformers_tests versions newest

# torch goes first and alone: a pinned version that is already installed is kept by every later call.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt torch
	touch $@

$(VENV)/.train: $(VENV)/.torch pyproject.toml constraints.txt
	$(PIP) install --quiet --constraint constraints.txt --editable '.[train]'
	touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml constraints.txt
	$(PIP) install --quiet --constraint constraints.txt --editable '.[train,eval,test,docs,demo]'
	touch $@

# transformers' own tests of models, which ours pass too (tests/models/test_transformers_common.py), are only in its source
# distribution.
$(VENV)/.transformers_tests: $(VENV)/.torch constraints.txt
	rm -rf $(VENV)/transformers_tests
	mkdir -p $(VENV)/transformers_tests
	$(PIP) download --quiet --no-deps --no-binary transformers --dest $(VENV)/transformers_tests $(TRANSFORMERS)
	cd $(VENV)/transformers_tests && tar -xzf $(subst ==,-,$(TRANSFORMERS)).tar.gz $(subst ==,-,$(TRANSFORMERS))/tests
	rm $(VENV)/transformers_tests/*.tar.gz
	touch $@

transformers_tests: $(VENV)/.transformers_tests

demo: $(VENV)/.train
	$(BIN)/accelerate launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
		--num_cpu_threads_per_process 1 \
		training/pretrain_gpst.py --config gpst_tiny --output-dir runs/gpst_tiny \
		--overwrite-output-dir

checkpoints: $(VENV)/.train
	$(BIN)/python training/make_checkpoints.py

test: $(VENV)/.test $(VENV)/.transformers_tests
	$(BIN)/python -m pytest -q -n $(NUM_WORKERS) --dist loadfile --no-loadscope-reorder -m 'not slow' $(PYTEST_ARGS)

# One version of transformers and what it asks for are installed; torch and everything else are shared.
$(OTHER)/.done: $(VENV)/.test
	$(BIN)/python -m venv --clear $(OTHER)
	$(OTHER)/bin/python -m pip --disable-pip-version-check install --quiet transformers==$(VERSION)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> `$(OTHER)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'`/shared.pth
	touch $@

versions: $(OTHER)/.done
	$(OTHER)/bin/python -m pytest -q $(SHORT) $(PYTEST_ARGS)

newest: $(VENV)/.torch
	$(PIP) index versions transformers | sed -n '1s/.*(\(.*\))$$/transformers==\1/p' > newest.txt
	grep transformers== newest.txt
	$(MAKE) versions

gpu: $(VENV)/.test
	$(BIN)/python -m pytest -v -m gpu tests/models/test_gpu.py
	$(BIN)/python training/benchmark.py --device cuda
	$(BIN)/python training/benchmark.py --device cuda --precision tf32
	$(BIN)/python training/benchmark.py --device cuda --precision bf16

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pydoclint -q hf_synlm training
	$(BIN)/python training/release/lint_exports.py

# Not --quiet, under which warnings do not count. The variable silences a notice of the theme about its successors.
docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) build site *.egg-info .mypy_cache .ruff_cache .pytest_cache
