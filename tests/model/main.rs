//! The model as a whole: sampling against scoring bit for bit, gradients against finite differences and Transformers, files.

mod files;
mod gradients;
mod invariance;
mod support;
mod transformers;
