//! `learner train`: checks everything, opens or reopens the run directory, runs the stages and shows what came of it.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Instant;

use super::agree::{self, Facts};
use super::closing::{explain, finish};
use super::device::{self, RankWork, Work};
use super::directory::{self, RunDirectory};
use super::launch::{self, LaunchArguments, Node};
use super::ranks::{self, RankError};
use super::recipe;
use super::run_file::SettingArguments;
use super::setup::{self, Tasks, Text};
use super::{CliError, OutputArguments, restart, signals::StopSignal};
use crate::config::{Change, RunFile};
use crate::device::{Device, GemmLibrary};
use crate::evaluate::HeldOut;
use crate::grader::Grader;
use crate::model::ModelConfig;
use crate::parallel::{Mesh, Ranks, World};
use crate::report::Reporter;
use crate::sandbox::Sandbox;
use crate::stage::{self, Context, Learner, RunState, Stage};
use crate::train::{Checkpoints, MetricsLog, Policy, Trainer};
use crate::types::{Progress, Silent, bytes};

#[derive(clap::Args, Clone, Debug)]
pub struct TrainArguments {
    #[command(flatten)]
    pub settings: SettingArguments,
    /// Run directory [default: runs/NAME]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Go on with the run in the run directory, or start it if there is none yet
    #[arg(long)]
    pub resume: bool,
    #[command(flatten)]
    launch: LaunchArguments,
    /// Start again by itself, with --resume, after a rank was lost: at most K times
    #[arg(long, value_name = "K", default_value_t = 0, hide_default_value = true, help_heading = launch::HEADING)]
    max_restarts: usize,
}

impl TrainArguments {
    /// Whether anything was given on the command line.
    pub fn any_given(&self) -> bool {
        let TrainArguments { settings, out, resume, launch, max_restarts } = self;
        !settings.none_given() || out.is_some() || *resume || launch.any_given() || *max_restarts > 0
    }
}

pub fn run(arguments: &TrainArguments, output: &OutputArguments) -> Result<(), CliError> {
    if let Some(ended) = restart::supervise(arguments.max_restarts) {
        return ended;
    }
    let started = Instant::now();
    let (run_file, directory) = directory::open(arguments)?;
    run_file.check_runs().map_err(CliError::refused)?;
    let scaled = arguments.settings.changes();
    let choice = run_file.device().map_err(CliError::Refused)?;
    let Some(node) = Node::find(&arguments.launch, &run_file, choice)? else {
        let (_lock, checkpoint) = directory::lock_and_choose(&run_file, &directory)?;
        let training = Training::prepare(&run_file, &directory, checkpoint, 1)?;
        let stop = StopSignal::listen()?;
        return device::run_on(
            choice,
            run_file.run.gemm,
            RankTraining { training: &training, stop, output, started, scaled: &scaled, warning: None },
        );
    };
    let places = node.join(&run_file, &directory.path.display().to_string())?;
    let stop = StopSignal::listen()?;
    let facts = Facts::of(&run_file, &node, &directory);
    // By the first rank of this node, once the checkpoint is chosen.
    let prepared = OnceLock::new();
    let ended = ranks::run(places, |index, ranks, kept| {
        let locked = ranks.first().then(|| directory::lock_and_choose(&run_file, &directory));
        let chosen = locked.as_ref().map(|locked| locked.as_ref().map(|(_, checkpoint)| checkpoint.as_deref()));
        let refused = |line| RankError::Agreed(CliError::Refused(line));
        let checkpoint = agree::on_checkpoint(ranks, &run_file, &directory, chosen)?.map_err(refused)?;
        let training = prepared.get_or_init(|| Training::prepare(&run_file, &directory, checkpoint, node.devices));
        // Whatever is wrong here is told to all nodes.
        let facts = facts.clone().with(training.as_ref());
        let warning = agree::compare(ranks, &facts)?.map_err(refused)?;
        // All have just heard of it if it could not be prepared.
        let Ok(training) = training else { return Ok(()) };
        let work = RankTraining { training, stop: stop.clone(), output, started, scaled: &scaled, warning };
        device::run_rank(choice, &run_file, index, ranks.clone(), node.mesh, kept, work)
    });
    match prepared.into_inner() {
        Some(Err(problem)) => Err(problem),
        _ => ended,
    }
}

/// A run that is about to start or to go on: what all ranks of this process share.
pub struct Training<'a> {
    run_file: &'a RunFile,
    directory: &'a RunDirectory,
    pub checkpoint: Option<PathBuf>,
    stages: Vec<Stage>,
    pub tasks: Tasks,
    text: Text,
    sandbox: Sandbox,
    /// Threads of each rank that run tests and grade.
    workers: usize,
}

