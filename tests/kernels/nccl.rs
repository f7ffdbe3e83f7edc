//! Links over NCCL between emulated devices, one thread each, against links over the host: the same bits, the same counts; and what
//! becomes of all ranks when one is lost.

use std::sync::mpsc;

use learner::collectives::{CollectiveError, Failure, Liveness, Operation};
use learner::device::cuda::Buffer;
use learner::device::{CudaDevice, Device, Role};
use learner::parallel::{Links, Mesh, NcclLinks, Ranks, World};

use crate::accept::assert_same_bits;
use crate::inputs::Inputs;
use crate::subject::{EMULATED_DEVICES, Emulated, all, settings};

/// Longer than any of these tests takes.
pub const NEVER: f64 = 600.0;

pub fn liveness(stall_seconds: f64) -> Liveness {
    Liveness { stall_seconds, ..Liveness::default() }
}

/// Runs `work(device, place)` on one thread and one device per rank; results by rank.
pub fn on_ranks<T: Send>(run: usize, ranks: usize, work: impl Fn(&CudaDevice, Ranks) -> T + Sync) -> Vec<T> {
    let one = |ranks: Ranks| {
        let device = CudaDevice::emulated(&settings(run), ranks.rank()).expect("a device");
        work(&device, ranks)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = Ranks::local(ranks, NEVER).into_iter().map(|ranks| scope.spawn(|| one(ranks))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
    })
}

/// A buffer of `share` numbers per rank and some more, which are other numbers on each rank.
fn filled(device: &CudaDevice, role: Role, rank: usize, ranks: usize, share: usize) -> Buffer {
    let values = Inputs::new(&format!("shares of rank {rank}")).wide(ranks * share + 3, 1.0);
    device.upload(role, &values.iter().map(|value| (value * 1.000_123) as f32).collect::<Vec<_>>())
}

fn gathered_and_scattered(
    device: &CudaDevice,
    links: &dyn Links<CudaDevice>,
    role: Role,
    share: usize,
) -> Result<[Vec<f32>; 2], CollectiveError> {
    let (rank, ranks) = (links.rank(), links.ranks());
    let mut gathered = filled(device, role, rank, ranks, share);
    links.all_gather(&mut gathered, share)?;
    let mut scattered = filled(device, role, rank, ranks, share);
    links.reduce_scatter(&mut scattered, share)?;
    Ok([all(device, &gathered), device.read(&scattered, rank * share, share)])
}

#[test]
fn links_give_the_bits_and_the_counts_of_the_host() {
    let Some(emulated) = Emulated::take() else { return };
    // Copies and streams early and late; a group of one, odd ones, all devices.
    for (run, ranks) in [(0, 1), (1, 3), (2, 2), (2, EMULATED_DEVICES)] {
        emulated.configure(&settings(run));
        on_ranks(run, ranks, |device, place| {
            let mesh = Mesh::new(1, ranks, 1).expect("a mesh");
            let nccl = World::over_nccl(device, place.clone(), mesh, &liveness(NEVER))?;
            let hosts = World::over_hosts(device, place, mesh)?;
            for (role, share) in [(Role::Travelling, 1), (Role::Gradients, 1), (Role::Travelling, 37), (Role::Gradients, 1001)] {
                let found = gathered_and_scattered(device, &*nccl.world, role, share)?;
                let expected = gathered_and_scattered(device, &*hosts.world, role, share)?;
                for (name, (found, expected)) in ["gathered", "scattered"].into_iter().zip(found.iter().zip(&expected)) {
                    assert_same_bits(&format!("{name} {role:?}, {share} numbers of each of {ranks} ranks"), found, expected);
                }
            }
            let (found, expected) = (nccl.world.traffic(), hosts.world.traffic());
            for operation in [Operation::AllGather, Operation::ReduceScatter] {
                let (found, expected) = (found.of(operation), expected.of(operation));
                assert_eq!((found.calls, found.bytes), (expected.calls, expected.bytes), "{operation}");
                assert!(!found.time.is_zero() && found.exposed <= found.time, "{operation}: {found:?}");
            }
            Ok(())
        })
        .into_iter()
        .collect::<Result<(), CollectiveError>>()
        .expect("a run without failures");
        emulated.expect_no_findings();
    }
}

