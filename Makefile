# Every target sets up .venv and builds the native library if necessary.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := setup.py pyproject.toml $(wildcard csrc/*.h csrc/*.cpp csrc/cpu/* csrc/cuda/*)
OUT ?= out
# Installed by its version alone: its build for the CPU, for one CUDA or for another differs between
# package indices, so that no hash holds everywhere. The rest has hashes (requirements-dev.txt).
TORCH ?= 2.13.0

.PHONY: demo study test bench docs lint lock sanitize emulate fuzz prebuilt baselines wheel clean

demo: .venv/built
	$(BIN)/python examples/before_after.py --out $(OUT)
	$(BIN)/python -m study demo --out $(OUT)

test: .venv/built
	$(BIN)/python -m pytest -n 2 --dist loadgroup -q

# Takes an hour and more on two cores. An interrupted study goes on.
study: .venv/built
	$(BIN)/python -m study run --out $(OUT)/study.jsonl
	$(BIN)/python -m study report --records $(OUT)/study.jsonl --out $(OUT)

# Takes forty minutes on two cores; rewrites figures and pages from the new records.
bench: .venv/built
	$(BIN)/python -m benchmarks run
	$(BIN)/python -m benchmarks.trl_trainer
	$(BIN)/python -m benchmarks.megatron_step
	$(BIN)/python -m benchmarks.distributed
	$(BIN)/python -m benchmarks plot
	$(BIN)/python -m benchmarks report

# Writes build/docs/html; a warning is an error.
docs: .venv/installed
	$(BIN)/python -m sphinx -W -n --keep-going docs build/docs/html

lint: .venv/built
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck .ci/run .github/*.sh benchmarks/*.sh
	$(BIN)/clang-format --dry-run -Werror csrc/*.h csrc/*.cpp csrc/cpu/* csrc/cuda/* \
	  tests/cuda_on_host/*.h tests/cuda_on_host/*.cpp tests/cuda_on_host/cuda/* \
	  tests/cuda_driver/*.h tests/cuda_driver/*.cpp
	$(BIN)/zizmor -q --offline .github
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-issue-forms \
	  .github/ISSUE_TEMPLATE/[0-9]*.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-issue-config \
	  .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.citation-file-format CITATION.cff

# Runs the tests of the native CPU code with AddressSanitizer and UBSan, in a copy of the tree: not
# those of frameworks, compilers, pages and processes of their own.
UNSANITISED := benchmarks build cli cuda_build cuda_on_host docs hub instructions integrations \
  megatron own_losses policy_parity ranks sets_on_host sharded_weights slime supply triton_compile \
  trl verl verl_scopes workflows
sanitize: .venv/built
	rm -rf build/sanitize && mkdir -p build/sanitize
	cp -r bapo_kernels csrc docs fuzz tests setup.py pyproject.toml README.md LICENSE build/sanitize
	cd build/sanitize && BAPO_SANITIZE=1 BAPO_REQUIRE_NATIVE=1 \
	  ../../$(BIN)/python setup.py -q build_ext --inplace
	cd build/sanitize && PYTHONPATH=. BAPO_REQUIRE_NATIVE=1 ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  ../../$(BIN)/python -m pytest -q -n 2 --dist loadgroup -m "not compile" -k "not triton" \
	  $(UNSANITISED:%=--ignore tests/test_%.py)

# Runs the CUDA kernels on the CPU under SEEDS schedules (tests/cuda_on_host).
FIRST ?= 1
SEEDS ?= 200
emulate: .venv/built
	EMULATE_FIRST=$(FIRST) EMULATE_SEEDS=$(SEEDS) \
	  $(BIN)/python -m pytest -n 2 -q tests/test_cuda_on_host.py tests/test_sets_on_host.py

# Needs clang++; runs for DURATION seconds, 60 by default (fuzz/README.md).
fuzz:
	$(MAKE) -C fuzz run

# Builds what benchmarks/gpu_suite.sh takes as BAPO_PREBUILT, so that a GPU machine builds nothing.
# The checksums in SOURCES tell whether the sources have changed since.
PREBUILT := build/prebuilt
prebuilt: .venv/installed
	rm -rf $(PREBUILT) && mkdir -p $(PREBUILT)
	BAPO_REQUIRE_CUDA=1 $(BIN)/python setup.py -q build_ext --build-lib $(PREBUILT)/lib \
	  --build-temp $(PREBUILT)/objects
	mv $(PREBUILT)/lib/bapo_kernels/* $(PREBUILT)
	$(BIN)/python tests/cuda_driver/build.py $(PREBUILT)
	rm -rf $(PREBUILT)/lib $(PREBUILT)/objects $(PREBUILT)/*.o
	find csrc setup.py tests/cuda_driver -type f ! -name '*.pyc' | sort | xargs sha256sum \
	  > $(PREBUILT)/SOURCES
	$(BIN)/python -c "from benchmarks.records import commit; print(commit())" > $(PREBUILT)/COMMIT

# Downloads what benchmarks/gpu_suite.sh takes as WHEELS: the baselines, for Python 3.12.
WHEELS := wheels
baselines: .venv/installed
	rm -rf $(WHEELS)
	$(BIN)/pip download -q --disable-pip-version-check --no-deps --require-hashes \
	  --only-binary=:all: --python-version 3.12 --implementation cp \
	  --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
	  -d $(WHEELS) -r requirements-baselines.txt

# Builds the source distribution and the wheel of a release in dist/, in an environment of its own.
# nvcc and the symbols of an old glibc come from PyPI; torch is there for its headers.
WHEEL_ENV := build/wheel_env
wheel: $(WHEEL_ENV)/installed
	$(WHEEL_ENV)/bin/python -m release.wheel

$(WHEEL_ENV)/installed: requirements-wheel.txt
	$(PYTHON) -m venv $(WHEEL_ENV)
	$(WHEEL_ENV)/bin/pip install -q --disable-pip-version-check torch==$(TORCH)
	$(WHEEL_ENV)/bin/pip install -q --disable-pip-version-check --no-deps --require-hashes -r $<
	touch $@

clean:
	rm -rf .venv build dist out $(WHEELS) bapo_kernels/_C.abi3.so bapo_kernels/_build.json *.egg-info

# Writes requirements-*.txt from requirements-*.in; what an .in file still allows keeps its version.
# The list of the baselines is complete without what they depend on.
lock: .venv/installed
	for name in $(basename $(wildcard requirements-*.in)); do \
	  echo torch | $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes \
	    --excludes /dev/stdin --annotation-style line --custom-compile-command "make lock" \
	    $$([ $$name != requirements-baselines ] || echo --no-deps) $$name.in -o $$name.txt || exit 1; \
	done

# The locked list is complete, and --no-deps keeps pip from another torch.
.venv/installed: requirements-dev.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check torch==$(TORCH)
	$(BIN)/pip install -q --disable-pip-version-check --no-deps --require-hashes \
	  -r requirements-dev.txt
	touch $@

.venv/built: .venv/installed $(SOURCES)
	$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $@
