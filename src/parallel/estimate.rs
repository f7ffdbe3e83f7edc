//! How long a step should take: a roofline of every stage of [`micro_batch_schedule`], and what of its transfers nothing hides.
//!
//! ```text
//! compute of a stage  = FLOPs / (share x peak) of products and attention + bytes / (share x memory bandwidth) of the rest,
//!                       on the rank of a context group that takes longest
//! transfer of a stage = the slower of bytes over NVLink / its speed and bytes over the network / its speed
//! exposed             = first head group + max(0, transfer - first head group - compute)
//! step                = micro-batches x sum over stages of (compute + exposed) + optimizer
//! ```
//!
//! Latencies, launches and the host are not in it: it is what a well-tuned step could reach, to compare layouts with.

use std::collections::BTreeMap;

use super::context::{ContextPlan, pairs_per_token};
use super::context_exchange::head_groups;
use super::memory::{BF16, RankMemory};
use super::mesh::{Mesh, Placement};
use super::sharding::{Collective, SQUARES_BYTES, ShardedSizes, Stage, Transfer, Work, micro_batch_schedule};
use crate::device::Peaks;
use crate::device::cuda::roofline;
use crate::model::{ModelConfig, StepFlops};

/// What a kind of GPU and the machines around it can do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GpuSpecification {
    pub name: &'static str,
    /// As the driver calls it: the key to its peaks.
    driver_name: &'static str,
    pub memory_bytes: u64,
    /// Between GPUs of a node, bytes per second that one GPU receives.
    pub nvlink: f64,
    /// Between nodes, bytes per second that one GPU receives through a network card of its own.
    pub network: f64,
    /// Bytes per second from its node's memory.
    pub pcie: f64,
}

/// Speeds are what collectives reach: 400 of H100's and H200's 450 GB/s, and 45 of the 50 GB/s of a 400 Gb/s card; the same shares of A100's
/// 300 GB/s and 200 Gb/s; 50 of PCIe 5's 64 GB/s, 25 of PCIe 4's 32. Memory is that of the data sheets.
const GPUS: &[GpuSpecification] = &[
    gpu("h200", "NVIDIA H200", 141, 400e9, 45e9, 50e9),
    gpu("h100", "NVIDIA H100 80GB HBM3", 80, 400e9, 45e9, 50e9),
    gpu("a100", "NVIDIA A100-SXM4-80GB", 80, 267e9, 22.5e9, 25e9),
    gpu("a100-40gb", "NVIDIA A100-SXM4-40GB", 40, 267e9, 22.5e9, 25e9),
];

const fn gpu(
    name: &'static str,
    driver_name: &'static str,
    gigabytes: u64,
    nvlink: f64,
    network: f64,
    pcie: f64,
) -> GpuSpecification {
    GpuSpecification { name, driver_name, memory_bytes: gigabytes * 1_000_000_000, nvlink, network, pcie }
}

impl GpuSpecification {
    /// By a name of [`GpuSpecification::names`].
    pub fn named(name: &str) -> Option<GpuSpecification> {
        GPUS.iter().find(|gpu| gpu.name == name).copied()
    }

    /// By the name that the driver gives.
    pub fn of_device(driver_name: &str) -> Option<GpuSpecification> {
        GPUS.iter().find(|gpu| gpu.driver_name == driver_name).copied()
    }

    pub fn names() -> impl Iterator<Item = &'static str> {
        GPUS.iter().map(|gpu| gpu.name)
    }

    /// Of its chip; every row of the table has one.
    pub fn peaks(&self) -> Option<Peaks> {
        Peaks::of(self.driver_name)
    }

    /// What a plan may fill.
    pub fn usable_bytes(&self) -> u64 {
        self.memory_bytes.saturating_sub(RESERVED_BYTES)
    }
}

/// Left to the CUDA context, NCCL's buffers and the allocator's rounding.
pub const RESERVED_BYTES: u64 = 4 << 30;

/// Shares of the peaks that kernels reach. They are targets from published kernels, not measurements of this program.
pub const MATRIX_SHARE: f64 = 0.70;
pub const ATTENTION_FORWARD_SHARE: f64 = 0.60;
pub const ATTENTION_BACKWARD_SHARE: f64 = 0.50;
pub const MEMORY_SHARE: f64 = 0.90;

