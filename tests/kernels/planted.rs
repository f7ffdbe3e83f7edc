//! Faults planted in kernels (planted.cu) are found, named and placed; their clean twins pass; known traffic is counted exactly.

use cudarc::driver::{DevicePtr, DeviceRepr};
use learner::device::cuda::{EmulatorSettings, Finding, KernelCounters, LineCounters};

use crate::raw::{Gpu, Shape};
use crate::subject::{Emulated, settings};

const SOURCE: &str = include_str!("planted.cu");
const LENGTH: usize = 1024;
const THREADS: usize = 64;

/// The arguments of every kernel in planted.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct Planted {
    from: u64,
    to: u64,
    length: i64,
}
// SAFETY: plain numbers, laid out as in planted.cu.
unsafe impl DeviceRepr for Planted {}

/// `planted.cu:LINE` of the line that ends in this mark.
fn place(mark: &str) -> String {
    let line = SOURCE.lines().position(|line| line.ends_with(&format!("// {mark}")));
    format!("planted.cu:{}", line.unwrap_or_else(|| panic!("no line of planted.cu is marked {mark}")) + 1)
}

fn open() -> Gpu {
    let path = concat!(env!("OUT_DIR"), "/planted.so");
    Gpu::open(&[&std::fs::read(path).unwrap_or_else(|error| panic!("{path}: {error}"))])
}

/// What a fault must be found as.
struct Expected {
    /// The kernels are NAME_faulty and NAME_clean, its marks `FAULT NAME` and `OTHER NAME`.
    name: &'static str,
    kind: &'static str,
    /// The thread the finding is about, where it does not depend on the schedule.
    thread: Option<i32>,
    /// Thread of the second party, where there is one.
    other_thread: Option<i32>,
    /// Whether `OTHER NAME` must be named.
    other_place: bool,
    /// Floats in the buffers: as many as threads where the fault is to leave them.
    length: usize,
}

impl Expected {
    const fn new(name: &'static str, kind: &'static str) -> Expected {
        Expected { name, kind, thread: None, other_thread: None, other_place: false, length: LENGTH }
    }
    const fn thread(self, thread: i32) -> Expected {
        Expected { thread: Some(thread), ..self }
    }
    const fn other(self) -> Expected {
        Expected { other_place: true, ..self }
    }
    const fn other_thread(self, thread: i32) -> Expected {
        Expected { other_thread: Some(thread), ..self }
    }
    const fn tight(self) -> Expected {
        Expected { length: THREADS, ..self }
    }

    fn check(&self, findings: &[Finding]) {
        let about =
            format!("{}: expected {} at {}, found {findings:#?}", self.name, self.kind, place(&format!("FAULT {}", self.name)));
        let fits = |finding: &&Finding| {
            let place_fits = |place: &str, mark: &str| place.ends_with(&self::place(&format!("{mark} {}", self.name)));
            // Of two parties either may have come second.
            let there = place_fits(&finding.place, "FAULT") && (!self.other_place || place_fits(&finding.other_place, "OTHER"));
            let reversed = self.other_place && place_fits(&finding.place, "OTHER") && place_fits(&finding.other_place, "FAULT");
            finding.kind == self.kind && (there || reversed)
        };
        let finding = findings.iter().find(fits).unwrap_or_else(|| panic!("{about}"));
        assert_eq!(finding.kernel, format!("{}_faulty", self.name), "{about}");
        assert_eq!(finding.block, [0, 0, 0], "{about}");
        assert!(self.thread.is_none_or(|thread| thread == finding.thread), "{about}");
        assert!(self.other_thread.is_none_or(|thread| thread == finding.other_thread), "{about}");
        if self.other_place && self.kind == "race" {
            assert!(finding.thread >= 0 && finding.other_thread >= 0, "{about}");
        }
    }
}

