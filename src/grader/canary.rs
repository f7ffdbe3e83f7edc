//! Tests that must fail, for runs in which the code under test shares a process with its tests.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};

use crate::sandbox::TestRequest;

/// Tests that were mixed in. If one of them is not reported as failed, whoever reports is not the runner.
pub struct Canaries {
    names: Vec<String>,
}

impl Canaries {
    /// Adds two tests that fail honestly, under names that nobody can foresee: one anywhere, one at the end, when all that the
    /// code will do to the runner has been done.
    pub fn mix_in(request: &mut TestRequest) -> Canaries {
        let anywhere = random() as usize % (request.tests.len() + 1);
        let names = [anywhere, request.tests.len() + 1].map(|place| {
            let (file, function) = (format!("test_{:08x}.py", random() as u32), format!("test_{:08x}", random() as u32));
            let (found, wanted) = (random() % 1000, random() % 1000 + 1000);
            let name = format!("{file}::{function}");
            request.test_files.insert(file, format!("def {function}():\n    assert [{found}] == [{wanted}]\n"));
            request.tests.insert(place, name.clone());
            name
        });
        Canaries { names: names.to_vec() }
    }

    /// Takes the mixed-in tests out of what was reported; whether all of them were seen to fail.
    pub fn have_failed(&self, outcomes: &mut BTreeMap<String, bool>) -> bool {
        let found: Vec<Option<bool>> = self.names.iter().map(|name| outcomes.remove(name)).collect();
        found.iter().all(|outcome| *outcome == Some(false))
    }
}

/// The standard hasher's keys come from the operating system.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
