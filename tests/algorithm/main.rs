//! The maths of training as a whole: cotangents against finite differences, invariances, and what verl and TRL compute.

mod gradients;
mod peers;
mod properties;
mod support;
