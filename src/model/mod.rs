//! Qwen2/Qwen3: configuration, weights, forward and hand-written backward.
