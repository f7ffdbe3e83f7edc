//! How long work tells people where it is, without knowing whether a terminal, a log file or nobody reads.
//!
//! Rooms below take `&dyn Progress`; `report::Reporter` implements it, [`Silent`] serves tests and library use.

use serde_json::{Map, Value};

/// Something that shows people what is going on. All text is plain, without colour or control characters.
pub trait Progress: Send + Sync {
    /// Facts known before the work starts, as `(name, value)` rows.
    fn header(&self, title: &str, rows: &[(String, String)]);

    /// Opens a phase of `total` units (episodes, steps, tokens), or of unknown length. Phases may be open inside each
    /// other. Dropping a phase ends it without a word.
    fn phase(&self, name: &str, total: Option<u64>) -> Box<dyn Phase>;

    /// One line that stays: a finished step, a saved checkpoint.
    fn line(&self, text: &str);

    /// A line for those who asked for more (`-v`).
    fn detail(&self, text: &str);

    /// Something worth knowing that is not a result: where files are, how to go on.
    fn note(&self, text: &str);

    /// Something that may spoil the result. Shown even when all else is quiet.
    fn warn(&self, text: &str);

    /// A table with aligned columns; rows shorter than `headers` are filled with blanks.
    fn table(&self, title: &str, headers: &[&str], rows: &[Vec<String>]);

    /// A curve through `line` with `marks` set on it (for example training reward per step, and evaluations), both as
    /// `(x, y)`; either may be empty. Points that are not finite are left out.
    fn curve(&self, title: &str, y_label: &str, line: &[(f64, f64)], marks: &[(f64, f64)]);

    /// A record that was just added to the run's metrics, for whoever follows them elsewhere (TensorBoard). Shows nothing.
    fn record(&self, _record: &Map<String, Value>) {}
}

/// One open phase of a [`Progress`].
pub trait Phase: Send + Sync {
    /// `count` more units are done; `figures` are the numbers worth watching now, for example `pass 0.41, 310 tokens/s`.
    fn advance(&self, count: u64, figures: &str);

    /// Ends the phase and leaves `text` as a line, unless it is empty.
    fn finish(self: Box<Self>, text: &str);
}

/// Shows nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn header(&self, _title: &str, _rows: &[(String, String)]) {}
    fn phase(&self, _name: &str, _total: Option<u64>) -> Box<dyn Phase> {
        Box::new(Silent)
    }
    fn line(&self, _text: &str) {}
    fn detail(&self, _text: &str) {}
    fn note(&self, _text: &str) {}
    fn warn(&self, _text: &str) {}
    fn table(&self, _title: &str, _headers: &[&str], _rows: &[Vec<String>]) {}
    fn curve(&self, _title: &str, _y_label: &str, _line: &[(f64, f64)], _marks: &[(f64, f64)]) {}
}

impl Phase for Silent {
    fn advance(&self, _count: u64, _figures: &str) {}
    fn finish(self: Box<Self>, _text: &str) {}
}
