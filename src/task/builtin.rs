//! The proven pools and the tokenizer that ship with the quick start's recipe, and how they are made.
//!
//! `learner tasks make --preset quickstart --out DIR` remakes the three files of `recipes/quickstart/` byte for byte.

use super::bugfix::{Level, Split, demonstration_texts, generate};
use super::{TaskError, parse_tasks};
use crate::text::{TextError, Tokenizer, train};
use crate::types::Task;

const TRAIN: &str = include_str!("../../recipes/quickstart/train.jsonl");
const HELD_OUT: &str = include_str!("../../recipes/quickstart/held_out.jsonl");
const TOKENIZER: &[u8] = include_bytes!("../../recipes/quickstart/tokenizer.json");

/// What the shipped pools were drawn with.
const SEED: u64 = 1;
const TRAIN_TASKS: usize = 2_000;
const NAMES_TASKS: usize = 400;
const STRUCTURE_TASKS: usize = 64;
/// Tokens asked for, the 256 bytes included; training stops earlier, when every word is one token.
const VOCABULARY: usize = 512;

/// Tasks to learn from and tasks to be judged by; the latter say in `origin.split` what was held out.
#[derive(Clone, Debug, PartialEq)]
pub struct BuiltinPools {
    pub train: Vec<Task>,
    pub held_out: Vec<Task>,
}

/// The shipped pools.
pub fn builtin() -> Result<BuiltinPools, TaskError> {
    Ok(BuiltinPools {
        train: parse_tasks(TRAIN, "recipes/quickstart/train.jsonl")?,
        held_out: parse_tasks(HELD_OUT, "recipes/quickstart/held_out.jsonl")?,
    })
}

/// The shipped tokenizer.
pub fn builtin_tokenizer() -> Result<Tokenizer, TextError> {
    Tokenizer::from_bytes(TOKENIZER, "recipes/quickstart/tokenizer.json")
}

/// The bytes of the shipped `tokenizer.json`, to be copied into checkpoints.
pub fn builtin_tokenizer_json() -> &'static [u8] {
    TOKENIZER
}

/// Draws the pools anew: what [`builtin`] holds, from the generator.
pub fn make_builtin() -> Result<BuiltinPools, TaskError> {
    let mut held_out = generate(Level::Small, Split::Names, NAMES_TASKS, SEED)?;
    held_out.extend(generate(Level::Small, Split::Structure, STRUCTURE_TASKS, SEED)?);
    Ok(BuiltinPools { train: generate(Level::Small, Split::Train, TRAIN_TASKS, SEED)?, held_out })
}

/// Trains the tokenizer anew on the demonstrations' text of the training pool.
pub fn make_builtin_tokenizer(train: &[Task]) -> Result<Vec<u8>, TextError> {
    train::train_tokenizer(&demonstration_texts(train), VOCABULARY)
}