impl Training<'_> {
    fn prepare<'a>(
        run_file: &'a RunFile,
        directory: &'a RunDirectory,
        checkpoint: Option<PathBuf>,
        ranks: usize,
    ) -> Result<Training<'a>, CliError> {
        let stages = run_file.stages().map_err(CliError::refused)?;
        let tasks = Tasks::load(run_file)?;
        setup::set_threads(run_file.run.threads)?;
        setup::check_demonstrable(run_file, &stages, &tasks.train)?;
        // A checkpoint holds its own tokenizer: going on needs nothing else of the model it came from.
        let text = Text::load(checkpoint.as_deref().or(run_file.model.directory.as_deref()))?;
        text.format()?;
        let sandbox = setup::start_sandbox(run_file)?;
        let workers = sandbox.parallel().div_ceil(ranks);
        Ok(Training { run_file, directory, checkpoint, stages, tasks, text, sandbox, workers })
    }
}

/// What one rank does of it.
struct RankTraining<'a> {
    training: &'a Training<'a>,
    stop: StopSignal,
    output: &'a OutputArguments,
    started: Instant,
    /// What `--scale` has changed.
    scaled: &'a [Change],
    /// Something all ranks should know, for rank 0 to show.
    warning: Option<String>,
}

impl Work for RankTraining<'_> {
    fn on<D: Device>(self, device: D) -> Result<(), CliError> {
        let world = setup::world_of_one(&device)?;
        RankWork::on(self, device, world).map_err(CliError::from)
    }
}

impl RankWork for RankTraining<'_> {
    fn on<D: Device>(self, device: D, world: World<D>) -> Result<(), RankError> {
        train(device, world, self)
    }
}

fn train<D: Device>(device: D, world: World<D>, rank: RankTraining<'_>) -> Result<(), RankError> {
    let RankTraining { training, stop, output, started, scaled, warning } = rank;
    let Training { run_file, directory, checkpoint, stages, tasks, text, sandbox, workers } = training;
    let state = match checkpoint {
        Some(checkpoint) => state_of(checkpoint, tasks, stages)?,
        None => RunState::start(tasks.sha256()),
    };
    let policy = setup::load_policy(device, &world, run_file, checkpoint.as_deref(), text)?;
    setup::check_stages(policy.config(), stages)?;
    let disk = directory::disk_needed(run_file, stages, tasks.train.len(), policy.parameter_count());
    // Rank 0 is the one that writes and is seen.
    let ranks = world.ranks.clone();
    let _lock = if ranks.first() { directory::enter(directory, run_file, disk)? } else { None };
    if ranks.ranks() > 1 {
        let shared = agree::check_shared(&ranks, &directory.path, run_file)?;
        shared.map_err(|problem| RankError::Agreed(CliError::Refused(problem)))?;
    }
    let reporter = ranks.first().then(|| Reporter::new(output.verbosity(), output.json));
    let progress: &dyn Progress = reporter.as_ref().map_or(&Silent, |reporter| reporter);
    let settings = run_file.stage_settings();
    header(progress, training, &policy, &world, disk);
    if !scaled.is_empty() {
        let title = "scale tiny: not the recipe itself but its stages and settings on a tiny model, with the quick start's tasks and scaffold";
        progress.table(title, &recipe::CHANGE_HEADERS, &recipe::change_rows(scaled));
    }
    if let Some(warning) = &warning {
        progress.warn(warning);
    }

    let optimizer_settings = stages.get(state.stage).map_or(run_file.rl.optimizer, Stage::optimizer);
    let mut trainer = Trainer::new(policy, world, optimizer_settings, &run_file.step);
    if let Some(checkpoint) = checkpoint {
        trainer.restore_optimizer(checkpoint).map_err(CliError::failed)?;
        progress.note(&format!("going on from {}", checkpoint.display()));
    }
    device_memory(progress, trainer.policy().device());
    if run_file.run.gemm == GemmLibrary::CublasLt {
        progress.warn(
            "run.gemm = \"cublaslt\": its kernels depend on shapes, so sampled and recomputed log-probabilities may differ",
        );
    }
    let mut learner = Learner { trainer, state };
    let metrics = directory.path.join("metrics.jsonl");
    let log = match &reporter {
        Some(reporter) => {
            let log = MetricsLog::open(&metrics, learner.state.metrics_lines).map_err(CliError::failed)?;
            // TensorBoard's events are made anew from the metrics that are left.
            reporter.follow(&directory.path).map_err(CliError::failed)?;
            Some(log)
        }
        None => None,
    };
    let grader = Grader::new(sandbox.clone(), run_file.grader.clone());
    let context = Context {
        ranks: &ranks,
        directory: &directory.path,
        seed: run_file.run.seed,
        stages,
        settings: &settings,
        tokenizer: &text.tokenizer,
        format: text.format()?,
        tokenizer_json: &text.tokenizer_json,
        grader: &grader,
        workers: *workers,
        sandbox_tier: sandbox.tier(),
        train_tasks: &tasks.train,
        held_out: &tasks.held_out,
        progress,
        stop: &|| stop.raised(),
    };
    let summary = stage::run(context, &mut learner, log).map_err(|error| explain(error, &directory.path, ranks.ranks()))?;
    match &reporter {
        Some(reporter) => Ok(finish(&summary, &directory.path, reporter, output, started)?),
        None => Ok(()),
    }
}

