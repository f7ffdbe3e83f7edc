//! `learner plan`: what a training run on many GPUs needs and how fast it could be, from shapes alone. `docs/plan.md` has the formulas.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;

use super::setup::no_such_model;
use super::{CliError, OutputArguments, print_json, print_text};
use crate::device::Peaks;
use crate::model::ModelConfig;
use crate::parallel::{
    ATTENTION_BACKWARD_SHARE, ATTENTION_FORWARD_SHARE, Candidate, GpuSpecification, MATRIX_SHARE, MEMORY_SHARE, RESERVED_BYTES,
    ServerEstimate, ServerWorkload, StepEstimate, Workload, candidates,
};
use crate::report::table;
use crate::types::{bytes, percent};

#[derive(clap::Args)]
pub struct PlanArguments {
    /// Hugging Face directory, of which only config.json is read, or the name of a shape
    #[arg(long, value_name = "DIR|NAME")]
    model: PathBuf,
    /// Machines
    #[arg(long)]
    nodes: usize,
    /// GPUs of each machine, joined by NVLink
    #[arg(long)]
    gpus_per_node: usize,
    /// Kind of GPU: h200, h100, a100 or a100-40gb
    #[arg(long, value_name = "KIND")]
    gpu: String,
    /// Tokens of every sequence
    #[arg(long, value_name = "TOKENS")]
    context: usize,
    /// Sequences of a step over all GPUs; by default as many as there are GPUs
    #[arg(long)]
    sequences: Option<usize>,
    /// Keep the activations of every layer (`step.recompute = false`) instead of computing each again in the backward
    #[arg(long)]
    no_recompute: bool,
    /// Sequences that the built-in engine samples at once on every GPU, or a server where there are any; 0: they are not counted
    #[arg(long, default_value_t = 0)]
    rollout_sequences: usize,
    /// Of the machines, those that sample on servers instead of training
    #[arg(long, default_value_t = 0)]
    rollout_nodes: usize,
    /// GPUs of one server
    #[arg(long, default_value_t = 1)]
    tensor_parallel: usize,
    /// Bytes per second between one machine and the file system by which servers get weights, in GB/s
    #[arg(long, value_name = "GB/S", default_value_t = 10.0)]
    file_system: f64,
    /// Bytes per second that one GPU receives from its own node, in GB/s; by default that of the kind
    #[arg(long, value_name = "GB/S")]
    nvlink: Option<f64>,
    /// Bytes per second that one GPU receives from other nodes, in GB/s; by default that of the kind
    #[arg(long, value_name = "GB/S")]
    network: Option<f64>,
}

/// Far beyond any model's positions and any batch; it bounds the time and memory of planning.
const MOST_TOKENS: usize = 1 << 22;
const MOST_SEQUENCES: usize = 1 << 20;
const MOST_ROLLOUT_SEQUENCES: usize = 1 << 12;

/// What a config.json may say at most: with these every sum of a plan stays below 2^64.
const MOST_LAYERS: usize = 1 << 10;
const MOST_WIDTH: usize = 1 << 17;
const MOST_INTERMEDIATE: usize = 1 << 19;
const MOST_VOCABULARY: usize = 1 << 22;

