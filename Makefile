# Set-up in one command: `make demo` or `make test`. See README.md.
# .venv has no framework; .venv-all has torch, JAX, Triton and the linters as well.

PYTHON ?= python3
# The native library is compiled meanwhile. Python is compiled where it is first imported.
PIP = INL_BUILD_NATIVE=0 $(1)/bin/python -m pip --disable-pip-version-check install -q -q \
	--no-compile -c constraints.txt
PROJECTS = $(wildcard core/pyproject.toml libs/*/pyproject.toml plugins/*/pyproject.toml)
BUILD = "pip>=25.1" "setuptools>=77"
EDITABLE = --no-build-isolation
TORCH = -e libs/inl-torch -e "plugins/inl-cpu[torch]"
EVERYTHING = -e "core[cli,guidance,kv-events,otel,serve]" -e "libs/inl-toolkit[edge]" $(TORCH) \
	-e "plugins/inl-cuda[nvrtc]" \
	-e plugins/inl-rocm -e "plugins/inl-intel[openvino]" -e libs/inl-jax -e plugins/inl-tpu \
	-e "libs/inl-onnx[cpu]" -e plugins/inl-directml
LIBRARY = plugins/inl-cpu/src/inl_cpu/native/libinl.so
BUILD_NATIVE = $(PYTHON) plugins/inl-cpu/src/inl_cpu/build_native.py $(1) || \
	echo "the native library was not built, see above: torch computes instead"
# The instruction sets of the native library: of this processor, or all (native-all).
NATIVE = native-host
PARALLEL = $(MAKE) --no-print-directory -j2
SOURCES = $(wildcard core/src libs/*/src plugins/*/src)

