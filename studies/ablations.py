#!/usr/bin/env python3
"""Ablations: what four parts of the published recipes are worth on the quick start's tasks.

From one fine-tuned checkpoint, reinforcement learning with all four on (ablations.toml), and variants with one of them off, with
several seeds each. The tables go into docs/studies.md.

    python3 studies/ablations.py

After Ctrl-C the same command goes on; what has ended is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BASE = HERE / "ablations.toml"
PAGE = ROOT / "docs" / "studies.md"
MARKERS = ("<!-- made by studies/ablations.py -->", "<!-- end -->")

# Each differs from the base in one key.
VARIANTS: dict[str, str | None] = {
    "base": None,
    "no clip-higher": "rl.loss.clip.epsilon_high=0.2",
    "no compact filtering": "rl.filter.masked_endings=[]",
    "no length penalty": "rl.reward.step_penalty=off",
    "no std normalisation": "rl.advantage.estimator=dr_grpo",
}

# Whether the study runs, not what it finds.
SMOKE_VARIANTS = ("base", "no length penalty")
SMOKE_SHARED = ("rft.candidates=60", "rft.steps=10", "evaluate.tasks=2", "evaluate.samples=1", "evaluate.structure_tasks=0")
SMOKE_RUN = ("rl.steps=1", "rl.tasks_per_step=2", "rl.group_size=4", "rl.sequences_per_update=4", "evaluate.tasks=2", "evaluate.samples=1")

# 97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom, for two-sided intervals of 95 %.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

# Exit codes, those of the learner.
DONE, FAILED, BAD_USAGE, INTERRUPTED = range(4)


@dataclass
class Run:
    """One run of the learner. It is complete once it has a summary."""

    name: str
    directory: Path
    arguments: list[str]

    @property
    def log(self) -> Path:
        return self.directory.with_name(f"{self.directory.name}.log")

    @property
    def complete(self) -> bool:
        return (self.directory / "summary.json").is_file()

    def steps(self) -> list[dict[str, Any]]:
        """What metrics.jsonl says of the steps of reinforcement learning."""
        lines = map(json.loads, (self.directory / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if line["kind"] == "rl"]

    def evaluation(self) -> dict[str, Any]:
        """On held-out tasks, at the end: every run of the study has one."""
        [evaluation] = json.loads((self.directory / "summary.json").read_text())["evaluation"].values()
        return evaluation


@dataclass
class Study:
    """Settings of a study. Its directory keeps the base that all runs were made with, and in `study.json` the time they took."""

    learner: Path
    out: Path
    jobs: int
    seeds: int
    smoke: bool
    started: float = field(default_factory=time.monotonic)
    earlier: tuple[float, float] = (0.0, 0.0)

    @property
    def base(self) -> Path:
        return self.out / BASE.name

    def open(self) -> None:
        """Makes the directory, or goes on in it if it was made with the same settings."""
        self.out.mkdir(parents=True, exist_ok=True)
        file = self.out / "study.json"
        if file.is_file():
            found = json.loads(file.read_text())
            if (self.base.read_text(), found["smoke"]) != (BASE.read_text(), self.smoke):
                refuse(f"{self.out} holds runs of another {BASE.name}, or of another --smoke: give another --out, or remove it")
            self.earlier = (found["seconds"], found["processor_seconds"])
        self.base.write_text(BASE.read_text())
        self.save()

    def save(self) -> None:
        seconds, processor_seconds = self.times()
        content = {"smoke": self.smoke, "seconds": seconds, "processor_seconds": processor_seconds}
        partial = self.out / "study.json.partial"
        partial.write_text(json.dumps(content) + "\n")
        partial.replace(self.out / "study.json")

    def check(self) -> None:
        """Refuses the study if the learner refuses a variant, before anything runs."""
        for change in filter(None, VARIANTS.values()):
            command = [str(self.learner), "config", "check", "--config", str(self.base), "--set", change]
            checked = subprocess.run(command, capture_output=True, text=True)
            if checked.returncode != 0:
                refuse(f"--set {change}: {checked.stderr.strip()}")

    def times(self) -> tuple[float, float]:
        """Seconds by the clock, and of the processor in runs that have ended, without the tests in their sandboxes."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return self.earlier[0] + time.monotonic() - self.started, self.earlier[1] + used.ru_utime + used.ru_stime

    def shared(self) -> Run:
        """The fine-tuning of the quick start, alone."""
        stages = 'stages=[{ name = "rft", kind = "rft" }, { name = "after_rft", kind = "evaluate" }]'
        recipe = "smoke" if self.smoke else "quickstart"
        return self.run("shared", ["--recipe", recipe], [stages, *(SMOKE_SHARED if self.smoke else ())])

    def variants(self) -> dict[str, list[Run]]:
        """The runs of every variant, by seed. They need the shared checkpoint."""
        checkpoint = max(done.parent for done in self.shared().directory.glob("checkpoints/step-*/DONE"))
        start = ["--config", str(self.base), "--model", str(checkpoint), "--seed"]
        names, small = (SMOKE_VARIANTS, SMOKE_RUN) if self.smoke else (tuple(VARIANTS), ())
        changes = {name: [*filter(None, [VARIANTS[name]]), *small] for name in names}
        seeds = range(self.seeds)
        return {name: [self.run(f"{name}, seed {seed}", [*start, str(seed)], changes[name]) for seed in seeds] for name in names}

    def run(self, name: str, arguments: list[str], settings: Sequence[str]) -> Run:
        directory = self.out / name.replace(",", "").replace(" ", "-")
        sets = [word for setting in settings for word in ("--set", setting)]
        return Run(name, directory, [*arguments, *sets, "--resume", "--out", str(directory)])


