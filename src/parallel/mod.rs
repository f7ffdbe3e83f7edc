//! Many ranks: who holds which part of a tensor and which tokens, what every collective of a step moves, what it all takes.
//!
//! `mesh` numbers the ranks, `sharding` cuts tensors (ZeRO-3) and lists the collectives of a step, `context` cuts sequences,
//! `memory` adds up what a rank holds, `estimate` how long a step should take, `layouts` which grid is best. Everything here is a
//! pure function of shapes. `learner plan` is built on it; the trainer, which runs on one rank so far, does not call it yet.

mod context;
mod estimate;
mod layouts;
mod links;
mod memory;
mod mesh;
mod servers;
mod sharding;

pub use context::{BatchShard, CHUNK_TOKENS, ContextPlan, Slice, pairs_per_token};
pub use estimate::{
    ATTENTION_BACKWARD_SHARE, ATTENTION_FORWARD_SHARE, GpuSpecification, LinkBytes, MATRIX_SHARE, MEMORY_SHARE, RESERVED_BYTES,
    StepEstimate, Workload,
};
pub use layouts::{Candidate, Objection, candidates};
pub use links::Links;
pub use memory::RankMemory;
pub use mesh::{Coordinates, Mesh, MeshError, Placement};
pub use servers::{ServerEstimate, ServerWorkload};
pub use sharding::{Collective, Group, SCALARS, ShardedSizes, Stage, TensorShards, Transfer, Work, micro_batch_schedule};
