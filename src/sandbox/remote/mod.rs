//! Sandboxes on other machines: `learner sandbox serve` runs there, and this program's pool spreads over them.
//!
//! ```text
//! message   what a client asks of a runner and what it answers: length-prefixed JSON over TCP, after a handshake (crate::wire)
//! client    one runner, seen from here: connections, the last word on whether it is there
//! serve     a runner, seen from there: a port, and a sandbox behind it
//! ```
//!
//! A connection carries one run at a time, and a session has one to itself. While a run goes on the runner says so every
//! [`SIGN_OF_LIFE`]; a runner that says nothing for [`SILENCE`] is lost. What it was running is run again elsewhere: a run has no
//! effect but its result.
//!
//! The token keeps strangers out and is never sent. It does not hide what is sent: over a network that others can read, use a
//! tunnel.

mod client;
mod message;
mod serve;

use std::path::{Path, PathBuf};
use std::time::Duration;

pub use client::{Lost, Remote, RemoteSession};
pub use serve::{ServeSettings, Server};

use super::SandboxError;
use crate::wire::{Protocol, Token};

/// Version 1 of everything that clients and runners say to each other.
const PROTOCOL: Protocol = Protocol { magic: *b"SANDBOX\0", version: 1, side: "program" };

/// Where the token is, where no file of it is named.
pub const TOKEN_VARIABLE: &str = "LEARNER_SANDBOX_TOKEN";

/// How often a runner says that a run goes on.
const SIGN_OF_LIFE: Duration = Duration::from_secs(1);
/// A runner that has said nothing for so long is lost.
const SILENCE: Duration = Duration::from_secs(8);
/// The most bytes of one message: a workspace with its tests, or the outputs of a run, as JSON.
const LONGEST: usize = 1 << 30;

/// The token of a file, else of [`TOKEN_VARIABLE`].
///
/// # Errors
/// One line when there is none, or none that will do.
pub fn token(file: Option<&Path>) -> Result<Token, SandboxError> {
    let (text, from) = match file {
        Some(path) => {
            let text = std::fs::read_to_string(path)
                .map_err(|error| settings_error("token_file", format!("{}: {error}", path.display())))?;
            (text, path.display().to_string())
        }
        None => match std::env::var(TOKEN_VARIABLE) {
            Ok(text) => (text, TOKEN_VARIABLE.to_string()),
            Err(_) => return Err(settings_error("token_file", format!("not set, and {TOKEN_VARIABLE} is not either"))),
        },
    };
    Token::new(&text).map_err(|reason| settings_error("token_file", format!("{from}: {reason}")))
}

fn settings_error(field: &str, found: String) -> SandboxError {
    SandboxError::Settings {
        field: field.to_string(),
        found,
        remedy: "runners and learner need one secret of at least 16 characters, for example from `openssl rand -hex 32`"
            .to_string(),
    }
}

/// A tree as it is named to a runner, which must have the same directory at the same place.
fn place_of(tree: Option<&super::Snapshot>) -> Option<PathBuf> {
    tree.map(|tree| tree.path().to_path_buf())
}
