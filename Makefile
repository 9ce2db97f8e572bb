# Two commands do everything: `make demo` shows the product, `make test` checks it.
PYTHON ?= python3
# Without an NVIDIA driver torch is held at the CPU-tested version.
CONSTRAINTS := $(shell command -v nvidia-smi >/dev/null 2>&1 || echo "-c constraints-cpu.txt")
DEMO := .venv-demo
TEST := .venv-test

.PHONY: demo test check clean

demo: $(DEMO)/.installed
	$(DEMO)/bin/llmtop demo

test: check
	$(TEST)/bin/python -m pytest -q

# Static checks alone; they take seconds.
check: $(TEST)/.installed
	$(TEST)/bin/ruff check .
	$(TEST)/bin/mypy presets profiler trainer tui tests benchmarks
	$(TEST)/bin/lint-imports

$(DEMO)/.installed: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/python -m pip install --disable-pip-version-check -q $(CONSTRAINTS) -e '.[train]'
	touch $@

$(TEST)/.installed: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(TEST)
	$(TEST)/bin/python -m pip install --disable-pip-version-check -q $(CONSTRAINTS) -e '.[train,dev]'
	touch $@

clean:
	rm -rf $(DEMO) $(TEST)
