//! `learner bench kernels`: every kernel by itself against its floor. On an emulated GPU by counters, exactly; on a real one by time.

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::cases::{Case, Sizes, Watched, cases};
use super::figures::{Spread, percent};
use crate::cli::device::unless_the_device_fails;
use crate::cli::{CliError, OutputArguments, print_json, print_text};
use crate::device::cuda::{DeviceError, EmulatorSettings, Finding, KernelCounters, LineCounters};
use crate::device::{CudaDevice, Device, DeviceChoice, Peaks};

#[derive(clap::Args)]
pub struct KernelsArguments {
    /// Kernels whose names contain one of these; all of them when left out. With -v, counters of every source line
    names: Vec<String>,
    /// Where they run: cuda[:N] or emulated
    #[arg(long, default_value = "emulated", value_name = "DEVICE")]
    device: DeviceChoice,
}

/// Timed runs of each operation on a real GPU, after [`WARM_UPS`].
const RUNS: usize = 20;
const WARM_UPS: usize = 3;

/// One kernel, as `--json` gives it.
#[derive(Serialize)]
struct Row {
    kernel: String,
    shape: String,
    bytes_minimum: u64,
    /// What the minimum consists of.
    bytes_minimum_parts: Map<String, Value>,
    flops: u64,
    #[serde(flatten)]
    measured: Measured,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Measured {
    Emulated(Counted),
    Real(Timed),
}

/// On an emulated GPU, of one launch or of all launches of the operation.
#[derive(Serialize)]
struct Counted {
    launches: u64,
    bytes_moved: u64,
    sectors_per_request: f64,
    bank_conflicts: u64,
    tensor_core_ops: u64,
    barriers: u64,
    findings: Vec<Finding>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    lines: Vec<LineCounters>,
}

/// On a real GPU, of one launch.
#[derive(Serialize)]
struct Timed {
    microseconds: Spread,
    #[serde(skip_serializing_if = "Option::is_none")]
    tflops: Option<f64>,
    gigabytes_per_second: f64,
    /// The least time that the peaks allow over the median time; null where the peaks are not known.
    share_of_roof: Option<f64>,
}

pub fn run(arguments: &KernelsArguments, output: &OutputArguments) -> Result<(), CliError> {
    let sizes = match arguments.device {
        DeviceChoice::Cpu => return Err(CliError::Refused("--device cpu: kernels run on cuda or emulated".into())),
        DeviceChoice::Cuda { .. } => Sizes::REAL,
        DeviceChoice::Emulated { .. } => Sizes::EMULATED,
    };
    let mut cases = cases(&sizes);
    let asked = |watched: &Watched| {
        arguments.names.is_empty() || arguments.names.iter().any(|name| watched.kernel.contains(name.as_str()))
    };
    if let Some(name) = arguments
        .names
        .iter()
        .find(|name| !cases.iter().flat_map(|case| &case.watched).any(|watched| watched.kernel.contains(name.as_str())))
    {
        let known: Vec<&str> = cases.iter().flat_map(|case| &case.watched).map(|watched| watched.kernel.as_str()).collect();
        return Err(CliError::Refused(format!("no kernel is called {name}: {}", known.join(", "))));
    }
    cases.retain_mut(|case| {
        case.watched.retain(asked);
        !case.watched.is_empty()
    });
    let device = open(arguments.device).map_err(CliError::refused)?;
    if !output.json {
        print_text(&format!("{}\n{}\n", device.describe(), heading(&device)))?;
    }
    let mut rows = Vec::new();
    let mut found = Vec::new();
    for case in &cases {
        device.clear_findings();
        let measured = measured(&device, &sizes, case, output.verbose > 0)?;
        for row in &measured {
            if !output.json {
                print_text(&row.text())?;
            }
        }
        found.extend(device.findings()); // of all that ran, watched or not
        rows.extend(measured);
    }
    if output.json {
        print_json(&json!({"device": device.describe(), "emulated": device.is_emulated(), "kernels": rows}))?;
    }
    match found.first() {
        Some(first) => Err(CliError::Failed(format!("the emulated GPU found {first}; {} findings in all", found.len()))),
        None => Ok(()),
    }
}

fn open(choice: DeviceChoice) -> Result<CudaDevice, DeviceError> {
    match choice {
        DeviceChoice::Cuda { ordinal } => CudaDevice::open(ordinal),
        DeviceChoice::Cpu | DeviceChoice::Emulated { .. } => {
            let settings = EmulatorSettings { count: true, stop_at_findings: false, ..EmulatorSettings::default() };
            CudaDevice::emulated(&settings, 0)
        }
    }
}

/// One row for each watched kernel, or for each of its variants that ran.
///
/// # Errors
/// A watched kernel was not launched: the case is wrong.
fn measured(device: &CudaDevice, sizes: &Sizes, case: &Case, lines: bool) -> Result<Vec<Row>, CliError> {
    let rows = unless_the_device_fails(|| measure(device, sizes, case, lines))?;
    match case.watched.iter().find(|watched| !rows.iter().any(|row| is(&row.kernel, watched))) {
        Some(missing) => Err(CliError::Failed(format!(
            "{} was to be measured and did not run: its case in bench/cases.rs is wrong",
            missing.kernel
        ))),
        None => Ok(rows),
    }
}

fn measure(device: &CudaDevice, sizes: &Sizes, case: &Case, lines: bool) -> Vec<Row> {
    let mut run = (case.prepare)(device, sizes);
    device.synchronize();
    if device.is_emulated() {
        device.clear_counters();
        run(device);
        let (counters, findings) = (device.counters(), device.findings());
        let of = |watched: &Watched| {
            counters
                .iter()
                .filter(|counters| is(&counters.kernel, watched))
                .map(|counters| counted(watched, counters, &findings, lines))
                .collect::<Vec<_>>()
        };
        return case.watched.iter().flat_map(of).collect();
    }
    (0..WARM_UPS).for_each(|_| run(device));
    device.time_launches();
    (0..RUNS).for_each(|_| run(device));
    let launches = device.launch_times();
    let of = |watched: &Watched| {
        let times = launches.iter().filter(|launch| is(&launch.kernel, watched)).map(|launch| launch.microseconds);
        let kernel = launches.iter().find(|launch| is(&launch.kernel, watched))?.kernel.clone();
        Some(timed(watched, kernel, times.collect(), device.peaks()))
    };
    case.watched.iter().filter_map(of).collect()
}

/// Whether a launched kernel is the watched one, or the variant of it that the device chose: its tile (`_64x64`) or head_dim (`_d64`).
fn is(kernel: &str, watched: &Watched) -> bool {
    let variant = |rest: &str| {
        rest.strip_prefix('_').is_some_and(|name| name.trim_start_matches('d').starts_with(|c: char| c.is_ascii_digit()))
    };
    kernel.strip_prefix(&watched.kernel).is_some_and(|rest| rest.is_empty() || variant(rest))
}

fn row(watched: &Watched, kernel: String, measured: Measured) -> Row {
    let parts = watched.minimum.bytes.iter().map(|&(name, bytes)| (name.to_string(), Value::from(bytes))).collect();
    Row {
        kernel,
        shape: watched.shape.clone(),
        bytes_minimum: watched.minimum.total_bytes(),
        bytes_minimum_parts: parts,
        flops: watched.minimum.flops,
        measured,
    }
}

fn counted(watched: &Watched, counters: &KernelCounters, findings: &[Finding], lines: bool) -> Row {
    let total = &counters.total;
    let measured = Counted {
        launches: counters.launches,
        bytes_moved: counters.bytes_read + counters.bytes_written,
        sectors_per_request: total.global_sectors as f64 / total.global_requests.max(1) as f64,
        bank_conflicts: total.shared_wavefronts.saturating_sub(total.shared_wavefronts_least),
        tensor_core_ops: total.tensor_core_operations,
        barriers: total.barriers,
        findings: findings.iter().filter(|finding| finding.kernel == counters.kernel).cloned().collect(),
        lines: if lines { counters.lines.clone() } else { Vec::new() },
    };
    row(watched, counters.kernel.clone(), Measured::Emulated(measured))
}

fn timed(watched: &Watched, kernel: String, times: Vec<f64>, peaks: Option<Peaks>) -> Row {
    let spread = Spread::of(times);
    let median = spread.median;
    let (bytes, flops) = (watched.minimum.total_bytes() as f64, watched.minimum.flops as f64);
    let measured = Timed {
        microseconds: spread,
        tflops: (flops > 0.0).then(|| flops / median / 1e6),
        gigabytes_per_second: bytes / median / 1e3,
        share_of_roof: peaks.map(|peaks| share_of_roof(bytes, flops, median, peaks)),
    };
    row(watched, kernel, Measured::Real(measured))
}

/// The roofline (Williams et al. 2009): the longer of the time that the bytes take at the peak of memory and that of the FLOPs on the
/// tensor cores, over the measured time.
fn share_of_roof(bytes: f64, flops: f64, microseconds: f64, peaks: Peaks) -> f64 {
    let least = (bytes / peaks.memory_bytes).max(flops / peaks.tensor_flops);
    least / (microseconds * 1e-6)
}

fn heading(device: &CudaDevice) -> String {
    if device.is_emulated() {
        format!(
            "{:<30} {:>12} {:>12} {:>7} {:>8} {:>9} {:>10}  shape",
            "kernel", "bytes moved", "minimum", "ratio", "sectors", "conflicts", "mma"
        )
    } else {
        format!("{:<30} {:>10} {:>9} {:>9} {:>8}  shape", "kernel", "us", "TFLOP/s", "GB/s", "of roof")
    }
}

impl Row {
    fn text(&self) -> String {
        match &self.measured {
            Measured::Emulated(counted) => {
                let mut text = format!(
                    "{:<30} {:>12} {:>12} {:>7.3} {:>8.2} {:>9} {:>10}  {}\n",
                    self.kernel,
                    counted.bytes_moved,
                    self.bytes_minimum,
                    counted.bytes_moved as f64 / self.bytes_minimum.max(1) as f64,
                    counted.sectors_per_request,
                    counted.bank_conflicts,
                    counted.tensor_core_ops,
                    self.shape
                );
                counted.findings.iter().for_each(|finding| text += &format!("  FINDING {finding}\n"));
                counted.lines.iter().for_each(|line| text += &line_text(line));
                text
            }
            Measured::Real(timed) => format!(
                "{:<30} {:>10.1} {:>9} {:>9.0} {:>8}  {}\n",
                self.kernel,
                timed.microseconds.median,
                timed.tflops.map_or("-".to_string(), |tflops| format!("{tflops:.0}")),
                timed.gigabytes_per_second,
                percent(timed.share_of_roof),
                self.shape
            ),
        }
    }
}

/// `  rms_norm.cu:57   global 2048 requests, 32768 sectors (least 32768)   shared ...`
fn line_text(line: &LineCounters) -> String {
    let mut text = format!("  {:<28}", line.place);
    if line.global_requests > 0 {
        text += &format!(
            " global {} requests, {} sectors (least {})",
            line.global_requests, line.global_sectors, line.global_sectors_least
        );
    }
    if line.shared_requests > 0 {
        text += &format!(
            " shared {} requests, {} wavefronts (least {})",
            line.shared_requests, line.shared_wavefronts, line.shared_wavefronts_least
        );
    }
    if line.tensor_core_operations > 0 {
        text += &format!(" mma {}", line.tensor_core_operations);
    }
    if line.barriers > 0 {
        text += &format!(" barriers {}", line.barriers);
    }
    text + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEAKS: Peaks = Peaks { tensor_flops: 1e15, memory_bytes: 4e12 };

    /// 4 MB at 4 TB/s are 1 us; 4 GFLOP at 1 PFLOP/s are 4 us.
    #[test]
    fn the_roof_is_the_longer_of_two_times() {
        assert!((share_of_roof(4e6, 0.0, 2.0, PEAKS) - 0.5).abs() < 1e-12);
        assert!((share_of_roof(4e6, 4e9, 8.0, PEAKS) - 0.5).abs() < 1e-12);
    }

    #[test]
    fn a_variant_is_its_kernel_and_another_kernel_is_not() {
        let watched = |kernel: &str| Watched { kernel: kernel.to_string(), shape: String::new(), minimum: Default::default() };
        assert!(is("gemm_nt_bf16_64x64", &watched("gemm_nt_bf16")));
        assert!(is("swiglu", &watched("swiglu")));
        assert!(is("rotate_d128", &watched("rotate")));
        for (kernel, other) in [("embed_backward", "embed"), ("rms_norm_backward", "rms_norm"), ("rotate_backward_d64", "rotate")]
        {
            assert!(!is(kernel, &watched(other)));
        }
        assert!(!is("gemm_nt_f32_64x64", &watched("gemm_nt_bf16")));
    }
}
