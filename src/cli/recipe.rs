//! `learner recipe`: the recipes that come with the program, each setting with where it comes from.

use serde_json::{Value, json};

use super::run_file::Scale;
use super::{CliError, OutputArguments, print_json, print_text};
use crate::config::recipes::{OWN, RECIPES, Setting, Source, about, recipe, settings};
use crate::config::{Change, Layers, Missing};
use crate::report::table;

#[derive(clap::Args)]
pub struct RecipeArguments {
    #[command(subcommand)]
    command: RecipeCommand,
}

#[derive(clap::Subcommand)]
enum RecipeCommand {
    /// The recipes and what each is about
    List,
    /// A recipe's settings, each with its source; `?` marks what the publication does not state, `*` what we decided
    Show(ShowArguments),
}

#[derive(clap::Args)]
struct ShowArguments {
    name: String,
    /// What becomes of the settings at this scale, and by which rule
    #[arg(long)]
    scale: Option<Scale>,
}

pub fn run(arguments: &RecipeArguments, output: &OutputArguments) -> Result<(), CliError> {
    match &arguments.command {
        RecipeCommand::List => list(output.json),
        RecipeCommand::Show(arguments) => show(arguments, output.json),
    }
}

fn list(json: bool) -> Result<(), CliError> {
    if json {
        return print_json(&RECIPES.map(|(name, text)| json!({ "name": name, "about": about(text).join(" ") })));
    }
    let rows: Vec<Vec<String>> = RECIPES
        .iter()
        .map(|(name, text)| {
            let about = about(text).join(" ");
            let sentence = about.split_once(". ").map_or(about.as_str(), |(sentence, _)| sentence);
            vec![(*name).to_owned(), sentence.trim_end_matches('.').to_owned()]
        })
        .collect();
    print_text(&(table(&["recipe", "what it is"], &rows).join("\n") + "\n"))
}

fn show(arguments: &ShowArguments, json: bool) -> Result<(), CliError> {
    let name = arguments.name.as_str();
    let unknown = || CliError::Refused(format!("{name}: no such recipe; there are {}", RECIPES.map(|(name, _)| name).join(", ")));
    let text = recipe(name).ok_or_else(unknown)?;
    let settings = settings(text).map_err(|problems| CliError::Failed(problems.join("\n")))?;
    let mut layers = Layers::from_recipe(name);
    if arguments.scale.is_some() {
        layers.scale_down();
    }
    let changes = layers.changes().to_vec();
    let run_file = layers.finish().map_err(CliError::refused)?;
    let missing = run_file.missing();
    if json {
        let shown: Vec<Value> = settings.iter().map(describe).collect();
        return print_json(&json!({ "name": name, "settings": shown, "changes": changes, "missing": missing }));
    }
    let mut text = format!("recipe {name}\n\n{}\n\n", about(text).join("\n"));
    text += &match arguments.scale {
        Some(_) => scaled(&changes, &settings),
        None => sources(name, &settings, &missing),
    };
    print_text(&text)
}

fn describe(setting: &Setting) -> Value {
    json!({ "key": setting.key, "value": setting.value, "source": setting.cited })
}

/// Every setting with its source, and what they add up to.
fn sources(name: &str, settings: &[Setting], missing: &[Missing]) -> String {
    let row = |Setting { key, value, cited, .. }: &Setting| {
        let cell = |text: Option<String>| text.unwrap_or_default();
        vec![
            cell(cited.as_ref().map(|cited| cited.source.mark().to_owned())),
            key.clone(),
            value.clone(),
            cell(cited.as_ref().map(ToString::to_string)),
            cell(cited.as_ref().map(|cited| cited.note.clone())),
        ]
    };
    let rows: Vec<Vec<String>> = settings.iter().map(row).collect();
    let mut text = table(&["", "key", "value", "source", "remark"], &rows).join("\n") + "\n\n";
    if !OWN.contains(&name) {
        let count =
            |source| settings.iter().filter(|setting| setting.cited.as_ref().is_some_and(|cited| cited.source == source)).count();
        let (unstated, ours) = (count(Source::Unstated), count(Source::Ours));
        text += &format!(
            "{} settings: {} as published, {unstated} that the publication does not state (?), {ours} that we decided (*).\n",
            settings.len(),
            settings.len() - unstated - ours
        );
    }
    text += &format!("All other keys have the program's defaults: learner config show --recipe {name}\n");
    for Missing { key, value, part } in missing {
        text += &format!("Cannot run yet at full scale: {key} is {value} and needs {part}\n");
    }
    if !missing.is_empty() {
        text += &format!("Small, on this machine: learner --recipe {name} --scale tiny\n");
    }
    text
}

/// What changes and by which rule, and what stays.
fn scaled(changes: &[Change], settings: &[Setting]) -> String {
    let mut text = change_lines(changes).join("\n") + "\n\n";
    let stays = settings.iter().filter(|setting| changes.iter().all(|change| change.key != setting.key)).count();
    text += &format!("The recipe's other {stays} settings stay as they are.\n");
    text
}

/// A table of what changes at a small scale.
fn change_lines(changes: &[Change]) -> Vec<String> {
    table(&CHANGE_HEADERS, &change_rows(changes))
}

pub const CHANGE_HEADERS: [&str; 4] = ["key", "recipe", "here", "rule"];

/// One row for each key; what a new stage consists of is summed up in one.
pub fn change_rows(changes: &[Change]) -> Vec<Vec<String>> {
    let value = |value: &Option<String>| value.clone().unwrap_or_else(|| "-".into());
    changes.iter().map(|Change { key, from, to, rule }| vec![key.clone(), value(from), value(to), (*rule).to_owned()]).collect()
}
