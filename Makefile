# Two commands do all the set-up: `make demo` and `make test`. See README.md.

PYTHON ?= python3
PIP = $(1)/bin/python -m pip --disable-pip-version-check install -q -q -c constraints.txt
PROJECTS = $(wildcard core/pyproject.toml libs/*/pyproject.toml plugins/*/pyproject.toml)
PACKAGES = -e "core[cli]" -e plugins/inl-cpu
TORCH = -e libs/inl-torch -e "plugins/inl-cpu[torch]"
NATIVE = plugins/inl-cpu/src/inl_cpu/native/libinl.so
KERNELS = tests/plugins/cpu/native tests/torch/triton
COMPILED = tests/torch/triton/test_compile.py
SOURCES = core/src libs/inl-jax/src libs/inl-torch/src plugins/inl-cpu/src plugins/inl-cuda/src

.PHONY: demo test test-core test-all test-kernels test-rest test-compiled-amd test-compiled lint clean

demo: .venv/.demo
	.venv/bin/inl generate "Why is the sky blue? Answer in two sentences." --max-tokens 40

# What the other tests need is installed beside the core's, which leave a core free.
test:
	$(MAKE) --no-print-directory -j2 -Otarget test-core .venv/.test
	$(MAKE) --no-print-directory test-all

# The core's own tests, where torch, jax and triton are not installed.
test-core: .venv-core/.test
	.venv-core/bin/python -m pytest tests/core

# Everything that needs a backend; kernels that are built and interpreted take one core.
test-all: .venv/.test
	$(MAKE) --no-print-directory -j2 -Otarget test-kernels test-rest test-compiled-amd test-compiled

test-kernels: .venv/.test
	.venv/bin/python -m pytest $(KERNELS) --ignore=$(COMPILED)

test-compiled: .venv/.test
	.venv/bin/python -m pytest $(COMPILED) -k "not hip"

test-compiled-amd: .venv/.test
	.venv/bin/python -m pytest $(COMPILED) -k hip

test-rest: .venv/.test
	.venv/bin/python -m pytest $(filter-out tests/core tests/data,$(wildcard tests/*)) $(KERNELS:%=--ignore=%)

lint: .venv/.test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy $(SOURCES) tests/typing
	PYTHONPATH=. .venv/bin/lint-imports

.venv/.demo: $(PROJECTS) constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "INL needs Python 3.11 or newer; try: make PYTHON=python3.12 demo")'
	$(PYTHON) -m venv .venv
	$(call PIP,.venv) $(PACKAGES)
	@test -e $(NATIVE) || echo "no C++ compiler: installing torch instead"
	@test -e $(NATIVE) || $(call PIP,.venv) $(TORCH)
	@touch $@

.venv/.test: .venv/.demo pyproject.toml
	$(call PIP,.venv) -U "pip>=25.1"
	$(call PIP,.venv) $(TORCH) -e plugins/inl-cuda -e libs/inl-jax --group test --group outside --group lint
	$(call PIP,.venv) --no-deps triton
	@touch $@

.venv-core/.test: core/pyproject.toml pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-core
	$(call PIP,.venv-core) -U "pip>=25.1"
	$(call PIP,.venv-core) -e "core[cli,testing]" --group test
	@touch $@

clean:
	rm -rf .venv .venv-core
