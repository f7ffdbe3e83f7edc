//! Tokenizer, chat format and the rule that sampled tokens are never re-tokenised.