/// Where the run was at a checkpoint.
fn state_of(checkpoint: &Path, tasks: &Tasks, stages: &[Stage]) -> Result<RunState, CliError> {
    let state: RunState = Checkpoints::load_state(checkpoint).map_err(CliError::failed)?;
    if state.tasks_sha256 != tasks.sha256() {
        let message = format!("{}: the tasks have changed since; put them back, or start another run", checkpoint.display());
        return Err(CliError::Refused(message));
    }
    let unknown = state.stages.keys().find(|name| !stages.iter().any(|stage| stage.name == **name));
    if let Some(name) = unknown {
        let message = format!("{}: it has been through a stage {name:?} that the run file does not list", checkpoint.display());
        return Err(CliError::Refused(message));
    }
    Ok(state)
}

fn header<D: Device>(progress: &dyn Progress, training: &Training<'_>, policy: &Policy<D>, world: &World<D>, disk: u64) {
    let Training { run_file, directory, stages, tasks, sandbox, .. } = training;
    let held_out = HeldOut::draw(&tasks.held_out, &run_file.evaluate, run_file.run.seed);
    let row = |name: &str, value: String| (name.to_owned(), value);
    let origin = match &run_file.model.directory {
        Some(directory) => directory.display().to_string(),
        None => format!("drawn at random, seed {}", run_file.run.seed),
    };
    progress.header(
        &format!("learner: {}", run_file.run.name),
        &[
            row("model", format!("{} ({origin})", describe_shape(policy.config()))),
            row("parameters", format!("{}", policy.parameter_count())),
            row("device", policy.device().describe() + &describe_ranks(&world.ranks, &world.mesh)),
            row("memory", describe_memory(policy, stages, &held_out)),
            row("tasks", format!("{} to train on ({})", tasks.train.len(), run_file.tasks.train)),
            row("held out", format!("{} tasks, {} of unseen structure", held_out.main.len(), held_out.structure.len())),
            row("sandbox", format!("tier {}, {} at once", sandbox.tier(), sandbox.parallel())),
            row("stages", stages.iter().map(Stage::describe).collect::<Vec<_>>().join(", ")),
            row("disk", format!("up to {} in {}", bytes(disk), directory.path.display())),
        ],
    );
}

/// What a rank holds, by purpose, in the stage that needs most of it.
fn describe_memory<D: Device>(policy: &Policy<D>, stages: &[Stage], held_out: &HeldOut) -> String {
    let Policy::Whole { model, .. } = policy else {
        return "weights, gradients and moments in shards over all ranks, and a copy of the weights to sample from".into();
    };
    let most = |bytes: &dyn Fn(&stage::Settings) -> usize| stages.iter().map(|stage| bytes(&stage.settings)).max().unwrap_or(0);
    let memory = model.memory_by_purpose(stages.iter().all(|stage| stage.settings.step.recompute));
    let caches = most(&|settings| {
        let episodes = settings.rl.tasks_per_step * settings.rl.group_size;
        let evaluated = (held_out.main.len() + held_out.structure.len()) * settings.evaluate.samples;
        settings.engine.max_sequences.min(episodes.max(evaluated)) * settings.agent.max_tokens * memory.key_values_per_token
    });
    let purposes = [
        ("weights", memory.weights + memory.packed),
        ("gradients", memory.gradients),
        ("optimizer", memory.optimizer),
        ("activations", most(&|settings| settings.step.micro_batch_tokens * memory.activations_per_token)),
        ("keys and values up to", caches),
    ];
    purposes.map(|(purpose, count)| format!("{purpose} {}", bytes(count as u64))).join(", ")
}

/// How many devices there are like this one.
fn describe_ranks(ranks: &Ranks, mesh: &Mesh) -> String {
    if ranks.ranks() == 1 {
        return String::new();
    }
    let mut hosts = ranks.hosts();
    hosts.dedup();
    let (data, context) = (mesh.data(), mesh.context());
    format!("; {} ranks on {} hosts: {data} data parallel x {context} context parallel", ranks.ranks(), hosts.len())
}

/// What the device has given out before the first step, by purpose, where it keeps count.
fn device_memory<D: Device>(progress: &dyn Progress, device: &D) {
    let rows: Vec<Vec<String>> = device
        .memory_use()
        .iter()
        .filter(|line| line.peak > 0)
        .map(|line| vec![line.purpose.to_owned(), bytes(line.in_use as u64), bytes(line.peak as u64)])
        .collect();
    if !rows.is_empty() {
        progress.table("device memory before the first step", &["purpose", "in use", "peak"], &rows);
    }
}

/// The shape of a model in a line.
fn describe_shape(config: &ModelConfig) -> String {
    format!(
        "{}: {} layers, hidden {}, {} query and {} key/value heads of {}, vocabulary {}",
        config.family.model_type(),
        config.layers,
        config.hidden,
        config.query_heads,
        config.key_value_heads,
        config.head_dim,
        config.vocabulary
    )
}
