//! `learner tasks make|show|check`: draws proven tasks, prints one, proves those of a file.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use clap::{Args, Subcommand, ValueEnum};
use rayon::prelude::*;
use serde_json::json;

use super::CliError;
use crate::grader::{self, Grader, TaskCheck};
use crate::task::bugfix::{Level, Split, generate};
use crate::task::{TaskError, make_builtin, make_builtin_tokenizer, read_tasks, write_tasks};
use crate::types::{Task, Workspace, write_atomically};

/// Make, show and check task files.
#[derive(Args, Clone, Debug)]
pub struct TasksArguments {
    #[command(subcommand)]
    pub command: TasksCommand,
}

#[derive(Subcommand, Clone, Debug)]
pub enum TasksCommand {
    /// Draw tasks of a built-in family; each is proven in the sandbox before anything is written.
    Make(MakeArguments),
    /// Print a task for reading.
    Show(ShowArguments),
    /// Prove every task of a file: its tests fail on the files as found and pass with the gold patch.
    Check(CheckArguments),
}

#[derive(Args, Clone, Debug)]
pub struct MakeArguments {
    #[arg(long, value_enum, default_value = "bugfix")]
    pub kind: FamilyChoice,
    #[arg(long, value_enum, default_value = "small")]
    pub level: LevelChoice,
    #[arg(long, value_enum, default_value = "train")]
    pub split: SplitChoice,
    /// Number of tasks.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub count: u32,
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Remake what ships with a recipe instead: its task files and tokenizer, into the directory `--out`.
    #[arg(long, value_enum, conflicts_with_all = ["level", "split", "count", "seed"])]
    pub preset: Option<Preset>,
    /// The task file to write, or with `--preset` the directory.
    #[arg(long, value_name = "PATH")]
    pub out: PathBuf,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum FamilyChoice {
    Bugfix,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum LevelChoice {
    Small,
    Large,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum SplitChoice {
    Train,
    Names,
    Structure,
    /// Six tasks of `names` to each of `structure`.
    HeldOut,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preset {
    Quickstart,
}

#[derive(Args, Clone, Debug)]
pub struct ShowArguments {
    pub file: PathBuf,
    /// The task to print; default: the first.
    #[arg(long)]
    pub id: Option<String>,
}

#[derive(Args, Clone, Debug)]
pub struct CheckArguments {
    pub file: PathBuf,
    /// Runs of each test over the same files, to find flaky ones.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeats: u32,
}

/// # Errors
/// [`CliError::Refused`] for a bad task file or a machine without a sandbox, [`CliError::Failed`] for a task that is not proven.
pub fn run(arguments: &TasksArguments, json: bool) -> Result<(), CliError> {
    match &arguments.command {
        TasksCommand::Make(arguments) => make(arguments, json),
        TasksCommand::Show(arguments) => show(arguments, json),
        TasksCommand::Check(arguments) => check(arguments, json),
    }
}

impl From<TaskError> for CliError {
    fn from(error: TaskError) -> CliError {
        match error {
            TaskError::Write { .. } => CliError::Failed(error.to_string()),
            _ => CliError::Refused(error.to_string()),
        }
    }
}

fn make(arguments: &MakeArguments, json: bool) -> Result<(), CliError> {
    let (tasks, files) = match arguments.preset {
        Some(Preset::Quickstart) => make_quickstart(&arguments.out)?,
        None => {
            let tasks = draw(arguments)?;
            prove(&tasks)?;
            write_tasks(&arguments.out, &tasks)?;
            (tasks.len(), vec![arguments.out.clone()])
        }
    };
    let files: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
    if json {
        return print(&format!("{}\n", json!({"tasks": tasks, "files": files})));
    }
    print(&format!("{tasks} tasks, each proven in the sandbox, written to {}\n", files.join(", ")))
}

fn draw(arguments: &MakeArguments) -> Result<Vec<Task>, TaskError> {
    let FamilyChoice::Bugfix = arguments.kind;
    let level = match arguments.level {
        LevelChoice::Small => Level::Small,
        LevelChoice::Large => Level::Large,
    };
    let count = arguments.count as usize;
    let of = |split, count| generate(level, split, count, arguments.seed);
    match arguments.split {
        SplitChoice::Train => of(Split::Train, count),
        SplitChoice::Names => of(Split::Names, count),
        SplitChoice::Structure => of(Split::Structure, count),
        SplitChoice::HeldOut => Ok([of(Split::Names, count - count / 7)?, of(Split::Structure, count / 7)?].concat()),
    }
}

/// The shipped pools and tokenizer, into `directory`. Returns the number of tasks and the files written.
fn make_quickstart(directory: &Path) -> Result<(usize, Vec<PathBuf>), CliError> {
    let pools = make_builtin()?;
    let tokenizer = make_builtin_tokenizer(&pools.train).map_err(|error| CliError::Failed(error.to_string()))?;
    prove(&[&pools.train[..], &pools.held_out].concat())?;
    let unwritable = |path: &Path, error: std::io::Error| CliError::Failed(format!("{}: cannot write: {error}", path.display()));
    std::fs::create_dir_all(directory).map_err(|error| unwritable(directory, error))?;
    let [train, held_out, tokenizer_file] = ["train.jsonl", "held_out.jsonl", "tokenizer.json"].map(|name| directory.join(name));
    write_tasks(&train, &pools.train)?;
    write_tasks(&held_out, &pools.held_out)?;
    write_atomically(&tokenizer_file, &tokenizer).map_err(|error| unwritable(&tokenizer_file, error))?;
    Ok((pools.train.len() + pools.held_out.len(), vec![train, held_out, tokenizer_file]))
}

/// Refuses to go on unless every task is proven.
fn prove(tasks: &[Task]) -> Result<(), CliError> {
    let checks = check_all(tasks, 1)?;
    match checks.iter().find(|check| !check.passed()) {
        None => Ok(()),
        Some(check) => {
            Err(CliError::Failed(format!("task {} could not be proven, nothing was written: {}", check.id, complaints(check))))
        }
    }
}

/// One check per task, in order, on all cores; progress goes to standard error.
fn check_all(tasks: &[Task], repeats: usize) -> Result<Vec<TaskCheck>, CliError> {
    let grader = Grader::new(super::grade::start(None)?, grader::Settings::default());
    let (done, started) = (AtomicUsize::new(0), Instant::now());
    let checks = tasks.par_iter().map(|task| {
        let check = grader.check(task, repeats);
        let done = done.fetch_add(1, Ordering::Relaxed) + 1;
        // At most ten lines, and none for a handful of tasks.
        if tasks.len() >= 50 && done.is_multiple_of(tasks.len().div_ceil(10)) {
            eprintln!("{done} of {} tasks run in the sandbox, {:.0} s", tasks.len(), started.elapsed().as_secs_f64());
        }
        check
    });
    Ok(checks.collect())
}

fn complaints(check: &TaskCheck) -> String {
    let mut parts = check.problems.clone();
    parts.extend(check.flaky.iter().map(|test| format!("{test} is flaky")));
    parts.extend(check.infrastructure.iter().map(|reason| format!("the sandbox failed: {reason}")));
    parts.join("; ")
}

fn check(arguments: &CheckArguments, json: bool) -> Result<(), CliError> {
    let tasks = read_tasks(&arguments.file)?;
    let checks = check_all(&tasks, arguments.repeats as usize)?;
    let failed: Vec<&TaskCheck> = checks.iter().filter(|check| !check.passed()).collect();
    let file = arguments.file.display().to_string();
    if json {
        let passed = checks.len() - failed.len();
        let repeats = arguments.repeats;
        let counts = [count(&checks, Trouble::Problem), count(&checks, Trouble::Flaky), count(&checks, Trouble::Infrastructure)];
        let [problems, flaky, infrastructure] = counts;
        print(&format!(
            "{}\n",
            json!({"file": file, "tasks": checks.len(), "repeats": repeats, "passed": passed, "with_problems": problems,
                   "flaky": flaky, "infrastructure": infrastructure, "failed": failed})
        ))?;
    } else {
        let lines: Vec<String> = failed.iter().map(|check| format!("{}: {}\n", check.id, visible(&complaints(check)))).collect();
        let times = if arguments.repeats == 1 { "once".to_string() } else { format!("{} times", arguments.repeats) };
        let mut summary = format!("{} of {} tasks proven, each run {times}", checks.len() - failed.len(), checks.len());
        for (trouble, words) in
            [(Trouble::Problem, "with problems"), (Trouble::Flaky, "flaky"), (Trouble::Infrastructure, "not run to the end")]
        {
            let found = count(&checks, trouble);
            if found > 0 {
                let _ = write!(summary, "; {found} {words}");
            }
        }
        print(&format!("{}{summary}\n", lines.concat()))?;
    }
    let infrastructure = count(&checks, Trouble::Infrastructure);
    if failed.is_empty() {
        Ok(())
    } else if infrastructure == failed.len() {
        Err(CliError::Infrastructure(format!("{file}: {infrastructure} of {} tasks could not be run", checks.len())))
    } else {
        Err(CliError::Failed(format!("{file}: {} of {} tasks failed", failed.len(), checks.len())))
    }
}

#[derive(Clone, Copy)]
enum Trouble {
    Problem,
    Flaky,
    Infrastructure,
}

/// Tasks with this trouble; a task may have more than one.
fn count(checks: &[TaskCheck], trouble: Trouble) -> usize {
    let has = |check: &&TaskCheck| match trouble {
        Trouble::Problem => !check.problems.is_empty(),
        Trouble::Flaky => !check.flaky.is_empty(),
        Trouble::Infrastructure => check.infrastructure.is_some(),
    };
    checks.iter().filter(has).count()
}

/// The task of a file with this id.
pub fn find<'a>(tasks: &'a [Task], file: &Path, id: &str) -> Result<&'a Task, CliError> {
    let unknown = || CliError::Refused(format!("{}: no task has the id {id:?}", file.display()));
    tasks.iter().find(|task| task.id == id).ok_or_else(unknown)
}

fn show(arguments: &ShowArguments, json: bool) -> Result<(), CliError> {
    let tasks = read_tasks(&arguments.file)?;
    // A task file holds at least one task.
    let first = tasks.first().map(|task| task.id.clone()).unwrap_or_default();
    let task = find(&tasks, &arguments.file, arguments.id.as_ref().unwrap_or(&first))?;
    print(&if json { format!("{}\n", json!(task)) } else { visible(&readable(task)) })
}

/// A task on one page.
fn readable(task: &Task) -> String {
    let mut page = format!("task {}\n", task.id);
    if let Some(origin) = &task.origin {
        let vague = if origin.vague { ", vague issue" } else { "" };
        page += &format!("{}, skeleton {}, bug {}, split {}{vague}\n", origin.family, origin.skeleton, origin.kind, origin.split);
    }
    let _ = write!(page, "\n{}\n", task.issue);
    write_files(&mut page, "", &task.files);
    write_files(&mut page, "visible test ", &task.visible_tests);
    write_files(&mut page, "hidden test ", &task.hidden_tests);
    if let Some(repository) = &task.repository {
        let _ = write!(page, "\nrepository {}\n", repository.display());
    }
    for (title, tests) in [("FAIL_TO_PASS", &task.fail_to_pass), ("PASS_TO_PASS", &task.pass_to_pass)] {
        let _ = write!(page, "\n{title}: {}\n", if tests.is_empty() { "none".into() } else { tests.join(" ") });
    }
    let _ = write!(page, "\ngold patch\n{}", task.gold_patch);
    page
}

fn write_files(page: &mut String, title: &str, files: &Workspace) {
    for (path, text) in files {
        let _ = write!(page, "\n{title}{path}\n");
        for (index, line) in text.lines().enumerate() {
            let _ = writeln!(page, "{:>4}  {line}", index + 1);
        }
    }
}

/// A task file may come from anywhere: control characters are shown, not sent to the terminal.
pub fn visible(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() && c != '\n' && c != '\t' { c.escape_default().to_string() } else { c.to_string() })
        .collect()
}

/// To standard output; a reader that has gone away is no failure.
fn print(text: &str) -> Result<(), CliError> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(CliError::Failed(format!("cannot write to standard output: {error}")))
        }
        _ => Ok(()),
    }
}
