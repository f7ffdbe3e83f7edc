//! `learner bench step` on several ranks: the sharded trainer, what it hands to collectives, and the share of N times one rank.

use serde::{Deserialize, Serialize};

use super::Subject;
use super::figures::{Spread, peak_resident_bytes};
use super::step::{OneRank, RepeatedStep, StepArguments, one_rank_speed};
use super::step_figures::{STEP_NOTES, StepFigures};
use crate::cli::agree::{self, Facts};
use crate::cli::device::{self, RankWork};
use crate::cli::launch::Node;
use crate::cli::ranks::{self, RankError};
use crate::cli::{CliError, OutputArguments, print_json, print_text};
use crate::collectives::{Operation, Traffic};
use crate::config::RunFile;
use crate::device::{Device, DeviceChoice};
use crate::parallel::World;
use crate::train::Policy;
use crate::types::{self, bytes};

pub fn run(
    arguments: &StepArguments,
    subject: &Subject,
    node: &Node,
    run_file: &RunFile,
    output: &OutputArguments,
) -> Result<(), CliError> {
    let facts = Facts::without_run(settings(arguments), node.mesh.context());
    let places = node.join(run_file, "bench step")?;
    ranks::run(places, |index, ranks, kept| {
        // That clocks are apart does not matter here: no two of them are compared.
        let agreed = agree::compare(ranks, &facts)?;
        agreed.map_err(|difference| RankError::Agreed(CliError::Refused(difference)))?;
        let work = RankMeasuring { arguments, subject, devices: node.devices, output };
        device::run_rank(arguments.model.device, run_file, index, ranks.clone(), node.mesh, kept, work)
    })
}

/// What all ranks must have been given alike.
fn settings(arguments: &StepArguments) -> serde_json::Value {
    serde_json::json!({
        "--model": arguments.model.model,
        "--context": arguments.model.context,
        "--device": kind(arguments.model.device),
        "--gemm": arguments.model.gemm,
        "--steps": arguments.steps,
        "--warm-up": arguments.warm_up,
        "--recompute": arguments.recompute,
    })
}

/// Which of a machine's GPUs, or how many emulated ones, may differ.
fn kind(choice: DeviceChoice) -> &'static str {
    match choice {
        DeviceChoice::Cpu => "cpu",
        DeviceChoice::Cuda { .. } => "cuda",
        DeviceChoice::Emulated { .. } => "emulated",
    }
}

struct RankMeasuring<'a> {
    arguments: &'a StepArguments,
    subject: &'a Subject,
    /// Ranks of this process.
    devices: usize,
    output: &'a OutputArguments,
}

/// What one rank tells of itself.
#[derive(Serialize, Deserialize)]
struct RankFigures {
    /// Of each step.
    step_ms: Vec<f64>,
    /// Per step: from calls to their returns, and the part in which the rank had nothing else to do.
    collective_ms: f64,
    exposed_ms: f64,
    peak_bytes: Option<u64>,
}