const FAULTS: &[Expected] = &[
    Expected::new("read_out_of_bounds", "out_of_bounds").thread(63).tight(),
    Expected::new("write_out_of_bounds", "out_of_bounds").thread(0).tight(),
    Expected::new("misaligned_vector", "misaligned").thread(7),
    Expected::new("uninitialised_shared", "uninitialised").thread(9),
    Expected::new("index_past_array", "shared_bounds").thread(63),
    Expected::new("missing_barrier", "race").other(),
    Expected::new("missing_warp_barrier", "race").other(),
    Expected::new("missing_trailing_barrier", "race").other(),
    Expected::new("diverging_barriers", "barrier").other(),
    Expected::new("returned_before_barrier", "barrier"),
    Expected::new("deadlock", "warp_divergence").other(),
    Expected::new("lane_missing", "warp_divergence").other_thread(37),
    Expected::new("missing_wait", "race").other(),
    Expected::new("wait_one_short", "race").other(),
    Expected::new("never_waited", "missing_wait"),
];

/// Settings under which a finding is the test's to read, not the end of the run.
fn lenient(run: usize) -> EmulatorSettings {
    EmulatorSettings { stop_at_findings: false, ..settings(run) }
}

/// Launches a kernel on fresh buffers of `length` floats in a context of its own, and gives what was found until it ended.
fn findings_of(emulated: &Emulated, kernel: &str, length: usize) -> Vec<Finding> {
    let gpu = open();
    let (from, to) = (gpu.upload(&vec![1.0f32; length]), gpu.upload(&vec![0.0f32; length]));
    let arguments = Planted { from: from.device_ptr(&gpu.stream).0, to: to.device_ptr(&gpu.stream).0, length: THREADS as i64 };
    let launched = gpu.launch(kernel, &arguments);
    drop((from, to, gpu));
    let findings = emulated.findings();
    assert!(launched.is_ok() || !findings.is_empty(), "{kernel}: {launched:?} without a finding");
    findings
}

#[test]
fn planted_faults_are_found_and_clean_twins_pass() {
    let Some(emulated) = Emulated::take() else { return };
    for run in 0..4 {
        emulated.configure(&lenient(run));
        for fault in FAULTS {
            fault.check(&findings_of(&emulated, &format!("{}_faulty", fault.name), fault.length));
            let clean = findings_of(&emulated, &format!("{}_clean", fault.name), fault.length);
            assert!(clean.is_empty(), "{}_clean, run {run}: {clean:#?}", fault.name);
        }
    }
}

/// The one finding of a launch of `copy`, which is innocent: its host is at fault.
#[track_caller]
fn expect_fault_of_the_host(findings: &[Finding], kind: &str) {
    let [finding] = findings else { panic!("expected one finding of kind {kind}: {findings:#?}") };
    assert_eq!((finding.kind.as_str(), finding.kernel.as_str()), (kind, "copy"), "{finding:#?}");
    assert!(finding.place.ends_with(&place("FAULT copy")) && finding.thread >= 0, "{finding:#?}");
}

#[test]
fn memory_that_a_kernel_must_not_touch_is_told_apart() {
    let Some(emulated) = Emulated::take() else { return };
    emulated.configure(&lenient(0));
    let host = vec![0.0f32; THREADS];
    // What `copy` reads: memory of the host, of nobody, and memory that was given back.
    for kind in ["host_pointer", "uninitialised", "use_after_free"] {
        let gpu = open();
        let to = gpu.upload(&vec![0.0f32; THREADS]);
        let from = match kind {
            "use_after_free" => gpu.upload(&host),
            // SAFETY: nothing but the kernel reads it, and that nobody has written it is the point.
            _ => unsafe { gpu.stream.alloc::<f32>(THREADS) }.expect("device memory"),
        };
        let address = match kind {
            "host_pointer" => host.as_ptr() as u64,
            _ => from.device_ptr(&gpu.stream).0,
        };
        let kept = if kind == "use_after_free" {
            drop(from);
            None
        } else {
            Some(from)
        };
        let arguments = Planted { from: address, to: to.device_ptr(&gpu.stream).0, length: THREADS as i64 };
        let launched = gpu.launch("copy", &arguments);
        assert_eq!(launched.is_ok(), kind == "uninitialised", "{kind}: {launched:?}");
        expect_fault_of_the_host(&emulated.findings(), kind);
        drop((kept, to, gpu));
        let after = emulated.findings();
        assert!(after.is_empty(), "{kind}, when the context ended: {after:#?}");
    }
    let clean = findings_of(&emulated, "copy", THREADS);
    assert!(clean.is_empty(), "{clean:#?}");
}

