# `make demo` and `make test` set everything up by themselves on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo demo-lxc test test-slow test-bench lint setup setup-dev clean help

help:
	@echo "make demo       the whole job on this machine: deploy, warm-up, train, follow, evaluate, report"
	@echo "make demo-lxc   the same job, small, in a real container of the Proxmox bench (Linux, root)"
	@echo "make test       lint, types, layers and the tests that take seconds"
	@echo "make test-slow  the tests that take minutes, the demo among them"
	@echo "make test-bench the tests on the Proxmox bench only; fails where the bench cannot run"
	@echo "make clean      remove what the demo left (.dfo, demo-report); the environment stays"

demo: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" demo/run.sh

demo-lxc: setup
	@PYTHONPATH=tests $(BIN)/python -m bench.demo

test: setup-dev lint
	$(BIN)/pytest -n 2 -m "not slow"

test-slow: setup-dev
	$(BIN)/pytest -m slow

test-bench: setup-dev
	DFO_BENCH_REQUIRED=1 $(BIN)/pytest -n 2 -m bench

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict orchestrator
	$(BIN)/mypy dflash_core
	$(BIN)/lint-imports

setup: .venv/.demo-ready
setup-dev: .venv/.dev-ready

.venv/.demo-ready: pyproject.toml requirements/demo.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || \
	    { echo "error: cannot make .venv"; echo "  fix: apt install python3-venv"; exit 2; }
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet triton
	$(BIN)/pip install --quiet -e '.[train,demo]'
	$(BIN)/pip install --quiet --no-deps -r requirements/demo.txt
	@touch $@

.venv/.dev-ready: .venv/.demo-ready
	$(BIN)/pip install --quiet -e '.[train,demo,dev]'
	@touch $@

clean:
	rm -rf .dfo demo-report
