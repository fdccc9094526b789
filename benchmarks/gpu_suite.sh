#!/usr/bin/env bash
# Runs everything that needs a GPU, the most important stages first, without a network.
#
#   benchmarks/gpu_suite.sh [--list] [--only STAGE,...] [--from STAGE] [--budget S]
#
# Every stage has a time limit. A stage that fails or reaches its limit keeps what it has written and
# does not stop the others. Stages that would be pointless after a failure, or that no longer fit into
# the budget (560 s), are skipped. In $OUT the suite leaves summary.txt and gpu_suite.tar.gz, both
# renewed after every stage, and now/ while a stage runs. The archive has a JSON of pytest-benchmark for
# each stage of benchmarks, cuda_*.json, as benchmarks/results takes it.
#
# Needs torch >= 2.10, Triton, numpy, rich, typer, pytest, pytest-xdist and hypothesis, and nvcc
# unless $BAPO_PREBUILT is the output of `make prebuilt` for the same sources. The wheels in $WHEELS
# (`make baselines`) are installed without their dependencies, for the stages of benchmarks alone.
# BAPO_SUITE_DEVICE=cpu is a rehearsal on the CPU in small sizes.

set -uo pipefail

SELF=$(realpath "${BASH_SOURCE[0]}")
OUT=$(realpath -m "${OUT:-out/gpu}")
WHEELS=$(realpath -m "${WHEELS:-wheels}")
BAPO_PREBUILT=${BAPO_PREBUILT:+$(realpath -m "$BAPO_PREBUILT")}
PYTHON=${PYTHON:-python3}
DEVICE=${BAPO_SUITE_DEVICE:-cuda} # the native backend has the same name
export OUT WHEELS BAPO_PREBUILT PYTHON
cd "$(dirname "$SELF")/.." || exit 1
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 PYTHONUTF8=1

NOW=$OUT/now
# What -k takes of the cases.
MODELS="(Qwen3-8B-N8192 or Llama-3-8B or Gemma-3-12B) and bfloat16 and loss-from"
MODELS+=" and not (zero or real or head or targets)"
HEAD="trained-head or frozen-head"
SIZES=()
TESTS=(tests/test_gpu.py tests/test_loss.py tests/test_linear.py tests/test_log_probs.py
  tests/test_search.py tests/test_autograd.py tests/test_labels.py tests/test_misuse.py
  tests/test_numerics.py tests/test_errors.py tests/repository/test_benchmarks.py tests/test_cli.py
  tests/test_fuzz.py)
OTHER_TESTS=(tests/test_sampling_mask.py tests/test_policies.py tests/test_prepare.py
  tests/test_triton_rows.py tests/test_triton_sets.py tests/test_triton_sequences.py
  tests/test_distributed.py tests/test_metrics.py tests/test_compile.py
  tests/test_sampled_head.py)
WORKERS=6
# Rows in one block and in clusters of every size, aligned or not.
CHECKED_SIZES=(--N 512 --H 256 --V 5000 --V 20000 --V 40000 --V 80001 --V 151936 --V 262209)
STEP_SIZES=()
if [[ $DEVICE == cpu ]]; then
  MODELS="real and bapo_kernels" HEAD="trained-head and float32 and bapo_kernels"
  TESTS=(tests/test_log_probs.py)
  OTHER_TESTS=(tests/test_prepare.py)
  WORKERS=0
  SIZES=(--tokens 16 --vocab 500 --hidden 16)
  CHECKED_SIZES=(--N 16 --H 16 --V 500 --V 501)
  STEP_SIZES=(--tokens 16 --vocab 500)
fi

# --- Stages: name, limit in seconds, command, needs ---

NAMES=()
declare -A LIMIT COMMAND NEEDS STATUS

stage() {
  NAMES+=("$1")
  LIMIT[$1]=$2 COMMAND[$1]=$3 NEEDS[$1]=${*:4}
}