#[test]
fn leaks_are_found_when_the_context_ends() {
    let Some(emulated) = Emulated::take() else { return };
    emulated.configure(&lenient(0));
    let gpu = open();
    // cudarc gives memory back when its slice is dropped; this keeps no more than the address.
    let leaked = gpu.upload(&vec![0.0f32; THREADS]).leak();
    gpu.stream.synchronize().expect("a healthy device");
    drop(gpu);
    let findings = emulated.findings();
    let [finding] = &findings[..] else { panic!("expected one leak: {findings:#?}") };
    assert_eq!((finding.kind.as_str(), finding.address), ("leak", leaked), "{finding:#?}");
    assert!(finding.text.contains("256 bytes"), "{finding:#?}");
}

#[test]
fn launches_that_a_gpu_would_refuse_are_refused() {
    let Some(emulated) = Emulated::take() else { return };
    emulated.configure(&lenient(0));
    let gpu = open();
    let to = gpu.upload(&vec![0.0f32; THREADS]);
    let address = to.device_ptr(&gpu.stream).0;
    let arguments = Planted { from: address, to: address, length: THREADS as i64 };
    let right = gpu.shape("missing_barrier_clean");
    for wrong in [
        Shape { threads: 2048, ..right },
        Shape { threads: 0, ..right },
        Shape { shared_bytes: 300 << 10, ..right },
        Shape { shared_bytes: 100 << 10, ..right }, // more than 48 KiB, and nobody allowed it
        Shape { threads: 32, ..right },             // the kernel was compiled for 64
        Shape { shared_bytes: 16, ..right },        // less than its struct
    ] {
        let launched = gpu.launch_shaped("missing_barrier_clean", &arguments, wrong);
        let findings = emulated.findings();
        assert!(launched.is_err() || findings.iter().any(|finding| finding.kind == "launch"), "{wrong:?}: {findings:#?}");
    }
}

/// Counters of one launch of a kernel, and of the line with this mark.
fn count(emulated: &Emulated, kernel: &str, mark: &str) -> (KernelCounters, LineCounters) {
    emulated.configure(&EmulatorSettings { count: true, ..lenient(0) });
    emulated.clear_counters();
    let findings = findings_of(emulated, kernel, LENGTH);
    assert!(findings.is_empty(), "{findings:#?}");
    let counters = emulated.counters();
    let [counted] = &counters[..] else { panic!("expected one kernel: {counters:#?}") };
    assert_eq!((counted.kernel.as_str(), counted.launches, counted.blocks), (kernel, 1, 1));
    let place = if mark.is_empty() { String::new() } else { place(&format!("COUNT {mark}")) };
    let line = counted.lines.iter().find(|line| line.place.ends_with(&place));
    (counted.clone(), line.unwrap_or_else(|| panic!("no counters for {place}: {counted:#?}")).clone())
}

#[test]
fn bank_conflicts_are_counted() {
    let Some(emulated) = Emulated::take() else { return };
    for (kernel, wavefronts) in [("transpose_pitch_32", 32), ("transpose_pitch_33", 1)] {
        let (_, line) = count(&emulated, kernel, "column");
        assert_eq!((line.shared_requests, line.shared_wavefronts, line.shared_wavefronts_least), (32, 32 * wavefronts, 32));
    }
}

#[test]
fn sectors_are_counted() {
    let Some(emulated) = Emulated::take() else { return };
    for (kernel, mark, sectors) in [("strided_read", "strided", 32), ("dense_read", "dense", 4)] {
        let (whole, line) = count(&emulated, kernel, mark);
        assert_eq!((line.global_requests, line.global_sectors, line.global_sectors_least), (1, sectors, 4));
        assert_eq!((whole.bytes_read, whole.bytes_written), (32 * sectors, 128));
    }
}

#[test]
fn tensor_core_operations_are_counted() {
    let Some(emulated) = Emulated::take() else { return };
    let (whole, _) = count(&emulated, "product", "");
    assert_eq!((whole.total.tensor_core_operations, whole.total.barriers), (32, 1));
    assert_eq!(whole.total.shared_wavefronts, whole.total.shared_wavefronts_least, "swizzled tiles have no bank conflicts");
}
