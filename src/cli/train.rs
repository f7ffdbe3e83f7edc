//! `learner train`: checks everything, opens or reopens the run directory, runs the stages and shows what came of it.

use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::Value;

use super::device::{self, Work};
use super::setup::{self, Tasks, Text};
use super::{CliError, OutputArguments, print_json, signals::StopSignal};
use crate::config::{ConfigError, Layers, RunFile};
use crate::device::{Device, GemmLibrary};
use crate::evaluate::{Evaluation, HeldOut};
use crate::grader::Grader;
use crate::model::{Model, ModelConfig};
use crate::report::{self, Reporter};
use crate::sandbox::Sandbox;
use crate::stage::{self, Context, Learner, Point, RunError, RunState, Summary};
use crate::train::{Checkpoints, MetricsLog, Trainer, write_atomically};
use crate::types::{Progress, bytes};

/// The flags from which a run file is made.
#[derive(clap::Args, Clone, Debug)]
pub struct SettingArguments {
    /// Recipe to start from [default: quickstart]
    #[arg(long, value_name = "NAME")]
    recipe: Option<String>,
    /// Run file whose keys override the recipe's; may be given several times
    #[arg(long, value_name = "FILE")]
    config: Vec<PathBuf>,
    /// Hugging Face directory of the model (model.directory)
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Training tasks; some are set apart for evaluation (tasks.train)
    #[arg(long, value_name = "FILE")]
    tasks: Option<PathBuf>,
    /// Where the model runs (run.device)
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
    /// Seed of all random numbers (run.seed)
    #[arg(long)]
    seed: Option<u64>,
    /// Override one key, for example --set rl.steps=32; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

impl SettingArguments {
    /// The run file these flags stand for.
    pub fn resolve(&self) -> Result<RunFile, CliError> {
        let recipe = self.recipe.as_deref().unwrap_or("quickstart");
        self.layered(Layers::from_recipe(recipe)).map_err(CliError::refused)
    }

    fn layered(&self, base: Result<Layers, ConfigError>) -> Result<RunFile, ConfigError> {
        let mut layers = base?;
        for file in &self.config {
            layers.add_file(file)?;
        }
        if let Some(directory) = &self.model {
            layers.set_flag("--model", "model", "directory", directory.display().to_string())?;
        }
        if let Some(tasks) = &self.tasks {
            layers.set_flag("--tasks", "tasks", "train", tasks.display().to_string())?;
            layers.set_flag("--tasks", "tasks", "held_out", "")?;
        }
        if let Some(device) = &self.device {
            layers.set_flag("--device", "run", "device", device.as_str())?;
        }
        if let Some(seed) = self.seed {
            let seed = i64::try_from(seed).map_err(|_| ConfigError::Invalid {
                origin: format!("--seed {seed}"),
                reason: format!("must be at most {}", i64::MAX),
            })?;
            layers.set_flag("--seed", "run", "seed", seed)?;
        }
        for assignment in &self.set {
            layers.set(assignment)?;
        }
        layers.finish()
    }

    fn none_given(&self) -> bool {
        let SettingArguments { recipe, config, model, tasks, device, seed, set } = self;
        recipe.is_none()
            && config.is_empty()
            && model.is_none()
            && tasks.is_none()
            && device.is_none()
            && seed.is_none()
            && set.is_empty()
    }
}

#[derive(clap::Args, Clone, Debug)]
pub struct TrainArguments {
    #[command(flatten)]
    settings: SettingArguments,
    /// Run directory [default: runs/NAME]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Go on with the run in the run directory, or start it if there is none yet
    #[arg(long)]
    resume: bool,
}

impl TrainArguments {
    /// Whether anything was given on the command line.
    pub fn any_given(&self) -> bool {
        !self.settings.none_given() || self.out.is_some() || self.resume
    }
}

/// The directory of a run and how it is entered.
struct RunDirectory {
    path: PathBuf,
    resumes: bool,
}

const RUN_FILE: &str = "run.toml";

pub fn run(arguments: &TrainArguments, output: &OutputArguments) -> Result<(), CliError> {
    let started = Instant::now();
    let (run_file, directory) = open_run(arguments)?;
    if run_file.rollout.nodes > 0 {
        let message =
            "rollout.nodes: training samples with the built-in engine so far; set it to 0 (`learner servers` starts servers)";
        return Err(CliError::Refused(message.into()));
    }
    let choice = run_file.device().map_err(CliError::Refused)?;
    device::run_on(choice, run_file.run.gemm, Training { run_file, directory, output, started })
}

/// A run that is about to start or to go on.
struct Training<'a> {
    run_file: RunFile,
    directory: RunDirectory,
    output: &'a OutputArguments,
    started: Instant,
}

