#!/usr/bin/env bash
# All that needs a GPU, in at most ten minutes and without a network: builds the library, runs the
# tests on the GPU's backends, measures every target beside a copy. Leaves $OUT/gpu.jsonl, tests.log
# and tune.log. Needs torch >= 2.10, Triton, nvcc, pytest, hypothesis, rich, typer.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-out/gpu}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
export PYTHONPATH=.

$PYTHON setup.py -q build_ext --inplace || exit 1
$PYTHON -m bapo_kernels | tee "$OUT/environment.txt"
timeout 200 $PYTHON -m pytest -q -n 6 --dist loadgroup -m "not compile" \
  --ignore tests/test_triton_compile.py --ignore tests/test_instruction_sets.py \
  --ignore tests/test_cuda_on_host.py --ignore tests/test_ranks.py \
  --ignore tests/test_sharded_weights.py --ignore tests/test_trl.py --ignore tests/test_verl.py 2>&1 | tee "$OUT/tests.log" | tail -40
for tool in memcheck racecheck; do
  timeout 60 compute-sanitizer --tool "$tool" --error-exitcode 9 $PYTHON -m pytest -q -x \
    tests/test_loss.py -k "test_options and cuda and dtype1 and (paper or together)" \
    >"$OUT/$tool.log" 2>&1 && echo "$tool: clean" || echo "$tool: see $OUT/$tool.log"
done
timeout 200 $PYTHON -m benchmarks.gpu --out "$OUT/gpu.jsonl" 2>&1 | tee "$OUT/gpu.log"
timeout 80 $PYTHON -m benchmarks.tune_triton 2>&1 | tee "$OUT/tune.log" | head -16
