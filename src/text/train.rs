//! Trains the small byte-level BPE tokenizer of the quick start.
//!
//! The split pattern makes each punctuation mark a piece of its own (with an optional `=` behind it), so that a name has the same
//! token whatever stands next to it: a policy of half a million parameters copies lines token by token, and Qwen's own pattern,
//! which glues `(rows` together, doubled the number of tokens it had to choose.

use serde_json::json;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::BpeTrainerBuilder;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use super::TextError;

/// How text is cut before merges are learned within the pieces.
pub const SPLIT_PATTERN: &str = r" ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]=?|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Tokens that only templates and the policy can produce, in id order behind the vocabulary; the first three are special.
pub const ADDED_TOKENS: [&str; 10] = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<function=view>",
    "<function=edit>",
    "<function=run>",
    "<function=submit>",
    "</function>",
    "<parameter=line>",
    "</parameter>",
];

const SPECIAL_TOKENS: usize = 3;

/// Learns at most `vocabulary_size` tokens (256 bytes and merges) from `texts`, which hold no markup, and returns the bytes of
/// a `tokenizer.json` with [`ADDED_TOKENS`] behind them. The same texts give the same bytes: merges are taken by count, ties
/// by the ids of the pair, and counts do not depend on order.
pub fn train_tokenizer(texts: &[String], vocabulary_size: usize) -> Result<Vec<u8>, TextError> {
    let failed = |error: Box<dyn std::error::Error + Send + Sync>| TextError::Train(error.to_string());
    let untrained = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": SPLIT_PATTERN}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}
        ]},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": {}, "merges": []}
    });
    let mut tokenizer = tokenizers::Tokenizer::from_bytes(untrained.to_string().as_bytes()).map_err(failed)?;
    let trainer = BpeTrainerBuilder::new()
        .vocab_size(vocabulary_size)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build();
    tokenizer.train(&mut TrainerWrapper::from(trainer), texts.iter().map(String::as_str)).map_err(failed)?;
    let added = |special: bool| move |content: &&str| tokenizers::AddedToken::from(content.to_string(), special);
    let (special, ordinary) = ADDED_TOKENS.split_at(SPECIAL_TOKENS);
    tokenizer.add_special_tokens(&special.iter().map(added(true)).collect::<Vec<_>>());
    // Not normalized, so that they match the text as written.
    tokenizer.add_tokens(&ordinary.iter().map(added(false)).map(|token| token.normalized(false)).collect::<Vec<_>>());
    let mut text = tokenizer.to_string(true).map_err(failed)?;
    text.push('\n');
    Ok(text.into_bytes())
}
