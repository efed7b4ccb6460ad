# The two commands: `make demo` and `make test`. Both set everything up in .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# A file to a worker: what a file's tests share is made once. Three on two cores, as tests of launches
# wait for processes.
WORKERS := -n 3 --dist loadfile
QUICK := -m "not slow and not cluster"
# Kept, also where the environment forbids it: every process of the tests imports the same modules.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test collected test-all test-matrix test-clusters lint types accuracy gallery bench gpu soak reference readme docs constraints clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mpctl needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m compileall -q mpctl
	touch $@

demo: $(READY)
	$(BIN)/mpctl plan two-nodes-16-gpus
	$(BIN)/mpctl launch demo --run-dir runs/demo --overwrite
	@echo 'mpctl is installed in $(VENV): type  . $(BIN)/activate  to use it in this shell'

# Threads of one test wait for each other where the other's have the cores.
test test-all: export OMP_NUM_THREADS := 1

test: $(READY)
	$(MAKE) --no-print-directory -j2 lint types collected
	$(BIN)/python -m pytest $(WORKERS) $(QUICK)

# Compiles the tests once, beside mypy, which needs one core: the workers would each do it, half a minute long.
collected: $(READY)
	@$(BIN)/python -m pytest $(QUICK) --collect-only -qq > /dev/null || true

# With the coverage of branches, in ranks and commands that tests start too (pyproject.toml).
test-all: $(READY) lint types
	rm -rf .coverage && mkdir .coverage
	$(BIN)/python -m coverage run -m pytest $(WORKERS) -m "not cluster"; code=$$?; \
	$(BIN)/python -m coverage combine -q; $(BIN)/python -m coverage report; exit $$code

# What depends on versions, under other versions of Python and torch, where these Pythons are found
# (tests/matrix.py). MATRIX=--quick: the part that CI runs.
test-matrix: $(READY)
	$(BIN)/python -m tests.matrix $(MATRIX)

# Several nodes on this machine: Slurm, sshd, network namespaces. As root it installs what is
# missing by apt-get; what a machine cannot run is skipped and listed with the reason.
test-clusters: export OMP_NUM_THREADS := 1
test-clusters: $(READY)
	$(BIN)/python -m tests.multinode.needs
	$(BIN)/python -m pytest -m cluster -rs tests/multinode

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# Plans beside published runs, source by source; fails if one got worse than at the last release by more than a
# point (tests/recorded/accuracy_released.json). Half a minute of one core; writes benchmarks/results/accuracy.md.
accuracy: $(READY)
	$(BIN)/python -m benchmarks.accuracy_gate

# docs/gallery: every published run with its forecast and the line that plans it. Two minutes of one core.
gallery: $(READY)
	$(BIN)/python -m tests.gallery

bench: $(READY)
	$(BIN)/python -m benchmarks.plan_speed

# On a machine with a CUDA device: a minute of checks, the tests marked gpu, then the benchmark; writes the tables of
# benchmarks/results/gpu.md. Fifteen minutes show one case of each kind, BUDGET=60m all. Elsewhere it says that there is none.
BUDGET ?= 15m
gpu: $(READY)
	-$(BIN)/python -m benchmarks.gpu.smoke
	$(BIN)/python -m benchmarks.gpu --tests --budget $(BUDGET)

# Random faults over one run, whose losses must stay those of the undisturbed run; writes what it
# shows into benchmarks/results/reliability.md. HOSTS=2: over two hosts that ssh reaches (network namespaces, root).
FAULTS ?= 100
SEED ?= 1
HOSTS ?= 1
soak: $(READY)
	$(BIN)/python -m benchmarks.soak --hosts $(HOSTS) --faults $(FAULTS) --seed $(SEED) --write

# docs/reference.md, from the models and commands; tests/cli/test_reference.py wants it up to date.
reference: $(READY)
	$(BIN)/python -m tests.reference

# The output and the pictures in README.md; SLOW=--slow: the training of the demo too.
readme: $(READY)
	$(BIN)/python -m tests.readme $(SLOW)

# The site of docs/ and README.md in site/, searchable; a link or an anchor that leads nowhere fails.
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/.docs
	$(BIN)/mkdocs build

$(VENV)/.docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

constraints: $(VENV)/.docs
	{ sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu//'; } > .constraints.new
	mv .constraints.new constraints.txt

clean:
	rm -rf $(VENV)
