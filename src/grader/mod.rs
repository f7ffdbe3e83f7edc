//! An answer in, a verdict out: task + sandbox.
