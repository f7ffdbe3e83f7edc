//! Weights on disk: safetensors, single or sharded by `model.safetensors.index.json`, memory-mapped; f32, bf16 or f16 become f32.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use super::error::ModelError;
use super::parameters::{Layout, Part};
use crate::types::replace_file;

const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";

/// Reads every tensor of `layout` from `directory`, in stored order, and hands each to `accept(stored index, part, values)`.
///
/// # Errors
/// A missing, truncated or damaged file, a missing tensor, another shape or number format, or a tensor that the configuration
/// has no place for: one line naming file and tensor.
pub fn read(directory: &Path, layout: &Layout, mut accept: impl FnMut(usize, &Part, Vec<f32>)) -> Result<(), ModelError> {
    let shards = shards(directory)?;
    let mut remaining: BTreeMap<&str, (usize, &Part)> =
        layout.parts().map(|(index, part)| (part.name.as_str(), (index, part))).collect();
    for path in &shards {
        let file = File::open(path).map_err(|source| ModelError::io(path, source))?;
        // SAFETY: the map is read-only and private to this loop; a file that another process shrinks meanwhile would fault,
        // which is the documented condition of loading weights that nobody writes to.
        let map = unsafe { Mmap::map(&file) }.map_err(|source| ModelError::io(path, source))?;
        let tensors = SafeTensors::deserialize(&map).map_err(|error| {
            ModelError::weights(path, format!("not a complete safetensors file ({error}); download it again"))
        })?;
        let mut names = tensors.names();
        names.sort_unstable();
        for name in names {
            let view = tensors.tensor(name).map_err(|error| ModelError::weights(path, format!("tensor {name}: {error}")))?;
            match remaining.remove(name) {
                Some((index, part)) => accept(index, part, to_f32(path, part, &view)?),
                None if is_ignored(name, layout) => {}
                None => {
                    let problem = format!("tensor {name} has no place in the model that config.json describes");
                    return Err(ModelError::weights(path, problem));
                }
            }
        }
    }
    match remaining.into_keys().next() {
        None => Ok(()),
        Some(name) => {
            let path = if shards.len() == 1 { &shards[0] } else { directory };
            Err(ModelError::weights(path, format!("tensor {name} is missing")))
        }
    }
}

/// A tied model may still carry a copy of its head, and old files the rotary frequencies; both are computed from the rest.
fn is_ignored(name: &str, layout: &Layout) -> bool {
    (name == "lm_head.weight" && layout.head == layout.embedding) || name.ends_with("rotary_emb.inv_freq")
}

/// The files that hold the weights, in name order.
fn shards(directory: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let single = directory.join(SINGLE_FILE);
    if single.exists() {
        return Ok(vec![single]);
    }
    let index = directory.join(INDEX_FILE);
    if !index.exists() {
        return Err(ModelError::weights(directory, format!("holds neither {SINGLE_FILE} nor {INDEX_FILE}")));
    }
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let text = std::fs::read_to_string(&index).map_err(|source| ModelError::io(&index, source))?;
    let parsed: Index =
        serde_json::from_str(&text).map_err(|error| ModelError::weights(&index, format!("not a valid index: {error}")))?;
    let mut files: Vec<String> = parsed.weight_map.into_values().collect();
    files.sort_unstable();
    files.dedup();
    if let Some(outside) = files.iter().find(|file| Path::new(file).components().count() != 1 || file.starts_with('.')) {
        return Err(ModelError::weights(&index, format!("weight_map names {outside:?}, expected a file in the same directory")));
    }
    Ok(files.into_iter().map(|file| directory.join(file)).collect())
}

fn to_f32(path: &Path, part: &Part, view: &TensorView<'_>) -> Result<Vec<f32>, ModelError> {
    if view.shape() != part.shape {
        let problem = format!("tensor {} has shape {:?}, config.json asks for {:?}", part.name, view.shape(), part.shape);
        return Err(ModelError::weights(path, problem));
    }
    let bytes = view.data();
    match view.dtype() {
        Dtype::F32 => Ok(bytes.as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()),
        Dtype::BF16 => Ok(bytes.as_chunks::<2>().0.iter().map(|&bytes| bf16::from_le_bytes(bytes).to_f32()).collect()),
        Dtype::F16 => Ok(bytes.as_chunks::<2>().0.iter().map(|&bytes| f16::from_le_bytes(bytes).to_f32()).collect()),
        other => {
            let problem = format!("tensor {} has dtype {other:?}, supported are F32, BF16 and F16", part.name);
            Err(ModelError::weights(path, problem))
        }
    }
}

/// Writes `model.safetensors` in f32 with `tensors` given as (name, shape, values), each produced when its turn comes.
pub fn write(directory: &Path, layout: &Layout, mut values: impl FnMut(usize, &Part) -> Vec<f32>) -> Result<(), ModelError> {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".to_string(), serde_json::json!({ "format": "pt" }));
    let mut offset = 0;
    for (_, part) in layout.parts() {
        let end = offset + part.length() * size_of::<f32>();
        header
            .insert(part.name.clone(), serde_json::json!({ "dtype": "F32", "shape": part.shape, "data_offsets": [offset, end] }));
        offset = end;
    }
    let mut header = serde_json::Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let path = directory.join(SINGLE_FILE);
    let written = replace_file(&path, |file| {
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(&header)?;
        for (index, part) in layout.parts() {
            for chunk in values(index, part).chunks(1 << 16) {
                let bytes: Vec<u8> = chunk.iter().flat_map(|value| value.to_le_bytes()).collect();
                file.write_all(&bytes)?;
            }
        }
        Ok(())
    });
    written.map_err(|source| ModelError::io(&path, source))
}
