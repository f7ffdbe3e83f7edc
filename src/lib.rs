//! `learner` trains Qwen coding agents with reinforcement learning. This file is the map of the house: rooms are listed by
//! floor, an import runs only downward, and `tests/house.rs` holds the code to this order.

// Floor 0: words, maths, devices, text, connections.
pub mod algorithm;
pub mod device;
pub mod text;
pub mod types;
pub mod wire;

// Floor 1: the model, how ranks speak to each other, where programs run, what there is to solve.
pub mod collectives;
pub mod model;
pub mod sandbox;
pub mod task;

// Floor 2: many ranks, where tokens come from, what an answer is worth.
pub mod engine;
pub mod grader;
pub mod parallel;

// Floor 3: the agent and its episode.
pub mod agent;

// Floor 4: learning from episodes, measuring a policy.
pub mod evaluate;
pub mod train;

// Floor 5: what a run strings together.
pub mod stage;

// Floor 6: the run file, what people see, the command line.
pub mod cli;
pub mod config;
pub mod report;
