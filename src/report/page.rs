//! `report.html`: one file that shows a run, with everything inside it, so that it can be mailed or archived.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::layout::{self, duration};
use super::records::{PageError, Record, RunRecords, shown};
use super::svg::{self, Score, Series, escape};
use crate::types::Ending;

const STYLE: &str = include_str!("page.css");

/// Colours of the style sheet, `c0` to `c5`.
const COLOURS: usize = 6;

/// Reads `metrics.jsonl`, `summary.json` and `run.toml` of a run and writes `report.html` beside them, whole or not at
/// all. Works during a run too, with what there is. Returns the path of the page.
pub fn write_page(run_directory: &Path) -> Result<PathBuf, PageError> {
    let records = RunRecords::read(run_directory)?;
    let absolute = std::fs::canonicalize(run_directory).unwrap_or_else(|_| run_directory.to_path_buf());
    let name = absolute.file_name().map_or_else(|| "run".to_string(), |name| name.to_string_lossy().into_owned());
    let page = run_directory.join("report.html");
    let unfinished = run_directory.join("report.html.unfinished");
    let written = std::fs::write(&unfinished, page_text(&name, &records)).and_then(|()| std::fs::rename(&unfinished, &page));
    written.map_err(|source| PageError::Write { path: page.clone(), source })?;
    Ok(page)
}

/// The whole page.
fn page_text(name: &str, records: &RunRecords) -> String {
    let name = escape(name);
    let mut body = format!("<h1>{name}</h1>\n<p>{}</p>\n", escape(&subtitle(records)));
    body.push_str(&tiles(records));
    body.push_str(&section("Held-out score and setting", "two", &[held_out(records), facts(records)]));
    body.push_str(&section("Rejection fine-tuning", "grid", &fine_tuning(records)));
    body.push_str(&section("Reinforcement learning", "grid", &reinforcement(records)));
    body.push_str(&section("Results on held-out tasks", "", &[results(records)]));
    if !records.run_file.is_empty() {
        let run_file = escape(&records.run_file);
        body += &format!("<details><summary>run.toml</summary><div class=\"card\"><pre>{run_file}</pre></div></details>\n");
    }
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{name}</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )
}

type Points = Vec<(f64, f64)>;

/// Training pass rate by step of reinforcement learning, and held-out pass@1 where it was measured.
///
/// # Errors
/// As [`RunRecords::read`].
pub fn training_curve(run_directory: &Path) -> Result<(Points, Points), PageError> {
    let records = RunRecords::read(run_directory)?;
    let line = records.rl.iter().filter_map(|record| Some((record.number("step")?, record.number("pass_rate")?)));
    let marks =
        reinforced_evaluations(&records).filter_map(|record| Some((record.number("rl_step")?, record.number("pass_at_1")?)));
    Ok((line.collect(), marks.collect()))
}

fn subtitle(records: &RunRecords) -> String {
    let steps = |count: usize, stage: &str| match count {
        0 => None,
        1 => Some(format!("1 {stage} step")),
        count => Some(format!("{count} {stage} steps")),
    };
    let parts = [steps(records.rft.len(), "RFT"), steps(records.rl.len(), "RL")];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    if parts.is_empty() { "no steps recorded yet".to_string() } else { parts.join(", ") }
}

/// The few numbers one looks for first.
fn tiles(records: &RunRecords) -> String {
    let mut tiles: Vec<(String, String)> = Vec::new();
    for evaluation in &records.evaluations {
        let name = evaluation.text("name").unwrap_or("");
        if let Some(pass) = evaluation.number("pass_at_1").filter(|_| !name.contains("_step_")) {
            tiles.push((format!("{pass:.3}"), format!("pass@1 {}", evaluation_label(name))));
        }
    }
    let (first, last) = (reinforced_evaluations(records).next(), records.evaluations.last());
    let pass_of = |record: Option<&Record>| record.and_then(|record| record.number("pass_at_1"));
    if let (Some(before), Some(after), false) = (pass_of(first), pass_of(last), records.rl.is_empty()) {
        tiles.push((format!("{:+.3}", after - before), "gained by RL".to_string()));
    }
    if let Some(mismatch) = records.rl.iter().filter_map(|record| record.number("mismatch")).reduce(f64::max) {
        tiles.push((layout::number(mismatch), "mismatch, at most".to_string()));
    }
    let seconds: f64 = records.summary.numbers("seconds").values().sum();
    if seconds > 0.0 {
        tiles.push((duration(seconds), "in all".to_string()));
    }
    let tiles: String = tiles
        .iter()
        .map(|(value, name)| format!("<div class=\"tile\"><b>{}</b><span>{}</span></div>", escape(value), escape(name)))
        .collect();
    if tiles.is_empty() { tiles } else { format!("<div class=\"tiles\">{tiles}</div>\n") }
}

