//! What people see: header, progress, tables, curves, the run page, TensorBoard events.
//!
//! - `reporter`: the terminal, a plain log, or quiet; implements `types::Progress`.
//! - `layout`: durations, aligned tables and curves as lines of text.
//! - `page`: `report.html` of a run directory, drawn with `svg`.
//! - `tensorboard`: event files that TensorBoard reads.

mod layout;
mod plot;
mod reporter;

pub use reporter::{Reporter, Verbosity};