/// Products over the causal half of attention's square: scores and outputs forward; in the backward scores and the probabilities'
/// gradients twice (once for keys and values, once for queries, so that nothing is added in a changing order), dV, dK, dQ.
const FORWARD_PRODUCTS: f64 = 2.0;
const BACKWARD_QUERY_PRODUCTS: f64 = 3.0;
const BACKWARD_KEY_PRODUCTS: f64 = 4.0;

/// One global batch of equal sequences; a micro-batch is one of them over the ranks of a context group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Tokens of every sequence, all of them trained.
    pub context: usize,
    /// Sequences of a step over all ranks.
    pub sequences: usize,
    /// Sequences of the built-in engine on every GPU; 0 where rollouts happen elsewhere.
    pub engine_sequences: usize,
    /// Layers are computed again in the backward.
    pub recompute: bool,
}

/// Bytes that one GPU receives, and as many that it sends, by link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkBytes {
    pub nvlink: u64,
    pub network: u64,
}

impl LinkBytes {
    /// All-gather (or reduce-scatter, its mirror) in two levels: each GPU takes over the network the shards of the GPUs in its
    /// place on the other nodes, and over NVLink all that the others of its node then have.
    fn of(transfer: Transfer, mesh: &Mesh) -> LinkBytes {
        LinkBytes::of_shards(transfer.shard_bytes(mesh), transfer.collective.group().placement(mesh))
    }

    /// The same, where every rank has a shard of so many bytes.
    fn of_shards(shard: u64, placement: Placement) -> LinkBytes {
        let (nodes, per_node) = (placement.nodes as u64, placement.ranks_per_node as u64);
        LinkBytes { nvlink: shard * nodes * (per_node - 1), network: shard * (nodes - 1) }
    }

    fn add(&mut self, other: LinkBytes, times: u64) {
        self.nvlink = self.nvlink.saturating_add(times.saturating_mul(other.nvlink));
        self.network = self.network.saturating_add(times.saturating_mul(other.network));
    }

    fn seconds(self, gpu: &GpuSpecification) -> f64 {
        (self.nvlink as f64 / gpu.nvlink).max(self.network as f64 / gpu.network)
    }
}

/// A step of one layout.
#[derive(Clone, Debug, PartialEq)]
pub struct StepEstimate {
    /// Of the rank that holds most.
    pub memory: RankMemory,
    /// Of each replica.
    pub micro_batches: usize,
    /// Per GPU and step.
    pub link_bytes: LinkBytes,
    /// Per GPU and step, by collective: what it hands over.
    pub payload_bytes: BTreeMap<&'static str, u64>,
    pub compute_seconds: f64,
    /// Transfers that no computation hides.
    pub exposed_seconds: f64,
    pub optimizer_seconds: f64,
    pub tokens: usize,
    pub mfu_c6: f64,
    pub mfu_c12: f64,
}

impl StepEstimate {
    pub fn of(config: &ModelConfig, mesh: &Mesh, gpu: &GpuSpecification, peaks: &Peaks, workload: &Workload) -> StepEstimate {
        let plan = ContextPlan::new(&[workload.context], mesh.context(), pairs_per_token(config));
        let micro_batches = workload.sequences.div_ceil(mesh.data());
        let mut estimate = StepEstimate {
            memory: heaviest_rank(config, mesh, &plan, workload),
            micro_batches,
            link_bytes: LinkBytes::default(),
            payload_bytes: BTreeMap::new(),
            compute_seconds: 0.0,
            exposed_seconds: 0.0,
            optimizer_seconds: optimizer_seconds(config, mesh, peaks),
            tokens: workload.context * workload.sequences,
            mfu_c6: 0.0,
            mfu_c12: 0.0,
        };
        let work = WorkSeconds::of_slowest(config, &plan, workload, peaks);
        for stage in micro_batch_schedule(config, mesh, &plan, BF16) {
            estimate.add_stage(&stage, work.of(stage.work), config, mesh, gpu, workload.recompute);
        }
        estimate.add_squares(mesh);
        let flops = StepFlops::of(config, &[workload.context], workload.context);
        let peak = estimate.step_seconds() * mesh.world() as f64 * peaks.tensor_flops;
        estimate.mfu_c6 = flops.total(StepFlops::CAUSAL) * workload.sequences as f64 / peak;
        estimate.mfu_c12 = flops.total(StepFlops::FULL) * workload.sequences as f64 / peak;
        estimate
    }