/// A headed group of cards; nothing if all of them are missing.
fn section(title: &str, layout: &str, cards: &[Option<String>]) -> String {
    let cards: Vec<&str> = cards.iter().flatten().map(String::as_str).collect();
    if cards.is_empty() {
        return String::new();
    }
    format!("<h2>{title}</h2>\n<div class=\"{layout}\">\n{}\n</div>\n", cards.join("\n"))
}

/// A chart with its title, one line that says how to read it, and a legend of `(class, name)`.
fn card(title: &str, says: &str, legend: &[(String, String)], drawing: Option<String>) -> Option<String> {
    let drawing = drawing?;
    let entries: String =
        legend.iter().map(|(class, name)| format!("<span><i class=\"{class}\"></i>{}</span>", escape(name))).collect();
    let legend = if entries.is_empty() { entries } else { format!("<div class=\"legend\">{entries}</div>") };
    let (title, says) = (escape(title), escape(says));
    Some(format!("<figure class=\"card\"><figcaption><h3>{title}</h3><p>{says}</p></figcaption>{legend}{drawing}</figure>"))
}

fn series(records: &[Record], field: &str, name: &str, colour: usize) -> Series {
    let points = records.iter().filter_map(|record| Some((record.number("step")?, record.number(field)?))).collect();
    Series { name: name.to_string(), colour, points }
}

/// One field over steps, without a legend. A field that is 0 throughout is said to be so instead of drawn.
fn curve(records: &[Record], field: &str, title: &str, says: &str) -> Option<String> {
    let series = series(records, field, title, 0);
    if !series.points.is_empty() && series.points.iter().all(|point| point.1 == 0.0) {
        return card(title, says, &[], Some("<p class=\"zero\">0 at every step</p>".to_string()));
    }
    card(title, says, &[], svg::lines(title, &[series], &[]))
}

/// Several fields over steps, with a legend of those that are there.
fn curves(records: &[Record], fields: &[(&str, &str)], title: &str, says: &str) -> Option<String> {
    let named = fields.iter().enumerate().map(|(colour, (field, name))| series(records, field, name, colour));
    let present: Vec<Series> = named.filter(|series| !series.points.is_empty()).collect();
    card(title, says, &legend(&present), svg::lines(title, &present, &[]))
}

fn legend(series: &[Series]) -> Vec<(String, String)> {
    series.iter().map(|series| (format!("c{}", series.colour), series.name.clone())).collect()
}

/// Layers of a stack out of one number per record and name; a number that is missing is 0.
fn layers(records: &[Record], names: &[(&str, &str)], number: impl Fn(&Record, &str) -> Option<f64>) -> Vec<Series> {
    let steps = || records.iter().filter_map(|record| Some((record.number("step")?, record)));
    let named = names.iter().enumerate().map(|(index, (field, name))| {
        let points = steps().map(|(step, record)| (step, number(record, field).unwrap_or(0.0))).collect();
        Series { name: name.to_string(), colour: index % COLOURS, points }
    });
    named.filter(|series: &Series| series.points.iter().any(|point| point.1 > 0.0)).collect()
}

/// `before_rft` for people.
fn evaluation_label(name: &str) -> String {
    name.replace("rft", "RFT").replace("rl", "RL").replace('_', " ")
}

fn score(record: &Record, step: f64) -> Option<Score> {
    Some(Score {
        label: evaluation_label(record.text("name").unwrap_or("")),
        step,
        value: record.number("pass_at_1")?,
        interval: record.pair("ci95"),
        beside: record.number("pass_at_8"),
    })
}

