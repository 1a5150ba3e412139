# Every target sets up its own virtual environment; all that has to be there is Python >= 3.10 and the package index.

PYTHON ?= python3
VENV ?= .venv
# Work-stealing keeps neighbours on one worker, and with them the servers that they share.
PYTEST_ARGS ?= -n 3 --dist worksteal
EXTRAS = postgres,mysql,migrate,bodies,codings,orjson,encryption,prometheus,opentelemetry
# For how long the proof goes on, and from which seed; a new one if there is none.
SECONDS ?= 60
SEED ?=
# For how many keys the clients race at each isolation level; 25 in `make test`.
KEYS ?= 1500
# Where `make demo-shop` serves its page.
PORT ?= 5000
# Which benchmarks run; and whether with small sizes.
BENCH ?= others paths fingerprint growth startup memory
QUICK ?=
OWN_BENCH = $(filter-out others,$(BENCH))
OTHERS_BENCH = $(filter others,$(BENCH))
BIN = $(VENV)/bin
# The tests start some hundred processes. Each would compile the tree, and what no installer has compiled, anew.
unexport PYTHONDONTWRITEBYTECODE
PIP = $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
UV = $(BIN)/uv --quiet --no-python-downloads
DECLARED = pyproject.toml setup.cfg

# Where the wheel, and the oldest versions that pyproject.toml allows, are tested: apart from the tree.
WHEEL = build/wheel
LOWEST = build/lowest
# Where the benchmark `others` runs. The packages in it must not decide on the versions that the rest is measured with.
OTHERS = build/others
# What can fail there alone: a file that the wheel lacks; a dependency that is too old. The rest is `make test`'s.
FOR_WHEEL = tests/unit tests/neighbours tests/migration tests/test_docs.py
FOR_LOWEST = tests/store tests/app tests/migration
# The oldest Python among those that work here: old versions of dependencies may not install on new ones.
LOWEST_PYTHON ?= $(shell for python in python3.10 python3.11 $(PYTHON); do \
	$$python -c '' 2>/dev/null && { echo $$python; break; }; done)

.NOTPARALLEL:
.PHONY: help demo demo-shop demo-provider test pictures proof race bench memory lint types docs test-wheel test-lowest check clean

help:
	@echo 'make demo         run the example: payments that are charged once'
	@echo 'make demo-shop    serve a page where its payments can be made, and their answers lost (PORT=5000)'
	@echo 'make demo-provider  run the other one: a process that is killed while it charges'
	@echo 'make test         run the tests (PYTEST_ARGS="-k name" for some of them)'
	@echo 'make pictures     take the pictures of the docs anew (needs Chromium)'
	@echo 'make proof        kill, freeze and cut for a while, and check what came of it (SECONDS=600 SEED=7)'
	@echo 'make race         race for keys in atomic mode, at each isolation level (KEYS=1500)'
	@echo 'make bench        measure what a request costs (BENCH=paths for one of benchmarks/; with QUICK=1 figures mean little)'
	@echo 'make memory       measure what a server takes for bodies of 1 GiB; fails over 64 MiB (Linux)'
	@echo 'make lint         ruff and the import contracts'
	@echo 'make types        mypy'
	@echo 'make docs         build the documentation into docs/_build/html'
	@echo 'make test-wheel   build the wheel, and test it installed on its own'
	@echo 'make test-lowest  test with the oldest versions of all dependencies'
	@echo 'make check        test, lint, types and docs'
	@echo 'make clean        delete everything that make has made'

demo: $(VENV)/installed-demo
	@$(BIN)/python -m examples.payments.demo
	@echo 'To see it on a page, and lose answers yourself: make demo-shop'

demo-shop: $(VENV)/installed-demo
	@$(BIN)/python -m examples.payments.shop $(PORT)

demo-provider: $(VENV)/installed-demo
	@$(BIN)/python -m examples.provider.demo

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

pictures: $(VENV)/installed-dev
	mkdir -p docs/_static
	IDEMPOTENCY_TESTS_REQUIRE_ALL=1 IDEMPOTENCY_TESTS_PICTURES=docs/_static $(BIN)/python -m pytest -n 0 tests/browser