#[derive(Serialize)]
struct PlanReport {
    model: String,
    parameters: usize,
    gpu: &'static str,
    /// Those that train.
    nodes: usize,
    gpus_per_node: usize,
    context: usize,
    sequences: usize,
    tokens: usize,
    /// Whether every layer is computed again in the backward.
    recompute: bool,
    layout: LayoutReport,
    /// Of the GPU that holds most: every purpose, and `total`.
    per_gpu_bytes: BTreeMap<&'static str, u64>,
    usable_bytes: u64,
    bytes_per_step: LinkReport,
    /// What each GPU hands to collectives in a step.
    payload_bytes_per_step: BTreeMap<&'static str, u64>,
    step_seconds: f64,
    seconds: SecondsReport,
    #[serde(skip_serializing_if = "Option::is_none")]
    servers: Option<ServersReport>,
    tokens_per_second_per_gpu: f64,
    mfu_c6: f64,
    mfu_c12: f64,
    layouts: Vec<CandidateReport>,
    assumptions: Vec<String>,
    notes: Vec<String>,
    #[serde(skip)]
    purposes: Vec<(&'static str, u64)>,
}

#[derive(Clone, Copy, Serialize)]
struct LayoutReport {
    data_parallel: usize,
    context_parallel: usize,
    micro_batches: usize,
}

/// Received by each GPU; it sends as much.
#[derive(Serialize)]
struct LinkReport {
    nvlink: u64,
    network: u64,
}

#[derive(Serialize)]
struct SecondsReport {
    compute: f64,
    exposed_communication: f64,
    optimizer: f64,
}

/// Of the machines that sample on servers.
#[derive(Serialize)]
struct ServersReport {
    nodes: usize,
    servers: usize,
    tensor_parallel: usize,
    per_gpu_bytes: BTreeMap<&'static str, u64>,
    /// Of each update of the weights: what a training and a rollout node exchange with the file system.
    written_per_node: u64,
    read_per_node: u64,
    write_seconds: f64,
    load_seconds: f64,
}

#[derive(Serialize)]
struct CandidateReport {
    data_parallel: usize,
    context_parallel: usize,
    total_bytes: Option<u64>,
    step_seconds: Option<f64>,
    mfu_c6: Option<f64>,
    /// `null` for the best alone.
    why_not: Option<String>,
}

pub fn run(arguments: &PlanArguments, output: &OutputArguments) -> Result<(), CliError> {
    let config = arguments.config()?;
    let gpu = arguments.gpu()?;
    let peaks = gpu.peaks().ok_or_else(|| CliError::Refused(format!("--gpu {}: its peaks are not known", gpu.name)))?;
    let workload = arguments.workload()?;
    let servers = arguments.servers(&config, &gpu)?;
    let cluster = (arguments.training_nodes(), arguments.gpus_per_node);
    let candidates = candidates(&config, cluster, &gpu, &peaks, &workload)
        .map_err(|error| CliError::Refused(format!("--nodes, --gpus-per-node: {error}")))?;
    let best = candidates.iter().find(|candidate| candidate.objection.is_none());
    let Some((best, estimate)) = best.and_then(|best| Some((best, best.estimate.as_ref()?))) else {
        return Err(CliError::Failed(nothing_fits(&candidates)));
    };
    let mut report = report(arguments, &config, &gpu, &peaks, &workload, &candidates, (best, estimate));
    report.add_servers(arguments, &gpu, servers);
    if output.json { print_json(&report) } else { print_text(&report.text()) }
}

impl PlanArguments {
    fn config(&self) -> Result<ModelConfig, CliError> {
        match self.model.to_str().and_then(ModelConfig::named) {
            Some(config) => Ok(config),
            None if self.model.is_dir() => {
                let config = ModelConfig::load(&self.model).map_err(CliError::refused)?;
                let problem = |problem| CliError::Refused(format!("{}: {problem}", self.model.join("config.json").display()));
                plausible(&config).map_err(problem)?;
                Ok(config)
            }
            None => Err(no_such_model(&self.model)),
        }
    }

    fn gpu(&self) -> Result<GpuSpecification, CliError> {
        let Some(mut gpu) = GpuSpecification::named(&self.gpu) else {
            let names: Vec<_> = GpuSpecification::names().collect();
            return Err(CliError::Refused(format!("--gpu {}: known are {}", self.gpu, names.join(", "))));
        };
        for (flag, given, speed) in [("--nvlink", self.nvlink, &mut gpu.nvlink), ("--network", self.network, &mut gpu.network)] {
            match given {
                None => {}
                Some(gigabytes) if (1e-3..1e6).contains(&gigabytes) => *speed = 1e9 * gigabytes,
                Some(given) => return Err(CliError::Refused(format!("{flag} {given}: must be from 0.001 to 1000000 GB/s"))),
            }
        }
        Ok(gpu)
    }

    fn workload(&self) -> Result<Workload, CliError> {
        let gpus = self.training_nodes().saturating_mul(self.gpus_per_node);
        let sequences = self.sequences.unwrap_or_else(|| gpus.clamp(1, MOST_SEQUENCES));
        for (flag, given, range) in [
            ("--context", self.context, 1..=MOST_TOKENS),
            ("--sequences", sequences, 1..=MOST_SEQUENCES),
            ("--rollout-sequences", self.rollout_sequences, 0..=MOST_ROLLOUT_SEQUENCES),
        ] {
            if !range.contains(&given) {
                let message = format!("{flag} {given}: must be from {} to {}", range.start(), range.end());
                return Err(CliError::Refused(message));
            }
        }
        let engine_sequences = if self.rollout_nodes > 0 { 0 } else { self.rollout_sequences };
        Ok(Workload { context: self.context, sequences, engine_sequences, recompute: !self.no_recompute })
    }