impl Work for Training<'_> {
    fn on<D: Device>(self, device: D) -> Result<(), CliError> {
        train(device, self)
    }
}

fn train<D: Device>(device: D, Training { run_file, directory, output, started }: Training<'_>) -> Result<(), CliError> {
    let tasks = Tasks::load(&run_file)?;
    setup::set_threads(run_file.run.threads)?;
    let stop = StopSignal::listen()?;
    setup::check_demonstrable(&run_file, &tasks.train)?;
    let checkpoint = latest_checkpoint(&run_file, &directory)?;
    // A checkpoint holds its own tokenizer: going on needs nothing else of the model it came from.
    let text = Text::load(checkpoint.as_deref().or(run_file.model.directory.as_deref()))?;
    let format = text.format()?;
    let (model, state) = match &checkpoint {
        Some(checkpoint) => resume(device, checkpoint, &tasks, &text)?,
        None => (setup::load_model(device, &run_file, &text)?, RunState::start(tasks.sha256())),
    };
    setup::check_length(&model, run_file.agent.max_tokens, "agent.max_tokens")?;
    let sandbox = setup::start_sandbox(&run_file)?;
    let disk = disk_needed(&run_file, &model);
    let _lock = enter(&directory, &run_file, disk)?;

    let reporter = Reporter::new(output.verbosity(), output.json);
    let settings = run_file.stage_settings();
    let held_out = HeldOut::draw(&tasks.held_out, &run_file.evaluate, run_file.run.seed);
    header(&reporter, &run_file, &model, &tasks, &held_out, &sandbox, &directory, disk);

    let optimizer_settings = match state.point {
        Point::EvaluateBefore | Point::Rft => run_file.rft.optimizer,
        _ => run_file.rl.optimizer,
    };
    let mut trainer = Trainer::new(model, optimizer_settings);
    if let Some(checkpoint) = &checkpoint {
        Checkpoints::load_optimizer(checkpoint, &trainer.model, &mut trainer.optimizer).map_err(CliError::failed)?;
        reporter.note(&format!("going on from {}", checkpoint.display()));
    }
    device_memory(&reporter, trainer.model.device());
    if run_file.run.gemm == GemmLibrary::CublasLt {
        reporter.warn(
            "run.gemm = \"cublaslt\": its kernels depend on shapes, so sampled and recomputed log-probabilities may differ",
        );
    }
    let mut learner = Learner { trainer, state };
    let log = MetricsLog::open(&directory.path.join("metrics.jsonl"), learner.state.metrics_lines).map_err(CliError::failed)?;
    // TensorBoard's events are made anew from the metrics that are left.
    reporter.follow(&directory.path).map_err(CliError::failed)?;
    let workers = sandbox.parallel();
    let sandbox_tier = sandbox.tier();
    let grader = Grader::new(sandbox, run_file.grader.clone());
    let context = Context {
        directory: &directory.path,
        settings: &settings,
        tokenizer: &text.tokenizer,
        format,
        tokenizer_json: &text.tokenizer_json,
        grader: &grader,
        workers,
        sandbox_tier,
        train_tasks: &tasks.train,
        held_out,
        progress: &reporter,
        stop: &|| stop.raised(),
    };
    let summary = stage::run(&context, &mut learner, log).map_err(|error| explain(error, &directory.path))?;
    finish(&summary, &directory.path, &reporter, output, started)
}

