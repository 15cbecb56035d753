# Each target first installs into .venv. Requirements: python3 with venv, and a C compiler, which is optional on CPUs.
# VENV_FLAGS=--system-site-packages CONSTRAINTS=/dev/null uses the installed torch.
PYTHON ?= python3
CONSTRAINTS ?= .ci/constraints.txt
BIN := .venv/bin
# Python compiles the modules that it imports: compiling all of them would take half a minute.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

.PHONY: test demo bench gpu lint docs mutants clean

# Two processes with one thread each: spinning threads would slow both down.
test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

demo: .venv/installed
	$(BIN)/python -m revdeq demo

bench: .venv/installed
	$(BIN)/python bench/run.py $(if $(ONLY),--only $(ONLY)) $(if $(QUICK),--quick)

# Tests and measures a GPU, and packs the results into one file.
gpu: .venv/installed
	$(BIN)/python bench/gpu.py $(if $(QUICK),--quick)

# mypy reads a copy that is installed without being compiled: in the clone, kernels/ is not yet revdeq.kernels.
lint: .venv/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	rm -rf build .venv/types
	CC=false $(PIP) --no-build-isolation --no-deps --target .venv/types .
	cd .venv/types && ../bin/mypy --config-file $(CURDIR)/pyproject.toml -p revdeq

docs: .venv/dev
	$(BIN)/sphinx-build -W -q -d .venv/doctrees docs .venv/docs
	@echo "The pages are in .venv/docs: open .venv/docs/index.html"

# An interrupted run resumes.
mutants: .venv/installed
	$(BIN)/python tests/tools/mutants

# torch for AMD or Intel GPUs has its own Triton, under another name, which one in .venv would hide.
.venv/installed: setup.py pyproject.toml .ci/constraints.txt $(shell find kernels -name '*.[ch]')
	@echo "Setting up .venv (torch is large: this takes a minute or two) ..."
	$(PYTHON) -m venv $(VENV_FLAGS) .venv
	$(PIP) -c $(CONSTRAINTS) -e '.[demo,train,test]' accelerate
	$(if $(VENV_FLAGS),$(BIN)/python -m pip uninstall --quiet --yes triton)
	touch $@

.venv/dev: .venv/installed
	$(PIP) -c $(CONSTRAINTS) -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
	find kernels -name '*.so' -o -name '*.pyd' | xargs rm -f
