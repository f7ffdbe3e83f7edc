//! Faults planted above the kernels, between streams and between ranks, are found and named; their clean twins pass.

use std::ffi::c_int;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, result as driver};
use cudarc::nccl::sys::ncclDataType_t;
use cudarc::nccl::{Id, result as nccl};
use learner::device::cuda::{EmulatorSettings, Finding};

use crate::subject::{Emulated, settings};

/// The late streams of run 2, whose findings are the test's to read.
fn lenient() -> EmulatorSettings {
    EmulatorSettings { stop_at_findings: false, ..settings(2) }
}

/// One of two ranks: a stream, buffers in it, and some communicators with the other rank.
struct Rank {
    number: usize,
    stream: Arc<CudaStream>,
    communicators: Vec<cudarc::nccl::sys::ncclComm_t>,
}

impl Rank {
    fn all_gather(&self, communicator: usize, from: &CudaSlice<f32>, to: &CudaSlice<f32>, count: usize) {
        let (from, to) = (from.device_ptr(&self.stream).0, to.device_ptr(&self.stream).0);
        let (kind, stream) = (ncclDataType_t::ncclFloat32, self.stream.cu_stream().cast());
        // SAFETY: buffers, communicator and stream are alive until the stream is done; that lengths differ is a test's point.
        let _ =
            unsafe { nccl::all_gather(from as *const _, to as *mut _, count, kind, self.communicators[communicator], stream) };
    }

    fn end(self) {
        for communicator in self.communicators {
            // SAFETY: it is used no more.
            unsafe { nccl::comm_destroy(communicator) }.expect("the end of a communicator");
        }
    }
}

/// Runs `work` on two ranks with `communicators` between them; what was found until both have ended.
fn on_two_ranks(emulated: &Emulated, communicators: usize, work: impl Fn(Rank) + Sync) -> Vec<Finding> {
    let ids: Vec<Id> = (0..communicators).map(|_| Id::new().expect("an id")).collect();
    let run = |number: usize| {
        let stream = CudaContext::new(number).expect("a device").new_stream().expect("a stream");
        let come = |id: &Id| {
            let mut handle = std::ptr::null_mut();
            let unique = cudarc::nccl::sys::ncclUniqueId { internal: *id.internal() };
            // SAFETY: the handle outlives the call; the context is bound.
            unsafe { nccl::comm_init_rank(&mut handle, 2, unique, number as c_int) }.expect("a communicator");
            handle
        };
        work(Rank { number, communicators: ids.iter().map(come).collect(), stream });
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = [0, 1].map(|number| scope.spawn(move || run(number))).into();
        threads.into_iter().for_each(|thread| thread.join().expect("a rank"));
    });
    emulated.findings()
}

#[track_caller]
fn expect_one(findings: &[Finding], kind: &str, text: &str) {
    let [finding] = findings else { panic!("expected one finding of kind {kind}: {findings:#?}") };
    assert!(finding.kind == kind && finding.text.contains(text), "expected {kind}, {text:?}: {finding:#?}");
}

/// Two buffers of as many floats, written.
fn buffers(rank: &Rank, count: usize) -> (CudaSlice<f32>, CudaSlice<f32>) {
    let filled = |count| rank.stream.clone_htod(&vec![1.0f32; count]).expect("memory");
    (filled(count), filled(2 * count))
}

#[test]
fn ranks_that_disagree_are_found() {
    let Some(emulated) = Emulated::take() else { return };
    emulated.configure(&lenient());
    for faulty in [true, false] {
        let findings = on_two_ranks(&emulated, 1, |rank| {
            let (from, to) = buffers(&rank, 8);
            rank.all_gather(0, &from, &to, if faulty && rank.number == 1 { 7 } else { 8 });
            let waited = rank.stream.synchronize();
            // The call that came second was refused, and that rank has nothing to wait for.
            assert!(faulty || waited.is_ok(), "{waited:?}");
            rank.end();
        });
        match faulty {
            true => expect_one(&findings, "collective", "all_gather of "),
            false => assert!(findings.is_empty(), "{findings:#?}"),
        }
    }
}

