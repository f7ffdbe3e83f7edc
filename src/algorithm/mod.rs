//! Pure maths of reinforcement learning: advantages, losses, statistics. No I/O.
