//! `learner doctor`: what this machine offers and what is missing.

use serde::Serialize;

use super::launch::{self, LaunchArguments, Told};
use super::{CliError, OutputArguments, print_json};
use crate::device::cuda::nccl_version;
use crate::device::{CpuDevice, CudaDevice, Device};
use crate::parallel;
use crate::report::Reporter;
use crate::sandbox::{self, Sandbox, Tier};
use crate::types::{Progress, bytes};

#[derive(clap::Args)]
pub struct DoctorArguments {
    /// Show instead which node of how many this is, where the coordinator listens, and what says so
    #[arg(long)]
    launch: bool,
    #[command(flatten)]
    flags: LaunchArguments,
}

#[derive(Serialize)]
struct Findings {
    version: &'static str,
    processor: String,
    threads: usize,
    memory_bytes: Option<u64>,
    devices: Vec<DeviceFinding>,
    /// What GPUs exchange tensors through; one GPU needs none.
    nccl: DeviceFinding,
    sandbox: Vec<TierFinding>,
    /// The quick start can run here.
    ready: bool,
}

#[derive(Serialize)]
struct DeviceFinding {
    /// As `--device` takes it.
    name: &'static str,
    works: bool,
    /// What it is, or what is missing.
    details: String,
}

#[derive(Serialize)]
struct TierFinding {
    tier: String,
    works: bool,
    /// What holds in it, or why it cannot be had.
    details: Vec<String>,
}

pub fn run(arguments: &DoctorArguments, output: &OutputArguments) -> Result<(), CliError> {
    if arguments.launch {
        return show_launch(&arguments.flags, output);
    }
    if arguments.flags.any_given() {
        return Err(CliError::Refused("learner doctor: flags of a launch go with --launch".into()));
    }
    let sandbox: Vec<TierFinding> = [Tier::A, Tier::B].into_iter().map(probe).collect();
    let ready = sandbox.iter().any(|finding| finding.works);
    let findings = Findings {
        version: env!("CARGO_PKG_VERSION"),
        processor: CpuDevice::new().describe(),
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        memory_bytes: memory_bytes(),
        devices: devices(),
        nccl: found("nccl", nccl_version().map(|version| format!("NCCL {version}")).map_err(|error| error.to_string())),
        sandbox,
        ready,
    };
    if output.json {
        print_json(&findings)?;
    } else {
        show(&findings, output);
    }
    if ready { Ok(()) } else { Err(CliError::Failed("no sandbox tier can run Python tests here".into())) }
}

fn show_launch(flags: &LaunchArguments, output: &OutputArguments) -> Result<(), CliError> {
    let found = launch::told(&flags.describe(parallel::Settings::default().port, &launch::variables())?);
    if output.json {
        return print_json(&found);
    }
    let rows: Vec<(String, String)> = found.iter().map(Told::row).collect();
    Reporter::new(output.verbosity(), false).header("learner doctor --launch", &rows);
    Ok(())
}

/// Every kind of device. Real and emulated GPUs cannot be opened in one process, so the emulated one is looked for, not opened.
fn devices() -> Vec<DeviceFinding> {
    let (no_kernels, no_emulator) = CudaDevice::missing_from_the_binary();
    let cuda = CudaDevice::open(0).map(|device| device.describe()).map_err(|error| match no_kernels {
        Some(missing) if error.to_string() != missing => format!("{error}; {missing}"),
        _ => error.to_string(),
    });
    let emulated =
        no_emulator.map_or(Ok("an NVIDIA GPU emulated on this processor".to_owned()), |missing| Err(missing.to_owned()));
    vec![found("cpu", Ok(CpuDevice::new().describe())), found("cuda", cuda), found("emulated", emulated)]
}

fn found(name: &'static str, result: Result<String, String>) -> DeviceFinding {
    let (works, details) = match result {
        Ok(details) => (true, details),
        Err(missing) => (false, missing),
    };
    DeviceFinding { name, works, details }
}

fn probe(tier: Tier) -> TierFinding {
    let settings = sandbox::Settings { tier: Some(tier), minimum_tier: tier, ..sandbox::Settings::default() };
    match Sandbox::start(&settings) {
        Ok(sandbox) => {
            let mut details: Vec<String> = sandbox.guarantees().iter().map(|(name, how)| format!("{name}: {how}")).collect();
            let python = sandbox.python();
            details.push(match &python {
                Ok((path, version)) => format!("tests: Python {version}, {}", path.display()),
                Err(error) => error.to_string(),
            });
            TierFinding { tier: tier.to_string(), works: python.is_ok(), details }
        }
        Err(error) => TierFinding { tier: tier.to_string(), works: false, details: vec![error.to_string()] },
    }
}

fn show(findings: &Findings, output: &OutputArguments) {
    let row = |name: &str, value: String| (name.to_owned(), value);
    let mut rows = vec![
        row("version", findings.version.into()),
        row("processor", findings.processor.clone()),
        row("threads", findings.threads.to_string()),
        row("memory", findings.memory_bytes.map_or("unknown".into(), bytes)),
    ];
    for device in &findings.devices {
        let state = if device.works { "works" } else { "cannot be had" };
        rows.push(row(&format!("device {}", device.name), state.into()));
        rows.push(row("", device.details.clone()));
    }
    rows.push(row("many GPUs", if findings.nccl.works { "work" } else { "cannot be had" }.into()));
    rows.push(row("", findings.nccl.details.clone()));
    for finding in &findings.sandbox {
        let state = if finding.works { "works" } else { "cannot be had" };
        rows.push(row(&format!("sandbox tier {}", finding.tier), state.into()));
        rows.extend(finding.details.iter().map(|detail| row("", detail.clone())));
    }
    rows.push(row("quick start", if findings.ready { "ready: run `learner`" } else { "cannot run" }.into()));
    Reporter::new(output.verbosity(), false).header("learner doctor", &rows);
}

/// Memory that can be had without pushing others out.
fn memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()? * 1024)
}
