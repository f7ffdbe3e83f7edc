//! From a run file to the parts it names: tokenizer, tasks, model, sandbox. Whatever is wrong is refused here, before any
//! work starts and before anything is written.

use std::collections::HashSet;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::CliError;
use crate::agent::demonstrable;
use crate::config::RunFile;
use crate::device::Device;
use crate::model::{Model, ModelConfig, shape_names};
use crate::parallel::{Mesh, Ranks, ShardedModel, World};
use crate::sandbox::Sandbox;
use crate::stage::{Collect, Stage, StageKind};
use crate::task;
use crate::text::{ChatFormat, Tokenizer};
use crate::train::Policy;
use crate::types::Task;

/// Tokenizer and chat format of a policy, and the tokenizer's own file to write beside checkpoints.
pub struct Text {
    pub tokenizer: Tokenizer,
    pub tokenizer_json: Vec<u8>,
}

impl Text {
    /// The tokenizer of a Hugging Face directory, or the quick start's.
    pub fn load(directory: Option<&Path>) -> Result<Text, CliError> {
        let (tokenizer, tokenizer_json) = match directory {
            Some(directory) => {
                let path = directory.join("tokenizer.json");
                let json = std::fs::read(&path).map_err(|error| CliError::Refused(format!("{}: {error}", path.display())))?;
                (Tokenizer::load(directory).map_err(CliError::refused)?, json)
            }
            None => (task::builtin_tokenizer().map_err(CliError::failed)?, task::builtin_tokenizer_json().to_vec()),
        };
        Ok(Text { tokenizer, tokenizer_json })
    }

    pub fn format(&self) -> Result<ChatFormat<'_>, CliError> {
        ChatFormat::new(&self.tokenizer).map_err(CliError::refused)
    }
}

/// Loads or draws a model that is whole on one device.
pub fn load_model<D: Device>(device: D, run_file: &RunFile, text: &Text) -> Result<Model<D>, CliError> {
    if let Some(directory) = &run_file.model.directory {
        return load_model_from(device, directory, text);
    }
    let config = drawn_shape(&device, run_file, text)?;
    Ok(Model::initialise(device, config, run_file.run.seed))
}

/// The policy of a run, from a checkpoint if there is one: whole on one rank, in shards on many.
pub fn load_policy<D: Device>(
    device: D,
    world: &World<D>,
    run_file: &RunFile,
    checkpoint: Option<&Path>,
    text: &Text,
) -> Result<Policy<D>, CliError> {
    let directory = checkpoint.or(run_file.model.directory.as_deref());
    if world.ranks.ranks() == 1 {
        let model = match directory {
            Some(directory) => load_model_from(device, directory, text)?,
            None => load_model(device, run_file, text)?,
        };
        return Ok(Policy::whole(model));
    }
    let model = match directory {
        Some(directory) => {
            let model = ShardedModel::load(device, directory, world).map_err(CliError::refused)?;
            check_vocabulary(directory, model.config(), text)?;
            model
        }
        None => {
            let config = drawn_shape(&device, run_file, text)?;
            ShardedModel::initialise(device, config, run_file.run.seed, world)
        }
    };
    Ok(Policy::sharded(model))
}

/// The shape of a model that is drawn at random.
fn drawn_shape<D: Device>(device: &D, run_file: &RunFile, text: &Text) -> Result<ModelConfig, CliError> {
    let mut table = run_file.model.initialise.clone().unwrap_or_default();
    let vocabulary = text.tokenizer.vocabulary_size() as i64;
    table.entry("vocab_size").or_insert(toml::Value::Integer(vocabulary));
    let refused = |error: String| CliError::Refused(format!("model.initialise: {error}"));
    let json = serde_json::to_string(&table).map_err(|error| refused(error.to_string()))?;
    let config = ModelConfig::from_json(&json).map_err(|error| refused(error.to_string()))?;
    if config.vocabulary < vocabulary as usize {
        return Err(refused(format!("vocab_size = {}: the tokenizer has {vocabulary} entries", config.vocabulary)));
    }
    config.check_on(device).map_err(refused)?;
    Ok(config)
}

/// Refuses episodes longer than the model was made for.
pub fn check_length(config: &ModelConfig, max_tokens: usize, setting: &str) -> Result<(), CliError> {
    let most = config.max_positions;
    if max_tokens > most {
        let message = format!("{setting} = {max_tokens}: the model was made for at most {most} tokens (max_position_embeddings)");
        return Err(CliError::Refused(message));
    }
    Ok(())
}

/// Refuses a stage whose rotary embeddings make no sense for the model, or whose episodes are longer than it is made for by then.
pub fn check_stages(config: &ModelConfig, stages: &[Stage]) -> Result<(), CliError> {
    let mut config = config.clone();
    for Stage { name, settings, .. } in stages {
        if let Some(rope) = &settings.rope {
            config =
                config.with_rope(rope).map_err(|problem| CliError::Refused(format!("model.rope.{problem} (stage {name})")))?;
        }
        check_length(&config, settings.agent.max_tokens, &format!("agent.max_tokens of stage {name}"))?;
    }
    Ok(())
}

