#!/usr/bin/env bash
# What the project promises, at shell level: `tests/acceptance.sh NAME [WORK_DIR]`, from the root of a clone.
#   main-job   the quick start on three seeds, twice and with one thread; a run killed 50 times, and one of two ranks 10 times; the sandbox; refusals; and,
#              with MODEL_135M=DIR (a Hugging Face directory of type qwen2), a real model
#   sandbox    10,000 runs in a row that leave nothing, in each tier; the learner killed amid 100 sandboxes: all end within a second
#   recipes    every published recipe at --scale tiny in 6 minutes, and the whole pipeline of Nebius raising held-out pass@1 from stage to stage
#   long-sequence
#              a training step of a sequence of 131,072 tokens (or LONGEST=TOKENS, from 65536 on) over 8 processes: its memory, and its
#              time against shorter ones
# Prints one line per promise and stops at the first that does not hold.
set -euo pipefail
name=${1:?usage: tests/acceptance.sh main-job|sandbox|recipes|long-sequence [WORK_DIR]}
work=${2:-$(mktemp -d)}
root=$(cd "$(dirname "$0")/.." && pwd)
learner=$root/target/release/learner
mkdir -p "$work"

held() { printf 'holds: %s\n' "$*"; }
broken() { printf 'BROKEN: %s\n' "$*" >&2; exit 1; }

# Runs a command; prints its exit code, wall seconds and the peak resident bytes of its largest process.
measured() {
  python3 - "$@" <<'PY'
import resource, subprocess, sys, time
start = time.monotonic()
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
print(code, round(time.monotonic() - start, 1), peak)
PY
}

# same_result WHAT LEFT RIGHT: two runs have the same weights, summary and metrics, but for times.
same_result() {
  local weights
  weights=$(python3 - "$2" "$3" <<'PY'
import json, sys
def timeless(value):
    if isinstance(value, dict):
        return {key: timeless(of) for key, of in value.items() if key not in ("seconds", "speed")}
    return [timeless(of) for of in value] if isinstance(value, list) else value
def result(folder):
    summary = json.load(open(f"{folder}/summary.json"))
    metrics = [json.loads(line) for line in open(f"{folder}/metrics.jsonl")]
    return timeless(summary), timeless(metrics)
left, right = map(result, sys.argv[1:])
assert left[0]["weights_sha256"] == right[0]["weights_sha256"], "weights differ"
assert len(left[1]) == len(right[1]), f"{len(left[1])} and {len(right[1])} lines of metrics"
for a, b in zip(left[1], right[1]):
    assert a == b, f"metrics differ: {({key: (a.get(key), b.get(key)) for key in {*a, *b} if a.get(key) != b.get(key)})}"
assert left == right, "results differ"
print(left[0]["weights_sha256"])
PY
  ) || broken "$1: $2 and $3 differ"
  held "$1: $weights"
}

build() {
  local start=$SECONDS
  (cd "$root" && CARGO_TARGET_DIR=$work/clean-target cargo build --release 2>&1 | tail -n 1)
  local took=$((SECONDS - start))
  [ $took -lt 300 ] || broken "a clean release build took $took s"
  rm -rf "$work/clean-target"
  held "a clean release build takes $took s (under 300)"
  (cd "$root" && cargo build --release --quiet)
}

quick_start() {
  local seed
  for seed in 0 1 2; do
    rm -rf "$work/seed-$seed"
    read -r code seconds peak < <(measured "$learner" --seed $seed --out "$work/seed-$seed")
    [ "$code" = 0 ] || broken "quick start, seed $seed: exit code $code"
    python3 - "$work/seed-$seed/summary.json" "$seed" "$seconds" "$peak" <<'PY' || exit 1
import json, sys
path, seed, seconds, peak = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
summary = json.load(open(path))
before, after = (summary["evaluation"][name] for name in ("after_rft", "after_rl"))
for evaluation in (before, after):
    for key in ("pass_at_1", "pass_at_8", "ci95", "tasks", "samples", "ran_tests", "edited_after_failure"):
        assert evaluation[key] is not None, key
gain = after["pass_at_1"] - before["pass_at_1"]
print(f"seed {seed}: pass@1 {before['pass_at_1']:.3f} {before['ci95']} -> {after['pass_at_1']:.3f} {after['ci95']}, "
      f"gain {gain:.3f}, pass@8 {before['pass_at_8']:.3f} -> {after['pass_at_8']:.3f}, runs tests {before['ran_tests']:.2f} -> "
      f"{after['ran_tests']:.2f}, {seconds} s, {peak / 1e9:.2f} GB")
assert before["tasks"] >= 200 and after["tasks"] >= 200, "fewer than 200 held-out tasks"
assert gain >= 0.20, "gain below 0.20"
assert before["ci95"][1] < after["ci95"][0], "intervals touch"
assert seconds <= 360, "more than 6 minutes"
assert peak <= 3e9, "more than 3 GB"
assert summary["mismatch_max"] == 0 and len(summary["weights_sha256"]) == 64 and summary["seconds"]
PY
    held "quick start, seed $seed"
  done
  rm -rf "$work/again" "$work/one-thread"
  "$learner" -q --seed 0 --out "$work/again" > /dev/null
  same_result "the same seed twice" "$work/seed-0" "$work/again"
  "$learner" -q --seed 0 --set run.threads=1 --out "$work/one-thread" > /dev/null
  same_result "one thread and two" "$work/seed-0" "$work/one-thread"
}

