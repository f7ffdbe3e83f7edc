//! A tiny evaluator of the Python that task skeletons are written in.
//!
//! The generator has to know what the right and the wrong version of a function return before any sandbox runs them, the same
//! on every machine. This room runs both: module-level functions; `if`, `for`, `while`, assignments, `return`, `break`, `continue`;
//! integers, strings, lists, tuples, dictionaries; the builtins and methods the skeletons use. Anything else is refused
//! ([`Fault::Beyond`]), never guessed. Every generated task is proven again by the real interpreter in the sandbox.

mod builtins;
mod evaluate;
mod parse;
mod value;

pub use evaluate::{Fault, Program};
pub use value::Value;