# right:X needs backend X to run here, and its results not to have been found wrong.
define_stages() {
  local native=$DEVICE
  stage library 240 library
  stage environment 60 environment
  stage "answers_$native" 60 "answers $native" "$native"
  stage answers_triton 90 "answers triton" triton
  stage "graphs_$native" 40 "graphs $native" gpu "right:$native"
  stage graphs_triton 60 "graphs triton" gpu right:triton
  stage "targets_$native" 60 "targets $native logits log_probs" "right:$native" plugin
  stage targets_triton 75 "targets triton logits log_probs" right:triton plugin
  stage "hidden_$native" 50 "targets $native hidden" "right:$native" plugin
  stage hidden_triton 55 "targets triton hidden" right:triton plugin
  stage tests 160 "tests tests" right:any
  stage training_step 240 training_step "right:$native" trl
  stage baselines_logits 140 "models logits" right:any plugin
  stage baselines_hidden 140 "models hidden" right:any plugin
  stage memcheck 150 "sanitizer memcheck" right:any compute-sanitizer
  stage synccheck 150 "sanitizer synccheck" right:any compute-sanitizer
  # racecheck may take bulk copies, whose order a barrier in shared memory makes, for hazards: its
  # report is to be read before it is believed.
  stage racecheck 150 "sanitizer racecheck" right:any compute-sanitizer
  stage ncu 60 "counters ncu" right:any ncu
  stage ncu_sets 60 "counters ncu_sets --sets" right:any ncu
  stage other_tests 200 "tests other_tests" right:any
  stage tune 40 tune right:triton
  stage forms_of_head 120 forms_of_head right:any plugin
  stage sampling_mask 200 "measure sampling_masks test benchmarks/test_sampling_masks.py" right:any plugin
  stage distillation 240 "measure distillation test benchmarks/test_distillation.py" right:any plugin
  stage shapes 200 shapes right:any plugin
  stage validate 300 validate right:any
}

# --- Commands, each in its own shell; the last line of the log is the result of the stage ---

library() {
  local how="in place, newer than its sources"
  if [[ -n $BAPO_PREBUILT ]] && take_prebuilt && library_loads; then
    echo "prebuilt, $(cat "$BAPO_PREBUILT/COMMIT" 2>/dev/null || echo "of an unknown commit")"
    return
  fi
  if [[ ! -f bapo_kernels/_C.abi3.so ]] || ! library_loads ||
    [[ -n $(find csrc setup.py -newer bapo_kernels/_C.abi3.so) ]]; then
    $PYTHON setup.py -q build_ext --inplace # without nvcc, the CPU kernels alone
    how="built here"
  fi
  library_loads && echo "$how"
}

take_prebuilt() {
  local file
  if [[ -f $BAPO_PREBUILT/SOURCES ]] && ! sha256sum --check --quiet "$BAPO_PREBUILT/SOURCES"; then
    echo "$BAPO_PREBUILT was built from other sources"
    return 1
  fi
  for file in _C.abi3.so _build.json; do
    cp --remove-destination "$BAPO_PREBUILT/$file" bapo_kernels/ || return
  done
}

library_loads() {
  local absent=None
  [[ $DEVICE == cpu ]] || absent="None if 'cuda' in native.build_info() else native.why_no_cuda()"
  $PYTHON -c "from bapo_kernels.backends import native
raise SystemExit(native.WHY_NO_CPU or ($absent))"
}

environment() {
  local report absent
  if command -v nvidia-smi >/dev/null; then
    nvidia-smi --format=csv,noheader \
      --query-gpu=name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit
  fi
  $PYTHON -c "from benchmarks.records import commit; print('commit', commit())"
  report=$($PYTHON -m bapo_kernels) || return
  echo "$report"
  absent=$(grep -E "^backend ($DEVICE|triton) .*absent" <<<"$report") || {
    echo "$DEVICE and triton run here"
    return
  }
  echo "${absent//$'\n'/; }"
  return 1
}

answers() {
  $PYTHON -m bapo_kernels validate --device "$DEVICE" --backend "$1" --dtype bfloat16 \
    --limit 45 --json "$NOW/answers_$1.json"
}

graphs() {
  local asked="no_synchronisation or graph_capture or two_streams or compiled"
  $PYTHON -m pytest -v -p no:cacheprovider -k "$1 and not fp16 and ($asked)" tests/test_gpu.py
}

targets() {
  local files=("${@:2}")
  files=("${files[@]/#/benchmarks/test_}")
  measure "targets_$1_$2" "targets and bapo_kernels-$1" "${files[@]/%/.py}"
}

tests() {
  local chosen="gpu or $DEVICE or triton" backend files=("${TESTS[@]}")
  [[ $1 == tests ]] || files=("${OTHER_TESTS[@]}")
  for backend in "$DEVICE" triton; do
    is_right "$backend" || chosen="($chosen) and not $backend"
  done
  $PYTHON -m pytest -v -n "$WORKERS" --dist loadgroup --maxfail 50 -p no:cacheprovider \
    --junitxml "$NOW/$1.xml" -k "$chosen" "${files[@]}"
}

sanitizer() {
  local sets
  for sets in "" --sets; do
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --error-exitcode 9 \
      "$PYTHON" -m benchmarks.launch_rows --device "$DEVICE" "${ASKED[@]}" "${CHECKED_SIZES[@]}" \
      ${sets:+"$sets"} || return
  done
}