    fn training_nodes(&self) -> usize {
        self.nodes.saturating_sub(self.rollout_nodes)
    }

    /// What servers take, if there are any.
    fn servers(&self, config: &ModelConfig, gpu: &GpuSpecification) -> Result<Option<ServerEstimate>, CliError> {
        if self.rollout_nodes == 0 {
            return Ok(None);
        }
        if !(1e-3..1e6).contains(&self.file_system) {
            let message = format!("--file-system {}: must be from 0.001 to 1000000 GB/s", self.file_system);
            return Err(CliError::Refused(message));
        }
        let workload = ServerWorkload {
            training_nodes: self.training_nodes(),
            rollout_nodes: self.rollout_nodes,
            gpus_per_node: self.gpus_per_node,
            tensor_parallel: self.tensor_parallel,
            sequences: self.rollout_sequences,
            context: self.context,
            file_system: 1e9 * self.file_system,
            pcie: gpu.pcie,
        };
        let estimate = ServerEstimate::of(config, &workload)
            .map_err(|problem| CliError::Refused(format!("--nodes, --rollout-nodes, --tensor-parallel: {problem}")))?;
        if estimate.total() > gpu.usable_bytes() {
            let (needed, usable) = (bytes(estimate.total()), bytes(gpu.usable_bytes()));
            let message = format!(
                "a server's GPU needs {needed} of {usable}; more --tensor-parallel or fewer --rollout-sequences would help"
            );
            return Err(CliError::Failed(message));
        }
        Ok(Some(estimate))
    }
}

/// # Errors
/// The first size that no model of these families has.
fn plausible(config: &ModelConfig) -> Result<(), String> {
    for (field, found, most) in [
        ("num_hidden_layers", config.layers, MOST_LAYERS),
        ("hidden_size", config.hidden, MOST_WIDTH),
        ("num_attention_heads x head_dim", config.query_heads.saturating_mul(config.head_dim), MOST_WIDTH),
        ("intermediate_size", config.intermediate, MOST_INTERMEDIATE),
        ("vocab_size", config.vocabulary, MOST_VOCABULARY),
    ] {
        if found > most {
            return Err(format!("{field} is {found}, but plans go up to {most}"));
        }
    }
    Ok(())
}

/// The layout that comes nearest, and what is missing; if memory is not what all lack, what the first lacks.
fn nothing_fits(candidates: &[Candidate]) -> String {
    let nearest = candidates
        .iter()
        .filter_map(|candidate| Some((candidate.estimate.as_ref()?.memory.total(), candidate)))
        .min_by_key(|(total, _)| *total)
        .map(|(_, candidate)| candidate)
        .or(candidates.first());
    let why = nearest.map_or(String::new(), |candidate| {
        let objection = candidate.objection.map_or(String::new(), |objection| objection.to_string());
        format!(": the nearest, {} x {} (data x context), {objection}", candidate.data, candidate.context)
    });
    format!("no layout fits{why}; more GPUs, a shorter context, more sequences or fewer rollout sequences would help")
}

fn report(
    arguments: &PlanArguments,
    config: &ModelConfig,
    gpu: &GpuSpecification,
    peaks: &Peaks,
    workload: &Workload,
    candidates: &[Candidate],
    (best, estimate): (&Candidate, &StepEstimate),
) -> PlanReport {
    let purposes = estimate.memory.by_purpose();
    PlanReport {
        model: arguments.model.display().to_string(),
        parameters: config.parameter_count(),
        gpu: gpu.name,
        nodes: arguments.training_nodes(),
        gpus_per_node: arguments.gpus_per_node,
        context: workload.context,
        sequences: workload.sequences,
        tokens: estimate.tokens,
        recompute: workload.recompute,
        layout: LayoutReport { data_parallel: best.data, context_parallel: best.context, micro_batches: estimate.micro_batches },
        per_gpu_bytes: purposes.into_iter().chain([("total", estimate.memory.total())]).collect(),
        usable_bytes: gpu.usable_bytes(),
        bytes_per_step: LinkReport { nvlink: estimate.link_bytes.nvlink, network: estimate.link_bytes.network },
        payload_bytes_per_step: estimate.payload_bytes.clone(),
        step_seconds: estimate.step_seconds(),
        seconds: SecondsReport {
            compute: estimate.compute_seconds,
            exposed_communication: estimate.exposed_seconds,
            optimizer: estimate.optimizer_seconds,
        },
        servers: None,
        tokens_per_second_per_gpu: estimate.tokens as f64 / estimate.step_seconds() / (best.data * best.context) as f64,
        mfu_c6: estimate.mfu_c6,
        mfu_c12: estimate.mfu_c12,
        layouts: candidates.iter().map(CandidateReport::of).collect(),
        assumptions: assumptions(gpu, peaks, workload),
        notes: notes(arguments, config, workload),
        purposes: purposes.to_vec(),
    }
}

impl ServersReport {
    fn lines(&self) -> [String; 2] {
        let [weights, caches] = ["weights", "caches"].map(|purpose| bytes(self.per_gpu_bytes.get(purpose).copied().unwrap_or(0)));
        [
            format!(
                "  servers         {} of {} GPUs on {} more nodes, each GPU {weights} of weights and {caches} of keys and values",
                self.servers, self.tensor_parallel, self.nodes
            ),
            format!(
                "  weights to them {:.1} s: {:.1} writing ({} a node), {:.1} loading ({} a node)",
                self.write_seconds + self.load_seconds,
                self.write_seconds,
                bytes(self.written_per_node),
                self.load_seconds,
                bytes(self.read_per_node)
            ),
        ]
    }
}

impl CandidateReport {
    fn of(candidate: &Candidate) -> CandidateReport {
        let estimate = candidate.estimate.as_ref();
        CandidateReport {
            data_parallel: candidate.data,
            context_parallel: candidate.context,
            total_bytes: estimate.map(|estimate| estimate.memory.total()),
            step_seconds: estimate.map(StepEstimate::step_seconds),
            mfu_c6: estimate.map(|estimate| estimate.mfu_c6),
            why_not: candidate.objection.map(|objection| objection.to_string()),
        }
    }

