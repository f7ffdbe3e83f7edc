//! What of the solution an agent could find without solving: compiled copies, later commits, a second copy of the mended file.

use std::fs;
use std::path::Path;

use super::answer::Answer;
use crate::types::Task;

/// Entries of a repository that are looked at; more are left unseen, and that is said.
const MOST_ENTRIES: usize = 100_000;
/// Larger files are no copies of source.
const MOST_BYTES: u64 = 1 << 20;

/// One line for each thing that should not be in what the agent gets to see.
pub fn audit(task: &Task, mended: &Answer) -> Vec<String> {
    let mut problems = Vec::new();
    // A short file is equal to others by chance.
    let solutions: Vec<(&String, &str)> = mended
        .changed
        .iter()
        .filter(|(path, text)| path.ends_with(".py") && text.len() >= 40)
        .map(|(path, text)| (path, text.trim()))
        .collect();
    let mut copies = |path: &str, text: &str| {
        for (solved, _) in solutions.iter().filter(|(solved, solution)| *solved != path && text.contains(solution)) {
            problems.push(format!("{path} holds the mended text of {solved}"));
        }
    };
    for (path, text) in task.files.iter().chain(&task.visible_tests) {
        copies(path, text);
    }
    let Some(repository) = &task.repository else {
        problems.extend(task.files.keys().filter_map(|path| suspicious(Path::new(path))));
        return problems;
    };
    let (mut waiting, mut seen) = (vec![repository.clone()], 0);
    let mut found = Vec::new();
    while let Some(directory) = waiting.pop() {
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            seen += 1;
            let (path, kind) = (entry.path(), entry.file_type());
            let Ok(relative) = path.strip_prefix(repository) else { continue };
            if let Some(problem) = suspicious(relative) {
                found.push(problem);
                continue;
            }
            match kind {
                Ok(kind) if kind.is_dir() && seen < MOST_ENTRIES => waiting.push(path),
                Ok(kind) if kind.is_file() && entry.metadata().is_ok_and(|found| found.len() <= MOST_BYTES) => {
                    if let Ok(text) = fs::read_to_string(&path) {
                        copies(&relative.to_string_lossy(), &text);
                    }
                }
                _ => {}
            }
        }
    }
    if seen >= MOST_ENTRIES {
        found.push(format!("the repository has more than {MOST_ENTRIES} entries: not all of them were looked at"));
    }
    problems.extend(found);
    problems.sort();
    problems.dedup();
    problems
}

/// A place where the solution may lie in another form.
fn suspicious(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_string_lossy();
    let shown = path.display();
    if name.ends_with(".pyc") || name == "__pycache__" {
        return Some(format!("{shown} is compiled code, which may be that of the mended files"));
    }
    let git = path.components().any(|part| part.as_os_str() == ".git");
    git.then(|| format!("{shown} is a git directory, which may hold later commits"))
}
