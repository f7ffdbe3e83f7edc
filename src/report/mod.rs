//! What people see: header, progress, tables, curves, the run page, TensorBoard events.
//!
//! - `reporter`: the terminal, a plain log, or quiet; implements `types::Progress`.
//! - `layout`: durations, aligned tables as lines of text; `plot`: a curve; `scale`: their axes.
//! - `page`: `report.html` of a run directory, drawn with `svg`.
//! - `tensorboard`: event files that TensorBoard reads.

mod layout;
mod page;
mod plot;
mod records;
mod reporter;
mod scale;
mod svg;
mod tensorboard;

pub use layout::table;
pub use page::{training_curve, write_page};
pub use records::PageError;
pub use reporter::{Reporter, Verbosity};
pub use tensorboard::{EventError, EventWriter};
