# Everything runs in .venv, which is made on first use and again when the dependencies change.

PYTHON ?= python3
BIN := .venv/bin
# Of Hypothesis, in `make test-all`: every example of a property, or a quarter (`quick`).
PROFILE ?= full
INSTALLED := .venv/.installed
# The tests start many processes, which need not compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-slow test-official test-clients check site audit format bench-ttft eval clean

demo: $(INSTALLED)
	$(BIN)/ragcache demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist worksteal

# With what takes a third of a second or more, of which `make test` runs a part: kills, state machines,
# loads, the page in a browser, requests by schema, second processes, scripts, most families of models;
# and with every example of a property and the tests with the mark `nightly`, unless PROFILE says
# otherwise. Where there is a PostgreSQL, also tests/cluster, whose soak takes RAGCACHE_SOAK_SECONDS
# (900). And the official clients of tests/clients/table.py.
test-all: test-slow test-official

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m "slow or not slow" --hypothesis-profile $(PROFILE) -n auto --dist worksteal

test-official: $(INSTALLED)
	$(BIN)/python -m pytest -m official tests/clients/test_clients.py

# Clients that others wrote, installed from PyPI and npm into ~/.cache/ragcache-test-clients, against
# a real service.
test-clients: $(INSTALLED)
	$(BIN)/python -m pytest -m clients tests/clients

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/house.py
	$(BIN)/python tools/prose.py
	$(BIN)/bandit --quiet --severity-level medium --configfile pyproject.toml --recursive ragcache schemas connectors api
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/zizmor --offline --quiet --min-severity medium .github
	$(BIN)/python tools/release.py
	$(BIN)/python tools/signatures.py
	$(MAKE) site

# The documentation, in build/site.
site: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Known vulnerabilities of the tested versions. Needs pip-audit, and fails where the index has no such
# data.
audit: $(INSTALLED)
	$(BIN)/pip install --quiet pip-audit
	$(BIN)/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-ttft: $(INSTALLED)
	$(BIN)/ragcache bench ttft

# The embedded reader on the example handbook, through the real retriever.
eval: $(INSTALLED)
	rm -rf build/eval
	$(BIN)/ragcache ingest handbook examples/handbook --state build/eval
	$(BIN)/ragcache eval handbook examples/questions.jsonl --state build/eval

clean:
	rm -rf .venv build dist *.egg-info

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	tools/install.sh .venv -e '.[dev]'
	touch $@
