# `make quickstart` and `make test` are all a newcomer needs; both work in a fresh clone.
# Override with e.g. `make quickstart PYTHON=python3.12 ARGS="--size small --device cuda"`.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
JOBS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

.PHONY: help quickstart test test-serving lint clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart  train a 4 M-parameter model on real text, about six minutes on two CPU cores (ARGS=... adds flags)"
	@echo "make test        run every test (ARGS=... adds pytest arguments, JOBS=8 runs eight files at a time)"
	@echo "make test-serving  build llama.cpp (ten minutes) and compare what it computes with a model trained here"
	@echo "make lint        ruff and mypy"
	@echo "make clean       remove the virtual environment and caches; keeps runs/"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, got %s: pass PYTHON=/path/to/python3.11" % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-train: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[train]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[dev]'
	@touch $@

quickstart: $(VENV)/.installed-train
	$(BIN)/python examples/train_quickstart.py $(ARGS)

# The tests' tensors are tiny: one thread each, and JOBS files at a time.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile $(ARGS)

# llama.cpp with the converter that its Python distribution bundles; `docs/serving.md` says what is compared.
LLAMA_CPP := llama_cpp_python-0.3.36

build/$(LLAMA_CPP)/pyproject.toml: | $(VENV)/.installed-dev
	$(BIN)/python -m pip download --disable-pip-version-check --no-deps --no-binary llama-cpp-python --dest build llama-cpp-python==0.3.36
	tar -xzf build/$(LLAMA_CPP).tar.gz -C build

$(VENV)/.installed-serving: $(VENV)/.installed-dev build/$(LLAMA_CPP)/pyproject.toml
	$(PIP) ./build/$(LLAMA_CPP)
	@touch $@

test-serving: $(VENV)/.installed-serving
	OMP_NUM_THREADS=1 LLAMA_CPP_SOURCE=$(CURDIR)/build/$(LLAMA_CPP)/vendor/llama.cpp $(BIN)/python -m pytest tests/serving -s $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
