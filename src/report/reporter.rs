//! The one place that decides how things are shown: bars on a terminal, plain lines in a log, or almost nothing.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use serde_json::{Map, Value};

use super::layout;
use super::plot;
use super::tensorboard::{EventError, EventWriter};
use crate::types::{Phase, Progress, Silent};

/// How much to show.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verbosity {
    /// `-q`: warnings only.
    Quiet,
    #[default]
    Normal,
    /// `-v`: also the lines given to [`Progress::detail`].
    Verbose,
}

/// In a log, an open phase says where it is at most this often.
const PLAIN_INTERVAL: Duration = Duration::from_secs(5);

/// Shows a run to people. Writes to standard output, or to standard error when `--json` reserves standard output.
pub struct Reporter {
    verbosity: Verbosity,
    colour: bool,
    sink: Sink,
    /// TensorBoard's view of the metrics, once [`Reporter::follow`] has opened it.
    events: Mutex<Option<EventWriter>>,
}

/// Where lines go. Cheap to clone: phases keep one.
#[derive(Clone)]
enum Sink {
    /// Lines are written above the open bars.
    Terminal { bars: MultiProgress, to_stderr: bool },
    /// Lines are written one after the other, without control characters.
    Plain(Arc<Mutex<Box<dyn Write + Send>>>),
}

impl Reporter {
    /// Chooses once, from what the output is: a terminal gets bars, and colour unless `NO_COLOR` is set; a file, a pipe
    /// or a terminal that says `TERM=dumb` gets plain lines.
    pub fn new(verbosity: Verbosity, json: bool) -> Reporter {
        let interactive = if json { std::io::stderr().is_terminal() } else { std::io::stdout().is_terminal() };
        let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|value| value == "dumb");
        if interactive && !dumb {
            let target = if json { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::stdout() };
            let bars = MultiProgress::with_draw_target(target);
            let sink = Sink::Terminal { bars, to_stderr: json };
            return Reporter { verbosity, colour: !set("NO_COLOR"), sink, events: Mutex::new(None) };
        }
        let output: Box<dyn Write + Send> = if json { Box::new(std::io::stderr()) } else { Box::new(std::io::stdout()) };
        Reporter::plain(verbosity, output)
    }

    /// Plain lines into `output`.
    pub fn plain(verbosity: Verbosity, output: Box<dyn Write + Send>) -> Reporter {
        let sink = Sink::Plain(Arc::new(Mutex::new(output)));
        Reporter { verbosity, colour: false, sink, events: Mutex::new(None) }
    }

    /// From now on every record of the metrics also goes to `run_directory/tensorboard`, after those that
    /// `metrics.jsonl` already holds.
    pub fn follow(&self, run_directory: &Path) -> Result<(), EventError> {
        let writer = EventWriter::open(run_directory)?;
        *lock(&self.events) = Some(writer);
        Ok(())
    }

    fn shows(&self, least: Verbosity) -> bool {
        self.verbosity >= least
    }

    /// `text` in an ANSI style (`1` bold, `2` dim, `33` yellow) where colour is on.
    fn paint(&self, style: &str, text: &str) -> String {
        if self.colour && !text.is_empty() { format!("\x1b[{style}m{text}\x1b[0m") } else { text.to_string() }
    }

    fn block(&self, title: &str, lines: impl IntoIterator<Item = String>) {
        let title = self.paint("1", &layout::printable(title));
        let lines: Vec<String> = lines.into_iter().map(|line| format!("  {line}")).collect();
        self.sink.write(&format!("\n{title}\n{}", lines.join("\n")));
    }
}

impl Progress for Reporter {
    fn header(&self, title: &str, rows: &[(String, String)]) {
        if self.shows(Verbosity::Normal) {
            let facts = layout::facts(rows).into_iter();
            self.block(
                title,
                facts.map(|(name, value)| {
                    format!("{}  {}", self.paint("2", &layout::printable(&name)), layout::printable(&value))
                        .trim_end()
                        .to_string()
                }),
            );
        }
    }

    fn phase(&self, name: &str, total: Option<u64>) -> Box<dyn Phase> {
        let name = layout::printable(name);
        if !self.shows(Verbosity::Normal) {
            return Box::new(Silent);
        }
        match &self.sink {
            Sink::Terminal { bars, .. } => {
                let bar = bars.add(ProgressBar::new(total.unwrap_or(0)));
                bar.set_style(bar_style(total.is_some(), self.colour));
                bar.set_prefix(name);
                bar.enable_steady_tick(Duration::from_millis(250));
                Box::new(TerminalPhase { bar, sink: self.sink.clone() })
            }
            Sink::Plain(_) => {
                let state = Mutex::new(Pace { started: Instant::now(), last_shown: Duration::ZERO, done: 0 });
                Box::new(PlainPhase { name, total, state, sink: self.sink.clone() })
            }
        }
    }