    pub fn step_seconds(&self) -> f64 {
        self.compute_seconds + self.exposed_seconds + self.optimizer_seconds
    }

    /// The same stage of every micro-batch. What attention waits for has nothing to run beside: the first group of heads, and all keys and
    /// values of a backward that has no forward to compute again.
    fn add_stage(
        &mut self,
        stage: &Stage,
        compute: f64,
        config: &ModelConfig,
        mesh: &Mesh,
        gpu: &GpuSpecification,
        recompute: bool,
    ) {
        let (mut bytes, mut waited) = (LinkBytes::default(), 0.0);
        let of_first_group = 1.0 / head_groups(config, mesh.context()) as f64;
        for &transfer in &stage.transfers {
            let moved = LinkBytes::of(transfer, mesh);
            bytes.add(moved, 1);
            waited += match transfer.collective {
                Collective::GatherKeysValues if stage.work == Work::Backward && !recompute => moved.seconds(gpu),
                Collective::GatherKeysValues | Collective::GatherQueries => of_first_group * moved.seconds(gpu),
                _ => 0.0,
            };
            let payload = self.payload_bytes.entry(transfer.collective.name()).or_default();
            *payload = payload.saturating_add((self.micro_batches as u64).saturating_mul(transfer.payload_bytes(mesh)));
        }
        let exposed = waited + (bytes.seconds(gpu) - waited - compute).max(0.0);
        self.link_bytes.add(bytes, self.micro_batches as u64);
        self.compute_seconds += self.micro_batches as f64 * compute;
        self.exposed_seconds += self.micro_batches as f64 * exposed;
    }

    /// One all-reduce of a number, too small to have a time: a reduce-scatter and an all-gather of equal parts.
    fn add_squares(&mut self, mesh: &Mesh) {
        if mesh.world() == 1 {
            return;
        }
        let part = SQUARES_BYTES.div_ceil(mesh.world() as u64);
        self.link_bytes.add(LinkBytes::of_shards(part, mesh.world_placement()), 2);
        self.payload_bytes.insert("squares_all_reduce", SQUARES_BYTES);
    }
}

fn heaviest_rank(config: &ModelConfig, mesh: &Mesh, plan: &ContextPlan, workload: &Workload) -> RankMemory {
    let Workload { context, engine_sequences, recompute, .. } = *workload;
    let ranks = RankMemory::of_ranks(config, mesh, plan, recompute, engine_sequences, context);
    ranks.into_iter().max_by_key(RankMemory::total).unwrap_or_default()
}

/// AdamW and the norm of the gradients over a rank's shard, bound by memory.
fn optimizer_seconds(config: &ModelConfig, mesh: &Mesh, peaks: &Peaks) -> f64 {
    let elements = ShardedSizes::new(config, mesh.world(), BF16).master_shard() as usize / size_of::<f32>();
    let bytes = roofline::adamw(elements).total_bytes() + roofline::sum_of_squares(elements).total_bytes();
    bytes as f64 / (MEMORY_SHARE * peaks.memory_bytes)
}

/// Seconds of each kind of stage.
#[derive(Clone, Copy, Debug, Default)]
struct WorkSeconds {
    start: f64,
    forward: f64,
    head: f64,
    backward: f64,
    end: f64,
}

impl WorkSeconds {
    fn of(&self, work: Work) -> f64 {
        match work {
            Work::Start => self.start,
            Work::Forward => self.forward,
            Work::Head => self.head,
            Work::Backward => self.backward,
            Work::End => self.end,
        }
    }

