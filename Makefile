# Every target sets up `.venv` by itself: from the lock file of the Python it finds, again when the lock changes.
#   make PYTHON=/path/to/python3 ...   another Python;   make JOBS=8 test   more test processes
#   make CASES=even test   one of the two halves in conftest.py: of the cases, and of tests below the public functions

PYTHON ?= $(shell sh .ci/find-python)
VENV ?= .venv
JOBS ?= 2
LIMIT ?= 2
CASES ?= all
export PYTHONPATH := $(CURDIR)
# Of tests and notebooks, which are processes beside each other on small arrays, BLAS in one thread takes 8% fewer CPU seconds.
export OPENBLAS_NUM_THREADS := 1
# The programs of benchmarks/: those that run by themselves.
BENCHMARKS = $(sort $(shell grep -l __main__ benchmarks/*/*.py))
PY := $(VENV)/bin/python

program = $(wildcard benchmarks/*/$(subst -,_,$(1)).py)

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-hosts test test-compilers test-models lint types format imports rules notebooks render pages counts readme docs release lock clean distclean

help:  ## list the targets
	@echo "make demo and make test need only Python 3.11+ and make; the rest is set up in $(VENV)."
	@sed -n 's/^\([a-z%-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'
	@echo "benchmarks: $(subst _,-,$(patsubst %.py,bench-%,$(notdir $(BENCHMARKS))))"

setup:  ## the virtual environment, pinned by requirements/
	@test -n "$(PYTHON)"
	@sh .ci/venv $(VENV) "$(PYTHON)"

demo: setup  ## plan and run three networks on 8 virtual CPU devices (under 4 minutes)
	@echo "== demo: python -m demo"
	@$(PY) -m demo

demo-hosts: setup  ## train the demo's GPT in two processes of four virtual CPU devices
	@echo "== demo-hosts: examples/several_processes.py, twice"
	@sh examples/two_processes.sh $(PY)

test: setup  ## every test and every documented example, in JOBS processes
	@echo "== test: pytest, $(JOBS) processes, $(CASES) cases"
	@$(PY) -m pytest -q -n $(JOBS) --dist worksteal --durations=15 --cases $(CASES)

lint: setup  ## ruff: rules and formatting
	@echo "== lint: ruff check, ruff format --check"
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

types: setup  ## pyright, standard
	@echo "== types: pyright"
	@$(PY) -m pyright --pythonpath $(PY)

format: setup  ## let ruff write what lint asks for
	@echo "== format: ruff check --fix, ruff format"
	@$(PY) -m ruff check --fix-only .
	@$(PY) -m ruff format .

imports: setup  ## print the import graph of the package, with counts
	@$(PY) tests/helpers/import_graph.py

rules: setup  ## check every sharding rule against arrays on 2 to 8 devices: wrong and missing ones
	@echo "== rules: benchmarks/correctness/rules.py, some candidates of every operator; LIMIT=8 for more"
	@$(PY) benchmarks/correctness/rules.py --limit $(LIMIT)

test-compilers: setup  ## fidelity on the real TPU and GPU compilers, in an environment of its own
	@echo "== test-compilers: benchmarks/compilers/compilers.py"
	@$(PY) benchmarks/compilers/compilers.py

test-models: setup  ## third-party models, plain and sharded, in an environment of their own
	@echo "== test-models: benchmarks/models/models.py"
	@$(PY) benchmarks/models/models.py

bench-%: setup  ## run the program % of benchmarks/*/ (benchmarks/README.md lists them)
	@test -n "$(call program,$*)" || { echo "no benchmark $*; make help lists them"; exit 1; }
	@echo "== bench: $(call program,$*)"
	@$(PY) $(call program,$*)

notebooks: setup  ## run every notebook from a clean start, and compare what it keeps with what it says
	@echo "== notebooks: $(words $(wildcard notebooks/*.ipynb)) found"
	@ls -S notebooks/*.ipynb | xargs -n 1 -P $(JOBS) $(PY) notebooks/run.py

render: setup  ## run every notebook and keep what its cells show in it
	@echo "== render: $(words $(wildcard notebooks/*.ipynb)) found"
	@for n in $(wildcard notebooks/*.ipynb); do $(PY) notebooks/run.py --write $$n || exit 1; done

docs:  ## build the documentation in build/docs, without warnings, in an environment of its own
	@test -n "$(PYTHON)"
	@sh .ci/venv .venv-docs "$(PYTHON)" requirements/docs.txt
	@echo "== docs: sphinx-build -W, $(words $(wildcard docs/*.md docs/*/*.md)) pages and $(words $(wildcard notebooks/*.ipynb)) notebooks"
	@.venv-docs/bin/python -m sphinx -W --keep-going -q -b html -d build/doctrees docs build/docs
	@echo "== docs: open build/docs/index.html"

pages: setup  ## run the code of the pages in docs/ and write what it prints into them
	@echo "== pages: python -m tests.helpers.pages"
	@$(PY) -m tests.helpers.pages

counts: setup  ## write the counts of search effort that tests compare (with VENV=.venv312 for the other JAX)
	@echo "== counts: python -m tests.helpers.search_counts"
	@$(PY) -m tests.helpers.search_counts

readme: setup  ## run the README's code and write what it prints into it
	@echo "== readme: python tests/helpers/readme.py"
	@$(PY) tests/helpers/readme.py

release: setup  ## build the wheel, install it in a clean environment, run the README there
	@echo "== release: .ci/release"
	@sh .ci/release "$(PYTHON)" $(VENV)

lock:  ## write requirements/*.txt anew from clean environments
	@sh .ci/lock 3.11 0.10.2 0.12.8
	@sh .ci/lock 3.12 0.12.0.1 0.12.12
	@sh .ci/lock 3.11 0.10.2 0.12.8 docs

clean:  ## remove caches and build results
	@echo "== clean"
	@rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean  ## clean, and remove the virtual environments
	@rm -rf .venv .venv312 .venv-models .venv-docs
