//! The words everybody speaks: plain data that travels between rooms, with no behaviour beyond keeping itself consistent. And what
//! every room does in one way: draw random numbers, replace a file, print a count of bytes.
//!
//! ```text
//! Task -> Episode (Transcript, Ending, Verdict) -> Group -> Sample -> Batch
//! ```

mod batch;
mod episode;
pub mod exact;
mod files;
mod progress;
mod random;
mod task;
mod units;

pub use batch::{Batch, Sample};
pub use episode::{Ending, Episode, EpisodeCounts, Group, Transcript, Verdict};
pub use files::{replace_file, sync_folder, write_atomically};
pub use progress::{Phase, Progress, Silent};
pub use random::{Key, Purpose};
pub use task::{Slot, Task, TaskOrigin, TestRunner, Workspace};
pub use units::{bytes, percent};