    /// Ranks of a context group wait for one another in every layer, so each stage takes what its slowest rank takes.
    fn of_slowest(config: &ModelConfig, plan: &ContextPlan, workload: &Workload, peaks: &Peaks) -> WorkSeconds {
        let context = workload.context;
        let layers_only = StepFlops::of(config, &[context], 0);
        let with_head = StepFlops::of(config, &[context], context);
        let total_area: u128 = (0..plan.ranks()).map(|rank| plan.area(rank)).sum();
        let mut slowest = WorkSeconds::default();
        for rank in (0..plan.ranks()).filter(|&rank| plan.tokens(rank) > 0) {
            let token_share = plan.tokens(rank) as f64 / context as f64;
            let area_share = plan.area(rank) as f64 / total_area as f64;
            let key_area_share = plan.key_area(rank) as f64 / total_area as f64;
            let layers = config.layers as f64;
            // A third of the FLOPs is the forward's; the backward may compute a layer's forward once more, the head does its logits.
            let matrices = |flops: f64, share: f64| token_share * flops * share / (MATRIX_SHARE * peaks.tensor_flops);
            let layer = layers_only.matrices / layers;
            let products = |share: f64, count: f64| share * count * layers_only.attention_squares / layers / peaks.tensor_flops;
            let attention = products(area_share, FORWARD_PRODUCTS) / ATTENTION_FORWARD_SHARE;
            let attention_backward =
                products(area_share, BACKWARD_QUERY_PRODUCTS) + products(key_area_share, BACKWARD_KEY_PRODUCTS);
            let passes = MemoryBound::of(config, plan.tokens(rank), plan.shared_rows(), peaks);
            let forward = matrices(layer, 1.0 / 3.0) + attention + passes.forward;
            let backward = matrices(layer, 2.0 / 3.0) + attention_backward / ATTENTION_BACKWARD_SHARE + passes.backward;
            let head = matrices(with_head.matrices - layers_only.matrices, 4.0 / 3.0) + passes.head;
            slowest = WorkSeconds {
                start: slowest.start.max(passes.start),
                forward: slowest.forward.max(forward),
                head: slowest.head.max(head),
                backward: slowest.backward.max(if workload.recompute { forward + backward } else { backward }),
                end: slowest.end.max(passes.end),
            };
        }
        slowest
    }
}

/// Seconds of what memory bounds, in each kind of stage without its recomputation.
struct MemoryBound {
    start: f64,
    forward: f64,
    head: f64,
    backward: f64,
    end: f64,
}