/// Refuses training tasks that the scripted demonstrations of fine-tuning cannot solve.
pub fn check_demonstrable(run_file: &RunFile, stages: &[Stage], tasks: &[Task]) -> Result<(), CliError> {
    let scripted = |stage: &&Stage| {
        let rft = &stage.settings.rft;
        stage.kind == StageKind::Rft && rft.collect == Collect::Script && !rft.skipped()
    };
    let Some(Stage { name, .. }) = stages.iter().find(scripted) else { return Ok(()) };
    let reasons: Vec<String> = tasks.iter().filter_map(|task| demonstrable(task).err()).collect();
    match reasons.first() {
        Some(reason) => Err(CliError::Refused(format!(
            "{}: {} of {} tasks cannot be demonstrated, the first: {reason}; let the policy attempt them with --set \
             rft.collect=policy, or leave fine-tuning out with --set rft.candidates=0 (stage {name})",
            run_file.tasks.train,
            reasons.len(),
            tasks.len()
        ))),
        None => Ok(()),
    }
}

pub fn load_model_from<D: Device>(device: D, directory: &Path, text: &Text) -> Result<Model<D>, CliError> {
    let model = Model::load(device, directory).map_err(CliError::refused)?;
    check_vocabulary(directory, model.config(), text)?;
    Ok(model)
}

fn check_vocabulary(directory: &Path, config: &ModelConfig, text: &Text) -> Result<(), CliError> {
    let (entries, rows) = (text.tokenizer.vocabulary_size(), config.vocabulary);
    if entries > rows {
        let message = format!("{}: tokenizer.json has {entries} entries, the model only {rows} rows", directory.display());
        return Err(CliError::Refused(message));
    }
    Ok(())
}

/// Training and held-out tasks of a run.
pub struct Tasks {
    pub train: Vec<Task>,
    pub held_out: Vec<Task>,
}

impl Tasks {
    pub fn load(run_file: &RunFile) -> Result<Tasks, CliError> {
        let settings = &run_file.tasks;
        let train = read(&settings.train)?;
        let (train, held_out) = if settings.held_out.is_empty() {
            train.into_iter().partition(|task| share_of(&task.id) >= settings.held_out_share)
        } else {
            (train, read(&settings.held_out)?)
        };
        let known: HashSet<&str> = train.iter().map(|task| task.id.as_str()).collect();
        if let Some(task) = held_out.iter().find(|task| known.contains(task.id.as_str())) {
            let message = format!("{}: task {:?} is also a training task ({})", settings.held_out, task.id, settings.train);
            return Err(CliError::Refused(message));
        }
        for (name, tasks) in [("training", &train), ("held-out", &held_out)] {
            if tasks.is_empty() {
                let message = format!("{}: no {name} tasks; see tasks.held_out and tasks.held_out_share", settings.train);
                return Err(CliError::Refused(message));
            }
        }
        Ok(Tasks { train, held_out })
    }
}

impl Tasks {
    /// SHA-256 over everything a task holds, training tasks first.
    pub fn sha256(&self) -> String {
        let mut hash = Sha256::new();
        for task in self.train.iter().chain(&self.held_out) {
            // A task is plain text and numbers: writing it cannot fail.
            hash.update(serde_json::to_vec(task).unwrap_or_default());
            hash.update(b"\n");
        }
        hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Reads a task file, or one of the quick start's own pools.
pub fn read(name: &str) -> Result<Vec<Task>, CliError> {
    match name {
        "builtin:train" => Ok(task::builtin().map_err(CliError::failed)?.train),
        "builtin:held_out" => Ok(task::builtin().map_err(CliError::failed)?.held_out),
        _ if name.starts_with("builtin:") => {
            Err(CliError::Refused(format!("{name}: no such built-in tasks; there are builtin:train and builtin:held_out")))
        }
        path => task::read_tasks(Path::new(path)).map_err(CliError::refused),
    }
}

/// A number in `[0, 1)` that depends on the id alone, so that a task stays on its side when others come and go.
fn share_of(id: &str) -> f64 {
    let hash = Sha256::digest(id.as_bytes());
    let number = hash[..8].iter().fold(0u64, |number, &byte| number << 8 | byte as u64);
    (number >> 11) as f64 / (1u64 << 53) as f64
}

/// The sandbox, with a Python that runs in it.
pub fn start_sandbox(run_file: &RunFile) -> Result<Sandbox, CliError> {
    let sandbox = Sandbox::start(&run_file.sandbox).map_err(CliError::refused)?;
    sandbox.python().map_err(CliError::refused)?;
    Ok(sandbox)
}

/// Sets the number of threads of the model, once for the whole program.
pub fn set_threads(threads: usize) -> Result<(), CliError> {
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build_global()
        .map_err(|error| CliError::Failed(format!("run.threads = {threads}: {error}")))
}

/// `--model` is neither a directory nor a shape.
pub fn no_such_model(model: &Path) -> CliError {
    let names: Vec<_> = shape_names().collect();
    CliError::Refused(format!("--model {}: neither a folder nor one of {}", model.display(), names.join(", ")))
}

/// The world of a run on one rank.
pub fn world_of_one<D: Device>(device: &D) -> Result<World<D>, CliError> {
    let mesh = Mesh::new(1, 1, 1).map_err(CliError::failed)?;
    World::over_hosts(device, Ranks::one(), mesh).map_err(CliError::failed)
}