killed() {
  rm -rf "$work/whole" "$work/killed"
  local start end
  start=$(date +%s%N); "$learner" -q --recipe smoke --out "$work/whole" > /dev/null; end=$(date +%s%N)
  local took=$(((end - start) / 1000000)) i pid
  for i in $(seq 50); do
    "$learner" -q --recipe smoke --resume --out "$work/killed" > /dev/null 2>&1 & pid=$!
    sleep "$(python3 -c "import random; print(random.uniform(0, $took) / 4000)")"
    kill -9 $pid 2> /dev/null || true
    wait $pid 2> /dev/null || true
  done
  "$learner" -q --recipe smoke --resume --out "$work/killed" > /dev/null
  same_result "killed 50 times and resumed" "$work/whole" "$work/killed"
}

# Starts one of two nodes on loopback in the background: two_nodes RANK OUT [FLAG...].
two_nodes() {
  local rank=$1 out=$2
  shift 2
  LEARNER_TOKEN=acceptance-of-two-ranks "$learner" -q --recipe smoke --nodes 2 --node-rank "$rank" --coordinator 127.0.0.1:29733 \
    --out "$out" "$@" > /dev/null 2>&1 &
}

killed_ranks() {
  rm -rf "$work/whole-2" "$work/killed-2"
  local start end first second i pid
  start=$(date +%s%N)
  two_nodes 0 "$work/whole-2"; first=$!
  two_nodes 1 "$work/whole-2"; second=$!
  wait $first && wait $second || broken "two ranks that nothing happens to"
  end=$(date +%s%N)
  local took=$(((end - start) / 1000000))
  for i in $(seq 10); do
    two_nodes 0 "$work/killed-2" --resume; first=$!
    two_nodes 1 "$work/killed-2" --resume; second=$!
    sleep "$(python3 -c "import random; print(random.uniform(0, $took) / 2000)")"
    # One at random; the other ends by itself.
    if [ $((RANDOM % 2)) = 0 ]; then pid=$first; else pid=$second; fi
    kill -9 $pid 2> /dev/null || true
    wait $first 2> /dev/null || true
    wait $second 2> /dev/null || true
  done
  two_nodes 0 "$work/killed-2" --resume; first=$!
  two_nodes 1 "$work/killed-2" --resume; second=$!
  wait $first && wait $second || broken "two ranks, killed 10 times, do not go on"
  same_result "one of two ranks killed 10 times, both resumed" "$work/whole-2" "$work/killed-2"
}

real_model() {
  if [ -z "${MODEL_135M:-}" ]; then
    echo "skipped: a real model (set MODEL_135M)"
    return
  fi
  rm -rf "$work/real"
  read -r code seconds peak < <(measured "$learner" --config "$root/recipes/small-model.toml" --model "$MODEL_135M" --out "$work/real")
  [ "$code" = 0 ] || broken "the real model: exit code $code"
  python3 - "$work/real" "$seconds" "$peak" <<'PY' || exit 1
import json, sys
folder, seconds, peak = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
summary = json.load(open(f"{folder}/summary.json"))
steps = [line for line in map(json.loads, open(f"{folder}/metrics.jsonl")) if line["kind"] == "rl"]
norms = [line["gradient_norm"] for line in steps]
print(f"135M: {summary['rft_steps']} fine-tuning steps, gradient norms of RL {norms}, mismatch {summary['mismatch_max']}, {seconds} s, {peak / 1e9:.2f} GB")
assert summary["rft_steps"] == 20 and len(steps) == 2 and max(norms) > 0
assert summary["mismatch_max"] == 0 and seconds <= 900 and peak <= 6e9
PY
  held "a real model of 135M parameters"
}

