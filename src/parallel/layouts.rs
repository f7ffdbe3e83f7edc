//! Which data x context layout trains fastest in the memory of a GPU, and why each other one does not.

use super::context::CHUNK_TOKENS;
use super::estimate::{GpuSpecification, StepEstimate, Workload};
use super::mesh::{Mesh, MeshError};
use crate::device::Peaks;
use crate::model::ModelConfig;

/// What speaks against a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Objection {
    #[error("{0}")]
    Mesh(#[from] MeshError),
    #[error("{context} context ranks for {chunks} chunks of {CHUNK_TOKENS} tokens: some would have none")]
    Chunks { context: usize, chunks: usize },
    #[error("{replicas} replicas for {sequences} sequences: some would have none")]
    Sequences { replicas: usize, sequences: usize },
    #[error("needs {:.1} GB of the {:.1} GB that a plan may fill", *needed as f64 / 1e9, *usable as f64 / 1e9)]
    Memory { needed: u64, usable: u64 },
    #[error("slower than the best")]
    Slower,
}

/// A layout that was looked at.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    pub data: usize,
    pub context: usize,
    /// Where ranks can be laid out so.
    pub estimate: Option<StepEstimate>,
    /// `None` for the best alone.
    pub objection: Option<Objection>,
}

/// All layouts of `nodes x gpus_per_node` GPUs, one per divisor of their number, by ascending context-parallel degree. The best of those
/// that fit takes the least time for a step, with the lowest degree where several take the same; if none fits there is no best.
///
/// # Errors
/// No ranks, or too many.
pub fn candidates(
    config: &ModelConfig,
    (nodes, gpus_per_node): (usize, usize),
    gpu: &GpuSpecification,
    peaks: &Peaks,
    workload: &Workload,
) -> Result<Vec<Candidate>, MeshError> {
    let world = Mesh::new(nodes, gpus_per_node, 1)?.world();
    let look_at = |context: usize| {
        let data = world / context;
        let chunks = workload.context.div_ceil(CHUNK_TOKENS);
        let mut candidate = Candidate { data, context, estimate: None, objection: None };
        match Mesh::new(nodes, gpus_per_node, context) {
            Err(error) => candidate.objection = Some(error.into()),
            Ok(_) if context > chunks => candidate.objection = Some(Objection::Chunks { context, chunks }),
            Ok(_) if data > workload.sequences => {
                candidate.objection = Some(Objection::Sequences { replicas: data, sequences: workload.sequences });
            }
            Ok(mesh) => {
                let estimate = StepEstimate::of(config, &mesh, gpu, peaks, workload);
                let (needed, usable) = (estimate.memory.total(), gpu.usable_bytes());
                candidate.objection = (needed > usable).then_some(Objection::Memory { needed, usable });
                candidate.estimate = Some(estimate);
            }
        }
        candidate
    };
    let mut candidates: Vec<Candidate> = (1..=world).filter(|&context| world.is_multiple_of(context)).map(look_at).collect();

    let seconds = |candidate: &Candidate| candidate.estimate.as_ref().map_or(f64::INFINITY, StepEstimate::step_seconds);
    let best = (0..candidates.len())
        .filter(|&index| candidates[index].objection.is_none())
        .min_by(|&a, &b| seconds(&candidates[a]).total_cmp(&seconds(&candidates[b])));
    for (index, candidate) in candidates.iter_mut().enumerate() {
        if candidate.objection.is_none() && Some(index) != best {
            candidate.objection = Some(Objection::Slower);
        }
    }
    Ok(candidates)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(name: &str, layout: (usize, usize), context: usize, sequences: usize) -> Vec<Candidate> {
        let config = ModelConfig::named(name).expect("a known shape");
        let gpu = GpuSpecification::named("h200").expect("a known GPU");
        let workload = Workload { context, sequences, engine_sequences: 0, recompute: true };
        candidates(&config, layout, &gpu, &gpu.peaks().expect("peaks"), &workload).expect("ranks")
    }

    fn best(candidates: &[Candidate]) -> Vec<usize> {
        candidates.iter().filter(|candidate| candidate.objection.is_none()).map(|candidate| candidate.context).collect()
    }

    /// 131,072 tokens of activations are too many for one GPU, so a sequence is shared; and where nothing is short, inside a node.
    #[test]
    fn long_sequences_are_shared() {
        for name in ["qwen3-8b", "qwen2.5-72b"] {
            let candidates = look(name, (16, 8), 131_072, 128);
            assert_eq!(candidates.iter().map(|candidate| candidate.context).collect::<Vec<_>>(), [1, 2, 4, 8, 16, 32, 64, 128]);
            let best = best(&candidates);
            assert!(best.len() == 1 && best[0] <= 16, "{name}: {best:?}");
            for candidate in &candidates {
                let fits = candidate.estimate.as_ref().is_some_and(|estimate| estimate.memory.total() <= 136_705_032_704);
                assert_eq!(fits, !matches!(candidate.objection, Some(Objection::Memory { .. })), "{name} {}", candidate.context);
            }
        }
        let objection = look("qwen2.5-72b", (16, 8), 131_072, 128)[0].objection;
        assert!(matches!(objection, Some(Objection::Memory { .. })), "{objection:?}");
    }

    #[test]
    fn short_sequences_are_not_shared() {
        assert_eq!(best(&look("qwen3-0.6b", (2, 8), 2048, 64)), [1]);
    }

    #[test]
    fn every_objection_is_named() {
        let candidates = look("tiny", (3, 4), 300, 4);
        let objection = |context: usize| {
            candidates.iter().find(|candidate| candidate.context == context).and_then(|candidate| candidate.objection)
        };
        assert_eq!(objection(1), Some(Objection::Sequences { replicas: 12, sequences: 4 }));
        assert_eq!(objection(3), Some(Objection::Mesh(MeshError::Uneven { context: 3, ranks_per_node: 4 })));
        assert_eq!(objection(4), Some(Objection::Chunks { context: 4, chunks: 3 }));
        // One GPU cannot hold what training 72 billion parameters takes: 16 bytes each, and the bf16 copy of all but the embedding.
        let least = 18 * 72_706_203_648 - 2 * 152_064 * 8_192;
        let candidates = look("qwen2.5-72b", (1, 1), 128, 1);
        assert!(matches!(candidates[0].objection, Some(Objection::Memory { needed, .. }) if needed > least));
    }
}
