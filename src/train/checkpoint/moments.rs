//! Adam's moments in files: each rank writes those of its own parts of tensors, and any number of ranks finds its parts in them
//! again.
//!
//! A tensor of such a file is `first.NAME[START..END]` (or `second.`): elements of the Hugging Face tensor NAME, row-major. So
//! neither the cut over the ranks nor the order in which a model stores its tensors binds whoever reads them.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, Metadata};
use serde::de::IgnoredAny;

use super::{CheckpointError, Stored};
use crate::device::Device;
use crate::model::{Entry, Layout, Part};
use crate::train::files::FileError;
use crate::train::optimizer::AdamW;

/// Key in the header: steps taken.
pub(super) const STEPS: &str = "steps";

/// As an optimizer gives them.
const MOMENTS: [&str; 2] = ["first", "second"];

/// One moment of some elements of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct MomentPart {
    /// `first` or `second`.
    pub moment: &'static str,
    /// Of the Hugging Face tensor.
    pub tensor: String,
    pub range: Range<usize>,
    /// `[range]`
    pub values: Vec<f32>,
}

impl MomentPart {
    pub fn name(&self) -> String {
        let MomentPart { moment, tensor, range, .. } = self;
        format!("{moment}.{tensor}[{}..{}]", range.start, range.end)
    }
}

/// The file that `rank` of `ranks` writes.
pub(super) fn moments_file(rank: usize, ranks: usize) -> String {
    format!("optimizer-{:05}-of-{ranks:05}.safetensors", rank + 1)
}

/// The optimizer's state as it is written: its pieces cut where a Hugging Face tensor ends.
pub(super) fn moment_parts<D: Device>(layout: &Layout, optimizer: &AdamW<D>) -> Vec<MomentPart> {
    let mut parts = Vec::new();
    for (index, piece) in optimizer.ranges().iter().enumerate() {
        let moments = optimizer.read(index);
        for (moment, values) in MOMENTS.iter().zip(&moments) {
            for (part, range) in overlaps(&layout.entries[index], piece) {
                let start = part.offset + range.start - piece.start;
                let values = values[start..start + range.len()].to_vec();
                parts.push(MomentPart { moment, tensor: part.name.clone(), range, values });
            }
        }
    }
    parts
}

/// Takes up the state that a checkpoint holds, whoever wrote it.
///
/// # Errors
/// A file is missing or damaged, or does not belong to this model.
pub fn restore<D: Device>(checkpoint: &Path, layout: &Layout, optimizer: &mut AdamW<D>) -> Result<(), CheckpointError> {
    let stored = StoredMoments::open(checkpoint)?;
    for (index, piece) in optimizer.ranges().to_vec().iter().enumerate() {
        let mut moments = [Vec::new(), Vec::new()];
        for (moment, values) in MOMENTS.iter().zip(&mut moments) {
            for (part, range) in overlaps(&layout.entries[index], piece) {
                values.extend(stored.read(moment, &part.name, range)?);
            }
        }
        optimizer.write(index, moments);
    }
    optimizer.set_steps(stored.steps);
    Ok(())
}

/// The Hugging Face tensors that a piece of a stored one holds something of, with the range of their elements.
fn overlaps<'a>(entry: &'a Entry, piece: &Range<usize>) -> impl Iterator<Item = (&'a Part, Range<usize>)> {
    let piece = piece.clone();
    entry.parts.iter().filter_map(move |part| {
        let (start, end) = (piece.start.max(part.offset), piece.end.min(part.offset + part.length()));
        (start < end).then(|| (part, start - part.offset..end - part.offset))
    })
}

/// The moments of a checkpoint, of which only what is asked for is read.
struct StoredMoments {
    folder: PathBuf,
    steps: u64,
    /// By `first.NAME`, what the files hold of it, ascending.
    parts: HashMap<String, Vec<StoredPart>>,
}

struct StoredPart {
    range: Range<usize>,
    file: PathBuf,
    /// Where the first element stands in the file, in bytes.
    offset: u64,
}

/// A header beyond this is damaged: real ones take some hundred bytes per tensor.
const MOST_HEADER_BYTES: u64 = 100 << 20;

impl StoredMoments {
    /// Reads the headers of all files in a checkpoint's folder.
    ///
    /// # Errors
    /// A file is missing or damaged, or they are not of the same step.
    fn open(folder: &Path) -> Result<StoredMoments, CheckpointError> {
        let mut found = StoredMoments { folder: folder.to_path_buf(), steps: 0, parts: HashMap::new() };
        let files = files(folder)?;
        for (place, path) in files.iter().enumerate() {
            let (steps, parts) = read_header(path)?;
            if place > 0 && steps != found.steps {
                return Err(broken(path, format!("is of step {steps}, others here are of step {}", found.steps)));
            }
            found.steps = steps;
            for (name, part) in parts {
                found.parts.entry(name).or_default().push(part);
            }
        }
        found.parts.values_mut().for_each(|parts| parts.sort_by_key(|part| part.range.start));
        Ok(found)
    }

