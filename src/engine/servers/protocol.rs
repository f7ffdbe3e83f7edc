//! What is asked of a server to steer it: health, new weights from a directory, their version. Both servers' own words.
//!
//! | | vLLM (development endpoints) | SGLang |
//! |---|---|---|
//! | load | `/pause`, `/collective_rpc` `reload_weights`, `/reset_prefix_cache`, version, `/resume` | `/update_weights_from_disk` |
//! | version is set | `/update_weight_version` | with the load, `/update_weight_version` |
//! | version is asked | `/weight_info` | `/get_model_info` |
//!
//! Keys and values computed with old weights must go, which vLLM does not do by itself. Servers without versions answer 404: they are
//! fed all the same, and what was loaded then counts as unverified.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::http::{Answer, Client, HttpError};
use super::settings::ServerKind;
use super::weights::Weights;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ProtocolError {
    #[error("{path}: {error}")]
    Http { path: &'static str, error: HttpError },
    #[error("{path}: status {status}: {excerpt}")]
    Refused { path: &'static str, status: u16, excerpt: String },
    #[error("{path}: says that it has {found}, not {wanted}")]
    OtherWeights { path: &'static str, found: String, wanted: String },
}

/// A server that is spoken to, all requests together within a time.
pub(super) struct Session<'a> {
    pub(super) kind: ServerKind,
    pub(super) client: Client<'a>,
    pub(super) deadline: Instant,
}

impl Session<'_> {
    /// # Errors
    /// Any answer but a good one.
    pub(super) fn health(&self) -> Result<(), ProtocolError> {
        let path = "/health";
        accepted(path, self.client.get(path, self.left()).map_err(|error| ProtocolError::Http { path, error })?).map(drop)
    }

    /// Replaces the weights; whether the server could confirm it.
    pub(super) fn load(&self, weights: &Weights) -> Result<bool, ProtocolError> {
        match self.kind {
            ServerKind::Vllm => {
                self.post("/pause?mode=wait", Value::Null)?;
                let reload = json!({"method": "reload_weights", "kwargs": {"weights_path": weights.directory}});
                self.post("/collective_rpc", reload)?;
                self.post("/reset_prefix_cache", Value::Null)?;
                self.set_version(weights)?;
                self.post("/resume", Value::Null)?;
            }
            ServerKind::Sglang => {
                let path = "/update_weights_from_disk";
                let from = json!({"model_path": weights.directory, "weight_version": weights.version, "flush_cache": true});
                let answer = self.post(path, from)?;
                if answer.json()["success"] == Value::Bool(false) {
                    return Err(ProtocolError::Refused { path, status: answer.status, excerpt: answer.excerpt() });
                }
            }
        }
        self.verify(weights)
    }

    /// Tells a server that was started with these weights what they are called; whether it could confirm it.
    pub(super) fn adopt(&self, weights: &Weights) -> Result<bool, ProtocolError> {
        self.set_version(weights)?;
        self.verify(weights)
    }

    fn set_version(&self, weights: &Weights) -> Result<(), ProtocolError> {
        // SGLang would throw away requests under way, if it were not told otherwise.
        let version = match self.kind {
            ServerKind::Vllm => json!({"new_version": weights.version}),
            ServerKind::Sglang => json!({"new_version": weights.version, "abort_all_requests": false}),
        };
        match self.post("/update_weight_version", version) {
            Err(ProtocolError::Refused { status: 404, .. }) => Ok(()),
            result => result.map(drop),
        }
    }

    fn verify(&self, weights: &Weights) -> Result<bool, ProtocolError> {
        let path = match self.kind {
            ServerKind::Vllm => "/weight_info",
            ServerKind::Sglang => "/get_model_info",
        };
        let answer = self.client.get(path, self.left()).map_err(|error| ProtocolError::Http { path, error })?;
        if answer.status == 404 {
            return Ok(false);
        }
        let found = accepted(path, answer)?.json();
        let Some(version) = found["weight_version"].as_str() else { return Ok(false) };
        if version != weights.version {
            let (found, wanted) = (format!("{version:?}"), format!("{:?}", weights.version));
            return Err(ProtocolError::OtherWeights { path, found, wanted });
        }
        Ok(true)
    }

    fn post(&self, path: &'static str, body: Value) -> Result<Answer, ProtocolError> {
        accepted(path, self.client.post(path, &body, self.left()).map_err(|error| ProtocolError::Http { path, error })?)
    }

    fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }
}

fn accepted(path: &'static str, answer: Answer) -> Result<Answer, ProtocolError> {
    if answer.ok() {
        return Ok(answer);
    }
    Err(ProtocolError::Refused { path, status: answer.status, excerpt: answer.excerpt() })
}
