//! `learner config`: the run file that a command line stands for, what is wrong with it, how two differ, and every key explained.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use super::directory::RUN_FILE;
use super::run_file::SettingArguments;
use super::{CliError, OutputArguments, print_json, print_text};
use crate::config::keys::{self, Key};
use crate::config::{Layers, RunFile, recipes};
use crate::report::table;

#[derive(clap::Args)]
pub struct ConfigArguments {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(clap::Subcommand)]
enum ConfigCommand {
    /// Print the run file with every key, as TOML (or JSON with --json)
    Show(ShowArguments),
    /// List everything that is wrong with the settings given, or say that they are fine
    Check(SettingArguments),
    /// The keys on which two differ, with both values; each is a recipe, a run file or a run directory
    Diff(DiffArguments),
    /// Every key with what it holds, its default and what it is for
    Keys(KeysArguments),
}

#[derive(clap::Args)]
struct ShowArguments {
    #[command(flatten)]
    settings: SettingArguments,
    /// Only this key, with what it is for; may be given several times
    #[arg(long, value_name = "KEY")]
    explain: Vec<String>,
}

#[derive(clap::Args)]
struct DiffArguments {
    #[arg(value_name = "A")]
    left: String,
    #[arg(value_name = "B")]
    right: String,
}

#[derive(clap::Args)]
struct KeysArguments {
    /// Only keys that hold this word, such as rl.loss
    word: Option<String>,
}

pub fn run(arguments: &ConfigArguments, output: &OutputArguments) -> Result<(), CliError> {
    match &arguments.command {
        ConfigCommand::Show(arguments) => show(arguments, output.json),
        ConfigCommand::Check(settings) => check(settings, output.json),
        ConfigCommand::Diff(arguments) => diff(arguments, output.json),
        ConfigCommand::Keys(arguments) => show_keys(arguments, output.json),
    }
}

fn show(arguments: &ShowArguments, json: bool) -> Result<(), CliError> {
    let run_file = arguments.settings.resolve()?;
    if arguments.explain.is_empty() {
        return match json {
            true => print_json(&run_file),
            false => print_text(&run_file.to_toml().map_err(CliError::Failed)?),
        };
    }
    let (all, values) = (keys::keys(), flat(&run_file)?);
    let mut found = Vec::new();
    for name in &arguments.explain {
        let key = all.iter().find(|key| key.name == *name);
        let key = key.ok_or_else(|| {
            let hint = keys::nearest(name, &[]).map(|key| format!("; did you mean {key}?")).unwrap_or_default();
            CliError::Refused(format!("--explain {name}: no such key{hint}"))
        })?;
        found.push((key, values.get(name)));
    }
    if json {
        let objects: Vec<Value> = found.iter().map(|(key, value)| json!({ "value": value, "key": describe(key) })).collect();
        return print_json(&objects);
    }
    let explained = found.iter().map(|(key, value)| {
        let value = value.map_or("absent", String::as_str);
        format!("{} = {value}\n{}", key.name, paragraph(key))
    });
    print_text(&explained.collect::<Vec<_>>().join("\n"))
}

fn check(settings: &SettingArguments, json: bool) -> Result<(), CliError> {
    let checked = settings.layers().finish();
    if json {
        let problems = checked.as_ref().err().map_or(&[][..], |error| &error.0);
        let missing = checked.as_ref().map(RunFile::missing).unwrap_or_default();
        print_json(&json!({ "ok": problems.is_empty(), "problems": problems, "missing": missing }))?;
        // Said already.
        return checked.map(|_| ()).map_err(|_| CliError::Refused(String::new()));
    }
    let run_file = checked.map_err(CliError::refused)?;
    match run_file.check_runs() {
        Ok(()) => print_text("ok\n"),
        Err(missing) => print_text(&format!("ok, but it cannot run yet:\n{}\n", missing.0.join("\n"))),
    }
}

/// What a recipe's name, a run file or a run directory stands for. A file that gives some keys only lies on the quick start, as it does
/// with `--config`.
fn named(name: &str) -> Result<RunFile, CliError> {
    if recipes::recipe(name).is_some() {
        return Layers::from_recipe(name).finish().map_err(CliError::refused);
    }
    let path = Path::new(name);
    let mut layers = Layers::from_recipe("quickstart");
    layers.add_file(&if path.is_dir() { path.join(RUN_FILE) } else { path.to_path_buf() });
    layers.finish().map_err(CliError::refused)
}

fn diff(arguments: &DiffArguments, json: bool) -> Result<(), CliError> {
    let (left, right) = (flat(&named(&arguments.left)?)?, flat(&named(&arguments.right)?)?);
    let mut names: Vec<&String> = left.keys().chain(right.keys()).collect();
    names.sort();
    names.dedup();
    let differing: Vec<[Option<&String>; 3]> =
        names.into_iter().map(|name| [Some(name), left.get(name), right.get(name)]).filter(|row| row[1] != row[2]).collect();
    if json {
        let objects: Vec<Value> = differing.iter().map(|[key, a, b]| json!({ "key": key, "a": a, "b": b })).collect();
        return print_json(&objects);
    }
    if differing.is_empty() {
        return print_text("no key differs\n");
    }
    let cell = |value: &Option<&String>| value.map_or("absent", String::as_str).to_owned();
    let rows: Vec<Vec<String>> = differing.iter().map(|row| row.iter().map(cell).collect()).collect();
    print_text(&lines(&table(&["key", &arguments.left, &arguments.right], &rows)))
}

fn show_keys(arguments: &KeysArguments, json: bool) -> Result<(), CliError> {
    let word = arguments.word.as_deref().unwrap_or_default();
    let found: Vec<Key> = keys::keys().into_iter().filter(|key| key.name.contains(word)).collect();
    if found.is_empty() {
        let hint = keys::nearest(word, &[]).map(|key| format!("; did you mean {key}?")).unwrap_or_default();
        return Err(CliError::Refused(format!("{word}: no key holds this{hint}")));
    }
    if json {
        return print_json(&found.iter().map(describe).collect::<Vec<_>>());
    }
    print_text(&found.iter().map(|key| format!("{}\n{}", key.name, paragraph(key))).collect::<Vec<_>>().join("\n"))
}

/// What a key holds, its default and what it is for, indented.
fn paragraph(key: &Key) -> String {
    let default = match key.default() {
        Ok(value) => format!("; default {value}"),
        Err("") => String::new(),
        Err(word) => format!("; {word}"),
    };
    let explanation = key.explanation().unwrap_or_default().replace('\n', "\n    ");
    format!("    {}{default}\n    {explanation}\n", key.field.describe())
}

fn describe(key: &Key) -> Value {
    let default = key.default();
    json!({
        "name": key.name,
        "holds": key.field.describe(),
        "default": default.as_ref().ok(),
        "required": default == Err("required"),
        "explanation": key.explanation(),
    })
}

/// Every key with its value in TOML.
fn flat(run_file: &RunFile) -> Result<BTreeMap<String, String>, CliError> {
    Ok(run_file.values().map_err(CliError::Failed)?.into_iter().collect())
}

fn lines(lines: &[String]) -> String {
    lines.iter().map(|line| line.trim_end().to_owned() + "\n").collect()
}
