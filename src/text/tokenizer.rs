//! A byte-level BPE tokenizer that knows trusted text from untrusted.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use serde_json::Value;

use super::TextError;

/// Tokenizer of a Hugging Face model (`tokenizer.json`), held twice: once as published, once without its added tokens.
///
/// Immutable after loading, so it may be shared between threads.
#[derive(Debug)]
pub struct Tokenizer {
    /// As published, but for post-processing: nothing is ever put before or behind the text.
    markup: tokenizers::Tokenizer,
    /// The same model with no added token, neither in the list of added tokens nor in the vocabulary.
    plain: tokenizers::Tokenizer,
    /// Content of every added token by its id.
    added: BTreeMap<u32, String>,
    /// Value of each character of the byte-level alphabet.
    byte_of: HashMap<char, u8>,
    vocabulary_size: usize,
    origin: String,
}

impl Tokenizer {
    /// Reads `directory/tokenizer.json`.
    pub fn load(directory: &Path) -> Result<Tokenizer, TextError> {
        let path = directory.join("tokenizer.json");
        let bytes = std::fs::read(&path)
            .map_err(|error| TextError::Read { path: path.display().to_string(), reason: error.to_string() })?;
        Tokenizer::from_bytes(&bytes, &path.display().to_string())
    }

    /// `bytes`: the text of a `tokenizer.json`; `origin` names it in errors.
    pub fn from_bytes(bytes: &[u8], origin: &str) -> Result<Tokenizer, TextError> {
        let invalid = |reason: String| TextError::Invalid { origin: origin.to_string(), reason };
        let mut description: Value =
            serde_json::from_slice(bytes).map_err(|error| invalid(format!("is not valid JSON: {error}")))?;
        let added = added_tokens(&description).map_err(invalid)?;
        description["post_processor"] = Value::Null;
        description["truncation"] = Value::Null;
        description["padding"] = Value::Null;
        let markup = build(&description).map_err(invalid)?;

        // Leaving the added tokens out of the list is not enough: some tokenizers also have them in the vocabulary, where the
        // ordinary algorithm could reach them.
        description["added_tokens"] = Value::Array(Vec::new());
        if let Some(vocabulary) = description["model"]["vocab"].as_object_mut() {
            vocabulary.retain(|content, _| !added.values().any(|token| token == content));
        }
        description["model"]["unk_token"] = Value::Null;
        let plain = build(&description).map_err(invalid)?;

        let vocabulary_size = markup.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
        Ok(Tokenizer { markup, plain, added, byte_of: byte_values(), vocabulary_size, origin: origin.to_string() })
    }

    /// Where this tokenizer was read from, for messages.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// Highest id plus one. A model's embedding may have more rows (Qwen pads it), never fewer.
    pub fn vocabulary_size(&self) -> usize {
        self.vocabulary_size
    }

    /// Ids of untrusted text: no added token matches, whatever the text says.
    pub fn encode_plain(&self, text: &str) -> Vec<u32> {
        encode(&self.plain, text)
    }

    /// Ids of text we wrote ourselves: added tokens match.
    pub fn encode_markup(&self, text: &str) -> Vec<u32> {
        encode(&self.markup, text)
    }

    /// The text of `ids`, added tokens included; bytes that are not UTF-8 become U+FFFD, ids without a token vanish.
    pub fn decode(&self, ids: &[u32]) -> String {
        String::from_utf8_lossy(&self.bytes(ids, |_| Vec::new())).into_owned()
    }

    /// For people: like [`Tokenizer::decode`], but what is not text stays visible, a stray byte as `\xNN`, an id that has no
    /// token as `<|ID|>`.
    pub fn decode_visible(&self, ids: &[u32]) -> String {
        let bytes = self.bytes(ids, |id| format!("<|{id}|>").into_bytes());
        let mut text = String::with_capacity(bytes.len());
        for chunk in bytes.utf8_chunks() {
            text.push_str(chunk.valid());
            text.extend(chunk.invalid().iter().map(|byte| format!("\\x{byte:02X}")));
        }
        text
    }

    /// The id whose token is exactly `content`.
    pub fn token_id(&self, content: &str) -> Option<u32> {
        self.markup.token_to_id(content)
    }

    /// True for ids that untrusted text can never produce.
    pub fn is_added(&self, id: u32) -> bool {
        self.added.contains_key(&id)
    }

    /// Id and content of every added token, in id order.
    pub fn added_tokens(&self) -> impl Iterator<Item = (u32, &str)> {
        self.added.iter().map(|(&id, content)| (id, content.as_str()))
    }

    fn bytes(&self, ids: &[u32], unknown: impl Fn(u32) -> Vec<u8>) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for &id in ids {
            if let Some(content) = self.added.get(&id) {
                bytes.extend_from_slice(content.as_bytes());
            } else if let Some(token) = self.markup.id_to_token(id) {
                let mut buffer = [0; 4];
                for character in token.chars() {
                    match self.byte_of.get(&character) {
                        Some(&byte) => bytes.push(byte),
                        None => bytes.extend_from_slice(character.encode_utf8(&mut buffer).as_bytes()),
                    }
                }
            } else {
                bytes.extend(unknown(id));
            }
        }
        bytes
    }
}

fn build(description: &Value) -> Result<tokenizers::Tokenizer, String> {
    let text = description.to_string();
    tokenizers::Tokenizer::from_bytes(text.as_bytes()).map_err(|error| format!("cannot be used: {error}"))
}

fn encode(tokenizer: &tokenizers::Tokenizer, text: &str) -> Vec<u32> {
    // A byte-level model has a token for each byte and its splitter a piece for each character: no text can fail. Should a
    // tokenizer without byte fallback come along, what it cannot say is left out rather than stopping a run.
    tokenizer.encode_fast(text, false).map(|encoding| encoding.get_ids().to_vec()).unwrap_or_default()
}

/// Content by id of the `added_tokens` list. Only byte-level BPE is accepted, the kind that Qwen uses.
fn added_tokens(description: &Value) -> Result<BTreeMap<u32, String>, String> {
    if description["model"]["type"] != "BPE" && !description["model"]["merges"].is_array() {
        return Err("field \"model\" is not of type BPE; only byte-level BPE tokenizers (Qwen2, Qwen3) are supported".into());
    }
    let mut added = BTreeMap::new();
    for token in description["added_tokens"].as_array().into_iter().flatten() {
        match (token["id"].as_u64().and_then(|id| u32::try_from(id).ok()), token["content"].as_str()) {
            (Some(id), Some(content)) => added.insert(id, content.to_string()),
            _ => return Err(format!("field \"added_tokens\" has an entry without id or content: {token}")),
        };
    }
    Ok(added)
}

/// The byte-level alphabet of GPT-2: printable Latin-1 characters stand for themselves, the other 68 bytes for the characters
/// from U+0100 on, in byte order.
fn byte_values() -> HashMap<char, u8> {
    let mut next = 0x100;
    (0..=255u8)
        .map(|byte| {
            let character = match byte {
                b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
                _ => {
                    next += 1;
                    char::from_u32(next - 1).unwrap_or(char::REPLACEMENT_CHARACTER)
                }
            };
            (character, byte)
        })
        .collect()
}
