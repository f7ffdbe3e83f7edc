//! Many ranks: who holds which part of a tensor and which tokens, what every collective of a step moves, what it all takes.
//!
//! `mesh` numbers the ranks, `sharding` cuts tensors (ZeRO-3) and lists the collectives of a step, `context` cuts sequences,
//! `memory` adds up what a rank holds, `estimate` how long a step should take, `layouts` which grid is best. Everything here is a
//! pure function of shapes. `learner plan` is built on it; the trainer, which runs on one rank so far, does not call it yet.

mod context;
mod context_exchange;
mod deal;
mod estimate;
mod host_links;
mod layouts;
mod links;
mod memory;
mod mesh;
mod nccl;
mod ranks;
mod settings;
mod sharded;
mod sharded_parameters;
mod sharding;
mod world;

pub use context::{CHUNK_TOKENS, ContextPlan, ContextShard, Slice, pairs_per_token};
pub use deal::deal;
pub use estimate::{
    ATTENTION_BACKWARD_SHARE, ATTENTION_FORWARD_SHARE, GpuSpecification, LinkBytes, MATRIX_SHARE, MEMORY_SHARE, RESERVED_BYTES,
    StepEstimate, Workload,
};
pub use layouts::{Candidate, Objection, candidates};
pub use links::Links;
pub use memory::RankMemory;
pub use mesh::{Coordinates, Mesh, MeshError, Placement};
pub use nccl::NcclLinks;
pub use ranks::Ranks;
pub use settings::Settings;
pub use sharded::ShardedModel;
pub use sharding::{Collective, Group, SCALARS, ShardedSizes, Stage, TensorShards, Transfer, Work, micro_batch_schedule};
pub use world::World;
