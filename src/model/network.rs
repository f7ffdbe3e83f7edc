//! A model without its parameters: what it computes, and the memory its passes work in.

use std::sync::{Arc, Mutex, MutexGuard};

use super::attention::{Attention, BlockAttention};
use super::config::ModelConfig;
use super::exchange::{KeyValueExchange, ParameterSource, TrainingPass, Unit};
use super::forward::{Keep, Rows};
use super::parameters::Layout;
use super::rotary::RotaryTable;
use super::workspace::Workspace;
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
    workspace: Mutex<Workspace<D>>,
}

impl<D: Device> Network<D> {
    /// The device must be able to run it: see [`ModelConfig::check_on`].
    pub fn new(device: D, config: ModelConfig) -> Self {
        let layout = Arc::new(Layout::new(&config));
        let rotary = RotaryTable::new(&device, &config);
        let workspace = Mutex::new(Workspace::new(&device, &config));
        Network { device, config, layout, rotary, workspace }
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    pub fn device(&self) -> &D {
        &self.device
    }

    pub(crate) fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    pub(super) fn workspace(&self) -> MutexGuard<'_, Workspace<D>> {
        self.workspace.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Log-probability and entropy at each of the pass's scored rows, at `temperature` (0 is read as 1).
    ///
    /// Panics if an id is not below the vocabulary.
    pub fn score(
        &self,
        source: &mut dyn ParameterSource<D>,
        exchange: &mut dyn KeyValueExchange<D>,
        pass: &TrainingPass,
        temperature: f32,
    ) -> Scores {
        todo!()
    }

    /// Scores a pass, asks for the loss's cotangents with respect to these scores, and adds the gradients of all weights.
    ///
    /// `cotangents` is called once on every rank, also where nothing is scored, so that it may exchange scores between them.
    /// Panics if an id is not below the vocabulary.
    pub fn forward_backward(
        &self,
        source: &mut dyn ParameterSource<D>,
        exchange: &mut dyn KeyValueExchange<D>,
        pass: &TrainingPass,
        settings: PassSettings,
        cotangents: impl FnOnce(&Scores) -> Cotangents,
    ) -> Scores {
        todo!()
    }
}