    fn row(&self) -> Vec<String> {
        let or_nothing = |value: Option<String>| value.unwrap_or_else(|| "-".to_string());
        vec![
            format!("{} x {}", self.data_parallel, self.context_parallel),
            or_nothing(self.total_bytes.map(bytes)),
            or_nothing(self.step_seconds.map(|seconds| format!("{seconds:.3}"))),
            or_nothing(self.mfu_c6.map(percent)),
            self.why_not.clone().unwrap_or_else(|| "best".to_string()),
        ]
    }
}

/// What the numbers rest on, and where it is from.
fn assumptions(gpu: &GpuSpecification, peaks: &Peaks, workload: &Workload) -> Vec<String> {
    let layers = if workload.recompute { "computed again in the backward" } else { "kept for the backward" };
    let of_peak = |share: f64| format!("{:.0} of {:.0} TFLOP/s", share * peaks.tensor_flops / 1e12, peaks.tensor_flops / 1e12);
    vec![
        format!(
            "products: {} (the best that stas00/ml-engineering measured on an H100 is 80 % of its peak; whole layers reach less)",
            of_peak(MATRIX_SHARE)
        ),
        format!(
            "attention forward: {} (FlashAttention-3 paper, H100, head_dim 128, causal: 602 to 616 from 8k tokens on)",
            of_peak(ATTENTION_FORWARD_SHARE)
        ),
        format!(
            "attention backward: {} (the same paper: 559 without a fixed order; 464 to 474 with one, Dao-AILab/flash-attention #1893), \
             over 7 products instead of 5: queries' gradients come from a pass of their own",
            of_peak(ATTENTION_BACKWARD_SHARE)
        ),
        format!(
            "norms, rotary embedding, SwiGLU, scores, AdamW: {:.0} % of {:.2} TB/s (QuACK on an H100: 90 %)",
            100.0 * MEMORY_SHARE,
            peaks.memory_bytes / 1e12
        ),
        format!(
            "links, received by each GPU: NVLink {} GB/s, network {} GB/s (by default 89 % of NVLink's and 90 % of one card's per GPU)",
            gpu.nvlink / 1e9,
            gpu.network / 1e9
        ),
        format!(
            "memory: {} less {} for the CUDA context, NCCL and rounding; every layer {layers}",
            bytes(gpu.memory_bytes),
            bytes(RESERVED_BYTES)
        ),
        "collectives cross the network once per node and shard; a transfer is hidden by the computation beside it, but for the \
         first head group of keys and values, and of queries; latencies, launches and the host take no time"
            .to_string(),
        "a micro-batch is one sequence on the context ranks of a replica; every token is trained".to_string(),
        "MFU = FLOPs / (step seconds x GPUs x peak); c = 6 counts the causal half of attention, c = 12 the whole square; what is \
         computed again does not count"
            .to_string(),
    ]
}

fn notes(arguments: &PlanArguments, config: &ModelConfig, workload: &Workload) -> Vec<String> {
    let mut notes = Vec::new();
    if workload.recompute {
        notes.push("a run computes layers again if it is told to: --set step.recompute=true".to_string());
    }
    if arguments.rollout_sequences == 0 {
        notes.push(
            "rollouts are not counted: --rollout-sequences adds the built-in engine's whole model and its caches, or those of servers".to_string(),
        );
    }
    if workload.context > config.max_positions {
        notes.push(format!(
            "the model was made for {} positions; longer ones need scaled rotary embeddings",
            config.max_positions
        ));
    }
    notes
}

impl PlanReport {
    fn add_servers(&mut self, arguments: &PlanArguments, gpu: &GpuSpecification, servers: Option<ServerEstimate>) {
        let Some(estimate) = servers else { return };
        self.assumptions.push(format!(
            "servers: weights go through a file system at {} GB/s for each node, then to each GPU at {} GB/s; sampling is not counted",
            arguments.file_system,
            gpu.pcie / 1e9
        ));
        self.servers = Some(ServersReport {
            nodes: arguments.rollout_nodes,
            servers: estimate.servers,
            tensor_parallel: arguments.tensor_parallel,
            per_gpu_bytes: BTreeMap::from([
                ("weights", estimate.weights),
                ("caches", estimate.caches),
                ("total", estimate.total()),
            ]),
            written_per_node: estimate.written_per_node,
            read_per_node: estimate.checkpoint,
            write_seconds: estimate.write_seconds,
            load_seconds: estimate.load_seconds,
        });
    }

