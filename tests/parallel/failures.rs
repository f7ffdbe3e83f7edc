//! A rank that is lost ends the passes of all others, with its name.

use std::panic::{AssertUnwindSafe, catch_unwind};

use learner::collectives::{CollectiveError, Failure};
use learner::device::CpuDevice;
use learner::model::PassSettings;
use learner::parallel::{ShardedModel, World};

use crate::support::{cotangents, global_batch, local, mesh, on_ranks, qwen3};

/// Rank 2 of four goes away instead of computing: the passes of the others unwind with an error that blames it.
#[test]
fn passes_unwind_when_a_rank_has_left() {
    let found = on_ranks(local(4), |ranks| {
        let rank = ranks.rank();
        let world = World::over_hosts(&CpuDevice::new(), ranks, mesh(2, 2)).expect("a world");
        let mut model = ShardedModel::initialise(CpuDevice::new(), qwen3(true), 5, &world);
        if rank == 2 {
            return None;
        }
        let settings = PassSettings { temperature: 1.0, recompute: false };
        let pass = || model.forward_backward(&global_batch()[0], settings, |scores| cotangents(scores).0);
        let payload = catch_unwind(AssertUnwindSafe(pass)).expect_err("no pass without rank 2");
        Some(*payload.downcast::<CollectiveError>().expect("the error as payload"))
    });
    for error in found.iter().flatten() {
        assert_eq!((error.rank, error.failure), (2, Failure::Gone), "{error}");
    }
    assert_eq!(found.iter().flatten().count(), 3);
}

/// A loss that panics while other ranks wait for this rank's gradients: they learn of it at once.
#[test]
fn a_panic_in_the_loss_stops_the_others() {
    let found = on_ranks(local(3), |ranks| {
        let rank = ranks.rank();
        let world = World::over_hosts(&CpuDevice::new(), ranks, mesh(3, 1)).expect("a world");
        let mut model = ShardedModel::initialise(CpuDevice::new(), qwen3(true), 5, &world);
        let settings = PassSettings { temperature: 1.0, recompute: false };
        let pass = || {
            model.forward_backward(&global_batch()[1], settings, |scores| match rank {
                1 => std::panic::resume_unwind(Box::new("a loss that cannot be")),
                _ => cotangents(scores).0,
            })
        };
        catch_unwind(AssertUnwindSafe(pass)).expect_err("no pass without rank 1").downcast::<CollectiveError>().ok()
    });
    assert!(found[1].is_none(), "its own panic goes on");
    for rank in [0, 2] {
        let error = found[rank].as_ref().expect("the error as payload");
        assert_eq!((error.rank, error.failure), (1, Failure::Aborted), "{error}");
    }
}
