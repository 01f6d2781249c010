# The project's commands. `make help` lists them; each sets up what it needs and is quick the second time.
#
# A set-up step is done when its stamp exists, and a stamp's name holds the digest of what the step reads: an edit of
# a requirements file repeats the step, a touched or freshly checked-out file does not.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

VENV := .venv
# Absolute: stages run in folders of their own.
VENV_PYTHON := $(CURDIR)/$(VENV)/bin/python
TARGET := $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),target)
RELEASE := $(TARGET)/release/cuda-agent

digest = $(shell cat $(1) | sha256sum | cut -c1-16)
UV := $(VENV)/.uv-$(call digest,requirements-bootstrap.txt)
RUNTIME := $(VENV)/.runtime-$(call digest,requirements.txt)
DEV := $(VENV)/.dev-$(call digest,requirements.txt requirements-dev.txt)
AZURITE := 3.35.0

# The first interpreter that the lock files were made and tested for. `make PYTHON=…` overrides it.
PYTHON ?= $(shell for name in python3 python3.12 python3.11 python3.13; do \
	command -v $$name >/dev/null && $$name -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	2>/dev/null && echo $$name && break; done)

# pip's and uv's own download settings hold; uv is tried first because it is several times as fast, and pip has the
# last word because it knows mirrors that only its configuration names.
install = $(VENV_PYTHON) -m uv pip install --quiet --python $(VENV_PYTHON) --require-hashes -r $(1) || \
	$(VENV_PYTHON) -m pip install --quiet --require-hashes -r $(1)

# Bytecode is kept, since without it torch takes twice as long to start, but not beside the stages' sources, at which cargo
# would look again.
export PYTHONPYCACHEPREFIX := $(abspath $(TARGET))/pycache
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help quickstart test lint-python lint-rust test-rust test-train test-python train-tools fuzz chaos rows mutants bench bench-store bench-evaluator bench-dataset bench-training bench-processes red-team graph test-gpu venv venv-dev azurite build tools python-tools relock relock-python

help: ## List the commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | \
		while IFS=$$'\t' read -r name text; do printf '  make %-14s %s\n' "$$name" "$$text"; done

quickstart: venv build ## Make a small dataset on the CPU: set up, build, run pipelines/quickstart.yaml
	@$(RELEASE) run pipelines/quickstart.yaml

# Most tests of the training program wait for each other's processes, and those in Python take what is left of the cores.
test: venv-dev azurite tools ## Everything that is checked before a change lands
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint-python lint-rust
	@$(MAKE) --no-print-directory test-rust
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target test-train test-python
	@echo "All checks passed."

# What they check and how is in pyproject.toml.
lint-python: venv-dev ## Format, lint and types of the Python; `.venv/bin/ruff format` and `ruff check --fix` mend most
	$(VENV)/bin/ruff format --check --quiet .
	$(VENV)/bin/ruff check --quiet .
	$(VENV)/bin/basedpyright --level error

lint-rust: tools
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked --quiet -- -D warnings

# A thread more than this project's two cores: some tests wait for a server, or for a time to pass.
test-rust: venv-dev azurite tools
	cargo test --workspace --locked --quiet -- --test-threads $(or $(THREADS),3)

# The programs as `test-rust` makes them. `cargo build` would make them again, without what only tests need of libraries.
built = cargo test --workspace --locked --quiet --no-run

# The training program links the torch of .venv, and nothing else does: other commands on the workspace leave it out.
# One thread a test: tests run side by side, and threads of torch that wait for each other do so by spinning.
with_torch = VIRTUAL_ENV=$(CURDIR)/$(VENV) PATH="$(CURDIR)/$(VENV)/bin:$$PATH" LIBTORCH_USE_PYTORCH=1
test-train: venv-dev tools ## The training program: its mathematics, models beside transformers, small runs
	$(with_torch) cargo clippy --package cuda-agent-train --features torch --all-targets --locked --quiet -- -D warnings
	$(built)
	$(with_torch) OMP_NUM_THREADS=1 cargo test --package cuda-agent-train --features torch --locked --quiet

train-tools: venv tools ## The training program, target/release/cuda-agent-train: it links the torch of .venv
	$(with_torch) cargo build --release --locked --package cuda-agent-train --features torch

# A worker for each core, up to eight; who has nothing left takes tests of others, since few files have most of the work.
test-python: venv-dev tools
	$(built)
	CUDA_AGENT_BIN=$(abspath $(TARGET))/debug/cuda-agent PYTHONPATH=stages/protocol/python:stages/ops/python:stages/torch_runtime \
		$(VENV_PYTHON) -m pytest -q -p no:cacheprovider --import-mode=importlib \
		--numprocesses auto --maxprocesses 8 --dist worksteal stages tests/python