impl RankWork for RankMeasuring<'_> {
    fn on<D: Device>(self, device: D, world: World<D>) -> Result<(), RankError> {
        let RankMeasuring { arguments, subject, devices, output } = self;
        let (ranks, mesh) = (world.ranks.clone(), world.mesh);
        let model = subject.open_sharded(device.clone(), &world)?;
        let (config, parameters) = (model.config().clone(), model.parameter_count());
        let step = RepeatedStep::new(arguments, config.vocabulary, &mesh);
        let mut trainer = step.trainer(Policy::sharded(model), world.clone());
        step.times(&mut trainer, arguments.warm_up)?;
        let before = group_traffic(&world);
        let step_ms = step.times(&mut trainer, arguments.steps)?;
        let groups = group_traffic(&world);
        let groups = groups.iter().zip(&before).map(|((group, after), (_, before))| (*group, after.since(before)));
        let collectives: Vec<CollectiveFigures> =
            groups.flat_map(|(group, traffic)| CollectiveFigures::of(group, &traffic, arguments.steps)).collect();
        let (memory_source, peak_bytes) = peak_memory(&device, devices);
        let own = RankFigures {
            step_ms,
            collective_ms: collectives.iter().map(|figures| figures.milliseconds).sum(),
            exposed_ms: collectives.iter().map(|figures| figures.exposed_milliseconds).sum(),
            peak_bytes,
        };
        // Room for the whole model, before one rank works alone.
        drop((trainer, world));
        let all = ranks.gather(&own)?;
        if !ranks.first() {
            return Ok(());
        }

        let count = mesh.world();
        let slowest = |index: usize| all.iter().map(|rank| rank.step_ms[index]).fold(0.0, f64::max);
        let step_ms = Spread::of((0..arguments.steps).map(slowest).collect());
        let step = StepFigures::of(&step, arguments, &config, parameters, &device, count, step_ms);
        let speed = step.tokens_per_second_per_device;
        let report = StepRanksReport {
            step,
            nodes: mesh.world_placement().nodes,
            data_parallel: mesh.data(),
            context_parallel: mesh.context(),
            recompute: arguments.recompute,
            tokens_per_second: speed * count as f64,
            collectives,
            collective_ms: Spread::of(all.iter().map(|rank| rank.collective_ms).collect()),
            exposed_ms: Spread::of(all.iter().map(|rank| rank.exposed_ms).collect()),
            memory: PeakMemory { source: memory_source, bytes_by_rank: all.iter().map(|rank| rank.peak_bytes).collect() },
            scaling: Scaling::of(speed, device, subject, arguments)?,
            notes: notes(arguments.model.device),
        };
        let printed = if output.json { print_json(&report) } else { print_text(&report.text()) };
        Ok(printed?)
    }
}

/// What this rank has handed over so far, by group. A context group of one exchanges nothing.
fn group_traffic<D: Device>(world: &World<D>) -> Vec<(&'static str, Traffic)> {
    let mut groups = vec![("world", world.world.traffic())];
    if world.mesh.context() > 1 {
        groups.push(("context", world.context.traffic()));
    }
    groups.push(("host", world.ranks.traffic()));
    groups
}

/// The calls of one kind in one group, of rank 0, per step.
#[derive(Serialize)]
struct CollectiveFigures {
    /// `world`: weights and gradients. `context`: keys, values, queries and scores of the ranks that share sequences. `host`: what the ranks
    /// say to each other about the step.
    group: &'static str,
    operation: Operation,
    calls: f64,
    /// Handed in by this rank.
    bytes: f64,
    milliseconds: f64,
    exposed_milliseconds: f64,
}

impl CollectiveFigures {
    /// One for each kind of call that was made.
    fn of(group: &'static str, traffic: &Traffic, steps: usize) -> Vec<CollectiveFigures> {
        let per_step = |total: f64| total / steps as f64;
        let figures = |operation: Operation| {
            let count = traffic.of(operation);
            (count.calls > 0).then(|| CollectiveFigures {
                group,
                operation,
                calls: per_step(count.calls as f64),
                bytes: per_step(count.bytes as f64),
                milliseconds: per_step(count.time.as_secs_f64() * 1e3),
                exposed_milliseconds: per_step(count.exposed.as_secs_f64() * 1e3),
            })
        };
        Operation::ALL.into_iter().filter_map(figures).collect()
    }
}

/// The most bytes that this rank has had, and who counted: the device, or else the system, which counts the whole process.
fn peak_memory<D: Device>(device: &D, devices: usize) -> (&'static str, Option<u64>) {
    let counted = device.memory_use();
    if counted.is_empty() {
        return ("process", peak_resident_bytes().map(|bytes| bytes / devices as u64));
    }
    ("device", Some(counted.iter().map(|line| line.peak as u64).sum()))
}

#[derive(Serialize)]
struct PeakMemory {
    /// `device`: the sum over purposes of the most that each had. `process`: the most resident bytes of the rank's process, divided by the
    /// ranks in it.
    source: &'static str,
    bytes_by_rank: Vec<Option<u64>>,
}

/// Each of N ranks against one alone.
#[derive(Serialize)]
struct Scaling {
    /// `measured` or `given`
    source: &'static str,
    one_rank_tokens_per_second: f64,
    /// Of N times one rank.
    share: f64,
}

