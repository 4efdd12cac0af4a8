# make train    trains, verifies and draws the default model in runs/tiny_lm
# make test     format, lint, types and every test
# make mutants  which small wrong edits of attention/ and models/ the tests notice
#
# make test TYPES=off runs the tests without a check of every annotated signature.
# All first install pinned versions into .venv. PYTHON=python3.12 picks another Python
# for a new .venv.

PYTHON := python3
BIN := .venv/bin
TYPES := on
INSTALLED := .venv/installed

.PHONY: train test mutants

train: $(INSTALLED)
	$(BIN)/python -m train.main --config=configs/tiny_lm.py --workdir=runs/tiny_lm

test: $(INSTALLED)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	TYPES=$(TYPES) $(BIN)/pytest --numprocesses=2 --dist=worksteal

mutants: $(INSTALLED)
	$(BIN)/python -m tests.mutants

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo 'error: $(PYTHON) must be Python 3.11 or newer; name one with PYTHON=...' >&2; \
	    exit 1; }
	@echo 'Installing pinned packages into .venv: a minute or two.'
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check \
	    --constraint constraints.txt --editable '.[test]'
	@touch $@
