# Each target first installs into .venv. Requirements: python3 with venv, and a C compiler, which is optional on CPUs.
# VENV_FLAGS=--system-site-packages CONSTRAINTS=/dev/null uses the installed torch.
PYTHON ?= python3
CONSTRAINTS ?= .ci/constraints.txt
BIN := .venv/bin

.PHONY: test demo bench gpu lint docs mutants versions dist clean

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

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	rm -rf .venv/types && mkdir -p .venv/types/revdeq
	ln -s $(CURDIR)/revdeq/* .venv/types/revdeq && ln -s $(CURDIR)/kernels .venv/types/revdeq/kernels
	cd .venv/types && ../bin/mypy --config-file $(CURDIR)/pyproject.toml -p revdeq
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/zizmor --offline --quiet .github/workflows

docs: .venv/installed
	$(BIN)/python docs/make_api.py

# An interrupted run resumes.
mutants: .venv/installed
	$(BIN)/python tests/tools/mutants
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --sample 300 tests/kernels/test_emulated_kernels.py

# Every torch from the oldest to the newest: gigabytes and hours. An interrupted run resumes.
versions: .venv/installed
	$(BIN)/python tests/tools/versions.py $(ONLY)

dist: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build twine
	rm -rf dist && $(BIN)/python -m build && $(BIN)/python -m twine check --strict dist/*

# --no-compile saves half a minute: Python compiles the modules that it imports.
# torch for AMD or Intel GPUs has its own Triton, under another name, which one in .venv would hide.
.venv/installed: setup.py .ci/build_backend.py pyproject.toml .ci/constraints.txt kernels/cpu/common.h kernels/cpu/float64.c kernels/cpu/exact.c
	@echo "Setting up .venv (torch is large: this takes a minute or two) ..."
	$(PYTHON) -m venv $(VENV_FLAGS) .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(CONSTRAINTS) -e '.[demo,train,hub,tensorboard,test,torchdeq,lint]'
	$(if $(VENV_FLAGS),$(BIN)/python -m pip uninstall --quiet --yes triton)
	touch $@

clean:
	rm -rf .venv build dist *.egg-info kernels/*.so kernels/*.pyd
