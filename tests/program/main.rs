//! Tests of the whole program, started as a user starts it.

mod bench;
mod config;
mod configuration;
mod devices;
mod evaluate;
mod harness;
mod launch;
mod on_policy;
mod own_tasks;
mod plan;
mod recipes;
mod refusals;
mod resume;
mod smoke;
mod stages;
mod studies;
