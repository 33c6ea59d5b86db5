# Two commands on a fresh machine: `make run` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Tests side by side, a file to a process; several files start and kill measurements of their own.
WORKERS ?= 2

.PHONY: run test lint nsys clean

run: $(INSTALLED)  ## Measure one training step here, and show it.
	$(BIN)/stepscope run --tag first

test: lint  ## Lint, types and tests.
	$(BIN)/pytest -n $(WORKERS) --dist loadfile

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

nsys:  ## Get Nsight Systems for this Debian machine; the tests marked nsys then run.
	scripts/install-nsys

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,dev]'
	touch $@

clean:
	rm -rf $(VENV)
