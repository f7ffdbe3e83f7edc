//! ChatML as Qwen2 and Qwen3 write it, assembled from ids.
//!
//! ```text
//! <|im_start|>user
//! ISSUE<|im_end|>
//! <|im_start|>assistant
//! sampled ...<|im_end|>            the policy samples the end itself
//! <|im_start|>user                 from here: bridge(OBSERVATION)
//! OBSERVATION<|im_end|>
//! <|im_start|>assistant
//! ```
//!
//! Written by hand instead of run from the template in the model directory, because a template renders a whole
//! conversation and may change what was said before (Qwen3's drops earlier reasoning): appending is the only way to keep the
//! sampled ids a prefix of the next prompt. Qwen2.5's default system prompt is not added; give one if you want it.

use super::{TextError, Tokenizer};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    System,
    User,
}

/// One turn before the policy speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn<'a> {
    pub role: Role,
    pub content: &'a str,
}

/// The chat format over one tokenizer, with the ids of its control tokens.
#[derive(Clone, Copy, Debug)]
pub struct ChatFormat<'a> {
    tokenizer: &'a Tokenizer,
    start: u32,
    end: u32,
}

impl<'a> ChatFormat<'a> {
    /// Refuses a tokenizer that lacks `<|im_start|>` or `<|im_end|>` as added tokens.
    pub fn new(tokenizer: &'a Tokenizer) -> Result<ChatFormat<'a>, TextError> {
        let control = |token: &'static str| {
            tokenizer
                .token_id(token)
                .filter(|&id| tokenizer.is_added(id))
                .ok_or_else(|| TextError::NoChatToken { origin: tokenizer.origin().to_string(), token })
        };
        Ok(ChatFormat { tokenizer, start: control("<|im_start|>")?, end: control("<|im_end|>")? })
    }

    /// `<|im_end|>`: the policy's turn ends with it, and it is part of what was sampled.
    pub fn stop_token(&self) -> u32 {
        self.end
    }

    /// The prompt of an episode: `turns`, then the header of the assistant's first turn. The content of a user turn is untrusted
    /// and encoded plainly; a system turn is ours and may name added tokens.
    pub fn opening(&self, turns: &[Turn<'_>]) -> Vec<u32> {
        let mut ids = Vec::new();
        for turn in turns {
            ids.push(self.start);
            match turn.role {
                Role::System => ids.extend(self.tokenizer.encode_markup(&format!("system\n{}", turn.content))),
                Role::User => ids.extend(self.tokenizer.encode_plain(&format!("user\n{}", turn.content))),
            }
            ids.push(self.end);
            ids.extend(self.tokenizer.encode_plain("\n"));
        }
        self.push_assistant_header(&mut ids);
        ids
    }

    /// What follows a sampled `<|im_end|>`: the observation as a user turn and the header of the next assistant turn.
    pub fn bridge(&self, observation: &str) -> Vec<u32> {
        let mut ids = self.tokenizer.encode_plain("\n");
        ids.push(self.start);
        ids.extend(self.tokenizer.encode_plain(&format!("user\n{observation}")));
        ids.push(self.end);
        ids.extend(self.tokenizer.encode_plain("\n"));
        self.push_assistant_header(&mut ids);
        ids
    }

    fn push_assistant_header(&self, ids: &mut Vec<u32>) {
        ids.push(self.start);
        ids.extend(self.tokenizer.encode_plain("assistant\n"));
    }
}
