//! What a rank writes of a checkpoint, as it is at one moment: a copy in the host's memory and its way into files.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io;
use std::path::Path;

use safetensors::tensor::{Dtype, View};

use super::STATE;
use super::moments::{MomentPart, STEPS, moment_parts, moments_file};
use super::writer::Whole;
use crate::collectives::CollectiveError;
use crate::device::Device;
use crate::model::Entry;
use crate::parallel::Ranks;
use crate::train::files::{FileError, write_atomically};
use crate::train::optimizer::AdamW;
use crate::train::policy::Policy;
use crate::types::sync_folder;

/// One rank's part of the weights and of the optimizer's state.
pub struct Snapshot {
    rank: usize,
    ranks: usize,
    /// The model's config.json.
    config: String,
    /// The file of every tensor of the model.
    files: BTreeMap<String, String>,
    /// Those that this rank writes: name, shape and values.
    tensors: Vec<(String, Vec<usize>, Vec<f32>)>,
    /// Of the parts of tensors that this rank changes.
    moments: Vec<MomentPart>,
    /// Steps of the optimizer.
    steps: u64,
}

const INDEX: &str = "model.safetensors.index.json";

/// Which rank writes each of the stored tensors, of these lengths: neighbours together, as evenly as whole tensors allow.
fn owners(lengths: &[usize], ranks: usize) -> Vec<usize> {
    let total: u128 = lengths.iter().map(|&length| length as u128).sum();
    let mut before = 0u128;
    let mut owner = |&length: &usize| {
        let middle = 2 * before + length as u128;
        before += length as u128;
        (middle * ranks as u128 / (2 * total).max(1)).min(ranks as u128 - 1) as usize
    };
    lengths.iter().map(&mut owner).collect()
}

/// The file that holds what `owner` writes, as Hugging Face names them.
fn weights_file(owners: &[usize], owner: usize) -> String {
    let mut writing = owners.to_vec();
    writing.dedup();
    match (writing.iter().position(|&rank| rank == owner), writing.len()) {
        (_, 1) => "model.safetensors".into(),
        (place, count) => format!("model-{:05}-of-{count:05}.safetensors", place.unwrap_or(0) + 1),
    }
}

impl Snapshot {
    /// Copies what this rank writes. All ranks make this call: a tensor that is cut over them is gathered for the one that
    /// writes it.
    pub(in crate::train) fn take<D: Device>(
        policy: &mut Policy<D>,
        optimizer: &AdamW<D>,
        ranks: &Ranks,
    ) -> Result<Snapshot, CollectiveError> {
        let lengths: Vec<usize> = policy.layout().entries.iter().map(Entry::length).collect();
        let owners = owners(&lengths, ranks.ranks());
        let owned = policy.layout().parts().map(|(index, part)| (part.name.clone(), owners[index]));
        let owners_by_name: BTreeMap<String, usize> = owned.collect();
        let mut tensors = Vec::new();
        policy.gather_tensors(
            |name| owners_by_name.get(name) == Some(&ranks.rank()),
            |name, shape, values| tensors.push((name.to_owned(), shape.to_vec(), values)),
        )?;
        let file = |(name, owner)| (name, weights_file(&owners, owner));
        Ok(Snapshot {
            rank: ranks.rank(),
            ranks: ranks.ranks(),
            config: policy.config().to_json(),
            files: owners_by_name.into_iter().map(file).collect(),
            tensors,
            moments: moment_parts(policy.layout(), optimizer),
            steps: optimizer.steps(),
        })
    }

    /// Writes and syncs this rank's files into `folder`. `whole` is what rank 0 writes besides.
    ///
    /// # Errors
    /// A file could not be written. Then none of this rank's large files stay, for a full disk is the commonest reason. The folder does:
    /// other ranks may still be writing into it.
    pub(super) fn write(&self, folder: &Path, whole: Option<&Whole>) -> Result<(), FileError> {
        self.write_files(folder, whole).inspect_err(|_| {
            // Why the write failed is what matters; what cannot be removed either goes with the folder at the next start.
            for file in self.weights_file().into_iter().chain([moments_file(self.rank, self.ranks)]) {
                let _ = fs::remove_file(folder.join(file));
            }
        })
    }

    /// Of the tensors that this rank writes, if there are any.
    fn weights_file(&self) -> Option<String> {
        self.tensors.first().map(|(first, _, _)| self.files[first].clone())
    }

