# Two commands for a newcomer: `make demo` and `make test`.  Each sets up everything it
# needs in .venv from the locked dependencies; Python 3.11 or newer, git and make suffice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXPERIMENT ?= 34b-general
# The folders of the repository that are packages.
ROOMS := $(patsubst %/__init__.py,%,$(wildcard */__init__.py))
# The folders of our labs, a distribution of its own.
LABS := $(patsubst labs/%/__init__.py,%,$(wildcard labs/*/__init__.py))
# Two workers; one that has nothing left takes tests of the other.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

# Where it is set, every start compiles all of our modules again, which takes half a second.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test tests heavy check quick-tests lint types docs dist live clean lock

demo: $(VENV)/.installed
	$(BIN)/blis-replay validate $(EXPERIMENT)

# Two at a time, in this order: the type checker uses one processor, and so runs beside the linter and then the tests,
# which begin where the linter has nothing to say.
test: $(VENV)/.installed-dev
	$(MAKE) --no-print-directory -j 2 lint types tests

tests:
	$(PYTEST) -m "not heavy" --durations=5 --durations-min=2.5

# The rest of the tests: each takes more than two and a half seconds.
heavy: $(VENV)/.installed-dev
	$(PYTEST) -m heavy

# For the loop of daily work: what needs no recording, no browser and less than a minute.  A test that takes long
# is named at the end; mark it `slow`.
check: $(VENV)/.installed-dev
	$(MAKE) --no-print-directory -j 2 lint types quick-tests

quick-tests:
	$(PYTEST) -q -m "not realdata and not browser and not slow and not heavy" --durations=5 --durations-min=1

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/plain_english.py

# A type checker cannot follow an editable install into the folders, so it gets a package of links to them.
# What it knows of files that did not change is kept.
types: $(VENV)/.installed-dev
	rm -rf build/typed && mkdir -p build/typed/blis_replay build/typed/blis_replay_labs
	ln -s $(ROOMS:%=../../../%) build/typed/blis_replay
	ln -s $(LABS:%=../../../labs/%) build/typed/blis_replay_labs
	cd build/typed && ../../$(BIN)/python -m mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p blis_replay -p blis_replay_labs

# Runs every command of the documentation, fails where a page is not what it prints, and builds build/site.
docs: $(VENV)/.installed-dev
	$(BIN)/python scripts/docs.py

# Wheel and sdist in dist/, each installed into an empty environment and tried there.
dist:
	$(PYTHON) scripts/dist.py

# A real vLLM server on this machine, without a GPU: recorded, replayed, and one table.  3.5 GB and some 15 minutes, of
# two cores that have nothing else to do.
live: $(VENV)/.installed
	$(BIN)/python scripts/live.py

# Python compiles what is imported; the rest, which is most of it, would take a quarter of a minute.
$(VENV)/.installed: requirements.lock requirements-build.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("blis-replay needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --require-hashes -r requirements.lock -r requirements-build.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

# For work on the project: the instrument and the labs.
$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.lock labs/pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable ./labs
	touch $@

# Newer versions of everything: run it, run `make test`, commit both locks.
lock: $(VENV)/.installed-dev
	$(BIN)/pip install --quiet pip-tools
	$(BIN)/pip-compile --quiet --upgrade --generate-hashes --strip-extras --no-annotate --no-emit-index-url --no-emit-find-links --no-header --extra all --output-file requirements.lock pyproject.toml
	$(BIN)/pip-compile --quiet --upgrade --generate-hashes --strip-extras --allow-unsafe --no-annotate --no-emit-index-url --no-emit-find-links --no-header --constraint requirements.lock --extra dev --output-file requirements-dev.lock pyproject.toml

clean:
	rm -rf $(VENV) build dist .blis-replay .pytest_cache .mypy_cache .ruff_cache .hypothesis
