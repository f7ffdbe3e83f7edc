//! A byte-level BPE tokenizer that knows trusted text from untrusted.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use serde_json::Value;
use tokenizers::{NormalizedString, Normalizer};

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
    /// Id of the token of each single byte; a few published vocabularies lack some control characters.
    id_of_byte: [Option<u32>; 256],
    /// Some byte that text can hold has no token.
    incomplete: bool,
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
        if !is_byte_level(&description["pre_tokenizer"]) {
            return Err(invalid(
                "field \"pre_tokenizer\" has no ByteLevel step; only byte-level BPE tokenizers are supported".into(),
            ));
        }
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

        let byte_of = byte_values();
        let mut id_of_byte = [None; 256];
        for (character, &byte) in &byte_of {
            id_of_byte[usize::from(byte)] = plain.token_to_id(character.encode_utf8(&mut [0; 4]));
        }
        let in_text = |byte: &usize| !matches!(byte, 0xc0 | 0xc1 | 0xf5..);
        let incomplete = (0..256).filter(in_text).any(|byte| id_of_byte[byte].is_none());
        if !can_say(&id_of_byte, char::REPLACEMENT_CHARACTER) {
            return Err(invalid(
                "field \"model\" has no tokens for the bytes of U+FFFD, which stands for what it cannot say".into(),
            ));
        }
        let vocabulary_size = markup.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
        let origin = origin.to_string();
        Ok(Tokenizer { markup, plain, added, byte_of, id_of_byte, incomplete, vocabulary_size, origin })
    }

    /// Where this tokenizer was read from, for messages.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// Highest id plus one. A model's embedding may have more rows (Qwen pads it), never fewer.
    pub fn vocabulary_size(&self) -> usize {
        self.vocabulary_size
    }

    /// Ids of untrusted text: no added token matches, whatever the text says. A character with a byte that the vocabulary lacks
    /// is replaced by U+FFFD: nothing vanishes unseen.
    pub fn encode_plain(&self, text: &str) -> Vec<u32> {
        self.encode(&self.plain, text)
    }

    /// Ids of text we wrote ourselves: added tokens match. Otherwise like [`Tokenizer::encode_plain`].
    pub fn encode_markup(&self, text: &str) -> Vec<u32> {
        self.encode(&self.markup, text)
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

    fn encode(&self, tokenizer: &tokenizers::Tokenizer, text: &str) -> Vec<u32> {
        let sayable = if self.incomplete { Cow::Owned(self.sayable(tokenizer, text)) } else { Cow::Borrowed(text) };
        match tokenizer.encode_fast(sayable.as_ref(), false) {
            Ok(encoding) => encoding.get_ids().to_vec(),
            // The splitter's pattern can give up on a long text. The same bytes, one token each, say the same.
            Err(_) => sayable.bytes().filter_map(|byte| self.id_of_byte[usize::from(byte)]).collect(),
        }
    }

    /// `text`, normalized as it will be, with U+FFFD for each character that the vocabulary cannot say.
    fn sayable(&self, tokenizer: &tokenizers::Tokenizer, text: &str) -> String {
        let mut normalized = NormalizedString::from(text);
        let text = match tokenizer.get_normalizer().map(|normalizer| normalizer.normalize(&mut normalized)) {
            Some(Ok(())) => normalized.get(),
            _ => text,
        };
        let say = |character| if can_say(&self.id_of_byte, character) { character } else { char::REPLACEMENT_CHARACTER };
        text.chars().map(say).collect()
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

/// Whether every byte of `character` has a token.
fn can_say(id_of_byte: &[Option<u32>; 256], character: char) -> bool {
    character.encode_utf8(&mut [0; 4]).bytes().all(|byte| id_of_byte[usize::from(byte)].is_some())
}

/// Whether a pre-tokenizer, or one of a sequence, turns text into the byte-level alphabet.
fn is_byte_level(pre_tokenizer: &Value) -> bool {
    pre_tokenizer["type"] == "ByteLevel" || pre_tokenizer["pretokenizers"].as_array().into_iter().flatten().any(is_byte_level)
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