/// What a rank of a grid holds after its world gathers units and scatters gradients beside a computation in which its context group
/// exchanges others, beside which it computes again.
fn overlapping(device: &CudaDevice, world: &World<CudaDevice>) -> Result<Vec<Vec<f32>>, CollectiveError> {
    let (rank, ranks, share) = (world.world.rank(), world.world.ranks(), 300);
    let fill = |role, ranks| filled(device, role, rank, ranks, share);
    let mut matrices = [fill(Role::Travelling, ranks), fill(Role::Travelling, ranks)];
    let (mut vector, mut gradient) = (fill(Role::Weights, ranks), fill(Role::Gradients, ranks));
    let mut keys = fill(Role::Travelling, world.context.ranks());
    let mut computed = fill(Role::Gradients, 1);
    let mut inner = Ok(());
    for _ in 0..3 {
        world.world.overlapped(
            &mut |links| {
                matrices.iter_mut().try_for_each(|matrix| links.all_gather(matrix, share))?;
                links.all_gather(&mut vector, share)?;
                links.reduce_scatter(&mut gradient, share)?;
                // The same buffer again: this call must come after the one before.
                links.all_gather(&mut gradient, share)
            },
            &mut || {
                device.scale(&mut computed, 1.5);
                let communicate: &mut (dyn FnMut(&dyn Links<CudaDevice>) -> Result<(), CollectiveError> + Send) =
                    &mut |links| links.all_gather(&mut keys, share);
                inner = world.context.overlapped(communicate, &mut || device.scale(&mut computed, 0.5));
            },
        )?;
        std::mem::replace(&mut inner, Ok(()))?;
        // What was gathered is used, and its memory goes back and comes again, without a word to the host.
        let mut copy = device.zeros(Role::Gradients, ranks * share);
        device.copy(&gradient, &mut copy, ranks * share);
        device.scale(&mut copy, 0.25);
        device.copy(&copy, &mut gradient, ranks * share);
    }
    Ok([&matrices[0], &matrices[1], &vector, &gradient, &keys, &computed].map(|buffer| all(device, buffer)).to_vec())
}

#[test]
fn groups_and_computations_run_beside_each_other() {
    let Some(emulated) = Emulated::take() else { return };
    for run in [0, 2] {
        emulated.configure(&settings(run));
        let results = on_ranks(run, EMULATED_DEVICES, |device, place| {
            let mesh = Mesh::new(1, EMULATED_DEVICES, 4).expect("a mesh");
            let nccl = World::over_nccl(device, place.clone(), mesh, &liveness(NEVER))?;
            let hosts = World::over_hosts(device, place, mesh)?;
            let found = overlapping(device, &nccl)?;
            assert_eq!(nccl.world.traffic().of(Operation::AllGather).calls, 12);
            assert_eq!(nccl.context.traffic().total().calls, 3);
            Ok((found, overlapping(device, &hosts)?))
        });
        for (rank, result) in results.into_iter().enumerate() {
            let (found, expected) = result.unwrap_or_else(|error: CollectiveError| panic!("rank {rank}: {error}"));
            for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert_same_bits(&format!("buffer {index} of rank {rank}"), found, expected);
            }
        }
        emulated.expect_no_findings();
    }
}

// ---- failures ----