/// The run file and the directory, checked against each other. Nothing is written.
fn open_run(arguments: &TrainArguments) -> Result<(RunFile, RunDirectory), CliError> {
    let given = arguments.settings.resolve()?;
    let path = arguments.out.clone().unwrap_or_else(|| Path::new("runs").join(&given.run.name));
    let run_file_path = path.join(RUN_FILE);
    if run_file_path.exists() {
        if !arguments.resume {
            return Err(CliError::Refused(format!(
                "{} already holds a run: add --resume to go on with it, or --out DIR to start another",
                path.display()
            )));
        }
        let stored = Layers::from_file(&run_file_path).and_then(Layers::finish).map_err(CliError::refused)?;
        if !arguments.settings.none_given() && stored != given {
            return Err(CliError::Refused(format!(
                "{} differs from the settings given: {}; --resume goes on with a run as it was, so leave them out or choose another --out",
                run_file_path.display(),
                first_difference(&stored, &given)
            )));
        }
        return Ok((stored, RunDirectory { path, resumes: true }));
    }
    let holds_other = |name: &std::ffi::OsStr| name != "run.toml.partial";
    match std::fs::read_dir(&path) {
        Ok(entries) => {
            if entries.flatten().any(|entry| holds_other(&entry.file_name())) {
                return Err(CliError::Refused(format!("{} is not empty and holds no run: choose another --out", path.display())));
            }
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(CliError::Refused(format!("{}: {error} (choose another --out)", path.display()))),
    }
    Ok((given, RunDirectory { path, resumes: false }))
}

/// The first key on which two run files differ, with both values.
fn first_difference(stored: &RunFile, given: &RunFile) -> String {
    fn walk(prefix: &str, stored: &Value, given: &Value) -> Option<String> {
        match (stored, given) {
            (Value::Object(left), Value::Object(right)) => {
                let keys: std::collections::BTreeSet<&String> = left.keys().chain(right.keys()).collect();
                keys.into_iter().find_map(|key| {
                    let name = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                    walk(&name, left.get(key).unwrap_or(&Value::Null), right.get(key).unwrap_or(&Value::Null))
                })
            }
            (left, right) if left == right => None,
            (left, right) => Some(format!("{prefix} was {left}, given is {right}")),
        }
    }
    let value = |run_file: &RunFile| serde_json::to_value(run_file).unwrap_or(Value::Null);
    walk("", &value(stored), &value(given)).unwrap_or_else(|| "some key differs".into())
}

/// The newest whole checkpoint of the run that is gone on with.
fn latest_checkpoint(run_file: &RunFile, directory: &RunDirectory) -> Result<Option<PathBuf>, CliError> {
    if !directory.resumes {
        return Ok(None);
    }
    let checkpoints = Checkpoints::new(directory.path.join("checkpoints"), run_file.checkpoint.keep);
    Ok(checkpoints.latest().map_err(CliError::failed)?.map(|(path, _)| path))
}

/// The model and the state of a checkpoint.
fn resume<D: Device>(device: D, checkpoint: &Path, tasks: &Tasks, text: &Text) -> Result<(Model<D>, RunState), CliError> {
    let state: RunState = Checkpoints::load_state(checkpoint).map_err(CliError::failed)?;
    if state.tasks_sha256 != tasks.sha256() {
        let message = format!("{}: the tasks have changed since; put them back, or start another run", checkpoint.display());
        return Err(CliError::Refused(message));
    }
    Ok((setup::load_model_from(device, checkpoint, text)?, state))
}

/// Creates the run directory, its run file last (a directory without one is no run), and locks it for as long as the
/// returned file is open: two learners in one directory would undo each other's work.
fn enter(directory: &RunDirectory, run_file: &RunFile, disk: u64) -> Result<std::fs::File, CliError> {
    let path = &directory.path;
    if directory.resumes {
        check_disk(path, disk.saturating_sub(bytes_in(&path.join("checkpoints"))))?;
    } else {
        check_disk(path, disk)?;
        std::fs::create_dir_all(path)
            .map_err(|error| CliError::Refused(format!("{}: {error} (choose another --out)", path.display())))?;
        let text = run_file.to_toml().map_err(CliError::Failed)?;
        write_atomically(&path.join(RUN_FILE), text.as_bytes()).map_err(CliError::refused)?;
    }
    let run_file_path = path.join(RUN_FILE);
    let refused = |error: &dyn std::fmt::Display| CliError::Refused(format!("{}: {error}", run_file_path.display()));
    let lock = std::fs::File::open(&run_file_path).map_err(|error| refused(&error))?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(std::fs::TryLockError::WouldBlock) => {
            Err(CliError::Refused(format!("{}: another learner is at work on this run", path.display())))
        }
        Err(std::fs::TryLockError::Error(error)) => Err(refused(&error)),
    }
}

/// Bytes of all files below a folder; what cannot be read counts as nothing.
fn bytes_in(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => bytes_in(&entry.path()),
            Ok(metadata) => metadata.len(),
            Err(_) => 0,
        })
        .sum()
}

/// Bytes the run directory will take at most: kept checkpoints and one being written, and some room for logs.
fn disk_needed<D: Device>(run_file: &RunFile, model: &Model<D>) -> u64 {
    const METRICS: u64 = 4_000_000;
    // A token's id, mark, log-probability and text, as JSON.
    const TOKEN: u64 = 30;
    // Weights and two moments of Adam, f32.
    let checkpoint = model.parameter_count() as u64 * 3 * 4;
    let rollouts = run_file.rl.steps + 4 + run_file.rl.steps / run_file.evaluate.every.max(1);
    let episodes = run_file.rft.candidates + run_file.run.episodes_kept * rollouts;
    let episodes = episodes as u64 * run_file.agent.max_tokens as u64 * TOKEN;
    checkpoint * (run_file.checkpoint.keep as u64 + 1) + episodes + METRICS
}

