#!/usr/bin/env bash
# Checks the CUDA engine on the GPUs of this machine, one of which suffices, in a few minutes:
#   experiments/gpu_check.sh [folder for the logs]
# Builds it if it is not built, runs its tests (several ranks on one GPU), times the exchange kernel against a copy, and
# ends in a short table. Needs nvcc, CMake, a C++ compiler, and JAX for CUDA; without the last, the tests inside
# JAX are skipped.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
logs=${1:-$(mktemp -d)}
mkdir -p "$logs"
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" XLA_PYTHON_CLIENT_PREALLOCATE=false
results=()
failed=0

# check NAME SECONDS COMMAND...: runs it, and notes what came of it.
check() {
  local name=$1 limit=$2 start=$SECONDS outcome=passed
  shift 2
  timeout "$limit" "$@" >"$logs/$name.log" 2>&1 || outcome="FAILED ($?)"
  [[ $outcome == passed ]] || { failed=1; tail -n 15 "$logs/$name.log"; }
  results+=("$(printf '%-12s %-13s %4d s   %s' "$name" "$outcome" "$((SECONDS - start))" \
    "$(grep -hoE '[0-9]+ (passed|failed)[^=]*' "$logs/$name.log" | tail -n 1)")")
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
if [[ ! -f custom_calls/lib/libeinsummable_cuda.so ]]; then
  check build 240 sh -c "cmake -S . -B build -DPython_EXECUTABLE=\$(command -v $python) -DEINSUMMABLE_CUDA=ON &&
    cmake --build build --parallel"
fi
check ranks 120 "$python" -m pytest -q -p no:cacheprovider tests/test_cuda_ranks.py -k real
check processes 60 "$python" -m pytest -q -p no:cacheprovider tests/test_cuda_processes.py -k real
check library 60 "$python" -m pytest -q -p no:cacheprovider tests/test_cuda_build.py
check jax 90 "$python" -m pytest -q -p no:cacheprovider tests/test_cuda_jax.py
check selftest 120 "$python" -m einsummable_jax.selftest --platform=gpu
check speed 60 "$python" -m experiments.gpu_check --json="$logs/gpu_check.json"
cat "$logs/speed.log"
printf '%s\n' "${results[@]}"
exit $failed