fn held_out(records: &RunRecords) -> Option<String> {
    let scores: Vec<Score> = records.evaluations.iter().filter_map(|record| score(record, 0.0)).collect();
    let mut legend = vec![("mark ink".to_string(), "pass@1 with its 95 % interval".to_string())];
    if scores.iter().any(|score| score.beside.is_some()) {
        legend.push(("hollow c1".to_string(), "pass@8".to_string()));
    }
    let says = "Share of tasks never trained on that the policy solves.";
    card("Held-out pass@1", says, &legend, svg::scores("Held-out pass@1", &scores, "pass@8"))
}

/// Facts of the run: the summary's `header` (pairs or an object) if there is one, then its own scalars.
fn facts(records: &RunRecords) -> Option<String> {
    let mut rows: Vec<(String, String)> = match records.summary.value("header") {
        Some(Value::Array(pairs)) => pairs
            .iter()
            .filter_map(|pair| match pair.as_array()?.as_slice() {
                [name, value] => Some((shown(name)?, shown(value)?)),
                _ => None,
            })
            .collect(),
        Some(Value::Object(fields)) => fields.iter().filter_map(|(name, value)| Some((name.clone(), shown(value)?))).collect(),
        _ => Vec::new(),
    };
    rows.extend(records.summary.scalars().into_iter().map(|(name, value)| (name.replace('_', " "), value)));
    if rows.is_empty() {
        return None;
    }
    let rows: String = rows.iter().map(|(name, value)| format!("<dt>{}</dt><dd>{}</dd>", escape(name), escape(value))).collect();
    Some(format!("<div class=\"card\"><dl>{rows}</dl></div>"))
}

fn fine_tuning(records: &RunRecords) -> Vec<Option<String>> {
    let rft = &records.rft;
    vec![
        curve(rft, "loss", "Loss", "Negative log-likelihood per trained token, in nats."),
        curve(rft, "gradient_norm", "Gradient norm", "Before clipping."),
        curve(rft, "learning_rate", "Learning rate", ""),
    ]
}

fn reinforcement(records: &RunRecords) -> Vec<Option<String>> {
    let rl = &records.rl;
    let behaviour = [("ran_tests", "ran the tests"), ("edited_after_failure", "edited again after a failure")];
    let groups = [("groups_used", "used"), ("groups_all_passed", "all passed"), ("groups_none_passed", "none passed")];
    let groups = layers(rl, &groups, |record, field| record.number(field));
    vec![
        training_reward(records),
        stacked("Endings of episodes", "Share of the step's episodes.", endings(rl), true),
        curves(rl, &behaviour, "What the agent does", "Share of the step's episodes."),
        curve(rl, "entropy", "Entropy", "Mean at the trained tokens, in nats; near 0 learning ends."),
        curve(rl, "gradient_norm", "Gradient norm", "Before clipping."),
        curve(rl, "episode_tokens_mean", "Episode length", "Mean tokens per episode, observations included."),
        curve(rl, "turns_mean", "Turns", "Mean turns per episode."),
        stacked("Groups", "Only groups with both outcomes teach.", groups, false),
        curves(rl, &[("tokens_sampled", "sampled"), ("tokens_trained", "trained")], "Tokens", "Per step."),
        curve(rl, "clip_fraction", "Clip fraction", "Share of trained tokens that the ratio clip holds."),
        curve(rl, "mismatch", "Mismatch", "Largest difference of log-probabilities, in nats."),
        curve(rl, "learning_rate", "Learning rate", ""),
        stacked("Seconds by phase", "Wall time of each step.", seconds(rl), false),
    ]
}

fn stacked(title: &str, says: &str, layers: Vec<Series>, shares: bool) -> Option<String> {
    card(title, says, &legend(&layers), svg::stack(title, &layers, shares))
}

