//! Ctrl-C, SIGTERM and SIGUSR1 ask a run to drop its rollout or end its update, save and stop; a second one ends it at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::CliError;

/// True once a signal came.
#[derive(Clone)]
pub struct StopSignal(Arc<AtomicBool>);

impl StopSignal {
    /// Listens from now on.
    pub fn listen() -> Result<StopSignal, CliError> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGUSR1] {
            // In this order: the first signal finds the flag down and raises it, a second finds it up and exits. What the
            // last checkpoint holds stays whole either way.
            signal_hook::flag::register_conditional_shutdown(signal, 3, flag.clone())
                .and_then(|_| signal_hook::flag::register(signal, flag.clone()))
                .map_err(|error| CliError::Failed(format!("cannot listen for signals: {error}")))?;
        }
        Ok(StopSignal(flag))
    }

    pub fn raised(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
