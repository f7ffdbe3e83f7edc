//! What a plan counts is what emulated devices do: the bytes that ranks hand to NCCL, and the memory that their allocators gave out.

use learner::collectives::{CollectiveError, Operation};
use learner::device::{CudaDevice, Device};
use learner::model::{Cotangents, Family, Model, ModelConfig, PassSettings, Scores};
use learner::parallel::{
    ContextPlan, Group, Links, Mesh, RankMemory, Ranks, ShardedModel, World, micro_batch_schedule, pairs_per_token,
};
use learner::train::Policy;
use learner::train::optimizer::{AdamW, AdamWSettings, MomentPlace, NormLimits};
use learner::types::Batch;

use crate::inputs::Inputs;
use crate::nccl::{NEVER, liveness, on_ranks};
use crate::subject::{Emulated, settings};

/// Bytes of one number of what a GPU gathers.
const BF16: usize = 2;

/// Large enough that what nobody plans for (tables of indices, sums of squares) is a small part of the whole.
fn model(tied_embeddings: bool) -> ModelConfig {
    ModelConfig {
        family: Family::Qwen3,
        vocabulary: 1003,
        hidden: 128,
        intermediate: 256,
        layers: 3,
        query_heads: 4,
        key_value_heads: 2,
        head_dim: 32,
        norm_epsilon: 1e-6,
        rope_theta: 10_000.0,
        yarn: None,
        max_positions: 512,
        tied_embeddings,
        attention_bias: false,
        other: Default::default(),
    }
}

/// All tokens that can be are scored, as plans have it: of a document that context ranks share and some that stay whole, fewer in the
/// second replica.
fn batch_of(replica: usize) -> Batch {
    let lengths: &[usize] = if replica == 0 { &[260, 40, 20] } else { &[290, 62] };
    let mut inputs = Inputs::new("tokens of a plan");
    let documents: Vec<Vec<u32>> = lengths.iter().map(|&length| inputs.ids(length, 1003)).collect();
    Batch::pack(&documents.iter().map(Vec::as_slice).collect::<Vec<_>>(), |_, _| true)
}

/// `[group][kind]` bytes that a rank hands over: of the world and of its context group, to gathers and to scatters.
type Bytes = [[u64; 2]; 2];

fn planned(config: &ModelConfig, mesh: &Mesh, plan: &ContextPlan) -> Bytes {
    let mut bytes = [[0; 2]; 2];
    for transfer in micro_batch_schedule(config, mesh, plan, BF16).into_iter().flat_map(|stage| stage.transfers) {
        let group = usize::from(transfer.collective.group() == Group::Context);
        let kind = usize::from(!transfer.collective.gathers());
        bytes[group][kind] += transfer.payload_bytes(mesh);
    }
    bytes
}

fn counted(world: &World<CudaDevice>) -> Bytes {
    let of = |links: &dyn Links<CudaDevice>| {
        let traffic = links.traffic();
        [Operation::AllGather, Operation::ReduceScatter].map(|operation| traffic.of(operation).bytes)
    };
    [of(&*world.world), of(&*world.context)]
}

fn cotangents(scores: &Scores) -> Cotangents {
    Cotangents { log_probs: vec![-1e-3; scores.log_probs.len()], entropies: None }
}

/// One step of one micro-batch, as the trainer makes it; `after_pass` looks at what has travelled.
fn step(
    policy: &mut Policy<CudaDevice>,
    ranks: &Ranks,
    batch: &Batch,
    recompute: bool,
    after_pass: impl FnOnce(),
) -> Result<(), CollectiveError> {
    let device = policy.device().clone();
    let mut optimizer = AdamW::new(&device, policy.pieces(), AdamWSettings::default(), MomentPlace::Device);
    policy.forward_backward(batch, PassSettings { temperature: 1.0, recompute }, cotangents);
    after_pass();
    optimizer.step(policy.pieces(), ranks, 1e-3, NormLimits::clip_at(1.0))?;
    policy.after_step();
    Ok(())
}

