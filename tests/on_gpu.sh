#!/usr/bin/env bash
# Kernel tests and benchmarks on a GPU machine that has no toolchain.
#
#   tests/on_gpu.sh [FOLDER]             where cargo and nvcc are: builds, and packs binaries and this script into FOLDER
#                                        [target/on-gpu] and FOLDER.tar.gz
#   FOLDER/on_gpu.sh --run [FILE] [DEVICE]
#                                        on the GPU machine: runs everything that was packed and writes ONE JSON with the device's
#                                        name to FILE [on_gpu.json]; DEVICE is cuda [default], or emulated for a rehearsal
#
# Every part has a time limit. A part that fails is recorded with the end of its output and does not stop the rest; the exit code
# is 0 if all parts passed, 1 otherwise.
set -uo pipefail

pack() {
  local folder=${1:-target/on-gpu}
  cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
  set -e
  [[ -n ${CUDA_HOME:-} ]] || command -v nvcc >/dev/null || { echo "no nvcc (CUDA_HOME, PATH): the binaries would hold no GPU kernels" >&2; exit 1; }
  cargo build --release --locked
  # Cargo says in its JSON messages where the test binary is.
  local test_binary
  test_binary=$(cargo test --locked --test kernels --no-run --message-format=json |
    sed -n 's/.*"name":"kernels".*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
  [[ -x $test_binary ]] || { echo "no kernel test binary came out of cargo test --no-run" >&2; exit 1; }
  local target=${CARGO_TARGET_DIR:-target}
  rm -rf "$folder" "$folder.tar.gz"
  mkdir -p "$folder"
  cp tests/on_gpu.sh benches/peers/torch_gpu.py "$folder/"
  strip -o "$folder/learner" "$target/release/learner"
  strip -o "$folder/kernel-tests" "$test_binary"
  git rev-parse HEAD >"$folder/commit" 2>/dev/null || echo unknown >"$folder/commit"
  tar -C "$(dirname "$folder")" -czf "$folder.tar.gz" "$(basename "$folder")"
  echo "packed: $folder.tar.gz; on the GPU machine: tar xf it, then $(basename "$folder")/on_gpu.sh --run"
}

# Standard input as a JSON string: printable ASCII, nothing else survives.
json_string() {
  printf '"'
  tr -cd '\11\12\40-\176' | sed -e 's/\\/\\\\/g' -e 's/"/\\"/g' -e 's/\t/\\t/g' | awk '{ printf "%s%s", separator, $0; separator = "\\n" }'
  printf '"'
}

# part NAME SECONDS COMMAND...: runs it and appends an object to $parts. A command that prints one JSON object has it as `result`.
part() {
  local name=$1 limit=$2 began=$SECONDS code=0
  shift 2
  echo "== $name (at most $limit s)" >&2
  timeout -k 10 "$limit" "$@" >"$work/out" 2>"$work/error" || code=$?
  local timed_out=false result=null
  [[ $code == 124 || $code == 137 ]] && timed_out=true
  [[ $code == 0 && $(head -c 1 "$work/out") == "{" ]] && result=$(cat "$work/out")
  [[ $code == 0 ]] || failed=$((failed + 1))
  [[ $result == null ]] && cat "$work/out" >>"$work/error"
  [[ -s $parts ]] && echo , >>"$parts"
  {
    printf '{"name": %s, "command": %s, ' "$(printf '%s' "$name" | json_string)" "$(printf "%s" "${*//"$here/"/}" | json_string)"
    printf '"exit_code": %d, "timed_out": %s, "seconds": %d, ' "$code" "$timed_out" $((SECONDS - began))
    printf '"output_end": %s, "result": %s}\n' "$(tail -c 6000 "$work/error" | json_string)" "$result"
  } >>"$parts"
  echo "   exit code $code after $((SECONDS - began)) s" >&2
}

run() {
  local file=${1:-on_gpu.json} device=${2:-cuda} here
  here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  parts=$work/parts
  failed=0
  : >"$parts"
  local learner=$here/learner name=$device driver=none
  if [[ $device == cuda ]]; then
    local query=(nvidia-smi --format=csv,noheader -i 0)
    name=$(timeout 30 "${query[@]}" --query-gpu=name 2>/dev/null) || name=unknown
    driver=$(timeout 30 "${query[@]}" --query-gpu=driver_version 2>/dev/null) || driver=unknown
  fi

  # cuBLASLt, to measure against, comes with CUDA or with PyTorch.
  local library
  library=$(find /usr/local/cuda* /opt /usr/lib -name 'libcublasLt.so*' -not -path '*/stubs/*' 2>/dev/null | head -n 1)
  [[ -z $library ]] || export LD_LIBRARY_PATH="$(dirname "$library")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

  part kernel-tests 240 env LEARNER_TEST_DEVICE="$device" "$here/kernel-tests" --test-threads=1
  part bench-kernels 60 "$learner" bench kernels --device "$device" --json
  [[ $device != cuda ]] || part peer-torch 60 python3 "$here/torch_gpu.py"
  part smoke 120 "$learner" train --recipe smoke --device "$device" --out "$work/smoke" --json
  # NAME CONTEXT, from what must work to what is worth knowing.
  local shapes=("tiny 1024" "qwen2.5-0.5b 4096" "qwen3-0.6b 16384")
  [[ $device == emulated ]] && shapes=("tiny 32")
  local shape
  for shape in "${shapes[@]}"; do
    part "bench-step $shape" 120 "$learner" bench step --model "${shape% *}" --context "${shape#* }" --device "$device" --steps 3 --json
    [[ $device != cuda || $shape == tiny* ]] ||
      part "bench-step-cublaslt $shape" 120 "$learner" bench step --model "${shape% *}" --context "${shape#* }" --device cuda --gemm cublaslt --steps 3 --json
    part "bench-rollout $shape" 120 "$learner" bench rollout --model "${shape% *}" --context "${shape#* }" --device "$device" --sequences 8 --json
  done

  {
    printf '{"device": %s, "driver": %s, ' "$(printf '%s' "$name" | json_string)" "$(printf '%s' "$driver" | json_string)"
    printf '"commit": %s, "date": "%s", ' "$(json_string <"$here/commit")" "$(date -u +%Y-%m-%dT%H:%M:%SZ)"
    printf '"failed": %d, "parts": [\n' "$failed"
    cat "$parts"
    printf ']}\n'
  } >"$file"
  echo "$file: $failed parts failed" >&2
  [[ $failed == 0 ]]
}

case ${1:-} in
  --run) shift; run "$@" ;;
  -*) echo "usage: on_gpu.sh [FOLDER] | on_gpu.sh --run [FILE] [DEVICE]" >&2; exit 2 ;;
  *) pack "$@" ;;
esac