def refuse(reason: str) -> NoReturn:
    print(f"ablations: {reason}", file=sys.stderr)
    sys.exit(BAD_USAGE)


def run_all(study: Study, runs: Sequence[Run]) -> bool:
    """Runs what is not complete, `study.jobs` at a time; whether all are complete then. Interrupted, they save and stop."""
    waiting = [run for run in runs if not run.complete]
    done, failed = len(runs) - len(waiting), 0
    running: dict[int, tuple[subprocess.Popen[bytes], Run, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < study.jobs:
                run = waiting.pop(0)
                process = start(study.learner, run)
                running[process.pid] = (process, run, time.monotonic())
            ended, status = os.wait()
            process, run, started = running.pop(ended)
            process.returncode = os.waitstatus_to_exitcode(status)
            study.save()
            if process.returncode == 0 and run.complete:
                done += 1
                score = run.evaluation()["pass_at_1"]
                print(f"{done} of {len(runs)}  {run.name}: pass@1 {score:.3f}  {time.monotonic() - started:.0f} s", flush=True)
            else:
                failed += 1
                print(f"ablations: {run.name}: exit code {process.returncode}, read {run.log}", file=sys.stderr, flush=True)
    except BaseException:
        for process, _, _ in running.values():
            process.terminate()
        for process, _, _ in running.values():
            process.wait()
        study.save()
        raise
    return failed == 0


def start(learner: Path, run: Run) -> subprocess.Popen[bytes]:
    """Starts a run out of reach of the terminal's Ctrl-C: it gets one signal, from us, as a second would end it unsaved."""
    with run.log.open("ab") as log:
        command = [str(learner), *run.arguments]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


@dataclass
class Measure:
    """A figure of a run and how many decimal places of it are shown."""

    title: str
    of: Callable[[Run], float]
    places: int


def ended(*names: str) -> Callable[[Run], float]:
    """Share of held-out attempts that ended so."""

    def measure(run: Run) -> float:
        endings = run.evaluation()["endings"]
        return sum(endings[name] for name in names) / (sum(endings.values()) - endings["infrastructure"])

    return measure


def masked(run: Run) -> float:
    """Share of attempts that compact filtering left out of training."""
    steps = run.steps()
    return sum(sum(step["masked"].values()) for step in steps) / sum(sum(step["endings"].values()) for step in steps)


def in_training(name: str, last: int = 0) -> Callable[[Run], float]:
    """Mean of a figure of metrics.jsonl over the last steps in which it is defined; 0 for all steps."""

    def measure(run: Run) -> float:
        return mean([step[name] for step in run.steps()[-last:] if step[name] is not None])

    return measure


# Of each variant compared with the base.
OUTCOMES = (
    Measure("pass@1", lambda run: run.evaluation()["pass_at_1"], 3),
    Measure("turns", lambda run: run.evaluation()["turns_mean"], 2),
    Measure("ran out", ended("turn_limit", "token_limit", "timeout"), 3),
    Measure("bad call", ended("bad_call"), 3),
    Measure("entropy at the end", in_training("entropy", last=5), 3),
)

# Whether each of the four does anything at all.
MECHANISMS = (
    Measure("held by the lower bound", in_training("clip_fraction_low"), 4),
    Measure("held by the upper bound", in_training("clip_fraction_high"), 4),
    Measure("masked", masked, 3),
    Measure("length penalty", in_training("reward_step_penalty"), 3),
    Measure("deviation of rewards", in_training("reward_deviation"), 3),
    Measure("gradient norm", in_training("gradient_norm"), 2),
    Measure("updates of a rollout", in_training("updates"), 1),
)


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def half_width(values: Sequence[float]) -> float:
    """Of the 95 % interval of the mean by Student's t; not a number for a single value."""
    if len(values) < 2:
        return math.nan
    return T_QUANTILES[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))


def interval(values: Sequence[float], places: int, sign: str = "") -> str:
    """`mean [low, high]`, with `sign` "+" for differences; the mean alone of a single value."""
    middle, half = mean(values), half_width(values)
    if math.isnan(half):
        return f"{middle:{sign}.{places}f}"
    return f"{middle:{sign}.{places}f} [{middle - half:{sign}.{places}f}, {middle + half:{sign}.{places}f}]"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [("", *titles), ["---"] * (len(titles) + 1), *rows])


