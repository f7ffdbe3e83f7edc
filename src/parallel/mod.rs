//! Many ranks: who holds which part of a tensor and which tokens, what every collective of a step moves, what it all takes.
//!
//! ```text
//! mesh                 numbers the ranks: data parallel x context parallel
//! ranks, links, world  what the ranks say to each other on the host, and how buffers travel; `host_links` carries them over the host, `nccl` over NCCL
//! sharding             cuts tensors (ZeRO-3) and lists the collectives of a micro-batch
//! context              cuts sequences; `context_shard`: one rank's part, and where its attention finds those of others
//! sharded              the model over a world, from `sharded_parameters` and `context_exchange`, which implement what passes ask for
//! deal                 which replica computes which micro-batch
//! memory, estimate     what a rank holds and how long a step should take; `layouts`: which grid is best; `servers`: what sampling on servers takes
//! settings             the run file's `[parallel]`
//! ```
//!
//! What a plan counts and what a run does come from the same functions of shapes.

mod context;
mod context_exchange;
mod context_shard;
mod deal;
mod estimate;
mod host_links;
mod layouts;
mod links;
mod memory;
mod mesh;
mod nccl;
mod ranks;
mod servers;
mod settings;
mod sharded;
mod sharded_parameters;
mod sharding;
mod world;

pub use context::{ContextPlan, Slice, pairs_per_token};
pub use context_shard::ContextShard;
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
pub use servers::{ServerEstimate, ServerWorkload};
pub use settings::Settings;
pub use sharded::ShardedModel;
pub use sharding::{Collective, Group, Stage, Transfer, Work, micro_batch_schedule};
pub use world::World;