    fn write_files(&self, folder: &Path, whole: Option<&Whole>) -> Result<(), FileError> {
        fs::create_dir_all(folder).map_err(|source| FileError::new(folder, source))?;
        if let Some(file) = self.weights_file() {
            let tensors = self.tensors.iter().map(|(name, shape, values)| (name, Floats { shape: shape.clone(), values }));
            // Transformers asks for this note on who wrote the file.
            let note = HashMap::from([("format".to_owned(), "pt".to_owned())]);
            write_tensors(&folder.join(file), tensors, note)?;
        }
        let moments =
            self.moments.iter().map(|part| (part.name(), Floats { shape: vec![part.values.len()], values: &part.values }));
        let steps = HashMap::from([(STEPS.to_owned(), self.steps.to_string())]);
        write_tensors(&folder.join(moments_file(self.rank, self.ranks)), moments, steps)?;
        if let Some(Whole { tokenizer_json, state }) = whole {
            write_atomically(&folder.join("config.json"), self.config.as_bytes())?;
            write_atomically(&folder.join("tokenizer.json"), tokenizer_json)?;
            write_atomically(&folder.join(STATE), state)?;
            if self.files.values().any(|file| file != "model.safetensors") {
                write_atomically(&folder.join(INDEX), &self.index())?;
            }
        }
        sync_folder(folder).map_err(|source| FileError::new(folder, source))
    }

    /// Where Hugging Face's readers find each tensor.
    fn index(&self) -> Vec<u8> {
        serde_json::json!({ "metadata": {}, "weight_map": self.files }).to_string().into_bytes()
    }
}

/// Numbers as safetensors writes them.
struct Floats<'a> {
    shape: Vec<usize>,
    values: &'a [f32],
}

impl View for Floats<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Owned(self.values.iter().flat_map(|value| value.to_le_bytes()).collect())
    }
    fn data_len(&self) -> usize {
        size_of_val(self.values)
    }
}

fn write_tensors<'a>(
    path: &Path,
    tensors: impl Iterator<Item = (impl AsRef<str> + Ord + std::fmt::Display, Floats<'a>)>,
    note: HashMap<String, String>,
) -> Result<(), FileError> {
    let write = || {
        safetensors::serialize_to_file(tensors, Some(note), path).map_err(|error| match error {
            safetensors::SafeTensorError::IoError(source) => source,
            other => io::Error::other(other.to_string()),
        })?;
        File::open(path)?.sync_all()
    };
    write().map_err(|source| FileError::new(path, source))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn neighbours_share_a_file_and_one_writer_needs_no_number() {
        assert_eq!(owners(&[4, 1, 1, 1, 1], 2), [0, 1, 1, 1, 1]);
        assert_eq!(owners(&[1, 8, 1], 4), [0, 2, 3]);
        assert_eq!(owners(&[3, 0], 1), [0, 0]);
        assert_eq!(weights_file(&[0, 0], 0), "model.safetensors");
        assert_eq!(weights_file(&[0, 2, 3], 2), "model-00002-of-00003.safetensors");
    }

    /// A folder stands where the moments are to be written, after the weights have been.
    #[test]
    fn a_rank_that_cannot_write_its_part_leaves_no_large_file() {
        let folder = tempfile::tempdir().unwrap();
        let obstacle = folder.path().join(moments_file(0, 1));
        fs::create_dir(&obstacle).unwrap();
        let snapshot = Snapshot {
            rank: 0,
            ranks: 1,
            config: "{}".into(),
            files: BTreeMap::from([("norm".into(), "model.safetensors".into())]),
            tensors: vec![("norm".into(), vec![2], vec![1.0, 2.0])],
            moments: Vec::new(),
            steps: 1,
        };
        let problem = snapshot.write(folder.path(), None).unwrap_err().to_string();
        assert!(problem.contains("optimizer-00001-of-00001.safetensors"), "{problem}");
        let left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(left, [obstacle]);
    }

    proptest! {
        /// Ranks come in ascending order, and none writes more than its even share and half a tensor at either end.
        #[test]
        fn tensors_are_shared_out_evenly(lengths in proptest::collection::vec(0usize..1000, 1..60), ranks in 1usize..12) {
            let owners = owners(&lengths, ranks);
            prop_assert!(owners.is_sorted() && owners.iter().all(|&rank| rank < ranks));
            let (total, most) = (lengths.iter().sum::<usize>(), lengths.iter().max().unwrap());
            for rank in 0..ranks {
                let written: usize = (0..lengths.len()).filter(|&tensor| owners[tensor] == rank).map(|tensor| lengths[tensor]).sum();
                prop_assert!(total == 0 || written <= total / ranks + 1 + most, "{written} of {total} on {ranks}, {most}");
            }
        }
    }
}