counters() {
  local kernels="row_pass|row_gradient|prepare|policy|search|contributions|table|solve"
  [[ $1 == ncu ]] || kernels="sets|find_labels"
  local launches metrics=(
    gpu__time_duration.sum dram__bytes_read.sum dram__bytes_write.sum
    dram__throughput.avg.pct_of_peak_sustained_elapsed lts__t_sector_hit_rate.pct
    smsp__issue_active.avg.pct_of_peak_sustained_active smsp__inst_executed.sum
    smsp__inst_executed_op_local_ld.sum smsp__inst_executed_op_local_st.sum
    sm__warps_active.avg.pct_of_peak_sustained_active sm__maximum_warps_per_active_cycle_pct
    launch__registers_per_thread launch__grid_size launch__waves_per_multiprocessor
  )
  ncu --clock-control none --kernel-name "regex:$kernels" --page raw --csv \
    --log-file "$NOW/$1.csv" --metrics "$(IFS=, && echo "${metrics[*]}")" \
    "$PYTHON" -m benchmarks.launch_rows --device "$DEVICE" "${ASKED[@]}" "${@:2}" || return
  grep "^==ERROR==" "$NOW/$1.csv"
  launches=$(grep -cE '^"[0-9]+",' "$NOW/$1.csv")
  echo "$launches launches measured"
  ((launches > 0))
}

tune() { $PYTHON -m benchmarks.tune_triton --device "$DEVICE" --json "$NOW/tune.jsonl"; }

training_step() {
  add_wheels
  $PYTHON -m benchmarks.trl_trainer --device "$DEVICE" "${STEP_SIZES[@]}" \
    --out "$NOW/training_step.jsonl"
}

add_wheels() {
  local folder=$PWD/build/baselines
  if compgen -G "$WHEELS/*.whl" >/dev/null && [[ ! -d $folder ]]; then
    $PYTHON -m pip install -q --no-index --no-deps --no-compile --target "$folder" "$WHEELS"/*.whl
  fi
  PYTHONPATH=$PYTHONPATH:$folder
}

models() { measure "$1" "$MODELS" "benchmarks/test_$1.py"; }

forms_of_head() { measure forms_of_head "$HEAD" benchmarks/test_hidden.py; }

shapes() { measure shapes bapo_kernels benchmarks --minutes 3; }

# Leaves a JSON of this name with the benchmarks of files that a keyword selects.
measure() {
  local backend keyword="($2)"
  [[ $DEVICE == cuda ]] || keyword+=" and not compiled"
  for backend in "$DEVICE" triton; do
    is_right "$backend" || keyword+=" and not bapo_kernels-$backend"
  done
  add_wheels
  $PYTHON -m pytest -p no:cacheprovider -k "$keyword" --device "$DEVICE" "${SIZES[@]}" \
    --benchmark-json "$NOW/${DEVICE}_$1.json" "${@:3}"
}

validate() {
  $PYTHON -m bapo_kernels validate --device "$DEVICE" "${ASKED[@]}" --json "$NOW/validate.json"
}

is_right() { [[ " $RIGHT " == *" $1 "* ]]; }

# --- Which stages run, and running them ---

# Prints why a stage cannot run; nothing if it can.
why_not() {
  local need
  for need in ${NEEDS[$1]}; do
    case $need in
      right:any) [[ -n $RIGHT ]] || echo "no backend has passed its checks" ;;
      right:*) why_not_right "${need#right:}" ;;
      cuda | cpu | triton) why_not_here "$need" ;;
      gpu) [[ $DEVICE == cuda ]] || echo "needs a GPU" ;;
      trl) has trl || echo "TRL is neither installed nor in $WHEELS" ;;
      plugin) has pytest_benchmark || echo "pytest-benchmark is neither installed nor in $WHEELS" ;;
      *) command -v "$need" >/dev/null || echo "no $need on the path" ;;
    esac
  done
}

why_not_here() {
  local said
  said=$(sed -n "s/^backend $1  *//p" "$DONE/environment.log" 2>/dev/null)
  [[ $said == available ]] || echo "$1 is ${said:-not in the log of environment}"
}

# With --only or --from the results may not have been checked, which does not count as wrong.
why_not_right() {
  local answers=${STATUS[answers_$1]-ok}
  why_not_here "$1"
  [[ $answers == ok ]] || echo "answers_$1: $answers"
}

has() {
  compgen -G "$WHEELS/$1-*.whl" >/dev/null ||
    $PYTHON -c "from importlib.metadata import version; version('$1')" &>/dev/null
}

right_backends() {
  local backend
  for backend in "$DEVICE" triton; do
    [[ -n $(why_not_right "$backend") ]] || echo "$backend"
  done | paste -sd " "
}