# Each scenario so many times; docs/chaos.md has what they are and what came of them.
chaos: venv-dev tools ## The chaos suite at length: kills, faults, damage (`CHAOS=50` rounds of each, `SEED=1`)
	CUDA_AGENT_CHAOS=$(or $(CHAOS),10) CUDA_AGENT_CHAOS_SEED=$(or $(SEED),$(shell date +%s)) \
		cargo test --package cuda-agent --test integration --locked --quiet -- --exact --nocapture \
		chaos::nothing_is_lost_or_wrong_in_chaos

# Of packages Cargo says which depend on which; of modules a test reads it, and fails where they do so in a circle.
graph: tools ## Which package depends on which, and in each crate which module names which
	@cargo tree --package cuda-agent --locked --edges normal --no-dedupe --format '{p}' | sed -n 's/\(cuda-agent[a-z-]*\) v.*/\1/p'
	@cargo test --package cuda-agent --test integration --locked --quiet -- --exact --nocapture --test-threads=1 \
		architecture::modules_have_no_circles

# Random cases of the model, then 2,560 rows shared by 2, 4 and 12 engines over a folder and over S3, so many times each.
rows: venv-dev tools ## By-row execution at length: is each row done once? (`MODEL=500` cases, `SEED=1`, `TIMES=20`)
	CUDA_AGENT_ROWS=$(or $(MODEL),500) CUDA_AGENT_ROWS_SEED=$(or $(SEED),$(shell date +%s)) \
		CUDA_AGENT_ROW_SHARING=$(or $(TIMES),20) \
		cargo test --package cuda-agent --test integration --locked --quiet -- --nocapture --test-threads=1 \
		rows_model:: row_sharing::each_row_is_done_once_at_length

# A test that fails ends a mutant, and a report is all that comes of it: no score fails.
mutants: venv-dev tools ## Which mistakes no test would notice, in keys, plans, rows and leases (`MUTANTS="--sample 0 --place key"`)
	@command -v cargo-mutants >/dev/null || { \
		echo "missing: cargo-mutants (cargo install cargo-mutants --locked)" >&2; exit 1; }
	nice -n 10 python3 bench/mutants.py $(MUTANTS)

# Each target has its share of the time; what is found is printed with the case and the FUZZ_SEED that leads to it.
fuzz: tools ## Damaged pipelines, manifests, records, rows, events and names (`FUZZ_SECONDS=600` in all, `FUZZ_SEED=1`)
	FUZZ_SECONDS=$(or $(FUZZ_SECONDS),600) $(if $(FUZZ_SEED),FUZZ_SEED=$(FUZZ_SEED)) \
		cargo test --package cuda-agent --test integration --locked --quiet -- --nocapture --test-threads=1 fuzz::

bench: build ## Compare with ninja, DVC and Snakemake; `BENCH="--quick"` leaves out the slow peers
	python3 bench/run.py --binary $(RELEASE) $(BENCH)

bench-store: venv-dev build ## Compare push and pull with rclone and DVC, on an S3 server of its own; `BENCH="--quick"` leaves out DVC
	python3 bench/store.py --binary $(RELEASE) $(BENCH)

red-team: venv build ## What the judge lets through: mutations of right kernels, judged (`RED_TEAM="--count 500 --seed 2 --device cuda"`)
	CUDA_AGENT_PYTHON=$(VENV_PYTHON) $(VENV_PYTHON) bench/red_team.py --binary $(RELEASE) $(RED_TEAM)

bench-evaluator: venv build ## The evaluator's bars on a GPU: agreement, verdicts a second, spread, a misbehaving batch
	CUDA_AGENT_PYTHON=$(VENV_PYTHON) $(VENV_PYTHON) bench/evaluator.py --binary $(RELEASE) \
		$(or $(BENCH),agreement compile correct timed spread nasty)

bench-dataset: venv build ## How fast the dataset's stages are on a GPU (`BENCH="--tasks 600"`), and times beside other work against alone
	CUDA_AGENT_PYTHON=$(VENV_PYTHON) $(VENV_PYTHON) bench/dataset.py --binary $(RELEASE) $(BENCH)

bench-training: train-tools ## Sampler and trainer on a GPU beside transformers (`BENCH="sampler"`)
	$(VENV_PYTHON) bench/training.py --binary $(TARGET)/release/cuda-agent-train $(or $(BENCH),sampler plain shared trainer lora groups)