/// Refuses a disk that will not hold the run.
fn check_disk(path: &Path, needed: u64) -> Result<(), CliError> {
    let Some(existing) =
        std::path::absolute(path).ok().and_then(|path| path.ancestors().find(|path| path.exists()).map(Path::to_path_buf))
    else {
        return Ok(());
    };
    #[cfg(unix)]
    {
        let statistics =
            rustix::fs::statvfs(&existing).map_err(|error| CliError::Refused(format!("{}: {error}", existing.display())))?;
        let free = statistics.f_bavail * statistics.f_frsize;
        if free < needed {
            return Err(CliError::Refused(format!(
                "{}: the run needs up to {}, only {} are free there (free some space, choose another --out or lower checkpoint.keep)",
                path.display(),
                bytes(needed),
                bytes(free)
            )));
        }
    }
    Ok(())
}

#[allow(clippy::too_many_arguments)]
fn header<D: Device>(
    reporter: &Reporter,
    run_file: &RunFile,
    model: &Model<D>,
    tasks: &Tasks,
    held_out: &HeldOut,
    sandbox: &Sandbox,
    directory: &RunDirectory,
    disk: u64,
) {
    let row = |name: &str, value: String| (name.to_owned(), value);
    let origin = match &run_file.model.directory {
        Some(directory) => directory.display().to_string(),
        None => format!("drawn at random, seed {}", run_file.run.seed),
    };
    let config = model.config();
    let memory = model.memory_by_purpose();
    let micro_batch = run_file.step.micro_batch_tokens * memory.activations_per_token;
    let episodes = run_file.rl.tasks_per_step * run_file.rl.group_size;
    let evaluated = (held_out.main.len() + held_out.structure.len()) * run_file.evaluate.samples;
    let sequences = run_file.engine.max_sequences.min(episodes.max(evaluated));
    let caches = sequences * run_file.agent.max_tokens * memory.key_values_per_token;
    let memory = [
        ("weights", memory.weights + memory.packed),
        ("gradients", memory.gradients),
        ("optimizer", memory.optimizer),
        ("activations", micro_batch),
        ("keys and values up to", caches),
    ]
    .map(|(purpose, count)| format!("{purpose} {}", bytes(count as u64)));
    let groups = format!("{} tasks x {} attempts", run_file.rl.tasks_per_step, run_file.rl.group_size);
    reporter.header(
        &format!("learner: {}", run_file.run.name),
        &[
            row("model", format!("{} ({origin})", describe_shape(config))),
            row("parameters", format!("{}", model.parameter_count())),
            row("device", model.device().describe()),
            row("memory", memory.join(", ")),
            row("tasks", format!("{} to train on ({})", tasks.train.len(), run_file.tasks.train)),
            row("held out", format!("{} tasks, {} of unseen structure", held_out.main.len(), held_out.structure.len())),
            row("sandbox", format!("tier {}, {} at once", sandbox.tier(), sandbox.parallel())),
            row(
                "stages",
                format!(
                    "fine-tune on {} demonstrations, reinforce {} steps of {groups}",
                    run_file.rft.candidates, run_file.rl.steps
                ),
            ),
            row("disk", format!("up to {} in {}", bytes(disk), directory.path.display())),
        ],
    );
}

