# Every target sets up its environment and builds the native library if necessary. `demo`, `test` and
# `wheel` have small environments in build/; the other targets share .venv, which has everything.
PYTHON ?= python3
BIN = .venv/bin
SOURCES := setup.py pyproject.toml $(wildcard csrc/*.h csrc/*.cpp csrc/cpu/* csrc/cuda/*)
OUT ?= out
# Installed by its version alone: its build for the CPU, for one CUDA or for another differs between
# package indices, so that no hash holds everywhere. The rest has hashes (requirements/*.txt).
TORCH ?= 2.13.0
PYTEST = $(BIN)/python -m pytest -p no:benchmark -n 2 --dist loadgroup -q
LIBRARY := bapo_kernels/_build.json

.PHONY: check demo test test-all exhaustive processors versions oldest aarch64 study bench docs lint \
  lock sanitize emulate ptx mutants prebuilt baselines wheel clean
.NOTPARALLEL:
# Without bytecode every process compiles the modules of torch anew, which takes longer than most tests.
unexport PYTHONDONTWRITEBYTECODE
check demo test processors: export PYTHONPATH = $(CURDIR)

# The inner loop: policy_math.h alone, in 5 s; then the library for one instruction set, and on the CPU
# the first dtype of every loss, chunks of hidden states, and autograd. Other targets then build for
# all. Left out is what takes longest.
check: SLOW := real or plain or allocation
check: .venv/installed
	$(PYTEST) -n 0 -x tests/test_policy_math.py
	BAPO_REQUIRE_NATIVE=1 BAPO_PORTABLE=1 NVCC=false $(BIN)/python setup.py -q build_ext --inplace
	@touch -d @0 $(LIBRARY) && rm -f .venv/built
	$(PYTEST) -n 0 -x -k "cpu and (dtype0 or hand or autograd) and not ($(SLOW)) or chunks" \
	  $(foreach name,policies loss chunks autograd,tests/test_$(name).py)

demo: BIN = build/demo_env/bin
demo: build/demo_env/installed $(LIBRARY)
	$(BIN)/python examples/before_after.py --out $(OUT)
	$(BIN)/python -m study demo --out $(OUT)

# The mathematics on every backend that runs here, in a few minutes.
test: BIN = build/test_env/bin
test: build/test_env/installed $(LIBRARY)
	$(PYTEST) -m "not slow" --hypothesis-profile quick tests/test_*.py

# Also frameworks, processes, compiled GPU code, documentation, benchmarks and packaging. Without a GPU
# Triton's tests have a stage of their own, as PTX (`ptx`), one case each, where files take turns with
# sm_90 and sm_100; CUDA's here as that for sm_90. Then some with a default device that is not the
# arguments'.
test-all: .venv/built
	EMULATE_ARCH=90 $(PYTEST) -m "not repeated and not exhaustive" --hypothesis-profile quick
	$(PYTEST) --default-device meta -m "not slow and not compile" --hypothesis-profile quick \
	  -k "not triton" $(foreach name,loss search sampling_mask debug,tests/test_$(name).py) \
	  tests/frameworks/test_lm_head.py
	TRITON_PTX="90 100" $(PTX) -m "not slow and not repeated"

# The other cases of what `make test-all` has a part of, such as targets of compilers, emulated devices
# and options of trainers; more examples of properties; Triton's tests in a newer Triton's interpreter.
exhaustive: .venv/built build/triton_3.9/installed
	$(PYTEST) -m "exhaustive or hypothesis and not repeated"
	PYTHONPATH=$(CURDIR)/build/triton_3.9 \
	  $(PYTEST) -m "not slow or repeated" -k triton tests/test_*.py

# The tests whose numbers depend on the processor. PyTorch adds in other orders, on the CPU and in the
# reference, which stands for processors that we do not have; CONTRIBUTING.md says how to have fewer
# instructions too. Then all CPU tests of `make test` with memory full of NaN, which a processor may
# read and multiply by zero.
SUM_ORDERS ?= 11 12
processors: BIN = build/test_env/bin
processors: build/test_env/installed $(LIBRARY)
	for seed in $(SUM_ORDERS); do \
	  $(PYTEST) --sum-order $$seed -m "not slow and not compile" --hypothesis-profile quick \
	    -k "([cpu or budget or gemm or linear or reference) and not host" tests/test_*.py || exit 1; \
	done
	$(PYTEST) --poisoned -m "not slow and not compile" --hypothesis-profile quick -k "not triton and not forks" \
	  tests/test_*.py

# The fast tests and those of torch.compile, with what README promises: an interpreter and what pip
# installs for it, the oldest first. Each takes up to 7 GB of disk until its tests are done.
VERSIONS ?= python3.10,torch==2.10.0,triton==3.6.0 \
  python3.12,torch==2.11.0,triton==3.6.0,numpy==2.3.5 \
  python3.11,torch==2.13.0,triton==3.7.1 \
  python3.11,torch
versions:
	$(PYTHON) -m release.versions $(VERSIONS)

# Of these, torch.compile and the losses with the oldest.
oldest:
	$(PYTHON) -m release.versions --losses $(firstword $(VERSIONS))

# Takes hours on two cores, SmolLM2 alone two to four. An interrupted study goes on.
study: .venv/built
	$(BIN)/python -m study run --out $(OUT)/study.jsonl
	$(BIN)/python -m study report --records $(OUT)/study.jsonl --out $(OUT)

# Takes two to three hours on two cores; rewrites figures and pages from the new results. A processor
# with AVX2 alone has files of its own.
KIND ?= $(shell grep -qs avx512f /proc/cpuinfo || ! grep -qs avx2 /proc/cpuinfo && echo cpu || echo avx2)
bench: .venv/built
	for level in logits hidden log_probs search sampling_masks distillation step; do \
	  $(BIN)/python -m pytest benchmarks/test_$$level.py \
	    --benchmark-json=benchmarks/results/$(KIND)_$$level.json || echo "$$level has failures"; \
	done
	$(BIN)/python -m benchmarks.trl_trainer
	$(BIN)/python -m benchmarks.plot
	$(BIN)/python -m benchmarks.report

# Writes build/docs/html; a warning is an error.
docs: .venv/installed
	$(BIN)/python -m sphinx -W -n --keep-going docs build/docs/html

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck .ci/run .github/*.sh benchmarks/*.sh release/*.sh
	$(BIN)/clang-format --dry-run -Werror csrc/*.h csrc/*.cpp csrc/cpu/* csrc/cuda/* \
	  tests/*.cpp tests/cuda_on_host/*.h tests/cuda_on_host/*.cpp tests/ptx/*.h tests/ptx/*.cpp
	$(BIN)/zizmor -q --offline .github
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-issue-forms \
	  .github/ISSUE_TEMPLATE/[0-9]*.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-issue-config \
	  .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.citation-file-format CITATION.cff

# Runs the tests of the native CPU code with AddressSanitizer and UBSan, in a copy of the tree: not
# those of compilers and of processes of their own.
UNSANITISED := build cli cuda_on_host ranks sets_on_host sharded_weights triton_compile
sanitize: .venv/built
	rm -rf build/sanitize && mkdir -p build/sanitize
	cp -r bapo_kernels csrc docs tests setup.py pyproject.toml README.md LICENSE build/sanitize
	cd build/sanitize && BAPO_SANITIZE=1 BAPO_REQUIRE_NATIVE=1 \
	  ../../$(BIN)/python setup.py -q build_ext --inplace
	cd build/sanitize && PYTHONPATH=. BAPO_REQUIRE_NATIVE=1 ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  ../../$(PYTEST) -m "not compile" -k "not triton" \
	  $(filter-out $(UNSANITISED:%=tests/test_%.py),$(wildcard tests/test_*.py))

# Executes the PTX of the CUDA kernels on the CPU under SEEDS schedules (tests/cuda_on_host): for each
# device that of its architecture, or with EMULATE_ARCH=90, 100 or 120 that one for all.
FIRST ?= 1
SEEDS ?= 20
emulate: .venv/built
	EMULATE_FIRST=$(FIRST) EMULATE_SEEDS=$(SEEDS) \
	  $(PYTEST) tests/test_cuda_on_host.py tests/test_sets_on_host.py

# Executes the PTX of the Triton kernels on the CPU (tests/ptx), for sm_80, sm_90 and sm_100, under a
# race detector: every kernel, with every tensor and every flag. PTX_SEEDS are schedules. With
# PTX_ERRORS=1 approximate instructions are as inexact as they may be; a few float32 tests exceed
# their budgets.
PTX_SEEDS ?= 1 2 3
PTX_ERRORS ?= 0
PTX = PTX_COMPLETE=1 $(PYTEST) -k triton tests/test_*.py
ptx: .venv/built
	for capability in 80 90 100; do for seed in $(PTX_SEEDS); do \
	  TRITON_PTX=$$capability PTX_SEED=$$seed PTX_ERRORS=$(PTX_ERRORS) \
	    $(PTX) -m "not slow or repeated" || exit 1; \
	done; done

# Puts one-line faults into a copy of the tree, one at a time, which tests must notice (tests/mutants);
# with MUTANTS="NAME ..." those alone.
mutants: .venv/built
	PYTHONPATH=$(CURDIR)/tests:$(CURDIR) $(BIN)/python -m mutants $(MUTANTS)

# `make test` of the CPU backend on an emulated ARM processor (release/aarch64.sh), with torch 2.10: of
# PyPI's builds for ARM the last without CUDA. Left out are processes and compilers, which take minutes;
# `UNEMULATED=` leaves out nothing.
UNEMULATED := compile ranks sharded_weights triton_compile
aarch64:
	release/aarch64.sh make test TORCH=2.10.0 \
	  PYTEST_ADDOPTS="-k 'not triton and not cuda' $(UNEMULATED:%=--ignore=tests/test_%.py)"

# Builds what benchmarks/gpu_suite.sh takes as BAPO_PREBUILT, so that a GPU machine builds nothing.
# The checksums in SOURCES tell whether the sources have changed since.
PREBUILT := build/prebuilt
prebuilt: .venv/installed
	rm -rf $(PREBUILT) && mkdir -p $(PREBUILT)
	BAPO_REQUIRE_CUDA=1 TORCH_CUDA_ARCH_LIST=all \
	  $(BIN)/python setup.py -q build_ext --build-lib $(PREBUILT)/lib \
	  --build-temp $(PREBUILT)/objects
	mv $(PREBUILT)/lib/bapo_kernels/* $(PREBUILT)
	rm -rf $(PREBUILT)/lib $(PREBUILT)/objects
	find csrc setup.py -type f | sort | xargs sha256sum > $(PREBUILT)/SOURCES
	$(BIN)/python -c "from benchmarks.records import commit; print(commit())" > $(PREBUILT)/COMMIT

# Downloads what benchmarks/gpu_suite.sh takes as WHEELS: the baselines, for Python 3.12.
WHEELS := wheels
baselines: .venv/installed
	rm -rf $(WHEELS)
	$(BIN)/pip download -q --disable-pip-version-check --no-deps --require-hashes \
	  --only-binary=:all: --python-version 3.12 --implementation cp \
	  --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
	  -d $(WHEELS) -r requirements/baselines.txt

# Builds the source distribution and the wheel of a release in dist/, in an environment of its own.
# nvcc and the symbols of an old glibc come from PyPI; torch is there for its headers.
wheel: build/wheel_env/installed
	build/wheel_env/bin/python -m release.wheel

clean:
	rm -rf .venv build dist out $(WHEELS) bapo_kernels/*.so bapo_kernels/*_build.json *.egg-info

# Writes requirements/*.txt from the .in files; what an .in file still allows keeps its version. all.txt
# comes first, as others take their versions from it. That of the baselines leaves out what they
# depend on.
lock: .venv/installed
	for name in all baselines demo smollm2 test triton_3.9 wheel; do \
	  echo torch | $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes \
	    --excludes /dev/stdin --annotation-style line --custom-compile-command "make lock" \
	    $$(case $$name in baselines | smollm2) echo --no-deps; esac) requirements/$$name.in \
	    -o requirements/$$name.txt || exit 1; \
	done

# The locked lists are complete, and --no-deps keeps pip from another torch. Python compiles at its
# first import what pip does not.
PIP_INSTALL = pip install -q --disable-pip-version-check --no-compile
define set_up
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/$(PIP_INSTALL) torch==$(TORCH)
	$(@D)/bin/$(PIP_INSTALL) --no-deps --require-hashes -r $<
	touch $@
endef

build/%_env/installed: requirements/%.txt
	$(set_up)

.venv/installed: requirements/all.txt
	$(set_up)

# A newer Triton than that of .venv, which it replaces where PYTHONPATH has this folder.
build/triton_%/installed: requirements/triton_%.txt | .venv/installed
	rm -rf $(@D)
	.venv/bin/$(PIP_INSTALL) --no-deps --require-hashes --target $(@D) -r $<
	touch $@

# For all GPUs where there is a compiler, because tests read the machine code of their kernels.
.venv/built: .venv/installed $(SOURCES)
	$(if $(shell command -v $(or $(NVCC),nvcc)),BAPO_REQUIRE_CUDA=1) TORCH_CUDA_ARCH_LIST=all \
	  $(@D)/bin/$(PIP_INSTALL) --no-build-isolation --no-deps -e .
	touch $@

# In place, by the Python of the target that needs it.
$(LIBRARY): $(SOURCES)
	$(BIN)/python setup.py -q build_ext --inplace
