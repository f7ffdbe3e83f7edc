//! A model without its parameters: what it computes, and the memory its passes work in.

use std::sync::{Arc, Mutex, MutexGuard};

use super::attention::{BlockAttention, BlockBuffers};
use super::config::ModelConfig;
use super::exchange::{NoExchange, ParameterSource, SequenceExchange, TrainingPass, Unit, UnitTensors};
use super::forward::Rows;
use super::parameters::Layout;
use super::rope::RopeSettings;
use super::rotary::RotaryTable;
use super::workspace::{Keep, Workspace};
use crate::device::{Cotangents, Device, Role, Scores};

/// How a training pass runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PassSettings {
    /// Of the distribution whose log-probabilities count; 0 is read as 1.
    pub temperature: f32,
    /// Keep only the residual stream before each layer, and run each layer again before its backward (Chen et al. 2016):
    /// less memory for a third more work, with the same bits.
    pub recompute: bool,
}

/// A model's passes. Where the parameters come from and where keys and values travel is for the caller to say; passes of one
/// network run one at a time.
pub struct Network<D: Device> {
    pub(super) device: D,
    pub(super) config: ModelConfig,
    pub(super) layout: Arc<Layout>,
    pub(super) rotary: RotaryTable<D>,
    memory: Mutex<Memory<D>>,
}

/// What passes reuse.
pub(super) struct Memory<D: Device> {
    pub workspace: Workspace<D>,
    pub blocks: BlockBuffers<D>,
}

impl<D: Device> Network<D> {
    /// The device must be able to run it: see [`ModelConfig::check_on`].
    pub fn new(device: D, config: ModelConfig) -> Self {
        let layout = Arc::new(Layout::new(&config));
        let rotary = RotaryTable::new(&device, &config);
        let memory = Memory { workspace: Workspace::new(&device, &config), blocks: BlockBuffers::new() };
        Network { device, config, layout, rotary, memory: Mutex::new(memory) }
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Scales rotary embeddings so from now on, in every pass. Keys that caches hold already were turned as before. Returns whether that
    /// changes anything.
    ///
    /// # Errors
    /// Names the first setting that makes no sense.
    pub fn set_rope(&mut self, rope: &RopeSettings) -> Result<bool, String> {
        let config = self.config.with_rope(rope)?;
        let changes = config != self.config;
        if changes {
            self.rotary = RotaryTable::new(&self.device, &config);
            self.config = config;
        }
        Ok(changes)
    }

    pub fn device(&self) -> &D {
        &self.device
    }

    pub(crate) fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    pub(super) fn memory(&self) -> MutexGuard<'_, Memory<D>> {
        self.memory.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Log-probability and entropy at each of the pass's scored rows, at `temperature` (0 is read as 1).
    ///
    /// Panics if an id is not below the vocabulary.
    pub fn score(
        &self,
        source: &mut dyn ParameterSource<D>,
        exchange: &mut dyn SequenceExchange<D>,
        pass: &TrainingPass,
        temperature: f32,
    ) -> Scores {
        let mut scores = Scores::default();
        self.forward_to_head(source, exchange, pass, &mut |tensors, normed| {
            scores = self.device.head(normed, tensors.get(self.layout.head).linear(), &pass.targets, temperature);
        });
        scores
    }

    /// A pass without a backward, up to what the head reads: `[scored_rows, hidden]`.
    fn forward_to_head(
        &self,
        source: &mut dyn ParameterSource<D>,
        exchange: &mut dyn SequenceExchange<D>,
        pass: &TrainingPass,
        head: &mut dyn FnMut(&UnitTensors<'_, D>, &D::Buffer),
    ) {
        let mut memory = self.memory();
        let Memory { workspace, blocks } = &mut *memory;
        let mut attention = BlockAttention::new(&self.device, self.config.heads(), &pass.attention, exchange, blocks);
        self.forward(workspace, source, &mut attention, Rows::of(pass), Keep::Nothing);
        source.forward(Unit::Head, None, &mut |tensors| {
            self.norm_scored(workspace, tensors, &pass.scored_rows, Keep::Nothing);
            head(tensors, &workspace.scored.normed);
        });
    }

    /// Scores a pass, asks for the loss's cotangents with respect to these scores, and adds the gradients of all weights.
    ///
    /// `cotangents` is called once on every rank, also where nothing is scored, so that it may exchange scores between them.
    /// Panics if an id is not below the vocabulary.
    pub fn forward_backward(
        &self,
        source: &mut dyn ParameterSource<D>,
        exchange: &mut dyn SequenceExchange<D>,
        pass: &TrainingPass,
        settings: PassSettings,
        cotangents: impl FnOnce(&Scores) -> Cotangents,
    ) -> Scores {
        let PassSettings { temperature, recompute } = settings;
        let keep = Keep::for_backward(recompute);
        let mut memory = self.memory();
        let Memory { workspace, blocks } = &mut *memory;
        let mut attention = BlockAttention::new(&self.device, self.config.heads(), &pass.attention, exchange, blocks);
        self.forward(workspace, source, &mut attention, Rows::of(pass), keep);
        let mut scores = Scores::default();
        let mut cotangents = Some(cotangents);
        source.backward(Unit::Head, Some(Unit::Layer(self.config.layers - 1)), &mut |tensors, gradients| {
            self.norm_scored(workspace, tensors, &pass.scored_rows, keep);
            let head = tensors.get(self.layout.head).linear();
            scores = self.device.head(&workspace.scored.normed, head, &pass.targets, temperature);
            if let Some(cotangents) = cotangents.take() {
                let cotangents = cotangents(&scores);
                self.backward_head(workspace, tensors, gradients, pass, temperature, &cotangents);
            }
        });
        self.backward(workspace, source, &mut attention, pass, keep);
        scores
    }

    /// `[scored_rows, vocabulary]` raw logits, all at once: for comparing tiny models with others.
    pub(super) fn logits(&self, source: &mut dyn ParameterSource<D>, pass: &TrainingPass) -> Vec<f32> {
        let (device, numbers) = (&self.device, pass.scored_rows.len() * self.config.vocabulary);
        let mut logits = device.zeros(Role::Activations, numbers);
        self.forward_to_head(source, &mut NoExchange, pass, &mut |tensors, normed| {
            device.linear(normed, tensors.get(self.layout.head).linear(), &mut logits, pass.scored_rows.len());
        });
        device.read(&logits, 0, numbers)
    }
}
