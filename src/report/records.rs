//! What a run directory says about its run, read leniently: a field that is missing or of another type is absent.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

/// What the report needs of a run directory cannot be read, or the report cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum PageError {
    #[error("{path}: cannot be read: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path}, line {line}: not a JSON object ({reason}): repair or remove the line")]
    Line { path: PathBuf, line: usize, reason: String },
    #[error("{path}: not a JSON object ({reason}): repair or remove the file")]
    Summary { path: PathBuf, reason: String },
    #[error("{path}: cannot be written: {source}: free some space or check the permissions")]
    Write { path: PathBuf, source: std::io::Error },
}

/// One JSON object with lenient access to its fields.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Record(Map<String, Value>);

impl Record {
    fn parse(text: &str) -> Result<Record, String> {
        serde_json::from_str(text).map(Record).map_err(|error| error.to_string())
    }

    pub fn number(&self, field: &str) -> Option<f64> {
        self.0.get(field)?.as_f64()
    }

    pub fn text(&self, field: &str) -> Option<&str> {
        self.0.get(field)?.as_str()
    }

    pub fn value(&self, field: &str) -> Option<&Value> {
        self.0.get(field)
    }

    /// The fields of an object within the object that are numbers, in name order.
    pub fn numbers(&self, field: &str) -> BTreeMap<String, f64> {
        let inner = self.0.get(field).and_then(Value::as_object);
        inner.into_iter().flatten().filter_map(|(name, value)| Some((name.clone(), value.as_f64()?))).collect()
    }

    /// A pair of numbers such as an interval's ends.
    pub fn pair(&self, field: &str) -> Option<(f64, f64)> {
        match self.0.get(field)?.as_array()?.as_slice() {
            [low, high] => Some((low.as_f64()?, high.as_f64()?)),
            _ => None,
        }
    }

    /// Fields whose values are text, numbers or truths, as they would be shown to people.
    pub fn scalars(&self) -> Vec<(String, String)> {
        self.0.iter().filter_map(|(name, value)| Some((name.clone(), shown(value)?))).collect()
    }
}

/// A scalar as text.
pub fn shown(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Bool(truth) => Some(if *truth { "yes" } else { "no" }.to_string()),
        Value::Number(number) => Some(number.as_f64().map_or_else(|| number.to_string(), super::layout::number)),
        _ => None,
    }
}

/// Everything the page is made from.
#[derive(Clone, Debug, Default)]
pub struct RunRecords {
    /// Steps of rejection fine-tuning and of reinforcement learning, in order, counted through all stages of the kind.
    pub rft: Vec<Record>,
    pub rl: Vec<Record>,
    /// In the order they were made, each with `rl_step`: the step of reinforcement learning before it, 0 before the first.
    pub evaluations: Vec<Record>,
    /// Empty while the run is not over.
    pub summary: Record,
    /// `run.toml` as it is.
    pub run_file: String,
}

impl RunRecords {
    /// Reads `metrics.jsonl`, `summary.json` and `run.toml`. A missing file is an empty one, and a last line of the
    /// metrics that a kill cut short is left out; anything else that is not JSON is refused.
    pub fn read(run_directory: &Path) -> Result<RunRecords, PageError> {
        let metrics = run_directory.join("metrics.jsonl");
        let text = read_or_empty(&metrics)?;
        let mut records = Vec::new();
        for (index, line) in text.lines().enumerate() {
            match Record::parse(line) {
                _ if line.trim().is_empty() => {}
                Ok(record) => records.push(record),
                Err(_) if index + 1 == text.lines().count() && !text.ends_with('\n') => {}
                Err(reason) => return Err(PageError::Line { path: metrics, line: index + 1, reason }),
            }
        }
        let path = run_directory.join("summary.json");
        let text = read_or_empty(&path)?;
        let summary = if text.is_empty() {
            Record::default()
        } else {
            Record::parse(&text).map_err(|reason| PageError::Summary { path, reason })?
        };
        let run_file = read_or_empty(&run_directory.join("run.toml"))?;
        let records = counted_through(records);
        Ok(RunRecords {
            rft: steps_of(&records, "rft"),
            rl: steps_of(&records, "rl"),
            evaluations: evaluations_of(&records),
            summary,
            run_file,
        })
    }
}

fn read_or_empty(path: &Path) -> Result<String, PageError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
        Err(source) => Err(PageError::Read { path: path.to_path_buf(), source }),
    }
}