/// The training curve with the held-out scores set on it: those before, during and after RL.
fn training_reward(records: &RunRecords) -> Option<String> {
    let rl = &records.rl;
    let mut lines = vec![series(rl, "reward_mean", "mean reward", 0)];
    let passes = series(rl, "pass_rate", "pass rate", 1);
    if lines[0].points != passes.points {
        lines.push(passes);
    }
    lines.retain(|series| !series.points.is_empty());
    rl.last()?;
    let scores: Vec<Score> =
        reinforced_evaluations(records).filter_map(|record| score(record, record.number("rl_step")?)).collect();
    let mut legend = legend(&lines);
    if !scores.is_empty() {
        legend.push(("mark ink".to_string(), "held-out pass@1".to_string()));
    }
    let drawing = if lines.is_empty() { None } else { svg::lines("Training reward", &lines, &scores) };
    card("Training reward", "Mean over the step's episodes.", &legend, drawing)
}

/// The evaluation of what reinforcement learning began with, and those since.
fn reinforced_evaluations(records: &RunRecords) -> impl Iterator<Item = &Record> {
    let is_after = |record: &Record| record.number("rl_step").is_some_and(|step| step > 0.0);
    let first = records.evaluations.iter().position(is_after).unwrap_or(records.evaluations.len()).saturating_sub(1);
    records.evaluations.iter().skip(first)
}

/// Layers of the named endings, then of any other ending found.
fn endings(rl: &[Record]) -> Vec<Series> {
    let names: Vec<(&str, String)> = Ending::ALL.iter().map(|ending| (ending.name(), ending.name().replace('_', " "))).collect();
    let names: Vec<(&str, &str)> = names.iter().map(|(field, name)| (*field, name.as_str())).collect();
    layers(rl, &names, |record, field| record.numbers("endings").get(field).copied())
}

/// Layers of the phases, the longest first; beyond the colours there are, the rest together.
fn seconds(rl: &[Record]) -> Vec<Series> {
    let mut totals: BTreeMap<String, f64> = BTreeMap::new();
    for record in rl {
        for (phase, seconds) in record.numbers("seconds") {
            *totals.entry(phase).or_default() += seconds;
        }
    }
    let mut phases: Vec<(String, f64)> = totals.into_iter().collect();
    phases.sort_by(|one, other| other.1.total_cmp(&one.1));
    let own: Vec<&str> = phases.iter().take(COLOURS - 1).map(|(phase, _)| phase.as_str()).collect();
    let mut names: Vec<(&str, &str)> = own.iter().map(|&phase| (phase, phase)).collect();
    names.push(("", "other"));
    layers(rl, &names, |record, field| {
        let seconds = record.numbers("seconds");
        if field.is_empty() {
            Some(seconds.iter().filter(|(phase, _)| !own.contains(&phase.as_str())).map(|(_, seconds)| seconds).sum())
        } else {
            seconds.get(field).copied()
        }
    })
}