PYTEST = -m pytest -n $(WORKERS) --dist worksteal --durations=20 --durations-min=10
WORKERS = 2
# A fifth of the time, these wait for processes that are stopped, killed and restarted.
test-others: WORKERS = 3
# Torch and NumPy start a thread for each core. Those of two workers on two cores wait for
# each other most of the time; backends set the number of their threads themselves.
test test-deep test-others test-long test-tpu-compiler: export OMP_NUM_THREADS = 1
# Tests start hundreds of processes: these read compiled modules, and those of them that
# run pytest do not import the plugin of a client library.
unexport PYTHONDONTWRITEBYTECODE
test test-deep test-others test-long: export PYTEST_ADDOPTS = -p no:langsmith_plugin
# Without a framework: the core, the native backend, and the default model's oracle.
ORACLE = tests/integration/test_oracle.py tests/integration/test_inl_oracle.py
CORE_TESTS = tests/core tests/plugins/cpu $(ORACLE)
# Those first that have tests of a minute on one core, at whose end no other would be
# left: the compilations for TPUs and Triton's interpreter.
OTHER_TESTS = tests/plugins/tpu tests/torch \
	$(filter-out tests/__pycache__ tests/core tests/data \
	tests/plugins tests/support tests/torch tests/typing, \
	$(patsubst %/,%,$(wildcard tests/*/))) tests/plugins/cuda \
	tests/plugins/directml tests/plugins/intel tests/plugins/rocm

.PHONY: demo native-host native-all test test-all test-deep test-others test-long test-hosts test-ray test-nixl test-mooncake test-router test-tpu-compiler test-intel-compiler \
	test-webgpu test-torch-directml lint wheels docs clean

demo:
	$(PARALLEL) .venv/.demo
	.venv/bin/inl generate "Why is the sky blue? Answer in two sentences."

# Minutes, downloads included. Prints what it leaves out. SELECT: arguments of pytest.
test:
	$(PARALLEL) TOOLS=.venv/.tools NATIVE=native-all .venv/.demo
	INL_TEST_DEPTH=quick .venv/bin/python $(PYTEST) $(SELECT) $(CORE_TESTS)

# What `make test` leaves out: its tests at full depth, and the frameworks' tests.
test-all: test-deep test-others

test-deep: .venv-all/.test
	INL_TEST_DEPTH=full .venv-all/bin/python $(PYTEST) -m "full or scaled" $(CORE_TESTS)

test-others: .venv-all/.test .venv-all/.libtpu
	INL_TEST_DEPTH=full .venv-all/bin/python $(PYTEST) $(OTHER_TESTS) $(ORACLE:%=--ignore=%)

# Random steps of an engine, 100,000 each plain, repeated and with drafts, an interrupt at
# more places, 1,000 schemas, 50,000 damaged files, Triton kernels for more chips and
# dtypes, of larger shapes and of packed weights, the tutorial of traced backends, and
# client programs, each in an environment of its own (3 GB).
test-long: .venv-all/.test
	INL_TEST_DEPTH=long .venv-all/bin/python $(PYTEST) tests/core/engine/test_interrupts.py \
		tests/core/engine/test_repeated_soak.py tests/core/engine/test_runner_reset.py \
		tests/core/engine/test_soak.py tests/core/engine/test_snapshot_soak.py \
		tests/core/placement/test_data_ranks.py \
		tests/core/speculation/test_speculation_soak.py \
		tests/core/spec/test_tolerance.py tests/core/guidance/test_hostile.py tests/core/guidance/test_schemas.py \
		tests/core/checkpoints/test_structure_fuzz.py \
		tests/core/checkpoints/test_fuzz.py tests/core/kv_tiers/test_tier_crashes.py \
		tests/core/kv_tiers/test_tier_soak.py \
		tests/core/checkpoints/test_sentencepiece.py \
		tests/core/checkpoints/test_tiktoken_file.py \
		tests/core/scheduling/test_waiting_queue.py tests/core/text/test_plain_scored.py \
		tests/core/runners/test_stages.py \
		tests/core/engine/test_moved_requests.py tests/core/engine/test_moving_soak.py \
		tests/core/engine/test_remote_prefill.py tests/fleet \
		tests/torch/test_inl_transforms.py tests/integration/test_tutorial.py \
		tests/torch/triton/test_compile.py tests/torch/triton/test_interpreted.py \
		tests/integration/test_wheels.py tests/integration/test_install_page.py \
		tests/documents/test_documents.py \
		tests/plugins/tpu/test_packed_matmul.py tests/plugins/tpu/test_paged_attention.py \
		tests/plugins/tpu/test_tpu_contract.py tests/plugins/tpu/test_tpu_mesh.py \
		tests/plugins/tpu/test_tpu_hosts.py \
		tests/core/testing/test_faults.py tests/core/testing/test_sound_checks.py \
		tests/plugins/cpu/test_interrupts.py \
		tests/plugins/cpu/native/test_sanitized.py tests/integration/test_planted_faults.py \
		tests/integration/test_kind_faults.py \
		tests/integration/test_travelling_state.py \
		tests/integration/test_split_oracle.py tests/integration/test_real_encoders.py \
		tests/integration/test_families.py tests/integration/test_jax_ops.py \
		tests/plugins/tpu/test_xla_kernels.py \
		tests/plugins/intel/test_openvino_contract.py \
		tests/plugins/directml/test_directml_models.py \
		tests/plugins/intel/test_xpu_contract.py tests/plugins/intel/test_xpu_compile.py \
		tests/serve tests/clients tests/torch/test_eagle_graphs.py \
		tests/torch/test_collectives.py

# All tests that compile for TPUs, with counts of bundles for each chip; `make test-all`
# has whole steps, the products of packed weights, and the counts of decoding on a v6e.
test-tpu-compiler: .venv-all/.test .venv-all/.libtpu
	INL_TEST_DEPTH=long .venv-all/bin/python $(PYTEST) \
		tests/plugins/tpu/test_tpu_compile.py tests/plugins/tpu/test_tpu_mesh_compile.py

# Compiles the Triton kernels for Intel GPUs (minutes); the compilers take 800 MB. Needs
# apt-get of a Debian.
test-intel-compiler: .venv-all/.test
	test -e .intel/complete || .venv-all/bin/python tests/plugins/intel/fetch_compiler.py .intel
	INL_TEST_DEPTH=long .venv-all/bin/python -m pytest tests/plugins/intel/test_xpu_compile.py

# The default model on ONNX Runtime's WebGPU provider and a Vulkan driver that computes on
# the CPU; both take 350 MB. Needs apt-get of a Debian.
VULKAN = $(CURDIR)/.vulkan/debian
test-webgpu: .venv-all/.test
	test -e .vulkan/complete || .venv-all/bin/python tests/plugins/directml/fetch_vulkan.py .vulkan
	$(call PIP,.venv-all) $(EDITABLE) -e "plugins/inl-directml[webgpu]"
	LD_LIBRARY_PATH=$(VULKAN)/usr/lib/x86_64-linux-gnu:$(VULKAN)/lib/x86_64-linux-gnu \
		VK_ICD_FILENAMES=$(VULKAN)/usr/share/vulkan/icd.d/lvp_icd.json \
		INL_TEST_DEPTH=full .venv-all/bin/python -m pytest \
		tests/plugins/directml/test_webgpu.py

# The operators of torch-directml's torch, in an environment of its own of 5 GB: PyPI has
# this torch with CUDA only; it needs Python 3.11 or 3.12. Then an engine beside that
# environment, whose worker serves the default model on a simulated adapter.
TORCH_DIRECTML = torch==2.4.1 numpy==1.26.4 pluggy pytest pytest-timeout \
	hypothesis typer rich tokenizers jinja2
test-torch-directml: .venv-all/.test
	test -e .venv-directml/.complete || $(PYTHON) -m venv .venv-directml
	test -e .venv-directml/.complete || .venv-directml/bin/python -m pip install -q --no-compile $(TORCH_DIRECTML)
	touch .venv-directml/.complete
	PYTHONPATH=core/src:libs/inl-torch/src:plugins/inl-directml/src:tests/support \
		.venv-directml/bin/python -m pytest -p no:cacheprovider \
		tests/plugins/directml/test_torch_directml_operators.py
	INL_TEST_DEPTH=long INL_TEST_TORCH_DIRECTML=$(CURDIR)/.venv-directml/bin/python \
		PYTHONPATH=core/src:libs/inl-torch/src:plugins/inl-directml/src \
		.venv-all/bin/python -m pytest tests/plugins/directml/test_torch_directml_worker.py

# The native library for Windows, macOS and ARM, by the Zig compiler (minutes); its tests
# on ARM, in an emulator (an hour). Needs apt-get.
test-hosts: .venv-all/.test
	$(call PIP,.venv-all) --group hosts
	test -e .hosts/site || .venv-all/bin/python tests/hosts/fetch_tools.py .hosts
	INL_TEST_DEPTH=long .venv-all/bin/python -m pytest tests/hosts

# Workers in a Ray cluster of three hosts, which are network namespaces of this one, a
# fleet of two actors, a batch of INL_BATCH_LINES lines over these, and
# Ray Data on one host; needs root on Linux. Ray takes 450 MB.
test-ray: .venv-all/.test
	test -e .venv-ray/.complete || $(PYTHON) -m venv .venv-ray
	$(call PIP,.venv-ray) -U $(BUILD)
	$(call PIP,.venv-ray) -e "core[cli,serve]" -e plugins/inl-cpu -e "plugins/inl-ray[data]" --group test
	touch .venv-ray/.complete
	.venv-ray/bin/python -m pytest tests/plugins/ray

# Contents of caches by NIXL, between processes of this host. NIXL takes 200 MB.
test-nixl: .venv-all/.test
	test -e .venv-nixl/.complete || $(PYTHON) -m venv .venv-nixl
	$(call PIP,.venv-nixl) -U $(BUILD)
	$(call PIP,.venv-nixl) -e "core[cli]" -e plugins/inl-cpu -e plugins/inl-nixl --group test
	touch .venv-nixl/.complete
	.venv-nixl/bin/python -m pytest tests/plugins/nixl

# Blocks that engines share in Mooncake Store, over TCP; needs Debian's libibverbs1.
test-mooncake: .venv-all/.test
	test -e .venv-mooncake/.complete || $(PYTHON) -m venv .venv-mooncake
	$(call PIP,.venv-mooncake) -U $(BUILD)
	$(call PIP,.venv-mooncake) -e "core[cli]" -e plugins/inl-cpu -e plugins/inl-mooncake --group test
	touch .venv-mooncake/.complete
	.venv-mooncake/bin/python -m pytest tests/plugins/mooncake

# Routers of others in front of two engines; their environments have nothing of ours.
test-router: .venv-all/.test
	test -e .venv-router/.complete || $(PYTHON) -m venv .venv-router
	.venv-router/bin/python -m pip install -q -q vllm-router==0.1.17
	touch .venv-router/.complete
	test -e .venv-smg/.complete || $(PYTHON) -m venv .venv-smg
	.venv-smg/bin/python -m pip install -q -q smg==1.13.0
	touch .venv-smg/.complete
	INL_TEST_DEPTH=long INL_VLLM_ROUTER=.venv-router/bin/vllm-router \
		INL_SMG=.venv-smg/bin/smg \
		.venv-all/bin/python -m pytest tests/fleet/test_vllm_router.py

lint: .venv-all/.test
	.venv-all/bin/ruff check .
	.venv-all/bin/ruff format --check .
	.venv-all/bin/mypy $(SOURCES) tests/typing
	PYTHONPATH=.:plugins/inl-ray/src:plugins/inl-mooncake/src:plugins/inl-nixl/src .venv-all/bin/lint-imports

# Wheels of all packages for this system, in dist. Their errors name this folder.
wheels:
	test -e .venv-wheels/bin/python || $(PYTHON) -m venv .venv-wheels
	.venv-wheels/bin/python deploy/wheels.py dist --record

docs: .venv-docs/.docs
	.venv-docs/bin/mkdocs build --strict

.venv/.core: $(PROJECTS) constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "INL needs Python 3.11 or newer; try: make PYTHON=python3.12 demo")'
	$(PYTHON) -m venv .venv
	$(call PIP,.venv) -U $(BUILD)
	$(call PIP,.venv) $(EDITABLE) -e "core[cli]" -e plugins/inl-cpu
	@touch $@

.venv/.tools: .venv/.core pyproject.toml
	$(call PIP,.venv) --group test
	@touch $@

# They compile what has changed.
native-host:
	@$(call BUILD_NATIVE,--host)

native-all:
	@$(call BUILD_NATIVE)

# TOOLS: two pips must not change one environment at the same time.
.venv/.demo: .venv/.core | $(NATIVE) $(TOOLS)
	@test -e $(LIBRARY) || $(call PIP,.venv) $(EDITABLE) $(TORCH)
	@touch $@

.venv-all/.test: $(PROJECTS) constraints.txt pyproject.toml | native-all
	$(PYTHON) -m venv .venv-all
	$(call PIP,.venv-all) -U $(BUILD)
	$(call PIP,.venv-all) $(EDITABLE) $(EVERYTHING) --group test --group outside --group lint
	$(call PIP,.venv-all) --no-deps triton
	@touch $@

# libtpu compiles for TPUs on any x86-64 Linux and takes 700 MB. Without it, the tests
# that need it are skipped with the reason.
.venv-all/.libtpu: plugins/inl-tpu/pyproject.toml | .venv-all/.test
	@$(call PIP,.venv-all) $(EDITABLE) -e "plugins/inl-tpu[compiler]" && touch $@ || \
		echo "libtpu was not installed, see above: nothing is compiled for TPUs"

.venv-docs/.docs: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	$(call PIP,.venv-docs) -U $(BUILD)
	$(call PIP,.venv-docs) --group docs
	@touch $@

clean:
	rm -rf .venv .venv-all .venv-docs .venv-wheels dist site