    fn line(&self, text: &str) {
        if self.shows(Verbosity::Normal) {
            self.sink.write(&layout::printable(text));
        }
    }

    fn detail(&self, text: &str) {
        if self.shows(Verbosity::Verbose) {
            self.sink.write(&self.paint("2", &layout::printable(text)));
        }
    }

    fn note(&self, text: &str) {
        if self.shows(Verbosity::Normal) {
            self.sink.write(&format!("{} {}", self.paint("36", "note:"), layout::printable(text)));
        }
    }

    fn warn(&self, text: &str) {
        self.sink.write(&format!("{} {}", self.paint("33", "warning:"), layout::printable(text)));
    }

    fn table(&self, title: &str, headers: &[&str], rows: &[Vec<String>]) {
        if self.shows(Verbosity::Normal) {
            let lines = layout::table(headers, rows).into_iter().enumerate();
            self.block(
                title,
                lines.map(|(index, line)| {
                    let line = layout::printable(&line);
                    if index < 2 { self.paint("2", &line) } else { line }
                }),
            );
        }
    }

    fn curve(&self, title: &str, y_label: &str, line: &[(f64, f64)], marks: &[(f64, f64)]) {
        let lines = plot::curve(y_label, line, marks);
        if self.shows(Verbosity::Normal) && !lines.is_empty() {
            self.block(title, lines);
        }
    }

    /// A full disk must not end a run for the sake of a picture of it: the first failure is told, and the rest let go.
    fn record(&self, record: &Map<String, Value>) {
        let mut events = lock(&self.events);
        if let Some(Err(error)) = events.as_mut().map(|writer| writer.append(record)) {
            *events = None;
            self.warn(&format!("{error}; TensorBoard shows no further steps"));
        }
    }
}

/// A lock that outlives a panic elsewhere: what it guards is only shown.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Sink {
    /// Writes `text` and a newline. A reader that went away (a closed pipe) must not end a training run: errors are let go.
    fn write(&self, text: &str) {
        match self {
            Sink::Terminal { bars, to_stderr } => bars.suspend(|| {
                let _ = if *to_stderr { writeln!(std::io::stderr(), "{text}") } else { writeln!(std::io::stdout(), "{text}") };
            }),
            Sink::Plain(output) => {
                let mut output = lock(output);
                let _ = writeln!(output, "{text}").and_then(|()| output.flush());
            }
        }
    }

    /// The last word of a phase.
    fn write_closing(&self, text: &str) {
        if !text.is_empty() {
            self.write(&layout::printable(text));
        }
    }
}

/// `rollout    ━━━━━━━━╸───────── 52/128  14 s left  pass 0.41, 310 tokens/s`; a spinner where the length is unknown.
fn bar_style(known_length: bool, colour: bool) -> ProgressStyle {
    let template = match (known_length, colour) {
        (true, true) => "{prefix:10.bold} {bar:24.cyan/dim} {pos}/{len}  {left}{wide_msg}",
        (true, false) => "{prefix:10} {bar:24} {pos}/{len}  {left}{wide_msg}",
        (false, true) => "{prefix:10.bold} {spinner:.cyan} {pos}  {elapsed}  {wide_msg}",
        (false, false) => "{prefix:10} {spinner} {pos}  {elapsed}  {wide_msg}",
    };
    let left = |state: &ProgressState, out: &mut dyn std::fmt::Write| {
        if state.pos() > 0 {
            let _ = write!(out, "{} left  ", layout::time_left(state.eta().as_secs_f64()));
        }
    };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    style.with_key("left", left).progress_chars("━╸─")
}

struct TerminalPhase {
    bar: ProgressBar,
    sink: Sink,
}

impl Phase for TerminalPhase {
    fn advance(&self, count: u64, figures: &str) {
        self.bar.inc(count);
        self.bar.set_message(layout::printable(figures));
    }

    fn finish(self: Box<Self>, text: &str) {
        self.bar.finish_and_clear();
        self.sink.write_closing(text);
    }
}