impl MemoryBound {
    /// For `rows` tokens, at least one, `shared_rows` of them in documents that ranks share.
    fn of(config: &ModelConfig, rows: usize, shared_rows: usize, peaks: &Peaks) -> MemoryBound {
        use roofline::*;
        let (heads, hidden, intermediate) = (config.heads(), config.hidden, config.intermediate);
        let seconds = |kernels: &[Minimum]| {
            let bytes: u64 = kernels.iter().map(Minimum::total_bytes).sum();
            bytes as f64 / (MEMORY_SHARE * peaks.memory_bytes)
        };
        let (norm, norm_backward) = (|| add_rms_norm(rows, hidden), || rms_norm_backward(rows, hidden));
        MemoryBound {
            start: seconds(&[embed(rows, rows, hidden)]),
            forward: seconds(&[
                norm(),
                rotate(rows, rows, heads),
                append_keys_values(rows, heads),
                norm(),
                swiglu(rows, intermediate),
            ]),
            head: seconds(&[
                norm(),
                head_scores(rows, config.vocabulary),
                head_scores(rows, config.vocabulary),
                head_gradient(rows, config.vocabulary),
                norm_backward(),
            ]),
            backward: seconds(&[
                swiglu_backward(rows, intermediate),
                rms_norm(rows, hidden),
                norm_backward(),
                attention_delta(rows, heads),
                write_shared_queries(shared_rows, heads),
                rotate_backward(rows, rows, heads),
                rms_norm(rows, hidden),
                norm_backward(),
            ]),
            end: seconds(&[embed_backward(rows, rows, hidden)]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> ModelConfig {
        ModelConfig::named(name).expect("a known shape")
    }

    fn estimate(name: &str, nodes: usize, per_node: usize, degree: usize, context: usize, sequences: usize) -> StepEstimate {
        let gpu = GpuSpecification::named("h200").expect("a known GPU");
        let mesh = Mesh::new(nodes, per_node, degree).expect("a mesh");
        let workload = Workload { context, sequences, engine_sequences: 0, recompute: true };
        StepEstimate::of(&named(name), &mesh, &gpu, &gpu.peaks().expect("peaks"), &workload)
    }

    #[test]
    fn every_kind_has_peaks() {
        for gpu in GPUS {
            assert!(gpu.peaks().is_some(), "{}", gpu.name);
            assert_eq!(GpuSpecification::named(gpu.name), Some(*gpu));
        }
        assert_eq!(GpuSpecification::named("tpu"), None);
    }

    /// On 2 nodes of 4: a GPU that lacks 7 of 8 shards takes 1 of them over the network and 6 over NVLink.
    #[test]
    fn links_by_hand() {
        let mesh = Mesh::new(2, 4, 2).expect("a mesh");
        let weights = Transfer { collective: Collective::GatherWeights, whole_bytes: 800 };
        assert_eq!(LinkBytes::of(weights, &mesh), LinkBytes { nvlink: 600, network: 100 });
        let keys = Transfer { collective: Collective::GatherKeysValues, whole_bytes: 800 };
        assert_eq!(LinkBytes::of(keys, &mesh), LinkBytes { nvlink: 400, network: 0 });
    }

    /// `tiny` on two GPUs that share two sequences of 512 (see `sharding`): one shard of each gather, half of each scatter.
    #[test]
    fn tiny_on_two_by_hand() {
        let estimate = estimate("tiny", 1, 2, 2, 512, 2);
        let weights = 2 * 56_320 + 2 * (2 * 196_608 + 4 * 320) + 4 * 128;
        let gradients = 4 * (56_320 + 2 * 196_928 + 128);
        let (keys, queries, scores) = (2 * 2 * 512 * 128 * 2, 2 * 512 * 2 * 136 * 2, 4 * 2 * 512);
        assert_eq!(estimate.micro_batches, 2);
        assert_eq!(estimate.link_bytes, LinkBytes { nvlink: weights + gradients + keys + queries + scores + 2 * 4, network: 0 });
        let expected = [
            ("weights_all_gather", weights),
            ("gradients_reduce_scatter", 2 * gradients),
            ("keys_values_all_gather", keys),
            ("queries_all_gather", queries),
            ("scores_all_gather", scores),
            ("squares_all_reduce", 8),
        ];
        assert_eq!(estimate.payload_bytes, BTreeMap::from(expected));
    }

    /// One GPU exchanges nothing, and the roofline's MFU stays below its own shares of the peak.
    #[test]
    fn one_gpu_by_hand() {
        let estimate = estimate("qwen3-0.6b", 1, 1, 1, 4096, 1);
        assert_eq!((estimate.link_bytes, estimate.exposed_seconds), (LinkBytes::default(), 0.0));
        // Three quarters of the products' FLOPs are the maths, the rest is computed again.
        assert!(estimate.mfu_c6 < 0.75 * MATRIX_SHARE && estimate.mfu_c6 > 0.3, "{}", estimate.mfu_c6);
        assert!(estimate.mfu_c12 > estimate.mfu_c6);
    }

    /// Qwen3-8B at 131,072 tokens on 16 x 8: a gathered layer is 385,875,968 bytes in matrices and 4 x 10,240 in vectors (padded
    /// to 8 x 128 for the norms of 128), and a GPU takes 15 of its 128 shards over the network.
    #[test]
    fn eight_billion_at_full_length() {
        let estimate = estimate("qwen3-8b", 16, 8, 8, 131_072, 16);
        assert_eq!(estimate.micro_batches, 1);
        let layer = 2 * 192_937_984 + 4 * (2 * 4096 + 2 * 1024);
        let (embedding, head) = (2 * 622_329_856, 2 * 622_329_856 + 4 * 4096);
        let weights = 70 * layer + embedding + head;
        let gradients = 4 * (36 * (192_937_984 + 10_240) + 622_329_856 + 622_329_856 + 4096);
        assert_eq!(estimate.payload_bytes["weights_all_gather"], weights / 128);
        assert_eq!(estimate.payload_bytes["gradients_reduce_scatter"], gradients);
        assert_eq!(estimate.link_bytes.network, (weights + gradients) / 128 * 15 + 2 * 15);
        let exchanged = 36 * ((2 * 512 + 2080) << 20);
        let scores = estimate.payload_bytes["scores_all_gather"];
        assert!((16_384 * 8..17_000 * 8).contains(&scores), "two f32 for each token of the rank with most: {scores}");
        let nvlink = (weights + gradients) / 128 * 16 * 7 + exchanged / 8 * 7 + scores * 7 + 2 * 16 * 7;
        assert_eq!(estimate.link_bytes.nvlink, nvlink);
        assert!(estimate.exposed_seconds < 0.1 * estimate.compute_seconds, "a node of NVLink hides the exchange");
    }

    /// The example of docs/plan.md: what it says of memory, links and time is what this says.
    #[test]
    fn the_worked_example_is_this_one() {
        let estimate = estimate("qwen3-8b", 16, 8, 8, 131_072, 16);
        let usable = GpuSpecification::named("h200").expect("a known GPU").usable_bytes();
        let (memory, gigabytes) = (&estimate.memory, |bytes: u64| bytes as f64 / 1e9);
        let exchanged = 36 * (2 * memory.keys_values + 2 * memory.queries) / 8 * 7;
        let example = include_str!("../../docs/plan.md");
        for words in [
            format!("/ 128 = {:.0} MB", memory.weights as f64 / 1e6),
            format!("163,968) = {:.1} GB", gigabytes(memory.activations)),
            format!("16,384 = {:.0} MB", memory.head_workspace as f64 / 1e6),
            format!("= {} MiB, queries of half of the heads {} MiB", memory.keys_values >> 20, memory.queries >> 20),
            format!("{:.1} GB of {:.1} GB", gigabytes(memory.total()), gigabytes(usable)),
            format!("7 / 8 = {:.1} GB", gigabytes(exchanged)),
            format!("{:.2} s compute, {:.2} s exposed", estimate.compute_seconds, estimate.exposed_seconds),
            format!("{:.1} % MFU at c = 6, {:.1} % at c = 12", 100.0 * estimate.mfu_c6, 100.0 * estimate.mfu_c12),
        ] {
            assert!(example.contains(&words), "docs/plan.md does not say {words:?}");
        }
    }

    /// 32,768 tokens of Qwen3-8B on a node, 128 MiB of keys and values a layer: a backward that computes nothing again waits for three groups
    /// of four more.
    #[test]
    fn a_backward_with_no_forward_waits_for_its_keys() {
        let gpu = GpuSpecification::named("h200").expect("a known GPU");
        let (config, mesh, peaks) = (named("qwen3-8b"), Mesh::new(1, 8, 8).expect("a mesh"), gpu.peaks().expect("peaks"));
        let exposed = |recompute: bool| {
            let workload = Workload { context: 32_768, sequences: 1, engine_sequences: 0, recompute };
            StepEstimate::of(&config, &mesh, &gpu, &peaks, &workload).exposed_seconds
        };
        let more = 36.0 * 0.75 * (128u64 << 20) as f64 * 7.0 / 8.0 / gpu.nvlink;
        assert!((exposed(false) - exposed(true) - more).abs() < 1e-6, "{} and {more}", exposed(false) - exposed(true));
    }

    /// More nodes at the same work per GPU never come cheaper, and a faster network never hurts.
    #[test]
    fn exposure_follows_the_links() {
        let gpu = GpuSpecification::named("h200").expect("a known GPU");
        let (config, mesh) = (named("qwen3-8b"), Mesh::new(16, 8, 32).expect("a mesh"));
        let workload = Workload { context: 131_072, sequences: 4, engine_sequences: 0, recompute: true };
        let peaks = gpu.peaks().expect("peaks");
        let exposed = |network: f64| {
            StepEstimate::of(&config, &mesh, &GpuSpecification { network, ..gpu }, &peaks, &workload).exposed_seconds
        };
        assert!(exposed(10e9) > exposed(45e9) && exposed(45e9) >= exposed(400e9));
    }
}
