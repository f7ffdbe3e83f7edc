#!/usr/bin/env bash
# N hosts on one machine: tests/hosts.sh [N] [STEPS], N from 3 to 64 [4], STEPS of fine-tuning [5]. The program is LEARNER
# [target/release/learner]; files go to WORK_DIR [a folder of its own, removed at the end].
#
# Each host is a network namespace with a name and an address of its own, joined to the others by a bridge that stands in a namespace too:
# nothing of the machine's own network is touched, and everything is removed at the end, whatever happens. On each host one process
# `learner --nodes N` trains a tiny model. Then one is killed, a link is taken down, and three quarters of the hosts go on.
# Wants root, or unprivileged user namespaces. Prints a line per thing that holds, and stops at the first that does not.
set -uo pipefail
hosts=${1:-4}
steps=${2:-5}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
learner=$(realpath "${LEARNER:-$root/target/release/learner}")
# Every wait ends: hosts share this machine's cores.
patience=$((120 + 30 * hosts))
# Seconds in which all hosts must have ended after one was lost.
ending=10

held() { printf 'holds: %s\n' "$*"; }
broken() {
  printf 'BROKEN: %s\n' "$*" >&2
  for host in "${!pids[@]}"; do tail -n 3 "$work/host-$host.err" 2>/dev/null | sed "s/^/host-$host: /" >&2; done
  exit 1
}

[[ $hosts -ge 3 && $hosts -le 64 ]] || { echo "hosts.sh: $hosts hosts: 3 to 64 can be had" >&2; exit 2; }
[[ -x $learner ]] || { echo "hosts.sh: no program at $learner: cargo build --release, or set LEARNER" >&2; exit 2; }
command -v ip >/dev/null || { echo "hosts.sh: wants ip (Debian's package iproute2)" >&2; exit 2; }
if [[ $EUID -ne 0 && -z ${HOSTS_INSIDE:-} ]]; then
  unshare --user --map-root-user true 2>/dev/null ||
    { echo "hosts.sh: network namespaces want root, or unprivileged user namespaces (kernel.unprivileged_userns_clone)" >&2; exit 2; }
  HOSTS_INSIDE=1 exec unshare --user --map-root-user --mount --net "${BASH_SOURCE[0]}" "$@"
fi
# Names of namespaces are kept below /run, which only root may write.
[[ -z ${HOSTS_INSIDE:-} ]] || mount -t tmpfs tmpfs /run || exit 2

name=learner-hosts-$$
work=${WORK_DIR:-}
own_work=
[[ -n $work ]] || { work=$(mktemp -d); own_work=1; }
mkdir -p "$work"
declare -A pids=()

