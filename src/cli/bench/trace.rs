//! What a recorded round shows: time by phase and by operation, and the same as a Chrome trace.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, json};

use crate::cli::CliError;
use crate::device::OperationSpan;
use crate::train::write_atomically;

/// The phase of each span. A step is told by its operations: a forward begins with the embedding and ends at the head; after the
/// head's scores comes the backward, which ends with the embedding's; then the norm and the update. What lies before is
/// preparation (gradients set to 0, tables).
pub fn phases(spans: &[OperationSpan]) -> Vec<&'static str> {
    let mut current = "prepare";
    spans
        .iter()
        .map(|span| match span.operation {
            "embed" => {
                current = "forward";
                current
            }
            "head" | "head_backward" => {
                current = "backward";
                "head"
            }
            "head_sample" => {
                current = "prepare";
                "head"
            }
            "embed_backward" => std::mem::replace(&mut current, "prepare"),
            "sum_of_squares" | "adamw" => "optimizer",
            _ => current,
        })
        .collect()
}

/// Milliseconds by phase; `host` is what of the round's wall time no operation covers: the loss, packing, and calls.
pub fn phase_times(spans: &[OperationSpan], round_milliseconds: f64) -> BTreeMap<&'static str, f64> {
    let mut times = BTreeMap::new();
    for (span, phase) in spans.iter().zip(phases(spans)) {
        *times.entry(phase).or_insert(0.0) += milliseconds(span.end - span.start);
    }
    let covered: f64 = times.values().sum();
    times.insert("host", (round_milliseconds - covered).max(0.0));
    times
}

/// All calls of one operation with one shape.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OperationTime {
    pub operation: &'static str,
    pub shape: Vec<usize>,
    pub calls: usize,
    pub milliseconds: f64,
}

/// The longest first.
pub fn operation_times(spans: &[OperationSpan]) -> Vec<OperationTime> {
    let mut totals: BTreeMap<(&'static str, &[usize]), (usize, f64)> = BTreeMap::new();
    for span in spans {
        let (calls, time) = totals.entry((span.operation, &span.shape)).or_default();
        *calls += 1;
        *time += milliseconds(span.end - span.start);
    }
    let mut times: Vec<OperationTime> = totals
        .into_iter()
        .map(|((operation, shape), (calls, milliseconds))| OperationTime {
            operation,
            shape: shape.to_vec(),
            calls,
            milliseconds,
        })
        .collect();
    times.sort_by(|a, b| b.milliseconds.total_cmp(&a.milliseconds));
    times
}

/// The spans in the Trace Event Format: phases on one track, operations below it, times in microseconds from the first.
pub fn chrome_trace(spans: &[OperationSpan], process: &str) -> Value {
    let origin = spans.first().map_or(Duration::ZERO, |span| span.start);
    let microseconds = |time: Duration| (time - origin).as_nanos() as f64 / 1e3;
    let event = |name: &str, track: u32, start: Duration, end: Duration, arguments: Value| {
        json!({
            "name": name, "cat": "learner", "ph": "X", "pid": 1, "tid": track,
            "ts": microseconds(start), "dur": microseconds(end) - microseconds(start), "args": arguments,
        })
    };
    let named =
        |what: &str, track: u32, name: &str| json!({"name": what, "ph": "M", "pid": 1, "tid": track, "args": {"name": name}});
    let mut events = vec![
        named("process_name", 0, process),
        named("thread_name", 1, "phases"),
        named("thread_name", 2, "operations, each waited for"),
    ];
    let phases = phases(spans);
    let mut first = 0;
    for index in 0..spans.len() {
        let span = &spans[index];
        events.push(event(span.operation, 2, span.start, span.end, json!({"shape": span.shape})));
        if phases.get(index + 1) != Some(&phases[index]) {
            events.push(event(phases[index], 1, spans[first].start, span.end, json!({})));
            first = index + 1;
        }
    }
    json!({"displayTimeUnit": "ms", "traceEvents": events})
}

/// Writes the trace if a file was asked for.
pub fn write(file: Option<&Path>, spans: &[OperationSpan], process: &str) -> Result<(), CliError> {
    let Some(file) = file else { return Ok(()) };
    let text = serde_json::to_vec(&chrome_trace(spans, process)).map_err(CliError::failed)?;
    write_atomically(file, &text).map_err(CliError::failed)
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spans(operations: &[&'static str]) -> Vec<OperationSpan> {
        let at = |index: usize| Duration::from_micros(1000 * index as u64);
        let span = |(index, &operation): (usize, &&'static str)| {
            let (start, end) = (at(index), at(index) + Duration::from_micros(500));
            OperationSpan { operation, shape: vec![8, 4], start, end }
        };
        operations.iter().enumerate().map(span).collect()
    }

    const STEP: [&str; 10] =
        ["clear", "embed", "linear", "head", "head_backward", "rms_norm", "embed_backward", "write", "sum_of_squares", "adamw"];

    #[test]
    fn a_step_falls_into_phases() {
        let expected =
            ["prepare", "forward", "forward", "head", "head", "backward", "backward", "prepare", "optimizer", "optimizer"];
        assert_eq!(phases(&spans(&STEP)), expected);
        let times = phase_times(&spans(&STEP), 12.0);
        let expected = [("backward", 1.0), ("forward", 1.0), ("head", 1.0), ("host", 7.0), ("optimizer", 1.0), ("prepare", 1.0)];
        assert_eq!(times.into_iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn calls_of_one_shape_are_one_line_and_the_longest_comes_first() {
        let times = operation_times(&spans(&["linear", "swiglu", "linear"]));
        assert_eq!((times[0].operation, times[0].calls, times[0].milliseconds), ("linear", 2, 1.0));
        assert_eq!((times[1].operation, times[1].calls), ("swiglu", 1));
    }

    #[test]
    fn the_trace_has_a_track_of_phases_and_one_of_operations() {
        let trace = chrome_trace(&spans(&STEP), "test");
        let events = trace["traceEvents"].as_array().expect("events").clone();
        let on = |track: u64| {
            let of = |event: &&Value| event["ph"] == "X" && event["tid"] == track;
            events.iter().filter(of).map(|event| (event["name"].clone(), event["ts"].clone())).collect::<Vec<_>>()
        };
        assert_eq!(on(2).len(), STEP.len());
        let (names, starts): (Vec<_>, Vec<_>) = on(1).into_iter().unzip();
        assert_eq!(names, ["prepare", "forward", "head", "backward", "prepare", "optimizer"]);
        assert_eq!(starts, [0.0, 1000.0, 3000.0, 5000.0, 7000.0, 8000.0]);
    }
}
