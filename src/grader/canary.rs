//! Tests that must fail, for runs in which the code under test shares a process with its tests.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};

use crate::sandbox::TestRequest;

/// A test that was mixed in. If it is not reported as failed, whoever reports is not the runner.
pub struct Canary {
    name: String,
}

impl Canary {
    /// Adds a test that fails honestly, under a name and at a place that nobody can foresee.
    pub fn mix_in(request: &mut TestRequest) -> Canary {
        let file = format!("test_{:08x}.py", random() as u32);
        let name = format!("{file}::test_{:08x}", random() as u32);
        let function = name.rsplit("::").next().unwrap_or_default();
        let (found, wanted) = (random() % 1000, random() % 1000 + 1000);
        request.test_files.insert(file, format!("def {function}():\n    assert [{found}] == [{wanted}]\n"));
        let place = random() as usize % (request.tests.len() + 1);
        request.tests.insert(place, name.clone());
        Canary { name }
    }

    /// Takes the canary out of what was reported; whether it was seen to fail.
    pub fn has_failed(&self, outcomes: &mut BTreeMap<String, bool>) -> bool {
        outcomes.remove(&self.name) == Some(false)
    }
}

/// The standard hasher's keys come from the operating system.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