run() {
  local name=$1 limit=${LIMIT[$1]} left=$((BUDGET - SECONDS)) status reason command
  RIGHT=$(right_backends)
  reason=$(why_not "$name")
  if [[ -z $reason ]] && ((limit > left)); then
    case $name in
      library | environment) limit=$((left > 0 ? left : 1)) ;;
      *) reason="takes up to $limit s, and $left s of the budget are left" ;;
    esac
  fi
  if [[ -n $reason ]]; then
    report "$name" skipped 0 "${reason%%$'\n'*}"
    return
  fi
  read -ra command <<<"${COMMAND[$name]}"
  mkdir -p "$NOW"
  RUNNING=$name BEGUN=$SECONDS
  RIGHT=$RIGHT timeout -k 5 -s INT "$limit" bash "$SELF" --stage "${command[@]}" \
    >"$NOW/$name.log" 2>&1 &
  CHILD=$!
  wait "$CHILD" # a trap can interrupt this, but not a command in the foreground
  status=$?
  case $status in
    0) status=ok ;;
    124) status="timed out" ;;
    137) ((SECONDS - BEGUN < limit)) && status=failed || status="timed out" ;;
    *) status=failed ;;
  esac
  ended "$status"
}

ended() {
  local name=$RUNNING
  RUNNING=
  if [[ $1 != ok ]]; then
    FAILED=1
    tail -n 12 "$NOW/$name.log"
  fi
  report "$name" "$1" "$((SECONDS - BEGUN))" "$(result_of "$NOW/$name.log")"
}

# The last line that has a letter, without the frame of a table.
result_of() {
  grep -a '[[:alpha:]]' "$1" | tail -n 1 | sed 's/│//g; s/===*//g; s/  */ /g; s/^ //' | cut -c-240
}

report() {
  local line
  STATUS[$1]=$2
  line=$(printf '%-16s %-9s %4d s  %s' "$1" "$2" "$3" "$4")
  SUMMARY+=$line$'\n'
  echo "$line"
  keep
}

# Saves all results, so that a kill at any time loses only those of the running stage.
keep() {
  printf '%s' "$SUMMARY" >"$OUT/summary.txt"
  [[ ! -d $NOW ]] || cp -r "$NOW/." "$DONE"
  cp "$OUT/summary.txt" "$DONE"
  tar -C "$DONE/.." -czf "$OUT/gpu_suite.tar.gz.new" gpu_suite &&
    mv "$OUT/gpu_suite.tar.gz.new" "$OUT/gpu_suite.tar.gz"
  rm -rf "$NOW"
}

finish() {
  if [[ -n $RUNNING ]]; then
    kill -s INT "$CHILD"
    for _ in {1..30}; do
      kill -0 "$CHILD" 2>/dev/null || break
      sleep 0.1
    done
    kill -s KILL -- "-$CHILD" 2>/dev/null
    ended stopped
  fi
  rm -rf "${DONE%/*}"
}

main() {
  local only="" from="" name chosen=()
  BUDGET=560 RUNNING="" SUMMARY="" FAILED=0
  while (($#)); do
    case $1 in
      --list) printf '%s\n' "${NAMES[@]}"; exit ;;
      --only) only=${2?}; shift 2 ;;
      --from) from=${2?}; shift 2 ;;
      --budget) BUDGET=${2?}; shift 2 ;;
      *) sed -n '2,/^$/s/^# \{0,1\}//p' "$SELF" >&2; exit 2 ;;
    esac
  done
  for name in ${only//,/ } $from; do
    [[ -n ${LIMIT[$name]-} ]] || { echo "--list names the stages, not '$name'" >&2; exit 2; }
  done
  for name in "${NAMES[@]}"; do
    [[ $name != "$from" ]] || from=
    case $name in
      library | environment) ;; # all other stages need them
      *) [[ -z $from && (-z $only || ,$only, == *,$name,*) ]] || continue ;;
    esac
    chosen+=("$name")
  done

  DONE=$(mktemp -d)/gpu_suite
  mkdir -p "$OUT" "$DONE"
  rm -rf "$NOW"
  trap finish EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
  if [[ -z ${BAPO_COMMIT-} && -f $BAPO_PREBUILT/COMMIT ]] && ! git describe --always &>/dev/null; then
    BAPO_COMMIT=$(<"$BAPO_PREBUILT/COMMIT")
    export BAPO_COMMIT
  fi
  for name in "${chosen[@]}"; do run "$name"; done
  exit "$FAILED"
}

if [[ ${1-} == --stage ]]; then
  read -ra ASKED <<<"--backend ${RIGHT// / --backend }"
  "${@:2}"
else
  define_stages
  main "$@"
fi