/// What the device has given out before the first step, by purpose, where it keeps count.
fn device_memory<D: Device>(reporter: &Reporter, device: &D) {
    let rows: Vec<Vec<String>> = device
        .memory_use()
        .iter()
        .filter(|line| line.peak > 0)
        .map(|line| vec![line.purpose.to_owned(), bytes(line.in_use as u64), bytes(line.peak as u64)])
        .collect();
    if !rows.is_empty() {
        reporter.table("device memory before the first step", &["purpose", "in use", "peak"], &rows);
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

/// How a run that did not end well is told.
fn explain(error: RunError, directory: &Path) -> CliError {
    let resume = format!("learner --resume --out {}", directory.display());
    match error {
        RunError::Stopped { .. } => CliError::Interrupted(format!("{error}. To go on: {resume}")),
        RunError::File(_) | RunError::Checkpoint(_) => {
            CliError::Failed(format!("{error}. What was saved before is whole; once mended, go on: {resume}"))
        }
        error => CliError::failed(error),
    }
}

/// Writes the summary and the page, and shows the closing table and the curve.
fn finish(
    summary: &Summary,
    directory: &Path,
    reporter: &Reporter,
    output: &OutputArguments,
    started: Instant,
) -> Result<(), CliError> {
    let text = serde_json::to_vec_pretty(summary).map_err(CliError::failed)?;
    write_atomically(&directory.join("summary.json"), &text).map_err(CliError::failed)?;
    let page = report::write_page(directory).map_err(CliError::failed)?;

    let main: Vec<(&str, &Evaluation)> =
        [("before fine-tuning", "before_rft"), ("after fine-tuning", "after_rft"), ("after RL", "after_rl")]
            .iter()
            .filter_map(|(title, name)| summary.evaluation.get(*name).map(|evaluation| (*title, evaluation)))
            .collect();
    let (headers, rows) = evaluation_rows(&main);
    reporter.table("held-out tasks", &headers, &rows);
    let (line, marks) = curve(directory);
    reporter.curve("pass rate by step of reinforcement learning (line: training, marks: held out)", "pass rate", &line, &marks);
    let seconds: Vec<String> = summary.seconds.iter().map(|(phase, seconds)| format!("{phase} {seconds:.1}")).collect();
    reporter.note(&format!("seconds: {}; this start {:.1}", seconds.join(", "), started.elapsed().as_secs_f64()));
    reporter.note(&format!(
        "verdicts: {} from running tests, {} remembered; largest mismatch between sampling and training {}",
        summary.verdicts_executed, summary.verdicts_remembered, summary.mismatch_max
    ));
    if summary.wall_limit_hits > 0 {
        reporter.warn(&format!(
            "a wall-clock limit fired in {} episodes: this run may not reproduce bit for bit",
            summary.wall_limit_hits
        ));
    }
    if summary.episodes_lost > 0 {
        reporter.warn(&format!("{} episodes were lost to infrastructure faults and left out", summary.episodes_lost));
    }
    reporter.note(&format!("weights sha256 {}", summary.weights_sha256));
    reporter.note(&format!("curves and episodes: {}", page.display()));
    if output.json { print_json(summary) } else { Ok(()) }
}

/// Headers and rows of a table of evaluations.
pub fn evaluation_rows(evaluations: &[(&str, &Evaluation)]) -> (Vec<&'static str>, Vec<Vec<String>>) {
    let headers =
        vec!["policy", "pass@1", "95 % interval", "pass@8", "runs tests", "edits again", "turns", "tokens", "unseen structure"];
    let rows = evaluations
        .iter()
        .map(|(title, evaluation)| {
            let Evaluation { pass_at_1, ci95: [low, high], .. } = evaluation;
            vec![
                (*title).to_owned(),
                format!("{pass_at_1:.3}"),
                format!("{low:.3} to {high:.3}"),
                evaluation.pass_at_8.map_or("-".into(), |value| format!("{value:.3}")),
                format!("{:.2}", evaluation.ran_tests),
                format!("{:.2}", evaluation.edited_after_failure),
                format!("{:.1}", evaluation.turns_mean),
                format!("{:.0}", evaluation.episode_tokens_mean),
                evaluation.structure.as_ref().map_or("-".into(), |split| format!("{:.3}", split.pass_at_1)),
            ]
        })
        .collect();
    (headers, rows)
}

type Points = Vec<(f64, f64)>;

/// Training pass rate by step, and held-out pass@1 where it was measured.
fn curve(directory: &Path) -> (Points, Points) {
    let text = std::fs::read_to_string(directory.join("metrics.jsonl")).unwrap_or_default();
    let (mut line, mut marks): (Points, Points) = Default::default();
    for metrics in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        let number = |key: &str| metrics.get(key).and_then(Value::as_f64);
        match (metrics["stage"].as_str(), metrics["name"].as_str()) {
            (Some("rl"), _) => line.extend(number("step").zip(number("pass_rate"))),
            (Some("evaluation"), Some("after_rft")) => marks.extend(number("pass_at_1").map(|pass| (0.0, pass))),
            (Some("evaluation"), Some(name)) if name.starts_with("rl_step_") || name == "after_rl" => {
                let step = line.last().map_or(0.0, |(step, _)| *step);
                marks.extend(number("pass_at_1").map(|pass| (step, pass)));
            }
            _ => {}
        }
    }
    (line, marks)
}
