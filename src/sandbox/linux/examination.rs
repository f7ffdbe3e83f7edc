//! What a run of Python tests is told, in two parts: what may lie in the memory of the code under test, and what may not.

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde_json::json;

use super::supervise::Launched;
use super::wire;
use crate::sandbox::TestRequest;

/// The program that runs tests; one text, since it is handed to the interpreter as an argument.
pub const RUNNER: &str = concat!(include_str!("plain.py"), include_str!("separate.py"), include_str!("runner.py"));

/// Bytes that a socket takes at once, with room to spare.
const HELD_BY_THE_LINE: usize = 64 << 10;

/// What only the process that runs the tests gets to know.
pub struct Examination<'a> {
    pub request: &'a TestRequest,
    pub nonce: &'a str,
}

impl Examination<'_> {
    fn separate(&self) -> bool {
        self.request.runner.is_separate()
    }

    /// The tests have data files, which must lie somewhere out of the code's reach.
    pub fn hides_files(&self) -> bool {
        self.separate() && self.request.test_files.keys().any(|path| !path.ends_with(".py"))
    }

    /// What may be known before the code under test has a process of its own. `readable`: the machine's directories that every
    /// run may read.
    pub fn arrangement(&self, readable: &[PathBuf]) -> serde_json::Value {
        let readable = if self.hides_files() { readable } else { &[] };
        json!({"separate": self.separate(), "hidden": self.hides_files(), "removed": self.request.removed, "readable": readable})
    }

    /// Tells a run what to examine. One that could not start has closed its end; the supervisor then reads why. What the line
    /// cannot hold waits in a thread, since the run reads it only when it is set up, and the caller may have a part in that.
    pub fn send(&self, launched: &Launched) {
        let Some(evidence) = &launched.evidence else { return };
        let message = self.to_json();
        let long = message.to_string().len() > HELD_BY_THE_LINE;
        match evidence.try_clone() {
            Ok(evidence) if long => drop(std::thread::spawn(move || wire::send(evidence, &message, &[]))),
            _ => drop(wire::send(evidence, &message, &[])),
        }
    }

    fn to_json(&self) -> serde_json::Value {
        // Names of modules at the top of the code: `x.py` and directories.
        let name =
            |path: &String| path.split_once('/').map_or(path.strip_suffix(".py"), |(top, _)| Some(top)).map(str::to_string);
        let mut code: BTreeSet<String> = self.request.files.keys().filter_map(name).collect();
        for entry in self.request.tree.iter().flat_map(|tree| std::fs::read_dir(tree.path()).into_iter().flatten().flatten()) {
            let directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
            let path = format!("{}{}", entry.file_name().to_string_lossy(), if directory { "/" } else { "" });
            code.extend(name(&path));
        }
        json!({"files": self.request.test_files, "tests": self.request.tests, "nonce": self.nonce, "code": code})
    }
}