/// Gathers, and waits for the device, until the run stops; then every later call says the same.
fn until_it_stops(device: &CudaDevice, links: &NcclLinks) -> CollectiveError {
    let mut buffer = device.zeros(Role::Gradients, 3 * links.ranks());
    loop {
        let gathered = links.all_gather(&mut buffer, 3);
        // On a device, this is where a rank hangs for one that does not come.
        device.synchronize();
        if let Err(error) = gathered {
            assert_eq!(links.reduce_scatter(&mut buffer, 3), Err(error.clone()));
            assert_eq!(links.overlapped(&mut |_| Ok(()), &mut || panic!("nothing is computed any more")), Err(error.clone()));
            return error;
        }
    }
}

/// The error of every rank but `lost`, which does as it likes with its own links.
fn survivors_of(lost: usize, stall_seconds: f64, end: impl Fn(&Ranks, NcclLinks, &CudaDevice) + Sync) -> Vec<CollectiveError> {
    let Some(emulated) = Emulated::take() else { return Vec::new() };
    emulated.configure(&settings(0));
    let errors = on_ranks(0, 3, |device, ranks| {
        let links = NcclLinks::new(device, ranks.split(0).expect("a group"), &liveness(stall_seconds)).expect("links");
        let mut buffer = device.zeros(Role::Gradients, 3);
        links.all_gather(&mut buffer, 1).expect("nobody is lost yet");
        let met = ranks.barrier();
        if ranks.rank() == lost {
            met.expect("nobody is lost yet");
            end(&ranks, links, device);
            return None;
        }
        // The lost one may be through the barrier, and gone, before this rank is.
        Some(met.err().unwrap_or_else(|| until_it_stops(device, &links)))
    });
    emulated.expect_no_findings();
    errors.into_iter().flatten().collect()
}

#[test]
fn a_rank_that_stops_the_run_ends_all_that_wait_on_the_device() {
    for error in survivors_of(2, NEVER, |ranks, _, _| ranks.abort("its disk is full")) {
        assert_eq!((error.rank, error.failure, error.reason.as_str()), (2, Failure::Aborted, "its disk is full"));
    }
}

#[test]
fn a_rank_that_leaves_too_soon_is_named() {
    for error in survivors_of(1, NEVER, |_, links, _| drop(links)) {
        assert_eq!((error.rank, error.failure), (1, Failure::Gone), "{error}");
        assert!(error.reason.starts_with("it has left after 1 groups of calls, and rank "), "{error}");
    }
}

#[test]
fn a_rank_that_hangs_is_named() {
    for error in survivors_of(0, 1.0, |ranks, _links, _| {
        let (tell, told) = mpsc::channel();
        ranks.on_failure(move |_| tell.send(()).expect("somebody waits"));
        told.recv().expect("the others notice");
    }) {
        assert_eq!((error.rank, error.failure), (0, Failure::Stalled), "{error}");
        assert!(error.reason.contains("has waited for it in NCCL for"), "{error}");
    }
}

#[test]
fn a_rank_that_panics_is_named() {
    let errors = survivors_of(1, NEVER, |_, links, _| {
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            let _links = links;
            std::panic::resume_unwind(Box::new("a failure"));
        }));
        assert!(caught.is_err());
    });
    for error in errors {
        assert_eq!((error.rank, error.failure, error.reason.as_str()), (1, Failure::Aborted, "its thread panicked"));
    }
}

#[test]
fn a_rank_that_never_comes_holds_up_nobody_for_ever() {
    let Some(emulated) = Emulated::take() else { return };
    emulated.configure(&settings(0));
    let errors = on_ranks(0, 2, |device, ranks| {
        let group = ranks.split(0).expect("a group");
        if ranks.rank() == 1 {
            // It takes part in the meeting on the host, and then has no NCCL.
            group.broadcast::<Vec<u8>>(None).expect("an id");
            ranks.abort("no NCCL on this machine");
            return None;
        }
        NcclLinks::new(device, group, &liveness(NEVER)).err()
    });
    assert_eq!(
        errors.into_iter().flatten().map(|error| (error.rank, error.reason)).collect::<Vec<_>>(),
        [(1, "no NCCL on this machine".to_string())]
    );
    emulated.expect_no_findings();
}
