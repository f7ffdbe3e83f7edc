//! What ranks hand to their links, against the plan's schedule.

use learner::collectives::Operation;
use learner::device::CpuDevice;
use learner::model::{ModelConfig, PassSettings};
use learner::parallel::{ContextPlan, Group, Mesh, ShardedModel, World, micro_batch_schedule, pairs_per_token};
use learner::types::Batch;

use crate::support::{batch, cotangents, local, mesh, on_ranks, qwen2, qwen3};

/// `[group][kind]` bytes that the plan says a rank hands over.
fn planned(config: &ModelConfig, mesh: &Mesh, batch: &Batch) -> [[u64; 2]; 2] {
    let plan = ContextPlan::of(batch, mesh.context(), pairs_per_token(config));
    let mut bytes = [[0; 2]; 2];
    for transfer in micro_batch_schedule(config, mesh, &plan, size_of::<f32>()).into_iter().flat_map(|stage| stage.transfers) {
        let group = usize::from(transfer.collective.group() == Group::Context);
        let kind = usize::from(!transfer.collective.gathers());
        bytes[group][kind] += transfer.payload_bytes(mesh);
    }
    bytes
}

/// Of one micro-batch, in which layers run again in the backward as the plan has it.
fn counted(config: &ModelConfig, mesh: &Mesh, batch: &Batch) -> Vec<[[u64; 2]; 2]> {
    on_ranks(local(mesh.world()), |ranks| {
        let world = World::over_hosts(&CpuDevice::new(), ranks, *mesh).expect("a world");
        let mut model = ShardedModel::initialise(CpuDevice::new(), config.clone(), 5, &world);
        model.forward_backward(batch, PassSettings { temperature: 1.0, recompute: true }, |scores| cotangents(scores).0);
        let of = |links: &dyn learner::parallel::Links<CpuDevice>| {
            let traffic = links.traffic();
            let bytes = [Operation::AllGather, Operation::ReduceScatter].map(|operation| traffic.of(operation).bytes);
            assert_eq!(traffic.total().bytes, bytes[0] + bytes[1]);
            bytes
        };
        [of(&*world.world), of(&*world.context)]
    })
}

#[test]
fn payloads_are_those_of_the_plan() {
    let batches = [
        batch(&[700], |_, _| true),
        batch(&[300, 40, 200, 1, 130], |document, _| document != 2),
        batch(&[30, 20, 10], |_, _| true),
        Batch::default(),
    ];
    let four_layers = ModelConfig { layers: 4, ..qwen3(false) };
    for config in [qwen3(true), four_layers, qwen2()] {
        for (data, context) in [(1, 1), (2, 1), (1, 2), (1, 3), (2, 2)] {
            let mesh = mesh(data, context);
            for batch in &batches {
                let planned = planned(&config, &mesh, batch);
                for (rank, counted) in counted(&config, &mesh, batch).into_iter().enumerate() {
                    // A group of one hands its values to itself.
                    let [world, of_context] = counted;
                    let tokens = batch.ids.len();
                    assert!(
                        mesh.world() == 1 || world == planned[0],
                        "{data} x {context}, {tokens} tokens, rank {rank}: {world:?}, {planned:?}"
                    );
                    assert_eq!(of_context, planned[1], "{data} x {context}, {tokens} tokens, rank {rank}");
                }
            }
        }
    }
}