/// Counts the steps of all stages of a kind as one series, and notes at evaluations where reinforcement learning is by then.
fn counted_through(mut records: Vec<Record>) -> Vec<Record> {
    // By kind and stage, the steps of the stages of this kind before it; and by kind, the last step so far.
    let mut before: BTreeMap<(String, String), f64> = BTreeMap::new();
    let mut last: BTreeMap<String, f64> = BTreeMap::new();
    for record in &mut records {
        let (Some(kind), Some(stage)) = (record.text("kind"), record.text("stage")) else { continue };
        let (kind, stage) = (kind.to_owned(), stage.to_owned());
        if kind == "evaluation" {
            let step = last.get("rl").copied().unwrap_or(0.0);
            record.0.insert("rl_step".into(), step.into());
        } else if let Some(step) = record.number("step") {
            let last = last.entry(kind.clone()).or_default();
            let step = step + *before.entry((kind, stage)).or_insert(*last);
            *last = step;
            record.0.insert("step".into(), step.into());
        }
    }
    records
}

/// The steps of one kind in step order; of a step recorded twice the later record holds.
fn steps_of(records: &[Record], kind: &str) -> Vec<Record> {
    let of_kind = records.iter().filter(|record| record.text("kind") == Some(kind));
    let by_step: BTreeMap<i64, &Record> = of_kind.filter_map(|record| Some((record.number("step")? as i64, record))).collect();
    by_step.into_values().cloned().collect()
}

/// Evaluations in the order they were first made; of one made twice the later record holds.
fn evaluations_of(records: &[Record]) -> Vec<Record> {
    let mut evaluations: Vec<Record> = Vec::new();
    for record in records.iter().filter(|record| record.text("kind") == Some("evaluation")) {
        match evaluations.iter_mut().find(|earlier| earlier.text("name") == record.text("name")) {
            Some(earlier) => *earlier = record.clone(),
            None => evaluations.push(record.clone()),
        }
    }
    evaluations
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_with(metrics: &str) -> tempfile::TempDir {
        let run = tempfile::tempdir().unwrap();
        std::fs::write(run.path().join("metrics.jsonl"), metrics).unwrap();
        run
    }

    #[test]
    fn steps_are_sorted_and_the_later_record_holds() {
        let run = run_with(concat!(
            "{\"stage\":\"rl\",\"kind\":\"rl\",\"step\":2,\"loss\":1}\n\n{\"stage\":\"rl\",\"kind\":\"rl\",\"step\":1,\"loss\":null}\n",
            "{\"stage\":\"rl\",\"kind\":\"rl\",\"step\":2,\"loss\":2}\n{\"stage\":\"rft\",\"kind\":\"rft\",\"step\":0}\n{\"kind\":\"rl\"}\n",
            "{\"stage\":\"end\",\"kind\":\"evaluation\",\"name\":\"end\",\"ci95\":[0.1,0.2]}\n{\"stage\":\"rl\",\"st",
        ));
        let records = RunRecords::read(run.path()).unwrap();
        let losses: Vec<_> = records.rl.iter().map(|record| record.number("loss")).collect();
        assert_eq!(losses, [None, Some(2.0)]);
        assert_eq!((records.rft.len(), records.evaluations[0].pair("ci95")), (1, Some((0.1, 0.2))));
        assert_eq!(records.summary, Record::default());
    }

    #[test]
    fn steps_of_several_stages_are_one_series_and_evaluations_know_their_place_in_it() {
        let mut metrics = String::new();
        let mut line = |text: String| metrics += &format!("{text}\n");
        let evaluation = |name: &str| format!("{{\"stage\":\"{name}\",\"kind\":\"evaluation\",\"name\":\"{name}\",\"step\":9}}");
        line(evaluation("before"));
        for stage in ["stage1", "stage2"] {
            (1..=2).for_each(|step| line(format!("{{\"stage\":\"{stage}\",\"kind\":\"rl\",\"step\":{step}}}")));
            line(evaluation(&format!("after_{stage}")));
        }
        let run = run_with(&metrics);
        let records = RunRecords::read(run.path()).unwrap();
        let of = |records: &[Record], field: &str| records.iter().filter_map(|record| record.number(field)).collect::<Vec<_>>();
        assert_eq!(of(&records.rl, "step"), [1.0, 2.0, 3.0, 4.0]);
        assert_eq!(of(&records.evaluations, "rl_step"), [0.0, 2.0, 4.0]);
    }

    #[test]
    fn broken_files_are_named() {
        let run = run_with("{}\n{\"stage\n{}\n");
        let message = RunRecords::read(run.path()).unwrap_err().to_string();
        assert!(message.contains("metrics.jsonl, line 2"), "{message}");
        let run = run_with("");
        std::fs::write(run.path().join("summary.json"), "[1]").unwrap();
        let message = RunRecords::read(run.path()).unwrap_err().to_string();
        assert!(message.contains("summary.json: not a JSON object"), "{message}");
    }
}
