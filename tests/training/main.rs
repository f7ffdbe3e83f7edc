//! Training on one rank and on several, which are threads of this process.

mod checkpoints;
mod losses;
mod run;
mod stages;
mod steps;
mod support;
