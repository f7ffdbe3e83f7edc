//! How two programs that share a secret meet over TCP, and how they frame what they say: ranks of a job, and a learner with the
//! machines that run its sandboxes.

mod handshake;
mod token;

pub use handshake::{Caller, HandshakeError, Protocol, answer, call, read_frame, write_frame};
pub use token::Token;