fn results(records: &RunRecords) -> Option<String> {
    if records.evaluations.is_empty() {
        return None;
    }
    let rate = |record: &Record, field: &str| record.number(field).map_or("n/a".to_string(), |rate| format!("{rate:.3}"));
    let count = |record: &Record, field: &str| record.number(field).map_or("n/a".to_string(), layout::number);
    let row = |record: &Record| {
        let interval = record.pair("ci95").map_or("n/a".to_string(), |(low, high)| format!("{low:.3} to {high:.3}"));
        let cells = [
            escape(&evaluation_label(record.text("name").unwrap_or("unnamed"))),
            rate(record, "pass_at_1"),
            interval,
            rate(record, "pass_at_8"),
            count(record, "tasks"),
            count(record, "samples"),
            rate(record, "ran_tests"),
            rate(record, "edited_after_failure"),
        ];
        cells.iter().map(|cell| format!("<td>{cell}</td>")).collect::<String>()
    };
    let rows: String = records.evaluations.iter().map(|record| format!("<tr>{}</tr>", row(record))).collect();
    let heads = ["policy", "pass@1", "95 % interval", "pass@8", "tasks", "samples", "ran the tests", "edited after failure"];
    let heads: String = heads.iter().map(|head| format!("<th>{head}</th>")).collect();
    Some(format!("<div class=\"card scroll\"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run of 2 RFT steps and 3 RL steps with four evaluations.
    fn run() -> tempfile::TempDir {
        let run = tempfile::tempdir().unwrap();
        let mut metrics = String::new();
        let evaluation = |name: &str, pass: f64| {
            format!(
                "{{\"stage\":\"{name}\",\"kind\":\"evaluation\",\"name\":\"{name}\",\"pass_at_1\":{pass},\"pass_at_8\":0.8,\
                 \"ci95\":[{:.2},{:.2}]}}\n",
                pass - 0.01,
                pass + 0.01
            )
        };
        metrics += &evaluation("before_rft", 0.01);
        for step in 1..3 {
            metrics += &format!("{{\"stage\":\"rft\",\"kind\":\"rft\",\"step\":{step},\"loss\":0.5,\"learning_rate\":0.003}}\n");
        }
        metrics += &evaluation("after_rft", 0.3);
        for step in 1..4 {
            metrics += &format!("{{\"stage\":\"rl\",\"kind\":\"rl\",\"step\":{step},\"reward_mean\":0.{step}5,\"entropy\":0.1,");
            metrics +=
                "\"mismatch\":0,\"endings\":{\"submitted\":20,\"bad_call\":4},\"seconds\":{\"rollout\":3.5,\"train\":1.25}}\n";
            if step == 1 {
                metrics += &evaluation("rl_step_1", 0.4);
            }
        }
        metrics += &evaluation("after_rl", 0.55);
        let summary = r#"{"header":[["model","<qwen3>"]],"seconds":{"rl":90,"rft":35}}"#;
        std::fs::write(run.path().join("metrics.jsonl"), metrics).unwrap();
        std::fs::write(run.path().join("summary.json"), summary).unwrap();
        std::fs::write(run.path().join("run.toml"), "seed = 1 # <&>").unwrap();
        run
    }

    #[test]
    fn the_page_is_whole_and_needs_nothing_from_elsewhere() {
        let run = run();
        let path = write_page(run.path()).unwrap();
        let page = std::fs::read_to_string(path).unwrap();
        for part in [
            "<h3>Held-out pass@1</h3>",
            "<h3>Training reward</h3>",
            "<h3>Entropy</h3>",
            "<h3>Endings of episodes</h3>",
            "<h3>Seconds by phase</h3>",
            "<b>+0.250</b>",
            "2 min 05 s",
            "&lt;qwen3&gt;",
            "seed = 1 # &lt;&amp;&gt;",
            "95 % interval 0.5400 to 0.5600",
        ] {
            assert!(page.contains(part), "{part:?} is missing");
        }
        assert!(!page.contains("<h3>Gradient norm</h3>"), "a chart of a field that is not recorded");
        for outside in ["http://", "https://", "src=", "@import", "url(", "NaN", "\"inf", ",inf"] {
            assert!(!page.contains(outside), "{outside:?} in the page");
        }
        assert!(!run.path().join("report.html.unfinished").exists());
    }

    #[test]
    fn every_element_is_closed() {
        let run = run();
        let page = std::fs::read_to_string(write_page(run.path()).unwrap()).unwrap();
        for element in ["svg", "figure", "g", "text", "rect", "title", "div", "table", "tr", "td", "dl", "details"] {
            let opened = page.matches(&format!("<{element}>")).count() + page.matches(&format!("<{element} ")).count();
            assert_eq!(opened, page.matches(&format!("</{element}>")).count(), "<{element}>");
        }
    }

    #[test]
    fn an_empty_run_and_missing_fields_still_make_a_page() {
        let run = tempfile::tempdir().unwrap();
        let page = std::fs::read_to_string(write_page(run.path()).unwrap()).unwrap();
        assert!(page.contains("no steps recorded yet"));
        std::fs::write(
            run.path().join("metrics.jsonl"),
            "{\"stage\":\"rl\",\"kind\":\"rl\",\"step\":0}\n{\"stage\":\"x\",\"kind\":\"evaluation\"}\n",
        )
        .unwrap();
        let page = std::fs::read_to_string(write_page(run.path()).unwrap()).unwrap();
        assert!(page.contains("1 RL step") && page.contains("unnamed"));
    }

    #[test]
    fn a_directory_that_is_not_there_is_named() {
        let message = write_page(Path::new("/nonexistent/run")).unwrap_err().to_string();
        assert!(message.contains("/nonexistent/run/report.html"), "{message}");
    }
}