bench-processes: train-tools ## Training on two GPUs beside one: the same losses, and how much faster (`BENCH="--processes 4"`)
	$(VENV_PYTHON) bench/processes.py --binary $(TARGET)/release/cuda-agent-train $(BENCH)

test-gpu: venv-dev build ## The tests that need a GPU: the reference's, then every candidate of the corpus; prints a table
	PYTHONPATH=stages/torch_runtime $(VENV_PYTHON) -m pytest -q -p no:cacheprovider --import-mode=importlib \
		stages/kernels/python/test_reference_cuda.py
	CUDA_AGENT_PYTHON=$(VENV_PYTHON) $(VENV_PYTHON) bench/evaluator.py --binary $(RELEASE) agreement

venv: $(RUNTIME) ## The Python environment of the stages, in .venv
venv-dev: $(DEV) ## The same with what the tests need

$(UV):
	@$(MAKE) --no-print-directory python-tools
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-bootstrap.txt
	@rm -f $(VENV)/.uv-*
	@touch $@

$(RUNTIME): | $(UV)
	@echo "Installing torch and transformers into $(VENV) (about 2.5 GB to download, once)"
	@$(call install,requirements.txt)
	@rm -f $(VENV)/.runtime-*
	@touch $@

$(DEV): $(RUNTIME)
	@echo "Installing what the tests need into $(VENV)"
	@$(call install,requirements-dev.txt)
	@rm -f $(VENV)/.dev-*
	@touch $@

azurite: ## The Azure server of some tests, in build/azurite; they are skipped where npm can't install it
	@[ -e build/azurite/.$(AZURITE) ] || { \
		echo "Installing Azurite into build/azurite" && \
		npm install --prefix build/azurite --no-audit --no-fund --loglevel=error --fetch-retries=1 --ignore-scripts \
			azurite@$(AZURITE) && \
		touch build/azurite/.$(AZURITE); \
	} || echo "Azurite is not installed: the tests on Azure's protocol are skipped."

build: tools ## The release binary, target/release/cuda-agent
	@[ -e $(RELEASE) ] || echo "Building the binary: some five minutes on two cores, once"
	@cargo build --release --locked

relock: ## Accept changed stage sources after a version bump (SAME_RESULTS=1: they give the same results)
	@cargo run --quiet --package cuda-agent-builtin --example relock -- $(if $(SAME_RESULTS),--same-results)

# Universal locks: one file for every Python and platform that the wheels exist for.
compile = $(VENV_PYTHON) -m uv pip compile --quiet --universal --python-version 3.11 --fork-strategy fewest \
	--generate-hashes --no-header --no-annotate --no-emit-index-url --no-emit-find-links
relock-python: $(UV) ## Lock the requirements*.in files anew (UPGRADE=1: with the newest versions)
	$(compile) $(if $(UPGRADE),--upgrade) requirements-bootstrap.in -o requirements-bootstrap.txt
	$(compile) $(if $(UPGRADE),--upgrade) requirements.in -o requirements.txt
	$(compile) $(if $(UPGRADE),--upgrade) requirements-dev.in -c requirements.txt -o requirements-dev.txt

# What must be on the machine; each missing piece is named with what provides it, all of a kind at once.
tools:
	@missing=0; \
	need() { command -v "$$1" >/dev/null || { echo "missing: $$1 ($$2)" >&2; missing=1; }; }; \
	need cargo "the Rust toolchain, 1.95 or newer, as rustup installs it"; \
	need gcc "Debian, Ubuntu: apt install gcc"; \
	need g++ "torch.compile builds C++; Debian, Ubuntu: apt install g++"; \
	need python3 "Debian, Ubuntu: apt install python3 python3-venv python3-dev"; \
	exit $$missing

# What the interpreter must have, looked at only while there is no environment yet.
python-tools: tools
	@python=$(PYTHON); \
	if [ -z "$$python" ]; then \
		echo "missing: Python 3.11, 3.12 or 3.13 (python3 is $$(python3 --version 2>&1)); requirements.txt is locked" \
			"for these. Name another one with: make PYTHON=/path/to/python3.12" >&2; exit 1; \
	fi; \
	$$python -c 'import ensurepip' 2>/dev/null || { \
		echo "missing: the venv module of $$python (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }; \
	$$python -c 'import os, sysconfig; open(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null || { \
		echo "missing: Python.h of $$python, which torch.compile includes (Debian, Ubuntu: apt install python3-dev)" >&2; \
		exit 1; }
