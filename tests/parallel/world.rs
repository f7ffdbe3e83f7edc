//! What a sharded model is made of and gives away: fresh weights, replicas, parts for an optimizer.

use std::collections::BTreeMap;

use learner::device::{CpuDevice, Device};
use learner::model::{Model, ModelError};
use learner::parallel::{Mesh, Ranks, ShardedModel, World};

use crate::support::{global_batch, local, mesh, noisy_model, on_ranks, qwen2, qwen3};

fn tensors(model: &mut ShardedModel<CpuDevice>) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let mut tensors = BTreeMap::new();
    let accept = |name: &str, shape: &[usize], values| drop(tensors.insert(name.to_owned(), (shape.to_vec(), values)));
    model.gather_tensors(|_| true, accept).expect("all ranks");
    tensors
}

#[test]
fn fresh_weights_are_those_of_one_rank() {
    for config in [qwen3(true), qwen3(false), qwen2()] {
        let whole = Model::initialise(CpuDevice::new(), config.clone(), 11);
        let expected: BTreeMap<_, _> = whole.tensors().map(|(name, shape, values)| (name, (shape, values))).collect();
        let gathered = on_ranks(local(3), |ranks| {
            let world = World::over_hosts(&CpuDevice::new(), ranks, mesh(3, 1)).expect("a world");
            tensors(&mut ShardedModel::initialise(CpuDevice::new(), config.clone(), 11, &world))
        });
        assert!(gathered.iter().all(|tensors| *tensors == expected));
    }
}

#[test]
fn only_what_is_wanted_is_copied() {
    let gathered = on_ranks(local(2), |ranks| {
        let world = World::over_hosts(&CpuDevice::new(), ranks, mesh(2, 1)).expect("a world");
        let mut model = ShardedModel::initialise(CpuDevice::new(), qwen3(false), 11, &world);
        let wanted = if world.ranks.first() { "model.norm.weight" } else { "lm_head.weight" };
        let mut names = Vec::new();
        model.gather_tensors(|name| name == wanted, |name, _, _| names.push(name.to_owned())).expect("all ranks");
        names
    });
    assert_eq!(gathered, [["model.norm.weight"], ["lm_head.weight"]]);
}

/// A replica scores as the model that was saved, and after a change as the model that was changed.
#[test]
fn a_replica_is_the_whole_model() {
    for config in [qwen3(true), qwen3(false)] {
        let (model, directory) = noisy_model(config);
        let batch = &global_batch()[0];
        let expected = model.score(batch, 1.0);
        let scores = on_ranks(local(3), |ranks| {
            let world = World::over_hosts(&CpuDevice::new(), ranks, mesh(1, 3)).expect("a world");
            let mut sharded = ShardedModel::load(CpuDevice::new(), directory.path(), &world).expect("a model");
            let mut replica = sharded.replica().expect("a replica");
            let before = replica.score(batch, 1.0);
            let device = CpuDevice::new();
            sharded.pieces().for_each(|piece| device.scale(piece.values, 0.5));
            sharded.after_step();
            let stale = replica.score(batch, 1.0);
            sharded.refresh(&mut replica).expect("all ranks");
            (before, stale, replica.score(batch, 1.0), sharded.score(batch, 1.0))
        });
        for (before, stale, after, sharded) in scores {
            assert!(before == expected && stale == expected, "before anything is sent");
            assert!(after != expected && after == sharded, "after it");
        }
    }
}

/// The pieces of all ranks are every tensor's elements once, and longer only by padding.
#[test]
fn pieces_cover_every_tensor() {
    let ranges = on_ranks(local(5), |ranks| {
        let world = World::over_hosts(&CpuDevice::new(), ranks, mesh(5, 1)).expect("a world");
        let mut model = ShardedModel::initialise(CpuDevice::new(), qwen3(true), 11, &world);
        let range = |piece: learner::model::Piece<'_, CpuDevice>| {
            assert!(piece.packed.is_none() && piece.values.len() == piece.gradient.len());
            assert!(piece.values[piece.range.len()..].iter().all(|&value| value == 0.0));
            piece.range
        };
        model.pieces().map(range).collect::<Vec<_>>()
    });
    for index in 0..ranges[0].len() {
        let mut next = 0;
        for range in ranges.iter().map(|ranges| &ranges[index]) {
            assert_eq!(range.start, next);
            next = range.end;
        }
        assert!(next >= 8, "tensor {index}");
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let problem = World::over_hosts(&CpuDevice::new(), Ranks::one(), Mesh::new(1, 2, 1).expect("a mesh")).err();
    let line = problem.expect("a refusal").to_string();
    assert!(line.contains("a mesh of 2 ranks for a run of 1"), "{line}");

    let empty = tempfile::tempdir().expect("a directory");
    let world = World::over_hosts(&CpuDevice::new(), Ranks::one(), mesh(1, 1)).expect("a world");
    let problem = ShardedModel::load(CpuDevice::new(), empty.path(), &world).err();
    assert!(matches!(problem, Some(ModelError::Io { .. })), "{problem:?}");
}
