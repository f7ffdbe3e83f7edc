//! Unified diffs over several files.

use crate::types::{Task, Workspace};

use super::TaskError;

/// The files of `task` with its gold patch applied.
pub fn apply_gold(task: &Task) -> Result<Workspace, TaskError> {
    apply_patch(&task.files, &task.gold_patch)
        .map_err(|reason| TaskError::Invalid { id: task.id.clone(), reason: format!("field \"gold_patch\" {reason}") })
}

/// `files` with `patch` applied; the message says what does not fit. A file of `--- /dev/null` is created, one of
/// `+++ /dev/null` removed.
pub fn apply_patch(files: &Workspace, patch: &str) -> Result<Workspace, String> {
    let mut result = files.clone();
    for section in sections(patch)? {
        let parsed = diffy::Patch::from_str(&section.text).map_err(|error| format!("is not a unified diff: {error}"))?;
        let path = section.path();
        let before = match &section.old {
            Some(old) => result.get(old).ok_or_else(|| format!("changes {old}, which is not among the files"))?.clone(),
            None if result.contains_key(path) => return Err(format!("creates {path}, which exists")),
            None => String::new(),
        };
        let after = diffy::apply(&before, &parsed).map_err(|error| format!("does not apply to {path}: {error}"))?;
        if let Some(old) = &section.old {
            result.remove(old);
        }
        if let Some(new) = &section.new {
            result.insert(new.clone(), after);
        }
    }
    Ok(result)
}

/// Every path that `patch` changes, creates or removes.
pub fn touched_paths(patch: &str) -> Result<Vec<String>, String> {
    Ok(sections(patch)?.into_iter().flat_map(|section| section.old.into_iter().chain(section.new)).collect())
}

/// The part of a diff about one file; a path is absent where the diff says `/dev/null`.
struct Section {
    old: Option<String>,
    new: Option<String>,
    text: String,
}

impl Section {
    fn path(&self) -> &str {
        self.new.as_deref().or(self.old.as_deref()).unwrap_or("/dev/null")
    }
}

/// Cuts a diff at its `---`/`+++` headers. Lines are counted by the hunk headers, so that a removed line that itself begins with
/// `-- ` is not taken for a header.
fn sections(patch: &str) -> Result<Vec<Section>, String> {
    let mut sections: Vec<Section> = Vec::new();
    let (mut old_left, mut new_left) = (0usize, 0usize);
    let mut lines = patch.split_inclusive('\n').peekable();
    while let Some(line) = lines.next() {
        if old_left > 0 || new_left > 0 || line.starts_with('\\') {
            match line.as_bytes().first() {
                Some(b'-') => old_left = old_left.saturating_sub(1),
                Some(b'+') => new_left = new_left.saturating_sub(1),
                Some(b'\\') => {}
                _ => {
                    old_left = old_left.saturating_sub(1);
                    new_left = new_left.saturating_sub(1);
                }
            }
        } else if let Some(old) = line.strip_prefix("--- ") {
            let new = lines.peek().and_then(|next| next.strip_prefix("+++ ")).ok_or("has a --- line without a +++ line")?;
            let (old, new) = (header_path(old), header_path(new));
            sections.push(Section { old, new, text: String::new() });
            let section = sections.last_mut().ok_or("is empty")?;
            section.text.push_str(line);
            section.text.push_str(lines.next().unwrap_or_default());
            continue;
        } else if line.starts_with("@@") {
            (old_left, new_left) =
                hunk_lengths(line).ok_or_else(|| format!("is not a unified diff: bad hunk header {:?}", line.trim_end()))?;
        } else {
            // `diff --git`, `index`, mode lines and text between the files.
            continue;
        }
        sections.last_mut().ok_or("has a hunk before any --- line")?.text.push_str(line);
    }
    if sections.is_empty() {
        return Err(if patch.trim().is_empty() { "is empty" } else { "is not a unified diff: no --- and +++ lines" }.into());
    }
    match sections.iter().find(|section| section.text.lines().count() == 2) {
        Some(bare) => Err(format!("is not a unified diff: no hunk for {}", bare.path())),
        None => Ok(sections),
    }
}

/// The path of a header line without `a/`, `b/` and a trailing time stamp.
fn header_path(text: &str) -> Option<String> {
    let path = text.trim_end_matches(['\n', '\r']).split('\t').next().unwrap_or_default();
    let path = path.strip_prefix("a/").or_else(|| path.strip_prefix("b/")).unwrap_or(path);
    if path == "/dev/null" { None } else { Some(path.to_string()) }
}

/// `@@ -1,3 +1,4 @@` to (3, 4); a length left out is 1.
fn hunk_lengths(header: &str) -> Option<(usize, usize)> {
    let (old, rest) = header.strip_prefix("@@ -")?.split_once(" +")?;
    let (new, _) = rest.split_once(" @@")?;
    let length = |range: &str| range.split_once(',').map_or(Some(1), |(_, length)| length.parse().ok());
    Some((length(old)?, length(new)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workspace(files: &[(&str, &str)]) -> Workspace {
        files.iter().map(|(path, text)| (path.to_string(), text.to_string())).collect()
    }

    #[test]
    fn several_files_are_changed_created_and_removed() {
        let files = workspace(&[("a.py", "one\n-- two\nthree\n"), ("old.py", "gone\n")]);
        let patch = "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1,3 +1,3 @@\n one\n--- two\n+++ two\n three\n\
                     --- a/old.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-gone\n--- /dev/null\n+++ b/new.py\n@@ -0,0 +1 @@\n+fresh\n";
        let expected = workspace(&[("a.py", "one\n++ two\nthree\n"), ("new.py", "fresh\n")]);
        assert_eq!(apply_patch(&files, patch), Ok(expected));
        assert_eq!(touched_paths(patch).unwrap(), ["a.py", "a.py", "old.py", "new.py"]);
    }

    #[test]
    fn what_does_not_fit_is_said() {
        let files = workspace(&[("a.py", "one\n")]);
        let reason = |patch: &str| apply_patch(&files, patch).unwrap_err();
        assert!(reason(" \n").contains("is empty"));
        assert!(reason("replace one by two\n").contains("not a unified diff"));
        assert!(reason("--- a/a.py\n+++ b/a.py\n").contains("no hunk for a.py"));
        assert!(reason("--- a/b.py\n+++ b/b.py\n@@ -1 +1 @@\n-x\n+y\n").contains("b.py, which is not among the files"));
        assert!(reason("--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-two\n+y\n").contains("does not apply to a.py"));
        assert!(reason("--- a/a.py\n+++ b/a.py\n@@ nonsense @@\n-two\n+y\n").contains("not a unified diff"));
    }
}