/// `(purposes, bytes)` of a plan as the allocator groups them.
fn by_allocator(memory: &RankMemory) -> [(&'static [&'static str], u64); 4] {
    let RankMemory { weights, master, moments, gradients, gathered_weights, whole_gradients, .. } = *memory;
    let weights = weights + master + gathered_weights;
    let gradients = gradients + whole_gradients;
    let rest = memory.total() - weights - gradients - moments;
    [
        (&["weights"], weights),
        (&["gradients"], gradients),
        (&["optimizer"], moments),
        (&["activations", "statistics", "workspace", "keys and values"], rest),
    ]
}

/// The most that a device gave out, by purpose and in all, is within 5 % of the plan.
fn check_memory(what: &str, device: &CudaDevice, memory: &RankMemory) {
    let usage = device.memory_use();
    let peak = |purposes: &[&str]| -> u64 {
        usage.iter().filter(|line| purposes.contains(&line.purpose)).map(|line| line.peak as u64).sum()
    };
    let total: u64 = usage.iter().map(|line| line.peak as u64).sum();
    let lines = by_allocator(memory).map(|(purposes, planned)| (purposes.join(", "), peak(purposes), planned));
    for (purpose, found, planned) in lines.into_iter().chain([("all".to_owned(), total, memory.total())]) {
        let off = found as f64 / planned as f64 - 1.0;
        assert!(off.abs() <= 0.05, "{what}: {purpose} took {found} bytes, planned are {planned}: {:+.1} %", 100.0 * off);
    }
}

#[test]
fn one_device_takes_the_memory_that_is_planned() {
    let Some(emulated) = Emulated::take() else { return };
    emulated.configure(&settings(0));
    let mesh = Mesh::new(1, 1, 1).expect("a mesh");
    for (tied, recompute) in [(false, false), (false, true), (true, true)] {
        let (config, batch) = (model(tied), batch_of(0));
        let plan = ContextPlan::of(&batch, 1, pairs_per_token(&config));
        let memory = RankMemory::of_ranks(&config, &mesh, &plan, recompute, 0, 0);
        let device = CudaDevice::emulated(&settings(0), 0).expect("a device");
        let mut policy = Policy::whole(Model::initialise(device.clone(), config, 1));
        step(&mut policy, &Ranks::one(), &batch, recompute, || {}).expect("one rank loses nobody");
        check_memory(&format!("one device, recompute {recompute}"), &device, &memory[0]);
    }
    emulated.expect_no_findings();
}

#[test]
fn ranks_move_the_bytes_and_take_the_memory_that_are_planned() {
    let Some(emulated) = Emulated::take() else { return };
    emulated.configure(&settings(0));
    for (data, context, recompute) in [(1, 2, true), (2, 2, false), (1, 3, false)] {
        let (config, mesh) = (model(data == 1), Mesh::new(1, data * context, context).expect("a mesh"));
        let results = on_ranks(0, mesh.world(), |device, place| {
            let world = World::over_nccl(device, place, mesh, &liveness(NEVER))?;
            let at = mesh.coordinates(world.ranks.rank());
            let what = format!("{data} x {context}, recompute {recompute}, rank {}", world.ranks.rank());
            let batch = batch_of(at.data);
            let plan = ContextPlan::of(&batch, context, pairs_per_token(&config));
            let mut policy = Policy::sharded(ShardedModel::initialise(device.clone(), config.clone(), 1, &world));
            step(&mut policy, &world.ranks, &batch, recompute, || {
                assert_eq!(counted(&world), planned(&config, &mesh, &plan), "{what}: bytes handed over");
            })?;
            let memory = RankMemory::of_ranks(&config, &mesh, &plan, recompute, 0, 0);
            check_memory(&what, device, &memory[at.context]);
            world.ranks.barrier()
        });
        results.into_iter().collect::<Result<Vec<()>, CollectiveError>>().expect("no rank is lost");
    }
    emulated.expect_no_findings();
}
