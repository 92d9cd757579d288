# make demo   set up and run the main job on the embedded model; pictures go to demo-output/
# make space  set up and serve the page on which many draw on one engine; MODEL_ID and PID_ID choose other models
# make test   set up and run the tests
# make fuzz   set up and send the server 2,000 requests made from its own document
# make bench  set up and measure the engine against the stock pipeline, a quarter of an hour on an idle machine
# make lint   ruff, its formatter, mypy
PYTHON ?= python3
VENV ?= .venv
PYTEST_FLAGS ?=
DEMO_OUTPUT ?= demo-output

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
# Threads that wait give their core back. By default OpenMP's spin, and beside another busy process small models then
# take 30 times as long.
export OMP_WAIT_POLICY ?= passive
# What an install depends on; an older stamp is made anew.
SOURCES := pyproject.toml constraints.txt

.PHONY: demo space test fuzz bench lint clean
.DEFAULT_GOAL := test

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one with: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo-installed: $(VENV)/.created $(SOURCES)
	$(PIP_INSTALL) -e '.[demo]'
	@touch $@

$(VENV)/.dev-installed: $(VENV)/.created $(SOURCES)
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.demo-installed

demo: $(VENV)/.demo-installed
	$(BIN)/diffusers-continuous demo --output $(DEMO_OUTPUT)

space: $(VENV)/.demo-installed
	$(BIN)/python space_app.py

test: $(VENV)/.dev-installed
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

fuzz: $(VENV)/.dev-installed
	FUZZ_CASES=2000 $(BIN)/python -m pytest tests/test_serving_fuzz.py $(PYTEST_FLAGS)

bench: $(VENV)/.dev-installed
	$(BIN)/python scripts/bench_offline.py --requests 8 --size 128 --steps 20 --cfg 4 --repeats 3 --compile
	$(BIN)/python scripts/bench_offline.py --requests 8 --steps 20 --cfg 4 --repeats 3 --mixed
	$(BIN)/python scripts/bench_offline.py --requests 1 --size 128 --steps 20 --cfg 4 --repeats 3
	$(BIN)/python scripts/bench_offline.py --requests 1 --size 128 --steps 20 --cfg 1 --repeats 3

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src

clean:
	rm -rf $(VENV) $(DEMO_OUTPUT) test-artifacts build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