    /// Elements `range` of the moment of a tensor.
    ///
    /// # Errors
    /// The files do not hold them all, or cannot be read.
    fn read(&self, moment: &str, tensor: &str, range: Range<usize>) -> Result<Vec<f32>, CheckpointError> {
        let name = format!("{moment}.{tensor}");
        let mut values = Vec::with_capacity(range.len());
        for part in self.parts.get(&name).into_iter().flatten() {
            let next = range.start + values.len();
            if part.range.contains(&next) && next < range.end {
                let wanted = next..range.end.min(part.range.end);
                let place = part.offset + (wanted.start - part.range.start) as u64 * size_of::<f32>() as u64;
                values.extend(read_floats(&part.file, place, wanted.len()).map_err(|source| FileError::new(&part.file, source))?);
            }
        }
        if values.len() < range.len() {
            let missing = range.start + values.len();
            return Err(broken(&self.folder, format!("the optimizer's files lack element {missing} of {name}")));
        }
        Ok(values)
    }
}

fn broken(path: &Path, reason: String) -> CheckpointError {
    CheckpointError::Broken { path: path.to_path_buf(), reason }
}

/// All of `optimizer-I-of-N.safetensors`, for the N ranks that wrote the checkpoint.
///
/// # Errors
/// Also if there are others: files of two checkpoints have come into one folder, and no more can be trusted.
fn files(folder: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let ranks = Stored::<IgnoredAny>::read(folder)?.ranks;
    let files: Vec<PathBuf> = (0..ranks).map(|rank| folder.join(moments_file(rank, ranks))).collect();
    for entry in folder.read_dir().map_err(|source| FileError::new(folder, source))? {
        let path = entry.map_err(|source| FileError::new(folder, source))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("optimizer-") && !files.contains(&path) {
            return Err(broken(&path, format!("is not of this checkpoint, which {ranks} ranks wrote")));
        }
    }
    Ok(files)
}

fn read_header(path: &Path) -> Result<(u64, BTreeMap<String, StoredPart>), CheckpointError> {
    let io_error = |source| FileError::new(path, source);
    let mut file = File::open(path).map_err(io_error)?;
    let length = file.metadata().map_err(io_error)?.len();
    let mut size = [0; 8];
    file.read_exact(&mut size).map_err(io_error)?;
    let size = u64::from_le_bytes(size);
    if size > MOST_HEADER_BYTES.min(length) {
        return Err(broken(path, "not a complete safetensors file".into()));
    }
    let mut header = vec![0; size as usize];
    file.read_exact(&mut header).map_err(io_error)?;
    let header: Metadata = serde_json::from_slice(&header).map_err(|error| broken(path, error.to_string()))?;
    let steps = header.metadata().as_ref().and_then(|note| note.get(STEPS)?.parse().ok());
    let steps = steps.ok_or_else(|| broken(path, format!("the header has no {STEPS}")))?;
    let mut parts = BTreeMap::new();
    for (name, info) in header.tensors() {
        let (start, end) = info.data_offsets;
        let offset = 8 + size + start as u64;
        let part = name.strip_suffix(']').and_then(|name| {
            let (name, range) = name.rsplit_once('[')?;
            let (first, last) = range.split_once("..")?;
            let range = first.parse().ok()?..last.parse::<usize>().ok()?;
            Some((name.to_owned(), StoredPart { range, file: path.to_path_buf(), offset }))
        });
        let sound = |part: &StoredPart| {
            let bytes = part.range.end.checked_sub(part.range.start).and_then(|elements| elements.checked_mul(size_of::<f32>()));
            info.dtype == Dtype::F32 && bytes == end.checked_sub(start) && 8 + size + end as u64 <= length
        };
        match part {
            Some((name, part)) if sound(&part) => parts.insert(name, part),
            _ => return Err(broken(path, format!("tensor {name} is no part of a moment, or not wholly there"))),
        };
    }
    Ok((steps, parts))
}

fn read_floats(path: &Path, offset: u64, count: usize) -> io::Result<Vec<f32>> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(offset))?;
    let mut bytes = vec![0; count * size_of::<f32>()];
    file.read_exact(&mut bytes)?;
    Ok(bytes.as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect())
}