#[test]
fn a_rank_that_ends_before_a_call_of_the_other_is_found() {
    let Some(emulated) = Emulated::take() else { return };
    emulated.configure(&lenient());
    let findings = on_two_ranks(&emulated, 1, |rank| {
        let (from, to) = buffers(&rank, 8);
        if rank.number == 0 {
            rank.all_gather(0, &from, &to, 8);
            let _the_device_is_lost = rank.stream.synchronize();
        }
        rank.end();
    });
    expect_one(&findings, "collective", "rank 1 left the communicator");
}

#[test]
fn communicators_in_different_orders_are_found() {
    let Some(emulated) = Emulated::take() else { return };
    emulated.configure(&lenient());
    for faulty in [true, false] {
        let findings = on_two_ranks(&emulated, 2, |rank| {
            let (from, to) = buffers(&rank, 8);
            let first = if faulty { rank.number } else { 0 };
            rank.all_gather(first, &from, &to, 8);
            rank.all_gather(1 - first, &from, &to, 8);
            let waited = rank.stream.synchronize();
            assert_eq!(waited.is_ok(), !faulty, "{waited:?}");
            rank.end();
        });
        match faulty {
            true => expect_one(&findings, "deadlock", "in one order"),
            false => assert!(findings.is_empty(), "{findings:#?}"),
        }
    }
}

/// What a computation writes in one stream is sent from another: without an event between them, before it is written.
#[test]
fn a_missing_event_between_streams_is_found() {
    let Some(emulated) = Emulated::take() else { return };
    emulated.configure(&lenient());
    for faulty in [true, false] {
        let findings = on_two_ranks(&emulated, 1, |rank| {
            // SAFETY: the events that cudarc would add by itself are what is tested.
            unsafe { rank.stream.context().disable_event_tracking() };
            let compute = rank.stream.context().new_stream().expect("a stream");
            // SAFETY: it is written before it is read, but for the fault.
            let mut from = unsafe { compute.alloc::<f32>(8) }.expect("memory");
            let to = rank.stream.clone_htod(&[0.0f32; 16]).expect("memory");
            compute.memset_zeros(&mut from).expect("a computation");
            if !faulty {
                rank.stream.join(&compute).expect("an event");
            }
            rank.all_gather(0, &from, &to, 8);
            rank.stream.synchronize().expect("a healthy device");
            compute.synchronize().expect("a healthy device");
            rank.end();
        });
        match faulty {
            true => {
                assert!(!findings.is_empty());
                for finding in findings {
                    assert_eq!((&*finding.kind, &*finding.kernel), ("uninitialised", "nccl (send buffer)"), "{finding:#?}");
                }
            }
            false => assert!(findings.is_empty(), "{findings:#?}"),
        }
    }
}

#[test]
fn staging_memory_that_is_given_up_too_soon_is_found() {
    let Some(emulated) = Emulated::take() else { return };
    emulated.configure(&lenient());
    for faulty in [true, false] {
        let stream = CudaContext::new(0).expect("a device").new_stream().expect("a stream");
        let from = stream.clone_htod(&[1.0f32; 64]).expect("memory");
        // SAFETY: 64 floats of pinned memory, given back once; the emulator keeps it until the copy has run.
        unsafe {
            let staging = driver::malloc_host(256, 0).expect("pinned memory");
            let values = std::slice::from_raw_parts_mut(staging.cast::<f32>(), 64);
            driver::memcpy_dtoh_async(values, from.device_ptr(&stream).0, stream.cu_stream()).expect("a copy");
            if !faulty {
                stream.synchronize().expect("a healthy device");
            }
            driver::free_host(staging).expect("pinned memory is given back");
        }
        stream.synchronize().expect("a healthy device");
        match faulty {
            true => expect_one(&emulated.findings(), "stream", "while a queued copy still uses it"),
            false => emulated.expect_no_findings(),
        }
    }
}
