//! Buffers and the list of operations; each device implements every operation, forward and backward.
