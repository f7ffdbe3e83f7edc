//! Tokenizer, chat format and the rule that sampled tokens are never re-tokenised.
//!
//! Three kinds of text enter a policy's context, and each has its own door:
//!
//! - what the policy sampled: ids, kept as they are (nothing here touches them);
//! - what the environment says (issue, file, test output): [`Tokenizer::encode_plain`], in which no added token can match, so
//!   that a tool's output cannot forge a turn or a tool call;
//! - what we write ourselves (system prompt, scripted demonstrations): [`Tokenizer::encode_markup`].

mod chat;
mod tokenizer;
pub mod train;

pub use chat::{ChatFormat, Role, Turn};
pub use tokenizer::Tokenizer;

/// What can be wrong with a tokenizer. Every message is one line.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    #[error("{path}: {reason}; expected the tokenizer.json of a Hugging Face model directory")]
    Read { path: String, reason: String },
    #[error("tokenizer {origin}: {reason}")]
    Invalid { origin: String, reason: String },
    #[error(
        "tokenizer {origin} has no token {token}: the ChatML format of Qwen2 and Qwen3 needs it; use a Qwen2.5, Qwen3 or other ChatML tokenizer"
    )]
    NoChatToken { origin: String, token: &'static str },
    #[error("training a tokenizer: {0}")]
    Train(String),
}
