//! How a run ends: its summary, its page, and what people are shown.

use std::path::Path;
use std::time::Instant;

use super::ranks::RankError;
use super::{CliError, OutputArguments, print_json};
use crate::evaluate::Evaluation;
use crate::report::{self, Reporter};
use crate::stage::{RunError, StageKind, Summary};
use crate::train::write_atomically;
use crate::types::Progress;

/// How a run that did not end well is told.
pub fn explain(error: RunError, directory: &Path, ranks: usize) -> RankError {
    let resume = match ranks {
        1 => format!("learner --resume --out {}", directory.display()),
        _ => "the same command with --resume".into(),
    };
    match error {
        RunError::Stopped { .. } => RankError::Agreed(CliError::Interrupted(format!("{error}. To go on: {resume}"))),
        RunError::File(_) | RunError::Checkpoint(_) => {
            RankError::Own(CliError::Failed(format!("{error}. What was saved before is whole; once mended, go on: {resume}")))
        }
        RunError::Ranks(error) => RankError::Stopped(error),
        error => RankError::Own(CliError::failed(error)),
    }
}

/// Writes the summary and the page, and shows the closing table and the curve.
pub fn finish(
    summary: &Summary,
    directory: &Path,
    reporter: &Reporter,
    output: &OutputArguments,
    started: Instant,
) -> Result<(), CliError> {
    let text = serde_json::to_vec_pretty(summary).map_err(CliError::failed)?;
    write_atomically(&directory.join("summary.json"), &text).map_err(CliError::failed)?;
    let page = report::write_page(directory).map_err(CliError::failed)?;

    let of_stages = summary.stages.iter().filter(|stage| stage.kind == StageKind::Evaluate.name());
    let titles: Vec<(String, &Evaluation)> =
        of_stages.filter_map(|stage| Some((stage.name.replace('_', " "), summary.evaluation.get(&stage.name)?))).collect();
    let main: Vec<(&str, &Evaluation)> = titles.iter().map(|(title, evaluation)| (title.as_str(), *evaluation)).collect();
    let (headers, rows) = evaluation_rows(&main);
    reporter.table("held-out tasks", &headers, &rows);
    let (line, marks) = report::training_curve(directory).map_err(CliError::failed)?;
    reporter.curve("pass rate by step of reinforcement learning (line: training, marks: held out)", "pass rate", &line, &marks);
    let stages: Vec<String> = summary.stages.iter().map(|stage| format!("{} {:.1}", stage.name, stage.seconds)).collect();
    reporter.note(&format!("seconds by stage: {}", stages.join(", ")));
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
