//! Results against a plain loop over the ranks, bit for bit, and the bytes that are counted.

use half::bf16;
use learner::collectives::{Collectives, Count, Failure, HostCollectives, Operation, Reduction, Transport, split_evenly};
use proptest::prelude::*;

use crate::support::{CALM, in_both, local, on_ranks, tcp};

/// The value at `index` of what rank `rank` brings: of very different sizes, so that the order of a sum shows in its bits, and now
/// and then infinite or no number at all.
fn brought(seed: u64, rank: usize, index: usize) -> f32 {
    let mut state = seed ^ (rank as u64) << 40 ^ index as u64;
    for _ in 0..3 {
        state = (state ^ state >> 29).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1);
    }
    match state >> 58 {
        0 if state & 0xf0 == 0 => f32::NAN,
        1 if state & 0xf0 == 0 => f32::INFINITY,
        2 => -0.0,
        scale => (state as i32) as f32 * (scale as f32 - 40.0).exp2(),
    }
}

fn values(seed: u64, rank: usize, length: usize) -> Vec<f32> {
    (0..length).map(|index| brought(seed, rank, index)).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// The reduction that every rank must come to.
fn plain(seed: u64, ranks: &[usize], length: usize, reduction: Reduction) -> Vec<f32> {
    let reduce = |index: usize| {
        let mut result = brought(seed, ranks[0], index);
        for &rank in &ranks[1..] {
            let next = brought(seed, rank, index);
            result = match reduction {
                Reduction::Sum => result + next,
                Reduction::Max if result.is_nan() => result,
                Reduction::Max if next.is_nan() || next > result => next,
                Reduction::Max => result,
            };
        }
        result
    };
    (0..length).map(reduce).collect()
}

/// One call of a random program.
#[derive(Clone, Debug)]
struct Step {
    kind: usize,
    seed: u64,
    /// By rank; a call that needs one length takes the first.
    lengths: Vec<usize>,
    root: usize,
    reduction: Reduction,
}

fn step(ranks: usize) -> impl Strategy<Value = Step> {
    let length = prop_oneof![Just(0usize), 0usize..9, 0usize..3000];
    let lengths =
        prop_oneof![proptest::collection::vec(length, ranks), (0usize..50_000).prop_map(move |all| split_evenly(all, ranks))];
    let reduction = prop_oneof![Just(Reduction::Sum), Just(Reduction::Max)];
    let step = |(kind, seed, lengths, root, reduction)| Step { kind, seed, lengths, root, reduction };
    (0usize..5, any::<u64>(), lengths, 0..ranks, reduction).prop_map(step)
}

/// Makes the call and holds what comes of it to the plain loop; the bytes that this rank handed in.
fn check(place: &HostCollectives<impl Transport>, step: &Step) -> u64 {
    let Step { kind, seed, lengths, root, reduction } = step;
    let (rank, ranks, total) = (place.rank(), place.world_size(), lengths.iter().sum::<usize>());
    let everyone: Vec<usize> = (0..ranks).collect();
    let start: usize = lengths[..rank].iter().sum();
    let handed = match kind {
        0 => {
            let mut all = vec![7.0; total];
            place.all_gather(&values(*seed, rank, lengths[rank]), &mut all, lengths).expect("all_gather");
            let expected: Vec<f32> = everyone.iter().flat_map(|&rank| values(*seed, rank, lengths[rank])).collect();
            assert_eq!(bits(&all), bits(&expected), "{step:?}");
            lengths[rank]
        }
        1 => {
            let mut part = vec![7.0; lengths[rank]];
            place.reduce_scatter(&values(*seed, rank, total), &mut part, lengths, *reduction).expect("reduce_scatter");
            let expected = plain(*seed, &everyone, total, *reduction);
            assert_eq!(bits(&part), bits(&expected[start..start + part.len()]), "{step:?}");
            total
        }
        2 => {
            let mut all = values(*seed, rank, lengths[0]);
            place.all_reduce(&mut all, *reduction).expect("all_reduce");
            assert_eq!(bits(&all), bits(&plain(*seed, &everyone, lengths[0], *reduction)), "{step:?}");
            lengths[0]
        }
        3 => {
            let mut all = values(*seed, rank, lengths[0]);
            place.broadcast(&mut all, *root).expect("broadcast");
            assert_eq!(bits(&all), bits(&values(*seed, *root, lengths[0])), "{step:?}");
            if rank == *root { lengths[0] } else { 0 }
        }
        // Around the ring, where neighbours would wait for each other for ever if they sent first and then received.
        _ if ranks > 1 => {
            let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
            let mut received = vec![7.0; lengths[before]];
            place
                .exchange(&[(next, &values(*seed, rank, lengths[rank])[..])], &mut [(before, &mut received[..])])
                .expect("exchange");
            assert_eq!(bits(&received), bits(&values(*seed, before, lengths[before])), "{step:?}");
            lengths[rank]
        }
        _ => 0,
    };
    handed as u64 * 4
}

/// Runs a program on one rank and holds the counted bytes to what was handed in.
fn run(place: &HostCollectives<impl Transport>, program: &[Step]) {
    let handed: u64 = program.iter().map(|step| check(place, step)).sum();
    let total = place.traffic().total();
    assert_eq!(total.bytes, handed);
    assert_eq!(total.exposed, total.time);
    place.barrier().expect("all come to the end");
}

fn program(most: usize) -> impl Strategy<Value = (usize, Vec<Step>)> {
    let of_ranks = move |ranks: usize| (Just(ranks), proptest::collection::vec(step(ranks), 1..most));
    prop_oneof![Just(1usize), Just(2), Just(3), Just(5), Just(8)].prop_flat_map(of_ranks)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn threads_compute_the_bits_of_a_plain_loop((ranks, program) in program(8)) {
        on_ranks(local(ranks), |place| run(&place, &program));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn processes_compute_the_bits_of_a_plain_loop((ranks, program) in program(24)) {
        on_ranks(tcp(ranks, CALM), |place| run(&place, &program));
    }
}

#[test]
fn every_element_type_is_carried_and_reduced() {
    for (name, results) in in_both!(3, |place| {
        let rank = place.rank();
        let mut bytes = vec![0u8; 6];
        place.all_gather(&vec![rank as u8 + 1; rank + 1], &mut bytes, &[1, 2, 3]).expect("u8");
        let mut tokens = [1u64 << 40, rank as u64];
        place.all_reduce(&mut tokens, Reduction::Sum).expect("u64");
        let mut losses = [0.1f64 * rank as f64];
        place.all_reduce(&mut losses, Reduction::Sum).expect("f64");
        let mut halves = [256.0, 1.0].map(bf16::from_f32);
        place.all_reduce(&mut halves, Reduction::Sum).expect("bf16");
        let mut largest = [bf16::from_f32(-(rank as f32) - 1.0)];
        place.all_reduce(&mut largest, Reduction::Max).expect("bf16");
        (bytes, tokens, losses[0].to_bits(), halves.map(bf16::to_f32), largest[0].to_f32())
    }) {
        for result in results {
            let losses = (0.0f64 + 0.1) + 0.2;
            assert_eq!(result, (vec![1, 2, 2, 3, 3, 3], [3 << 40, 3], losses.to_bits(), [768.0, 3.0], -1.0), "{name}");
        }
    }
}

#[test]
fn groups_of_one_world_work_at_the_same_time() {
    // Context parallel 3 x data parallel 2: neighbours share a sequence.
    for (name, results) in in_both!(6, |place| {
        let rank = place.rank();
        let context = place.split(rank / 3).expect("a group");
        let data = place.split(rank % 3).expect("a group");
        let alone = data.split(data.rank()).expect("a group of one");
        let (mut sums, mut maxima) = ([0.0; 2], [0.0; 2]);
        for turn in 0..20 {
            let (mut of_context, mut of_data) = ([rank as f32 + turn as f32], [rank as f32]);
            let (communicated, ()) = context.overlapped(
                |context| context.all_reduce(&mut of_context, Reduction::Sum),
                || data.all_reduce(&mut of_data, Reduction::Max).expect("a maximum"),
            );
            communicated.expect("a sum");
            (sums[turn % 2], maxima[turn % 2]) = (of_context[0], of_data[0]);
        }
        let mut own = [rank as f32];
        alone.all_reduce(&mut own, Reduction::Sum).expect("a group of one");
        place.barrier().expect("all");
        assert_eq!((context.world_size(), data.world_size(), alone.world_size()), (3, 2, 1));
        assert_eq!((context.rank(), data.rank()), (rank % 3, rank / 3));
        assert_eq!((context.rank_in_world(2), data.rank_in_world(1)), (rank / 3 * 3 + 2, rank % 3 + 3));
        assert_eq!(place.traffic().of(Operation::Split).calls, 2);
        assert_eq!(context.traffic().of(Operation::AllReduce).bytes, 20 * 4);
        (sums, maxima, own)
    }) {
        for (rank, result) in results.into_iter().enumerate() {
            let sum = if rank < 3 { 3.0 } else { 12.0 };
            let expected = ([sum + 54.0, sum + 57.0], [(rank % 3) as f32 + 3.0; 2], [rank as f32]);
            assert_eq!(result, expected, "{name}, rank {rank}");
        }
    }
}

#[test]
fn calls_bytes_and_exposed_time_are_counted_by_kind() {
    for (name, results) in in_both!(2, |place| {
        let (rank, other) = (place.rank(), 1 - place.rank());
        let mut large = vec![0.0f32; 10];
        place.all_gather(&[1.0f32; 5], &mut large, &[5, 5]).expect("all_gather");
        place.broadcast(&mut large, 1).expect("broadcast");
        if rank == 0 {
            place.send(&[1u8, 2, 3], other).expect("send");
        } else {
            let mut received = [0u8; 3];
            place.receive(&mut received, other).expect("receive");
            assert_eq!(received, [1, 2, 3]);
        }
        // Hidden behind a computation that ends only after the call.
        let (done, wait) = std::sync::mpsc::channel();
        let ((), ()) = place.overlapped(
            |place| {
                place.barrier().expect("barrier");
                done.send(()).expect("the computation waits");
            },
            || wait.recv().expect("the barrier is done"),
        );
        // Exposed: the computation is over before the call begins.
        let (computed, begin) = std::sync::mpsc::channel();
        let values = &mut large;
        let ((), ()) = place.overlapped(
            move |place| {
                begin.recv().expect("the computation ends");
                std::thread::sleep(std::time::Duration::from_millis(50));
                place.all_reduce(values, Reduction::Sum).expect("all_reduce");
            },
            || computed.send(()).expect("the communication waits"),
        );
        place.traffic()
    }) {
        for (rank, traffic) in results.into_iter().enumerate() {
            let counted = |operation| {
                let Count { calls, bytes, .. } = traffic.of(operation);
                (calls, bytes)
            };
            assert_eq!(counted(Operation::AllGather), (1, 20), "{name}");
            assert_eq!(counted(Operation::Broadcast), (1, if rank == 1 { 40 } else { 0 }), "{name}");
            assert_eq!(counted(Operation::Send), if rank == 0 { (1, 3) } else { (0, 0) }, "{name}");
            assert_eq!(counted(Operation::Receive), if rank == 1 { (1, 0) } else { (0, 0) }, "{name}");
            assert_eq!(counted(Operation::Barrier), (1, 0), "{name}");
            assert!(traffic.of(Operation::Barrier).exposed.is_zero(), "{name}: {traffic:?}");
            assert!(!traffic.of(Operation::AllReduce).exposed.is_zero(), "{name}: {traffic:?}");
            assert!(traffic.of(Operation::AllReduce).exposed <= traffic.of(Operation::AllReduce).time);
        }
    }
}

#[test]
fn arguments_that_contradict_each_other_are_refused_and_the_world_goes_on() {
    for (name, results) in in_both!(2, |place| {
        let mut two = [0.0f32; 2];
        let lines: Vec<String> = [
            place.all_gather(&[1.0f32], &mut two, &[1]),
            place.all_gather(&[1.0f32], &mut two, &[1, 2]),
            place.all_gather(&[1.0f32], &mut two, &[usize::MAX, 3]),
            place.reduce_scatter(&[1.0f32, 2.0, 3.0], &mut two, &[4 - 1, 0], Reduction::Sum),
            place.broadcast(&mut two, 2),
            place.send(&[0u8], place.rank()),
            place.receive(&mut [0u8], 5),
            place.exchange::<f32>(&[(2, &[])], &mut []),
        ]
        .into_iter()
        .map(|result| {
            let error = result.expect_err("refused");
            assert_eq!((error.failure, error.rank), (Failure::Misuse, place.rank()));
            error.reason
        })
        .collect();
        assert_eq!(place.traffic().total().calls, 0);
        place.all_reduce(&mut two, Reduction::Sum).expect("the world goes on");
        lines
    }) {
        assert_eq!(results[0][0], "all_gather: 1 lengths for 2 ranks", "{name}");
        assert_eq!(results[0][1], "all_gather: lengths [1, 2] for 2 values of all ranks");
        assert_eq!(results[1][3], "reduce_scatter: a part of 2 values at rank 1, for which the lengths say 0");
        assert_eq!(results[1][4], "broadcast: root 2 of 2 ranks");
        assert_eq!(results[1][5], "send: rank 1 of 2 and rank 1");
    }
}

#[test]
fn messages_between_two_ranks_keep_their_order_and_large_ones_do_not_lock_up() {
    let length = 3_000_001;
    for (name, results) in in_both!(2, |place| {
        let (rank, other) = (place.rank(), 1 - place.rank());
        let (large, small) = (vec![rank as u8 + 1; length], [9 + rank as u8; 3]);
        let (mut first, mut second, mut third) = (vec![0; length], [0; 3], [0; 0]);
        let sends = [(other, &large[..]), (other, &small[..]), (other, &[][..])];
        place
            .exchange(&sends, &mut [(other, &mut first[..]), (other, &mut second[..]), (other, &mut third[..])])
            .expect("exchange");
        assert_eq!(place.traffic().of(Operation::Exchange).bytes, length as u64 + 3);
        (first == vec![other as u8 + 1; length], second)
    }) {
        assert_eq!(results, [(true, [10; 3]), (true, [9; 3])], "{name}");
    }
}
