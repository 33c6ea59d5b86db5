# Two commands on a fresh machine: `make run` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
COMPILED := $(VENV)/.compiled
# Tests side by side, a file to a process. Tests wait for processes, timers and disks, so three keep two cores busy.
WORKERS ?= 3
# Some machines forbid Python to keep what it compiled. Here hundreds of processes would compile the same files again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test tests quick lint style types docs measures hostile mutants nsys clean

run: $(INSTALLED)  ## Measure one training step here, show it, and leave its page.
	$(BIN)/stepscope run --tag first
	$(BIN)/stepscope report last

test: style  ## Lint, types and tests.
	@$(MAKE) --no-print-directory --jobs=2 types tests

tests: $(COMPILED)
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

hostile: $(INSTALLED)  ## The long campaigns: kills, signals, directories that vanish, damaged files. Over an hour on two cores.
	$(BIN)/python -m tests.hostile.signals --out results/cpu/hostile/signals.json
	$(BIN)/python -m tests.hostile.churn --out results/cpu/hostile/churn.json
	$(BIN)/python -m tests.hostile.kills --out results/cpu/hostile/kills.json
	$(BIN)/python -m tests.hostile.inputs --out results/cpu/hostile/inputs.json
	$(BIN)/python -m tests.hostile.captures --cases 8000 --jobs $(WORKERS) --out results/cpu/hostile/captures.json
	$(BIN)/python -m tests.hostile.records --out results/cpu/hostile/records.json
	$(BIN)/python -m tests.hostile.captures --snapshots --cases 2000 --jobs $(WORKERS) --out results/cpu/hostile/snapshots.json
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --long

quick: $(COMPILED)  ## The tests that take little: under two minutes on two cores.
	$(BIN)/pytest -n $(WORKERS) --dist loadfile -m "not slow"

lint: style types

style: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# It takes one core for over a minute: beside the tests mostly what they leave of it, and it ends before they do.
types: $(INSTALLED)
	nice -n 5 $(BIN)/pyright --pythonpath $(BIN)/python

docs: $(INSTALLED)  ## The documents as a site, in site/. Whatever is wrong with it, as a broken link, fails.
	$(BIN)/sphinx-build --quiet --fail-on-warning -c docs/site -d build/site docs site
	@echo "Open site/index.html"

measures: $(INSTALLED)  ## How large the source is, how knotted, and where it says a thing twice.
	$(BIN)/python -m tests.measures

mutants: $(INSTALLED)  ## Put faults into the source one by one: do the tests see each? Up to half an hour.
	$(BIN)/python -m tests.mutation.run --out results/cpu/mutation

nsys:  ## Get Nsight Systems for this Debian machine; the tests marked nsys then run.
	scripts/install-nsys

# A new pip finds what belongs together in a third of the time. It compiles nothing: most modules are never imported.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[torch,dev]'
	touch $@

# Compiles the modules that the tests import, a quarter of what is installed, and the tests: the workers, which import
# the same at the same time, would each do it. What is wrong with a test they say.
$(COMPILED): $(INSTALLED)
	$(BIN)/pytest --collect-only -qq > $@ 2>&1 || true

clean:
	rm -rf $(VENV)