clean_up() {
  trap - EXIT INT TERM
  for pid in "${pids[@]}"; do kill -9 "$pid" 2>/dev/null; done
  wait 2>/dev/null
  # With its namespace the bridge goes, and every link with one of its ends.
  for namespace in $(ip netns list | awk '{ print $1 }' | grep "^$name-"); do ip netns del "$namespace"; done
  [[ -z $own_work ]] || rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 1' INT TERM

network() {
  set -e
  ip netns add "$name-switch"
  ip -n "$name-switch" link add bridge type bridge
  ip -n "$name-switch" link set bridge up
  for ((host = 0; host < hosts; host++)); do
    ip netns add "$name-$host"
    ip -n "$name-switch" link add "port-$host" type veth peer name eth0 netns "$name-$host"
    ip -n "$name-switch" link set "port-$host" master bridge up
    ip -n "$name-$host" address add "10.83.0.$((host + 1))/24" dev eth0
    ip -n "$name-$host" link set lo up
    ip -n "$name-$host" link set eth0 up
  done
  set +e
}

# A run of seconds that goes through all stages: fine-tuning, two steps of reinforcement learning, evaluations.
settings=(--recipe smoke)
for setting in run.threads=1 sandbox.parallel=1 rft.candidates=48 "rft.steps=$steps" "rft.batch_sequences=$((2 * hosts))" rl.steps=2 \
  rl.tasks_per_step=4 rl.group_size=2 evaluate.tasks=2 evaluate.samples=2 evaluate.structure_tasks=0 evaluate.every=0 \
  checkpoint.every_rft_steps=1 checkpoint.every_rl_steps=1 checkpoint.keep=3 "parallel.rendezvous_seconds=$patience"; do
  settings+=(--set "$setting")
done
od -An -N16 -tx1 /dev/urandom | tr -d ' \n' >"$work/token"

# start RUN COUNT: a process on each of the first COUNT hosts.
start() {
  local run=$1 count=$2 host
  pids=()
  for ((host = 0; host < count; host++)); do
    # Each of these programs becomes the next one: the process that bash knows is learner itself.
    ip netns exec "$name-$host" unshare --uts sh -c 'hostname "$0" && exec "$@"' "host-$host" \
      "$learner" "${settings[@]}" --nodes "$count" --node-rank "$host" --coordinator 10.83.0.1:29600 --token-file "$work/token" \
      --out "$work/$run" --resume </dev/null >"$work/host-$host.out" 2>"$work/host-$host.err" &
    pids[$host]=$!
  done
}

running() { kill -0 "$1" 2>/dev/null; }

# until WHAT COMMAND...: waits until the command succeeds; all processes must go on running meanwhile.
until_it_holds() {
  local what=$1 deadline=$((SECONDS + patience)) host
  shift
  until "$@"; do
    [[ $SECONDS -lt $deadline ]] || broken "$what: not within $patience s"
    for host in "${!pids[@]}"; do running "${pids[$host]}" || broken "$what: host-$host has ended"; done
    sleep 0.05
  done
}

# Lines of metrics that a run has written.
lines() { wc -l 2>/dev/null <"$work/$1/metrics.jsonl" || echo 0; }
committed() { compgen -G "$work/$1/checkpoints/step-*/DONE" >/dev/null; }

# all_end LOST BEGAN: every host but LOST ends in time, with exit code 3 and a line that names it; $said is how long it took and a line.
all_end() {
  local lost=$1 began=$2 host code took line
  for host in "${!pids[@]}"; do
    [[ $host == "$lost" ]] && continue
    while running "${pids[$host]}"; do
      [[ $(($(date +%s%N) - began)) -lt $((ending * 1000000000)) ]] || broken "host-$host is at work $ending s after host-$lost was lost"
      sleep 0.05
    done
    wait "${pids[$host]}"
    code=$?
    line=$(tail -n 1 "$work/host-$host.err")
    [[ $code == 3 ]] || broken "host-$host ended with exit code $code, not 3: $line"
    [[ $(wc -l <"$work/host-$host.err") == 1 ]] || broken "host-$host said more than one line"
    [[ $line == "learner: rank $lost (host host-$lost) is gone: "* ]] || broken "host-$host does not name rank $lost: $line"
  done
  took=$(awk "BEGIN { printf \"%.1f\", $(($(date +%s%N) - began)) / 1e9 }")
  said="$took s: $line"
}

# Waits for all processes to end well.
all_succeed() {
  local run=$1 deadline=$((SECONDS + patience)) host
  for host in "${!pids[@]}"; do
    while running "${pids[$host]}"; do
      [[ $SECONDS -lt $deadline ]] || broken "$run: host-$host is at work after $patience s"
      sleep 0.1
    done
    wait "${pids[$host]}" || broken "$run: host-$host ended with exit code $?"
    [[ $host == 0 || ! -s $work/host-$host.out ]] || broken "$run: host-$host printed to standard output"
  done
  pids=()
}

# same_order WHOLE PARTS: both runs drew the same data in the same order and learned the same but for the grouping of float sums.
same_order() {
  python3 - "$work/$1" "$work/$2" <<'PY'
import glob, json, os, sys
def run(folder):
    steps = [line for line in map(json.loads, open(f"{folder}/metrics.jsonl")) if line["kind"] in ("rft", "rl")]
    episodes = {os.path.basename(path): [(episode["task_id"], episode["sample"]) for episode in map(json.loads, open(path))]
                for path in glob.glob(f"{folder}/episodes/rl-*.jsonl")}
    return steps, episodes
(whole, whole_episodes), (parts, parts_episodes) = map(run, sys.argv[1:])
assert [(line["kind"], line["step"]) for line in whole] == [(line["kind"], line["step"]) for line in parts], "steps differ"
for a, b in zip(whole, parts):
    if a["kind"] == "rft":
        assert a["tokens_trained"] == b["tokens_trained"], f"step {a['step']}: other sequences"
        assert abs(a["loss"] - b["loss"]) <= 1e-4 * abs(a["loss"]), f"step {a['step']}: loss {a['loss']} and {b['loss']}"
assert whole_episodes and whole_episodes == parts_episodes, "other tasks were drawn"
largest = max(abs(a["loss"] - b["loss"]) for a, b in zip(whole, parts) if a["kind"] == "rft")
print(f"{len(whole)} steps, losses of fine-tuning within {largest:.1e}")
PY
}

network || broken "the network of namespaces cannot be made"
started=$SECONDS
start whole "$hosts"
all_succeed whole
held "$hosts processes on $hosts hosts train as one learner, $steps steps of fine-tuning and 2 of reinforcement learning, in $((SECONDS - started)) s"

lost=$((RANDOM % hosts))
start parts "$hosts"
until_it_holds "a checkpoint" committed parts
began=$(date +%s%N)
kill -9 "${pids[$lost]}"
# Bash would say that it was killed.
wait "${pids[$lost]}" 2>/dev/null
all_end "$lost" "$began"
held "host-$lost killed, all others end with exit code 3 in $said"

lost=$((RANDOM % hosts))
before=$(lines parts)
start parts "$hosts"
until_it_holds "going on" grep -q 'going on from' "$work/host-0.out"
began=$(date +%s%N)
ip -n "$name-switch" link set "port-$lost" down
all_end "$lost" "$began"
held "the link of host-$lost down, all others end with exit code 3 in $said"
# The host that is cut off ends too, whomever it blames.
deadline=$((SECONDS + ending))
while running "${pids[$lost]}"; do
  [[ $SECONDS -lt $deadline ]] || broken "host-$lost, cut off, is at work after $ending s more"
  sleep 0.05
done
wait "${pids[$lost]}"
held "host-$lost, cut off, ends with exit code $?: $(tail -n 1 "$work/host-$lost.err")"
ip -n "$name-switch" link set "port-$lost" up

fewer=$((hosts * 3 / 4))
start parts "$fewer"
all_succeed parts
same=$(same_order whole parts) || broken "going on with $fewer hosts"
held "going on with $fewer of $hosts hosts from the checkpoint after $before lines of metrics ends as the whole run: $same"
