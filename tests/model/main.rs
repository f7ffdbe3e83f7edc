//! The model as a whole: sampling against scoring bit for bit, gradients against finite differences and Transformers, ranks, files.

mod files;
mod gradients;
mod invariance;
mod ranks;
mod support;
mod transformers;
mod yarn;
