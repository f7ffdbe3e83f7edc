//! What it takes to sample on servers: memory of each of their GPUs, and the way of new weights from the ranks that train to them.
//!
//! ```text
//! write  = checkpoint / training nodes / file system       every training node writes its share
//! read   = checkpoint / file system                        a node reads it once, its servers share what it has in memory
//! upload = weights of a GPU / PCIe                         every GPU takes its part from its node's memory
//! update = write + the slower of read and upload           pieces are uploaded while the next are read
//! ```
//!
//! Speeds are bytes per second of one node (file system) and of one GPU (PCIe). Starting up, pausing and the servers' own graphs and
//! buffers are not in it.

use crate::device::Heads;
use crate::device::cuda::PagedKeyValues;
use crate::model::{Layout, ModelConfig};

/// What servers compute with.
const BF16: u64 = 2;
/// What checkpoints are written in, which servers read.
const F32: u64 = 4;

/// Nodes that sample and nodes that train.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ServerWorkload {
    pub training_nodes: usize,
    pub rollout_nodes: usize,
    pub gpus_per_node: usize,
    /// GPUs of one server.
    pub tensor_parallel: usize,
    /// Sequences that one server samples at once, and their tokens.
    pub sequences: usize,
    pub context: usize,
    /// Bytes per second between one node and the file system that all see, each way.
    pub file_system: f64,
    /// Bytes per second from a node's memory to one GPU.
    pub pcie: f64,
}

/// See the module for the formulas.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ServerEstimate {
    /// Of all nodes.
    pub servers: usize,
    /// Of one GPU: its part of the weights in bf16.
    pub weights: u64,
    /// Of one GPU: keys and values of all sequences.
    pub caches: u64,
    /// Of the checkpoint's weights, in f32: what one rollout node reads at each update.
    pub checkpoint: u64,
    /// What one training node writes at each update.
    pub written_per_node: u64,
    pub write_seconds: f64,
    pub load_seconds: f64,
}

impl ServerEstimate {
    /// # Errors
    /// Numbers that do not go together, with the flags by which `learner plan` takes them.
    pub fn of(config: &ModelConfig, workload: &ServerWorkload) -> Result<ServerEstimate, String> {
        let ServerWorkload { training_nodes, rollout_nodes, gpus_per_node, tensor_parallel, .. } = *workload;
        if training_nodes == 0 || rollout_nodes == 0 {
            return Err(format!(
                "{rollout_nodes} rollout nodes and {training_nodes} others: at least one must sample and one train"
            ));
        }
        if tensor_parallel == 0 || !gpus_per_node.is_multiple_of(tensor_parallel) {
            return Err(format!("{tensor_parallel} GPUs a server: must divide the {gpus_per_node} GPUs of a node"));
        }
        if !config.query_heads.is_multiple_of(tensor_parallel) {
            return Err(format!(
                "{tensor_parallel} GPUs a server: must divide the model's {} attention heads",
                config.query_heads
            ));
        }
        let checkpoint = F32 * config.parameter_count() as u64;
        let weights = BF16 * parameters_of_gpu(config, tensor_parallel);
        let written_per_node = checkpoint.div_ceil(training_nodes as u64);
        let (read_seconds, upload_seconds) = (checkpoint as f64 / workload.file_system, weights as f64 / workload.pcie);
        Ok(ServerEstimate {
            servers: rollout_nodes.saturating_mul(gpus_per_node / tensor_parallel),
            weights,
            caches: caches_of_gpu(config, workload),
            checkpoint,
            written_per_node,
            write_seconds: written_per_node as f64 / workload.file_system,
            load_seconds: read_seconds.max(upload_seconds),
        })
    }

    /// Of one GPU.
    pub fn total(&self) -> u64 {
        self.weights + self.caches
    }

    /// From the end of a step to servers with its weights.
    pub fn update_seconds(&self) -> f64 {
        self.write_seconds + self.load_seconds
    }
}

/// Heads of keys and values on one GPU. Where there are fewer than GPUs, several hold the same.
fn key_value_heads_of_gpu(config: &ModelConfig, tensor_parallel: usize) -> usize {
    config.key_value_heads.div_ceil(tensor_parallel)
}

