//! Training over many ranks on the CPU: N ranks against one, over threads and over TCP; what travels, against the plan; failures.

mod bytes;
mod equal;
mod failures;
mod ranks;
mod support;
mod world;
