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
timeout 240 $PYTHON -m pytest -q -n 6 -m "not compile" --ignore tests/test_triton_compile.py \
  --ignore tests/test_instruction_sets.py 2>&1 | tee "$OUT/tests.log" | tail -40
timeout 200 $PYTHON -m benchmarks.gpu --out "$OUT/gpu.jsonl" 2>&1 | tee "$OUT/gpu.log"
timeout 120 $PYTHON -m benchmarks.tune_triton 2>&1 | tee "$OUT/tune.log" | head -16
