#!/usr/bin/env bash
# All that needs a GPU, in at most ten minutes (a minute to build, 480 s of limits) and without a
# network: builds the library, runs the tests on the GPU's backends, measures every target beside a
# copy and the peers that are installed. Leaves $OUT/cuda.jsonl and logs. Needs torch >= 2.10, Triton,
# nvcc, pytest, hypothesis, rich, typer; wheels of peers in $WHEELS are installed without their
# dependencies (liger-kernel, trl, cut-cross-entropy: 3 MiB).
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-out/gpu}
PYTHON=${PYTHON:-python3}
WHEELS=${WHEELS:-wheels}
mkdir -p "$OUT"
export PYTHONPATH=.

if compgen -G "$WHEELS/*.whl" >/dev/null; then
  $PYTHON -m pip install -q --no-index --no-deps --no-compile --target "$OUT/../peers" \
    "$WHEELS"/*.whl && PYTHONPATH=.:$(realpath "$OUT/../peers")
fi
$PYTHON setup.py -q build_ext --inplace || exit 1
$PYTHON -m bapo_kernels | tee "$OUT/environment.txt"
timeout 40 $PYTHON -m bapo_kernels validate --device cuda --json "$OUT/validate.jsonl" 2>&1 |
  tee "$OUT/validate.log" | tail -3
timeout 130 $PYTHON -m pytest -q -n 6 --dist loadgroup -m "not compile" \
  --ignore tests/test_triton_compile.py --ignore tests/test_instruction_sets.py \
  --ignore tests/test_cuda_on_host.py --ignore tests/test_ranks.py \
  --ignore tests/test_sharded_weights.py --ignore tests/test_trl.py --ignore tests/test_verl.py \
  --ignore tests/test_benchmarks.py --ignore tests/test_cli.py 2>&1 | tee "$OUT/tests.log" | tail -40
for tool in memcheck racecheck; do
  timeout 30 compute-sanitizer --tool "$tool" --error-exitcode 9 $PYTHON -m pytest -q -x \
    tests/test_loss.py -k "test_options and cuda and dtype1 and (paper or together)" \
    >"$OUT/$tool.log" 2>&1 && echo "$tool: clean" || echo "$tool: see $OUT/$tool.log"
done
measure="$PYTHON -m benchmarks run --device cuda --out $OUT/cuda.jsonl"
timeout 80 $measure --only bapo --minutes 1 >"$OUT/ours.log" 2>&1
timeout 100 $measure --minutes 1.2 >"$OUT/everybody.log" 2>&1
grep -h "of yardstick" -A 4 "$OUT/ours.log" | head -60
for backend in cuda triton; do
  timeout 15 $PYTHON -m bapo_kernels profile --device cuda --backend $backend --tokens 8192 \
    2>&1 | tee "$OUT/profile_$backend.log" | tail -15
done
timeout 40 $PYTHON -m benchmarks.tune_triton 2>&1 | tee "$OUT/tune.log" | head -16