# Runs the sandbox and checks its verdict. Usage: verdict AS TIER EXPECTED LIMIT_SECONDS COMMAND...
verdict() {
  local as=$1 tier=$2 expected=$3 limit=$4 runner=() start=$SECONDS
  shift 4
  if [ "$as" = user ]; then runner=(setpriv --reuid=65534 --regid=65534 --clear-groups --); fi
  (cd / && "${runner[@]}" "$work/bin/learner" sandbox --json --tier "$tier" --wall-seconds 10 -- "$@" > "$work/record" 2> "$work/stderr") || true
  [ $((SECONDS - start)) -le "$limit" ] || broken "sandbox as $as, tier $tier: $* took $((SECONDS - start)) s"
  python3 - "$expected" "$work/record" <<'PY' || { cat "$work/stderr" >&2; broken "sandbox as $as, tier $tier: $*"; }
import json, sys
record = json.load(open(sys.argv[2]))
keys = "verdict exit_code signal wall_seconds cpu_seconds peak_bytes stdout stderr truncated tier".split()
assert all(key in record for key in keys), record
assert record["verdict"] in sys.argv[1].split("|"), record
PY
}

sandbox() {
  local as tier users=(user)
  [ "$(id -u)" = 0 ] && users=(root user)
  # An ordinary user must be able to reach the program.
  rm -rf "$work/bin"; mkdir -p "$work/bin"; cp "$learner" "$work/bin/"; chmod 755 "$work" "$work/bin" "$work/bin/learner"
  for as in "${users[@]}"; do
    for tier in a b; do
      verdict "$as" $tier exited 3 sh -c 'sleep 1000 & echo hi'
      grep -q . "$work/stderr" && broken "sandbox as $as, tier $tier printed: $(cat "$work/stderr")"
      pgrep -f 'sleep 1000' > /dev/null && broken "sandbox as $as, tier $tier: a process stayed"
      verdict "$as" $tier 'process_limit' 15 sh -c 'bomb() { bomb | bomb & }; bomb; sleep 300'
      verdict "$as" $tier 'memory_limit' 15 python3 -c 'x = []
while True: x.append(b"x" * (1 << 24))'
      verdict "$as" $tier 'output_limit' 15 yes
      verdict "$as" $tier exited 5 python3 -c '
import socket
for kind, address in ((socket.SOCK_STREAM, ("1.1.1.1", 80)), (socket.SOCK_DGRAM, ("8.8.8.8", 53))):
    try:
        s = socket.socket(socket.AF_INET, kind); s.settimeout(2); s.connect(address); s.send(b"x")
    except OSError:
        continue
    raise SystemExit("reached")'
      held "sandbox as $as, tier $tier"
    done
  done
}

# A test of the sandbox, with what it prints.
sandbox_test() {
  (cd "$root" && cargo test --quiet --test sandbox -- --exact "$1" --include-ignored --nocapture > "$work/printed" 2>&1) ||
    { cat "$work/printed" >&2; broken "$1"; }
  grep ': ' "$work/printed"
}

sandbox_soak() {
  sandbox_test soak::ten_thousand_runs_leave_nothing
  held "10,000 runs in a row leave no process, mount, descriptor, directory or memory, in each tier"
}

sandbox_killed() {
  sandbox_test killed::everything_ends_with_the_learner
  python3 - "$work/printed" <<'PY' || broken "sandboxes outlive the learner by more than a second"
import re, sys
seconds = [float(found) for found in re.findall(r"sandboxes ended ([0-9.]+) s", open(sys.argv[1]).read())]
assert seconds and max(seconds) <= 1, seconds
PY
  held "kill -9 amid 100 sandboxes: all end within a second, and the next start leaves nothing"
}

tiny_recipes() {
  (cd "$root" && cargo build --release --quiet)
  local recipe
  for recipe in nebius nebius-rft nebius-stage1 nebius-stage2 deepswe dapo; do
    rm -rf "$work/$recipe"
    read -r code seconds peak < <(measured "$learner" --recipe "$recipe" --scale tiny --out "$work/$recipe")
    [ "$code" = 0 ] || broken "$recipe: exit code $code"
    python3 - "$work/$recipe/summary.json" "$recipe" "$seconds" "$peak" <<'PY' || broken "$recipe"
import json, sys
path, recipe, seconds, peak = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
evaluations = json.load(open(path))["evaluation"]
print(f"{recipe}: " + ", ".join(f"{name} {found['pass_at_1']:.3f} {found['ci95']}" for name, found in evaluations.items())
      + f", {seconds} s, {peak / 1e9:.2f} GB")
assert seconds <= 360, "more than 6 minutes"
if recipe == "nebius":
    found = [evaluations[name] for name in ("base", "after_rft", "after_stage1", "after_stage2")]
    assert all(a["pass_at_1"] < b["pass_at_1"] for a, b in zip(found, found[1:])), "a stage does not raise pass@1"
    assert found[0]["ci95"][1] < found[-1]["ci95"][0], "intervals of the first and the last touch"
PY
    held "$recipe at --scale tiny"
  done
}

