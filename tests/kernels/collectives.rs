//! NCCL on eight emulated devices, one thread each: exact sums, the same bits on every rank.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};
use cudarc::nccl::{Comm, Id, ReduceOp};

use crate::subject::{EMULATED_DEVICES, Emulated, settings};

const RANKS: usize = EMULATED_DEVICES;
const LENGTH: usize = 1000;

/// What rank `rank` brings: whole numbers, so that sums are exact in any order.
fn brought(rank: usize, length: usize) -> Vec<f32> {
    (0..length).map(|index| ((index * 31 + rank * 7) % 101) as f32 - 50.0).collect()
}

/// Runs `work(communicator, stream, rank)` on every rank at once; results by rank.
fn on_all_ranks<T: Send>(work: impl Fn(&Comm, &Arc<CudaStream>, usize) -> T + Sync) -> Vec<T> {
    let id = Id::new().expect("an id");
    let run = |rank: usize| {
        let stream = CudaContext::new(rank).expect("a device").new_stream().expect("a stream");
        let communicator = Comm::from_rank(stream.clone(), rank, RANKS, id).expect("a communicator");
        work(&communicator, &stream, rank)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..RANKS).map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank")).collect()
    })
}

#[test]
fn collectives_are_exact_and_equal_on_all_ranks() {
    let Some(emulated) = Emulated::take() else { return };
    for run in 0..4 {
        emulated.configure(&settings(run));
        let sum: Vec<f32> = (0..LENGTH).map(|index| (0..RANKS).map(|rank| brought(rank, LENGTH)[index]).sum()).collect();

        let reduced = on_all_ranks(|communicator, stream, rank| {
            let from = stream.clone_htod(&brought(rank, LENGTH)).expect("memory");
            let mut to = stream.alloc_zeros::<f32>(LENGTH).expect("memory");
            communicator.all_reduce(&from, &mut to, &ReduceOp::Sum).expect("all-reduce");
            stream.clone_dtoh(&to).expect("a copy")
        });
        assert!(reduced.iter().all(|found| *found == sum), "all-reduce");

        let scattered = on_all_ranks(|communicator, stream, rank| {
            let from = stream.clone_htod(&brought(rank, LENGTH)).expect("memory");
            let mut to = stream.alloc_zeros::<f32>(LENGTH / RANKS).expect("memory");
            communicator.reduce_scatter(&from, &mut to, &ReduceOp::Sum).expect("reduce-scatter");
            stream.clone_dtoh(&to).expect("a copy")
        });
        assert_eq!(scattered.concat(), sum, "reduce-scatter");

        let gathered = on_all_ranks(|communicator, stream, rank| {
            let from = stream.clone_htod(&brought(rank, 5)).expect("memory");
            let mut to = stream.alloc_zeros::<f32>(5 * RANKS).expect("memory");
            communicator.all_gather(&from, &mut to).expect("all-gather");
            stream.clone_dtoh(&to).expect("a copy")
        });
        let everything: Vec<f32> = (0..RANKS).flat_map(|rank| brought(rank, 5)).collect();
        assert!(gathered.iter().all(|found| *found == everything), "all-gather");

        let broadcast = on_all_ranks(|communicator, stream, rank| {
            let from = stream.clone_htod(&brought(rank, LENGTH)).expect("memory");
            let mut to = stream.alloc_zeros::<f32>(LENGTH).expect("memory");
            communicator.broadcast(Some(&from), &mut to, 3).expect("broadcast");
            stream.clone_dtoh(&to).expect("a copy")
        });
        assert!(broadcast.iter().all(|found| *found == brought(3, LENGTH)), "broadcast");
        emulated.expect_no_findings();
    }
}

/// Every rank passes its numbers to the next, as a ring.
#[test]
fn ranks_send_and_receive() {
    let Some(emulated) = Emulated::take() else { return };
    emulated.configure(&settings(0));
    let received = on_all_ranks(|communicator, stream, rank| {
        let from = stream.clone_htod(&brought(rank, 17)).expect("memory");
        let mut to = stream.alloc_zeros::<f32>(17).expect("memory");
        cudarc::nccl::group_start().expect("a group");
        communicator.send(&from, ((rank + 1) % RANKS) as i32).expect("send");
        communicator.recv(&mut to, ((rank + RANKS - 1) % RANKS) as i32).expect("receive");
        cudarc::nccl::group_end().expect("the end of the group");
        stream.clone_dtoh(&to).expect("a copy")
    });
    for (rank, found) in received.iter().enumerate() {
        assert_eq!(*found, brought((rank + RANKS - 1) % RANKS, 17), "rank {rank}");
    }
    emulated.expect_no_findings();
}

/// Sums of numbers that round: whatever the order, all ranks hold the same bits, twice.
#[test]
fn sums_that_round_are_the_same_bits_everywhere() {
    let Some(emulated) = Emulated::take() else { return };
    emulated.configure(&settings(1));
    let run = || {
        on_all_ranks(|communicator, stream, rank| {
            let values: Vec<f32> = (0..LENGTH).map(|index| 1.0 / (index + rank * 3 + 1) as f32).collect();
            let mut values = stream.clone_htod(&values).expect("memory");
            communicator.all_reduce_in_place(&mut values, &ReduceOp::Sum).expect("all-reduce");
            stream.clone_dtoh(&values).expect("a copy").into_iter().map(f32::to_bits).collect::<Vec<_>>()
        })
    };
    let first = run();
    assert!(first.iter().all(|found| *found == first[0]));
    assert_eq!(first, run());
    emulated.expect_no_findings();
}