def report(study: Study) -> str:
    """What was measured, as Markdown."""
    variants = study.variants()
    found = {name: [[measure.of(run) for run in runs] for measure in OUTCOMES] for name, runs in variants.items()}
    outcomes = [[name, *map(interval, found[name], (measure.places for measure in OUTCOMES))] for name in variants]
    differences, distinguishable = [], []
    for name in list(variants)[1:]:
        row = [name]
        for measure, ours, base in zip(OUTCOMES, found[name], found["base"]):
            difference = [value - other for value, other in zip(ours, base)]
            row.append(interval(difference, measure.places, "+"))
            if abs(mean(difference)) > half_width(difference):
                distinguishable.append(f"{measure.title} with {name}")
        differences.append(row)
    mechanisms = [
        [name, *(f"{mean([measure.of(run) for run in runs]):.{measure.places}f}" for measure in MECHANISMS)]
        for name, runs in variants.items()
    ]
    before, (seconds, processor_seconds) = study.shared().evaluation(), study.times()
    return "\n\n".join((
        f"{study.seeds} seeds, {study.jobs} runs at a time on {machine()}: {seconds / 60:.0f} minutes by the clock and "
        f"{processor_seconds / 60:.0f} of processor time, tests in the sandboxes not counted. The checkpoint that all start from has "
        f"pass@1 {before['pass_at_1']:.3f} in {before['turns_mean']:.2f} turns.",
        "Held-out tasks after training, mean over seeds and its 95 % interval:",
        table([measure.title for measure in OUTCOMES], outcomes),
        "Difference to the base, paired by seed, and its 95 % interval:",
        table([measure.title for measure in OUTCOMES], differences),
        f"Intervals that leave out 0: {', '.join(distinguishable) or 'none'}.",
        "Whether the four act, in training, mean over steps and seeds:",
        table([measure.title for measure in MECHANISMS], mechanisms),
    ))


def machine() -> str:
    """How many cores may be used, and of which kind."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    kinds = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} cores ({kinds[0] if kinds else 'of unknown kind'})"


def put_between_markers(page: Path, content: str) -> None:
    """Replaces what stands between the two markers."""
    before, first, rest = page.read_text().partition(MARKERS[0])
    _, second, after = rest.partition(MARKERS[1])
    if not second:
        refuse(f"{page} has no place for the tables: it needs the lines {MARKERS[0]} and {MARKERS[1]}")
    page.write_text(f"{before}{first}\n\n{content}\n\n{second}{after}")


def arguments() -> Study:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--learner", type=Path, default=ROOT / "target/release/learner", help="the program [%(default)s]")
    parser.add_argument("--out", type=Path, help="where the runs are kept [runs/ablations]")
    parser.add_argument("--jobs", type=int, default=cores, help="runs at a time, of one thread each [cores: %(default)s]")
    parser.add_argument("--seeds", type=int, default=3, help=f"of each variant, 2 to {len(T_QUANTILES) + 1} [%(default)s]")
    parser.add_argument("--smoke", action="store_true", help="see in seconds whether the study runs; its tables stay in --out")
    given = parser.parse_args()
    if not os.access(given.learner, os.X_OK):
        refuse(f"{given.learner} is no program: cargo build --release makes it, or give --learner")
    if given.jobs < 1 or not 2 <= given.seeds <= len(T_QUANTILES) + 1:
        refuse(f"--jobs {given.jobs} --seeds {given.seeds}: give at least 1 job and 2 to {len(T_QUANTILES) + 1} seeds")
    out = given.out or ROOT / ("runs/ablations-smoke" if given.smoke else "runs/ablations")
    return Study(given.learner.resolve(), out.resolve(), given.jobs, 1 if given.smoke else given.seeds, given.smoke)


def main() -> int:
    study = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    study.open()
    study.check()
    try:
        # Seed by seed, so that a study that was cut short has something to compare.
        complete = run_all(study, [study.shared()])
        if complete:
            complete = run_all(study, [run for of_a_seed in zip(*study.variants().values()) for run in of_a_seed])
    except KeyboardInterrupt:
        print("ablations: stopped; the same command goes on", file=sys.stderr)
        return INTERRUPTED
    if not complete:
        return FAILED
    content = report(study)
    (study.out / "tables.md").write_text(content + "\n")
    if not study.smoke:
        put_between_markers(PAGE, content)
    print(f"tables: {study.out / 'tables.md' if study.smoke else PAGE}")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