# One layer with two heads of 32, context parallel over 8 processes of one thread each, which find each other over TCP. The system
# counts each process's memory and CPU time. A step is the long sequence and as many tokens in shorter ones (docs/benchmarks.md).
long_sequence() {
  local longest=${LONGEST:-131072}
  (cd "$root" && cargo build --release --quiet)
  python3 - "$learner" "$work" "$longest" <<'PY' || broken "a long sequence"
import json, os, secrets, socket, subprocess, sys
learner, folder, longest = sys.argv[1:]
RANKS, HIDDEN, VOCABULARIES = 8, 64, (4096, 16384)
CONTEXTS = [int(longest) // part for part in (4, 2, 1)]
environment = {**os.environ, "RAYON_NUM_THREADS": "1", "LEARNER_TOKEN": secrets.token_hex(16)}

def free(port):
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True

def shape(vocabulary):
    path = f"{folder}/vocabulary-{vocabulary}.json"
    config = {"model_type": "qwen3", "vocab_size": vocabulary, "hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN,
              "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6,
              "rope_theta": 1e6, "max_position_embeddings": CONTEXTS[-1], "tie_word_embeddings": True}
    with open(path, "w") as file:
        json.dump(config, file)
    return path

def step(vocabulary, context):
    """Peak bytes of the rank that had most, and CPU seconds of all ranks per 10^9 pairs of a query and a key."""
    port = next(port for port in range(21000, 31000, RANKS) if all(free(port + rank) for rank in range(RANKS)))
    command = [learner, "bench", "step", "--json", "--model", shape(vocabulary), "--context", str(context), "--steps", "1",
               "--warm-up", "0", "--nodes", str(RANKS), "--context-parallel", str(RANKS), "--coordinator", f"127.0.0.1:{port}",
               "--one-rank-tokens-per-second", "none"]
    ranks = [subprocess.Popen([*command, "--node-rank", str(rank)], env=environment, stdout=subprocess.PIPE)
             for rank in range(RANKS)]
    printed = ranks[0].stdout.read()
    ended = [os.wait4(rank.pid, 0) for rank in ranks]
    assert all(status == 0 for _, status, _ in ended), f"{context} tokens: a rank failed"
    report = json.loads(printed)
    pairs = sum(length * (length + 1) // 2 for length in report["sequence_lengths"]) / 1e9
    peaks = [usage.ru_maxrss * 1024 for _, _, usage in ended]
    cpu = sum(usage.ru_utime + usage.ru_stime for _, _, usage in ended)
    wall = report["step_ms"]["median"] / 1e3
    print(f"{context} tokens, vocabulary {vocabulary}: peak MB by rank {[round(peak / 1e6) for peak in peaks]}; "
          f"{wall:.1f} s, {cpu:.1f} CPU s for {pairs:.2f}e9 pairs: {wall / pairs:.2f} s, {cpu / pairs:.2f} CPU s per 1e9; "
          f"exposed {report['exposed_ms']['median'] / 1e3:.1f} s", flush=True)
    return max(peaks), cpu / pairs

small, large = VOCABULARIES
peaks, cpu = zip(*(step(small, context) for context in CONTEXTS))
growth = step(large, CONTEXTS[-1])[0] - peaks[-1]
# What the logits of one rank's tokens would take.
logits = CONTEXTS[-1] // RANKS * (large - small) * 4
print(f"a vocabulary {large // small} times as large takes {growth / 1e6:.0f} MB a rank; kept logits would take {logits / 1e6:.0f} MB more")
assert growth < logits / 10, "memory grows with vocabulary x tokens"
assert cpu[-1] <= 1.1 * cpu[0], "time grows faster than the attention area"
PY
  held "$longest tokens over 8 processes: memory does not grow with vocabulary x tokens, nor time faster than the attention area"
}

main_job() {
  build
  quick_start
  killed
  killed_ranks
  sandbox
  real_model
  (cd "$root" && cargo test --quiet --test program refusals 2>&1 | tail -n 3)
  held "refusals"
}

case $name in
  main-job) main_job ;;
  main-job:*) "${name#main-job:}" ;;
  sandbox) sandbox_soak; sandbox_killed ;;
  sandbox:*) "sandbox_${name#sandbox:}" ;;
  recipes) tiny_recipes ;;
  long-sequence) long_sequence ;;
  *) echo "no acceptance named $name" >&2; exit 2 ;;
esac
