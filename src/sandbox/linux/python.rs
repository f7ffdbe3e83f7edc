//! Finds a Python that can run in the sandbox.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::sandbox::SandboxError;

/// An interpreter, found behind whatever shim or virtual environment led to it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Python {
    pub executable: PathBuf,
    /// Where its libraries are.
    pub prefix: PathBuf,
    pub version: String,
}

/// Runs nothing of the user's site and no `sitecustomize`; writes no bytecode. Not `-I`: the hash seed must count.
pub const FLAGS: [&str; 3] = ["-S", "-s", "-B"];

const ASK: &str = "import sys; print(getattr(sys, '_base_executable', None) or sys.executable); print(sys.base_prefix); \
                   print('%d.%d.%d' % sys.version_info[:3]); print(int(sys.version_info >= (3, 9)))";

/// Every interpreter worth trying, in order: the one that is named, or those on PATH.
///
/// # Errors
/// Says what was found instead when the named one is not a Python 3.9 or later, or when there is none at all.
pub fn candidates(named: Option<&Path>) -> Result<Vec<Python>, SandboxError> {
    if let Some(path) = named {
        return ask(path)
            .map(|python| vec![python])
            .map_err(|found| SandboxError::Python(format!("{}: {found}", path.display())));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories = std::env::split_paths(&path);
    let (mut seen, mut found, mut refused) = (BTreeSet::new(), Vec::new(), Vec::new());
    for place in directories.map(|directory| directory.join("python3")) {
        if !place.is_file() || !seen.insert(place.clone()) {
            continue;
        }
        match ask(&place) {
            Ok(python) if found.contains(&python) => {}
            Ok(python) => found.push(python),
            Err(reason) => refused.push(format!("{}: {reason}", place.display())),
        }
    }
    if !found.is_empty() {
        Ok(found)
    } else if refused.is_empty() {
        Err(SandboxError::Python("none on PATH".to_string()))
    } else {
        Err(SandboxError::Python(refused.join("; ")))
    }
}

/// Asks an interpreter who it is.
fn ask(path: &Path) -> Result<Python, String> {
    let output = Command::new(path)
        .args(["-I", "-S", "-c", ASK])
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("cannot be run: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = text.lines().collect();
    let [executable, prefix, version, new_enough] = lines[..] else {
        return Err("does not answer like Python 3".to_string());
    };
    if new_enough != "1" {
        return Err(format!("is Python {version}, 3.9 or later is needed"));
    }
    let real = |path: &str| std::fs::canonicalize(path).map_err(|error| format!("{path}: {error}"));
    Ok(Python { executable: real(executable)?, prefix: real(prefix)?, version: version.to_string() })
}
