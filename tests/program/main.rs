//! Tests of the whole program, started as a user starts it.

mod harness;
mod on_policy;
mod refusals;
mod resume;
mod smoke;