    fn text(&self) -> String {
        let mut lines = vec![
            format!(
                "{}, {} parameters, on {} x {} {}: {} sequences of {} tokens a step",
                self.model, self.parameters, self.nodes, self.gpus_per_node, self.gpu, self.sequences, self.context
            ),
            format!(
                "  layout          {} data x {} context, micro-batches of one sequence per replica: {}",
                self.layout.data_parallel, self.layout.context_parallel, self.layout.micro_batches
            ),
            format!(
                "  step            {:.3} s: {:.3} compute, {:.3} exposed communication, {:.3} optimizer",
                self.step_seconds, self.seconds.compute, self.seconds.exposed_communication, self.seconds.optimizer
            ),
            format!("  tokens/s        {:.0} per GPU", self.tokens_per_second_per_gpu),
            format!("  MFU             {} at c=6, {} at c=12", percent(self.mfu_c6), percent(self.mfu_c12)),
            format!(
                "  links, per GPU  NVLink {}, network {} a step each way",
                bytes(self.bytes_per_step.nvlink),
                bytes(self.bytes_per_step.network)
            ),
        ];
        lines.extend(self.servers.iter().flat_map(ServersReport::lines));
        lines.push(String::new());
        let total = self.per_gpu_bytes.get("total").copied().unwrap_or(0);
        let rows = self.purposes.iter().copied().filter(|&(_, count)| count > 0).chain([("total", total)]);
        let rows: Vec<Vec<String>> = rows.map(|(purpose, count)| vec![purpose.replace('_', " "), bytes(count)]).collect();
        lines.extend(table(&["memory per GPU", &format!("of {}", bytes(self.usable_bytes))], &rows));
        lines.push(String::new());
        let rows: Vec<Vec<String>> = self.layouts.iter().map(CandidateReport::row).collect();
        lines.extend(table(&["data x context", "memory", "step s", "MFU c=6", "why not"], &rows));
        lines.push(String::new());
        lines.extend(self.assumptions.iter().map(|assumption| format!("assumed: {assumption}")));
        lines.extend(self.notes.iter().map(|note| format!("note: {note}")));
        lines.into_iter().map(|line| line + "\n").collect()
    }
}