impl Scaling {
    /// `speed`: tokens per second of each rank. None where one rank cannot do it alone.
    fn of<D: Device>(speed: f64, device: D, subject: &Subject, arguments: &StepArguments) -> Result<Option<Scaling>, RankError> {
        let (source, alone) = match arguments.one_rank_tokens_per_second {
            Some(OneRank::Unknown) => return Ok(None),
            Some(OneRank::Given(alone)) => ("given", alone),
            None => ("measured", one_rank_speed(device, subject, arguments)?),
        };
        Ok(Some(Scaling { source, one_rank_tokens_per_second: alone, share: speed / alone }))
    }
}

#[derive(Serialize)]
struct StepRanksReport {
    #[serde(flatten)]
    step: StepFigures,
    nodes: usize,
    data_parallel: usize,
    context_parallel: usize,
    recompute: bool,
    /// Of all ranks together.
    tokens_per_second: f64,
    collectives: Vec<CollectiveFigures>,
    /// Over the ranks, per step.
    collective_ms: Spread,
    exposed_ms: Spread,
    memory: PeakMemory,
    scaling: Option<Scaling>,
    notes: Vec<&'static str>,
}

const RANK_NOTES: [&str; 4] = [
    "a step takes as long as its slowest rank; every replica has two micro-batches of the context, shared by its context ranks",
    "bytes are what rank 0 hands in: its part of an all-gather, all of a reduce-scatter; times are from a call to its return, waiting \
     for slower ranks included; exposed is the part in which the rank had nothing to compute",
    "memory counted by the device is the sum over purposes of the most that each had; else it is the most resident bytes of the \
     rank's process, the program and host copies included, divided by the ranks in it",
    "one rank: the same two micro-batches on rank 0 alone, weights whole, while the others wait; the share is tokens/s per device over \
     its tokens/s",
];

const SHARED_CORES: &str =
    "ranks on one machine's CPU share its cores, as does what emulates GPUs: the share says nothing about machines of their own";

fn notes(choice: DeviceChoice) -> Vec<&'static str> {
    let shared = (!matches!(choice, DeviceChoice::Cuda { .. })).then_some(SHARED_CORES);
    STEP_NOTES.into_iter().chain(RANK_NOTES).chain(shared).collect()
}

impl StepRanksReport {
    fn text(&self) -> String {
        let mut lines = vec![
            self.step.heading(),
            format!(
                "  ranks           {} on {} nodes: {} data parallel x {} context parallel",
                self.step.devices, self.nodes, self.data_parallel, self.context_parallel
            ),
            self.step.line(),
            format!("  tokens/s        {:.0}, {:.0} per device", self.tokens_per_second, self.step.tokens_per_second_per_device),
            self.step.utilisation_line(),
        ];
        lines.extend(self.collectives.iter().map(CollectiveFigures::line));
        lines.push(format!(
            "  in collectives  {:.2} ms a step median over ranks ({:.2} to {:.2}), exposed {:.2} ms ({:.2} to {:.2})",
            self.collective_ms.median,
            self.collective_ms.min,
            self.collective_ms.max,
            self.exposed_ms.median,
            self.exposed_ms.min,
            self.exposed_ms.max
        ));
        lines.push(format!("  peak memory     {} ({}, by rank)", self.memory.line(), self.memory.source));
        lines.push(match &self.scaling {
            Some(scaling) => format!(
                "  one rank        {:.0} tokens/s ({}): {} of {} times that",
                scaling.one_rank_tokens_per_second,
                scaling.source,
                types::percent(scaling.share),
                self.step.devices
            ),
            None => "  one rank        n/a".into(),
        });
        let notes = self.notes.iter().map(|note| format!("  note: {note}"));
        lines.into_iter().chain(notes).map(|line| line + "\n").collect()
    }
}

impl CollectiveFigures {
    fn line(&self) -> String {
        format!(
            "  {:<16}{}: {} in {:.0} calls, {:.2} ms of which {:.2} exposed",
            self.group,
            self.operation,
            bytes(self.bytes as u64),
            self.calls,
            self.milliseconds,
            self.exposed_milliseconds
        )
    }
}

impl PeakMemory {
    fn line(&self) -> String {
        let each = self.bytes_by_rank.iter().map(|peak| peak.map_or("n/a".into(), bytes));
        each.collect::<Vec<String>>().join(", ")
    }
}
