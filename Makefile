# Two commands do everything: `make demo` shows the product, `make test` checks it.
# PYTHON chooses the interpreter (3.11 or newer) that the virtual environments are made with.
PYTHON ?= python3
# Without an NVIDIA driver torch is held at the CPU-tested version.
CONSTRAINTS := $(shell command -v nvidia-smi >/dev/null 2>&1 || echo "-c constraints-cpu.txt")
DEMO := .venv-demo
TEST := .venv-test
TOOLS := .venv-tools

.PHONY: demo test check screenshot lock audit clean

# On a terminal the monitor opens; without one the run is followed line by line. The messages name the program
# as it is on the PATH, where this one is not.
demo: $(DEMO)/.installed
	@$(DEMO)/bin/llmtop demo; code=$$?; \
		echo "Where a message says llmtop, type $(DEMO)/bin/llmtop, or first: . $(DEMO)/bin/activate" >&2; \
		exit $$code

test: check
	$(TEST)/bin/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# Static checks alone; they take seconds.
check: $(TEST)/.installed
	$(TEST)/bin/ruff check .
	$(TEST)/bin/ruff format --check .
	$(TEST)/bin/mypy presets profiler trainer tui tests $(wildcard benchmarks/*.py benchmarks/*/*.py)
	$(TEST)/bin/lint-imports

# The README's pictures, exported by the app itself, one of them from the newest run: after `make demo`.
screenshot: $(TEST)/.installed
	$(TEST)/bin/python -m tests.screenshot docs

# requirements.lock, which the documented install reads: every package of the extra `all`, and what builds llmtop,
# by version and hash. Made anew after a change of pyproject.toml: `make lock`, then `make audit`.
lock: $(TOOLS)/.installed
	$(TOOLS)/bin/uv pip compile --quiet --universal --python-version 3.11 --constraint constraints-cpu.txt \
		--generate-hashes --no-emit-index-url --no-header --no-annotate --extra all \
		pyproject.toml $(TOOLS)/build.in --output-file requirements.lock

# What is known against the packages of the lock file. It fails too where a package could not be looked up.
audit: $(TOOLS)/.installed
	$(TOOLS)/bin/pip-audit --requirement requirements.lock --disable-pip --strict --progress-spinner off

$(TOOLS)/.installed: pyproject.toml
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --disable-pip-version-check 'uv>=0.9' 'pip-audit>=2.9'
	$(PYTHON) -c 'import tomllib; \
		print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], "editables", sep="\n")' \
		> $(TOOLS)/build.in
	touch $@

$(DEMO)/.installed: EXTRAS := train
$(TEST)/.installed: EXTRAS := train,dev
$(DEMO)/.installed $(TEST)/.installed: pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "llmtop needs Python 3.11 or newer; say which: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Making $(@D): pip fetches torch and DeepSpeed and shows how far it is; that takes some minutes," \
		"the first time only." >&2
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf $(DEMO) $(TEST) $(TOOLS)