/// Matrices are cut by heads, rows or columns; vectors are small and counted whole.
fn parameters_of_gpu(config: &ModelConfig, tensor_parallel: usize) -> u64 {
    let layout = Layout::new(config);
    let (mut matrices, mut vectors) = (0, 0);
    for entry in &layout.entries {
        let count = if entry.kind.decays() { &mut matrices } else { &mut vectors };
        *count += entry.length() as u64;
    }
    let held_twice = key_value_heads_of_gpu(config, tensor_parallel) * tensor_parallel - config.key_value_heads;
    let more = 2 * config.layers * config.hidden * config.head_dim * held_twice;
    (matrices + more as u64).div_ceil(tensor_parallel as u64) + vectors
}

fn caches_of_gpu(config: &ModelConfig, workload: &ServerWorkload) -> u64 {
    let heads = Heads { key_value_heads: key_value_heads_of_gpu(config, workload.tensor_parallel), ..config.heads() };
    let of_sequence = PagedKeyValues::bytes_of(heads, workload.context) as u64 * config.layers as u64;
    of_sequence.saturating_mul(workload.sequences as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKLOAD: ServerWorkload = ServerWorkload {
        training_nodes: 12,
        rollout_nodes: 4,
        gpus_per_node: 8,
        tensor_parallel: 4,
        sequences: 2,
        context: 131_072,
        file_system: 10e9,
        pcie: 50e9,
    };

    fn named(name: &str) -> ModelConfig {
        ModelConfig::named(name).expect("a known shape")
    }

    /// Qwen2.5-72B: 72,706,203,648 parameters, 2,138,112 of them in vectors, 8 key/value heads of 128.
    #[test]
    fn seventy_two_billion_by_hand() {
        let estimate = ServerEstimate::of(&named("qwen2.5-72b"), &WORKLOAD).expect("an estimate");
        let vectors = 80 * (2 * 8192 + 8192 + 2 * 1024) + 8192;
        assert_eq!(estimate.servers, 8);
        assert_eq!(estimate.checkpoint, 290_824_814_592);
        assert_eq!(estimate.weights, 2 * ((72_706_203_648 - vectors) / 4 + vectors));
        // Two heads of 128, keys and values, in bf16, 80 layers, two sequences.
        assert_eq!(estimate.caches, 2 * 80 * 131_072 * 2 * 2 * 128 * 2);
        assert_eq!(estimate.written_per_node, 290_824_814_592 / 12);
        assert!((estimate.write_seconds - 2.42354).abs() < 1e-4 && (estimate.load_seconds - 29.08248).abs() < 1e-4);
        assert!((estimate.update_seconds() - 31.506).abs() < 1e-3);
        assert_eq!(estimate.total(), estimate.weights + estimate.caches);
    }

    /// Eight heads on sixteen GPUs: each is held twice, and so are the rows that make it.
    #[test]
    fn heads_are_repeated_where_there_are_fewer_than_gpus() {
        let config = named("qwen2.5-72b");
        let on = |tensor_parallel| {
            let workload = ServerWorkload { gpus_per_node: 16, tensor_parallel, ..WORKLOAD };
            ServerEstimate::of(&config, &workload).expect("an estimate")
        };
        assert_eq!(on(16).caches, on(8).caches);
        let vectors = 80 * (2 * 8192 + 8192 + 2 * 1024) + 8192;
        let repeated = 2 * 80 * 8192 * 128 * 8;
        assert_eq!(on(16).weights, 2 * ((72_706_203_648 - vectors + repeated) / 16 + vectors));
        // With a fast file system, PCIe bounds.
        let fast = ServerWorkload { file_system: 1e15, ..WORKLOAD };
        let estimate = ServerEstimate::of(&config, &fast).expect("an estimate");
        assert_eq!(estimate.load_seconds, estimate.weights as f64 / 50e9);
    }

    #[test]
    fn what_cannot_be_is_named() {
        let problem = |workload: ServerWorkload| ServerEstimate::of(&named("qwen2.5-7b"), &workload).expect_err("refused");
        assert!(problem(ServerWorkload { rollout_nodes: 0, ..WORKLOAD }).contains("0 rollout nodes"));
        assert!(problem(ServerWorkload { training_nodes: 0, ..WORKLOAD }).contains("and 0 others"));
        assert!(problem(ServerWorkload { tensor_parallel: 3, ..WORKLOAD }).contains("must divide the 8 GPUs"));
        assert!(problem(ServerWorkload { tensor_parallel: 8, ..WORKLOAD }).contains("28 attention heads"));
    }
}