impl Drop for TerminalPhase {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

struct PlainPhase {
    name: String,
    total: Option<u64>,
    state: Mutex<Pace>,
    sink: Sink,
}

/// How far a phase is, and when it last said so.
struct Pace {
    started: Instant,
    last_shown: Duration,
    done: u64,
}

impl Phase for PlainPhase {
    fn advance(&self, count: u64, figures: &str) {
        let mut pace = lock(&self.state);
        pace.done += count;
        let elapsed = pace.started.elapsed();
        if elapsed >= pace.last_shown + PLAIN_INTERVAL {
            pace.last_shown = elapsed;
            self.sink.write(&plain_line(&self.name, pace.done, self.total, elapsed.as_secs_f64(), &layout::printable(figures)));
        }
    }

    fn finish(self: Box<Self>, text: &str) {
        self.sink.write_closing(text);
    }
}

/// `rollout 52/128, 14 s left, pass 0.41, 310 tokens/s`. The time left assumes that all units take the same time.
fn plain_line(name: &str, done: u64, total: Option<u64>, elapsed_seconds: f64, figures: &str) -> String {
    let mut line = match total {
        Some(total) if done > 0 => {
            let left = elapsed_seconds * total.saturating_sub(done) as f64 / done as f64;
            format!("{name} {done}/{total}, {} left", layout::time_left(left))
        }
        Some(total) => format!("{name} {done}/{total}"),
        None => format!("{name} {done}, {}", layout::duration(elapsed_seconds)),
    };
    if !figures.is_empty() {
        line.push_str(", ");
        line.push_str(figures);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Collects what a reporter writes.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn everything(verbosity: Verbosity) -> String {
        let log = Log::default();
        let reporter = Reporter::plain(verbosity, Box::new(log.clone()));
        let progress: &dyn Progress = &reporter;
        progress.header("learner", &[("model".to_string(), "qwen3\x1b[2J".to_string())]);
        let phase = progress.phase("rollout", Some(2));
        phase.advance(1, "pass 0.5");
        progress.line("step 1");
        progress.detail("tokens 17");
        phase.finish("rollout done");
        drop(progress.phase("dropped", None));
        progress.table("results", &["policy", "pass@1"], &[vec!["after rl".to_string(), "0.61".to_string()]]);
        progress.curve("reward", "reward", &[(0.0, 0.1), (1.0, 0.4)], &[(1.0, 0.4)]);
        progress.note("see report.html");
        progress.warn("a wall limit fired");
        let bytes = log.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn plain_output_has_every_part_and_no_control_characters() {
        let text = everything(Verbosity::Normal);
        for part in ["learner", "model  qwen3?[2J", "step 1", "rollout done", "after rl    0.61", "note: see", "warning: a wall"]
        {
            assert!(text.contains(part), "{part:?} is missing from:\n{text}");
        }
        assert!(!text.contains("tokens 17") && !text.contains("dropped"));
        assert!(text.chars().all(|character| character == '\n' || !character.is_control()));
    }

    #[test]
    fn verbosity_adds_details_and_quiet_leaves_warnings() {
        assert!(everything(Verbosity::Verbose).contains("tokens 17"));
        assert_eq!(everything(Verbosity::Quiet), "warning: a wall limit fired\n");
    }

    #[test]
    fn a_reader_that_went_away_is_no_error() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _bytes: &[u8]) -> std::io::Result<usize> {
                Err(std::io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Err(std::io::ErrorKind::BrokenPipe.into())
            }
        }
        Reporter::plain(Verbosity::Normal, Box::new(Closed)).line("into the void");
    }

    #[test]
    fn records_reach_tensorboard_once_followed() {
        let run = tempfile::tempdir().unwrap();
        let reporter = Reporter::plain(Verbosity::Quiet, Box::new(std::io::sink()));
        let record = serde_json::from_str(r#"{"stage":"rl","step":0,"loss":0.5}"#).unwrap();
        reporter.record(&record);
        reporter.follow(run.path()).unwrap();
        reporter.record(&record);
        let file = std::fs::read_dir(run.path().join("tensorboard")).unwrap().next().unwrap().unwrap();
        let text = String::from_utf8_lossy(&std::fs::read(file.path()).unwrap()).into_owned();
        assert_eq!(text.matches("rl/loss").count(), 1);
    }

    #[test]
    fn plain_lines_say_how_long_is_left() {
        assert_eq!(plain_line("rollout", 32, Some(128), 10.0, "pass 0.41"), "rollout 32/128, 30 s left, pass 0.41");
        assert_eq!(plain_line("rollout", 0, Some(128), 10.0, ""), "rollout 0/128");
        assert_eq!(plain_line("checking", 7, None, 10.0, ""), "checking 7, 10 s");
    }
}