proof: $(VENV)/installed-dev
	PROOF_SECONDS=$(SECONDS) PROOF_SEED=$(SEED) $(BIN)/python -m pytest -n 0 -s tests/acceptance/test_proof.py::test_proof

race: $(VENV)/installed-dev
	ATOMIC_KEYS=$(KEYS) $(BIN)/python -m pytest -n 0 -s --timeout 600 tests/app/test_atomic_races.py -k no_view_runs_twice

bench: $(if $(OWN_BENCH),$(VENV)/installed-dev) $(if $(OTHERS_BENCH),$(OTHERS)/installed)
	$(if $(OTHERS_BENCH),$(OTHERS)/bin/python -m benchmarks others $(if $(QUICK),--quick))
	$(if $(OWN_BENCH),$(BIN)/python -m benchmarks $(OWN_BENCH) $(if $(QUICK),--quick))

memory: $(VENV)/installed-dev
	$(BIN)/python -m benchmarks memory

lint: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/lint-imports

types: $(VENV)/installed-dev
	$(BIN)/mypy

docs: $(VENV)/installed-dev
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

check: test lint types docs

test-wheel: $(VENV)/installed-dev
	rm -rf $(WHEEL)
	$(UV) build --wheel --out-dir $(WHEEL)
	$(UV) venv --python $(BIN)/python $(WHEEL)/venv
	$(UV) pip install --python $(WHEEL)/venv "$$(echo $(WHEEL)/*.whl)[$(EXTRAS)]" --group test
	$(call test_apart,$(WHEEL),3,$(FOR_WHEEL))

test-lowest: $(VENV)/installed-dev
	rm -rf $(LOWEST)
	$(UV) build --wheel --out-dir $(LOWEST)
	$(UV) venv --python "$$($(LOWEST_PYTHON) -c 'import sys; print(sys.executable)')" $(LOWEST)/venv
	$(UV) pip compile --python $(LOWEST)/venv --resolution lowest-direct --all-extras --group drivers pyproject.toml \
		--no-header --output-file $(LOWEST)/versions.txt
	$(UV) pip install --python $(LOWEST)/venv --constraint $(LOWEST)/versions.txt \
		"$$(echo $(LOWEST)/*.whl)[$(EXTRAS)]" --group test
	$(call test_apart,$(LOWEST),2,$(FOR_LOWEST))

# The tests, and what they read, in a folder without the package, so that they can only import the installed one.
define test_apart
	mkdir $(1)/tree
	cp -R tests examples docs README.md pyproject.toml $(1)/tree
	cd $(1)/tree && ../venv/bin/python -c \
		'import flask_idempotency as it; assert "site-packages" in it.__file__, it.__file__; print("testing", it.__file__)'
	cd $(1)/tree && IDEMPOTENCY_TESTS_TURN=$(2) ../venv/bin/python -m pytest $(PYTEST_ARGS) -m "not thorough" $(3)
endef

clean:
	rm -rf $(VENV) build dist docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find flask_idempotency tests examples benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/created:
	@command -v $(PYTHON) >/dev/null || { \
		echo 'There is no $(PYTHON) here. Flask-Idempotency needs Python 3.10 or newer; name one with make PYTHON=...' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "$(PYTHON) is $$($(PYTHON) -V 2>&1). Flask-Idempotency needs Python 3.10 or newer; name one with make PYTHON=..." >&2; exit 1; }
	@echo 'Setting up $(VENV): this is done once, and takes a minute or two.'
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --upgrade pip
	@touch $@

$(VENV)/installed-demo: $(DECLARED) | $(VENV)/created
	$(PIP) install --editable . --group demo
	@touch $@

$(VENV)/installed-dev: $(DECLARED) | $(VENV)/created
	$(PIP) install --editable '.[$(EXTRAS)]' --group dev
	@touch $@ $(VENV)/installed-demo

$(OTHERS)/installed: $(DECLARED) | $(VENV)/created
	$(BIN)/python -m venv $(OTHERS)
	$(OTHERS)/bin/python -m pip --disable-pip-version-check --quiet --quiet install --upgrade pip
	$(OTHERS)/bin/python -m pip --disable-pip-version-check --quiet --quiet install --editable '.[$(EXTRAS)]' --group others
	@touch $@
