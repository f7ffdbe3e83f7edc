//! Unified diffs over several files, plain or as git makes them.
//!
//! Applied in memory by this code alone: no tool is started, nothing is written. Symbolic links, submodules, copies and binary
//! contents are refused, since a [`Workspace`] holds plain text files.

use crate::types::{Task, Workspace};

use super::TaskError;
use super::repository::file_as_found;

/// The files of `task` with its gold patch applied; of a repository in a directory, those that the patch touches.
pub fn apply_gold(task: &Task) -> Result<Workspace, TaskError> {
    patched(task, &task.gold_patch)
        .map_err(|reason| TaskError::Invalid { id: task.id.clone(), reason: format!("field \"gold_patch\" {reason}") })
}

fn patched(task: &Task, patch: &str) -> Result<Workspace, String> {
    let mut files = task.files.clone();
    for path in touched_paths(patch)? {
        if let Some(text) = file_as_found(task, &path)? {
            files.insert(path, text);
        }
    }
    apply_patch(&files, patch)
}

/// `files` with `patch` applied; the message says what does not fit. A file of `--- /dev/null` is created, one of
/// `+++ /dev/null` removed.
pub fn apply_patch(files: &Workspace, patch: &str) -> Result<Workspace, String> {
    let mut result = files.clone();
    for section in sections(patch)? {
        let path = section.path();
        let before = match &section.old {
            Some(old) => result.get(old).ok_or_else(|| format!("changes {old}, which is not among the files"))?.clone(),
            None if result.contains_key(path) => return Err(format!("creates {path}, which exists")),
            None => String::new(),
        };
        let after = if section.hunks == 0 {
            before
        } else {
            let parsed = diffy::Patch::from_str(&section.text).map_err(|error| format!("is not a unified diff: {error}"))?;
            diffy::apply(&before, &parsed).map_err(|error| format!("does not apply to {path}: {error}"))?
        };
        if section.new.is_none() && !after.is_empty() {
            return Err(format!("removes {path} but leaves some of its lines"));
        }
        if let Some(old) = &section.old {
            result.remove(old);
        }
        if let Some(new) = &section.new {
            if section.old.as_ref() != Some(new) && result.contains_key(new) {
                return Err(format!("moves a file to {new}, which exists"));
            }
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
#[derive(Default)]
struct Section {
    old: Option<String>,
    new: Option<String>,
    /// The hunks below a header without the names, which stand above and may be quoted.
    text: String,
    hunks: usize,
    /// Git has said in words what is done, so a section without hunks makes sense.
    described: bool,
}

impl Section {
    fn path(&self) -> &str {
        self.new.as_deref().or(self.old.as_deref()).unwrap_or("/dev/null")
    }
}

/// Cuts a diff into its files. Lines of a hunk are counted by its header, so that a removed line that itself begins with
/// `-- ` is not taken for a header.
fn sections(patch: &str) -> Result<Vec<Section>, String> {
    let mut sections: Vec<Section> = Vec::new();
    let (mut old_left, mut new_left) = (0usize, 0usize);
    // Between `diff --git` and the hunks.
    let mut in_git_header = false;
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
        } else if let Some(names) = line.strip_prefix("diff --git ") {
            let path = same_name(names.trim_end());
            sections.push(Section { old: path.clone(), new: path, ..Section::default() });
            in_git_header = true;
            continue;
        } else if let Some(old) = line.strip_prefix("--- ") {
            let new = lines.peek().and_then(|next| next.strip_prefix("+++ ")).ok_or("has a --- line without a +++ line")?;
            let (old, new) = (header_path(old)?, header_path(new)?);
            // A header that git has announced, or the next file, where the one announced has no hunks.
            let announced =
                in_git_header && sections.last().is_some_and(|last| !last.described || (&last.old, &last.new) == (&old, &new));
            if !announced {
                sections.push(Section::default());
            }
            in_git_header = false;
            let section = sections.last_mut().ok_or("is empty")?;
            (section.old, section.new) = (old, new);
            lines.next();
            section.text.push_str("--- old\n+++ new\n");
            continue;
        } else if line.starts_with("@@") {
            (old_left, new_left) =
                hunk_lengths(line).ok_or_else(|| format!("is not a unified diff: {:?} is no hunk header", line.trim_end()))?;
            in_git_header = false;
            let section = sections.last_mut().ok_or("is not a unified diff: it has a hunk before any file header")?;
            section.hunks += 1;
        } else if in_git_header {
            let section = sections.last_mut().ok_or("is empty")?;
            git_header_line(section, line.trim_end_matches(['\n', '\r']))?;
            continue;
        } else {
            if line.starts_with("Binary files ") || line.starts_with("GIT binary patch") {
                return Err("has binary contents".into());
            }
            continue; // what other tools write between files
        }
        if let Some(section) = sections.last_mut() {
            section.text.push_str(line);
        }
    }
    if old_left > 0 || new_left > 0 {
        return Err("ends in the middle of a hunk".into());
    }
    if sections.is_empty() {
        return Err(if patch.trim().is_empty() { "is empty" } else { "is not a unified diff" }.into());
    }
    for section in &sections {
        if section.hunks == 0 && !section.described {
            return Err(format!("has no hunk for {}", section.path()));
        }
        if section.old.is_none() && section.new.is_none() {
            return Err("has a file without a name".into());
        }
    }
    Ok(sections)
}

/// One line between `diff --git` and the hunks.
fn git_header_line(section: &mut Section, line: &str) -> Result<(), String> {
    if line.starts_with("Binary files ") || line.starts_with("GIT binary patch") {
        return Err(format!("has binary contents for {}", section.path()));
    }
    if line.starts_with("copy from ") || line.starts_with("copy to ") {
        return Err(format!("copies a file to {}, which is not supported", section.path()));
    }
    if let Some(old) = line.strip_prefix("rename from ") {
        (section.old, section.described) = (Some(unquoted(old)?), true);
    } else if let Some(new) = line.strip_prefix("rename to ") {
        (section.new, section.described) = (Some(unquoted(new)?), true);
    }
    for (words, made, removed) in
        [("new file mode ", true, false), ("deleted file mode ", false, true), ("new mode ", false, false)]
    {
        let Some(mode) = line.strip_prefix(words) else { continue };
        if !matches!(mode, "100644" | "100755" | "100664") {
            let what = if mode == "120000" { "a symbolic link" } else { "something that is no plain file" };
            return Err(format!("makes {} {what} (mode {mode})", section.path()));
        }
        section.described = true;
        if made {
            section.old = None;
        }
        if removed {
            section.new = None;
        }
    }
    Ok(())
}

/// The path of `a/PATH b/PATH`, where both are the same; otherwise later lines name them.
fn same_name(names: &str) -> Option<String> {
    if names.starts_with('"') {
        let (old, new) = names.split_once("\" \"")?;
        let (old, new) = (unquoted(&format!("{old}\"")).ok()?, unquoted(&format!("\"{new}")).ok()?);
        return (old.get(2..) == new.get(2..)).then(|| old.get(2..).map(str::to_string)).flatten();
    }
    let (old, new) = (names.get(..names.len() / 2)?, names.get(names.len() / 2 + 1..)?);
    let (old, new) = (old.strip_prefix("a/")?, new.strip_prefix("b/")?);
    (old == new).then(|| old.to_string())
}

/// The path of a header line without `a/`, `b/` and a trailing time stamp.
fn header_path(text: &str) -> Result<Option<String>, String> {
    let text = text.trim_end_matches(['\n', '\r']);
    let path = if text.starts_with('"') { unquoted(text)? } else { text.split('\t').next().unwrap_or_default().to_string() };
    let stripped = path.strip_prefix("a/").or_else(|| path.strip_prefix("b/")).unwrap_or(&path);
    Ok(if stripped == "/dev/null" { None } else { Some(stripped.to_string()) })
}

/// A name as git writes it: in quotes, with escapes as in C, if it holds anything unusual.
fn unquoted(text: &str) -> Result<String, String> {
    let Some(inside) = text.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')) else { return Ok(text.to_string()) };
    let wrong = || format!("has a badly quoted name: {text}");
    let mut bytes = Vec::new();
    let mut letters = inside.bytes();
    while let Some(letter) = letters.next() {
        if letter != b'\\' {
            bytes.push(letter);
            continue;
        }
        let escaped = letters.next().ok_or_else(wrong)?;
        bytes.push(match escaped {
            b'n' => b'\n',
            b't' => b'\t',
            b'r' => b'\r',
            b'"' | b'\\' => escaped,
            b'0'..=b'3' => {
                let digits = [escaped, letters.next().ok_or_else(wrong)?, letters.next().ok_or_else(wrong)?];
                let digits = std::str::from_utf8(&digits).map_err(|_| wrong())?;
                u8::from_str_radix(digits, 8).map_err(|_| wrong())?
            }
            _ => return Err(wrong()),
        });
    }
    String::from_utf8(bytes).map_err(|_| wrong())
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
    fn git_renames_modes_and_empty_files() {
        let files = workspace(&[("a.py", "one\n"), ("b.py", "two\nthree\n"), ("gone.py", ""), ("run.sh", "x\n")]);
        let patch = "diff --git a/a.py b/pkg/a b.py\nsimilarity index 100%\nrename from a.py\nrename to pkg/a b.py\n\
                     diff --git a/b.py b/c.py\nsimilarity index 50%\nrename from b.py\nrename to c.py\nindex 1..2 100644\n\
                     --- a/b.py\n+++ b/c.py\n@@ -1,2 +1,2 @@\n-two\n+zwei\n three\n\
                     diff --git a/gone.py b/gone.py\ndeleted file mode 100644\nindex e69de29..0000000\n\
                     diff --git a/pkg/__init__.py b/pkg/__init__.py\nnew file mode 100644\nindex 0000000..e69de29\n\
                     diff --git a/run.sh b/run.sh\nold mode 100644\nnew mode 100755\n\
                     diff --git \"a/\\303\\244.py\" \"b/\\303\\244.py\"\nnew file mode 100644\n--- /dev/null\n\
                     +++ \"b/\\303\\244.py\"\n@@ -0,0 +1 @@\n+four\n\\ No newline at end of file\n";
        let expected = workspace(&[
            ("pkg/a b.py", "one\n"),
            ("c.py", "zwei\nthree\n"),
            ("pkg/__init__.py", ""),
            ("run.sh", "x\n"),
            ("ä.py", "four"),
        ]);
        assert_eq!(apply_patch(&files, patch), Ok(expected));
    }

    #[test]
    fn a_plain_section_may_follow_one_without_hunks() {
        let files = workspace(&[("a.py", "one\n"), ("b.py", "two\n")]);
        let patch =
            "diff --git a/a.py b/c.py\nrename from a.py\nrename to c.py\n--- a/b.py\n+++ b/b.py\n@@ -1 +1 @@\n-two\n+zwei\n";
        assert_eq!(apply_patch(&files, patch), Ok(workspace(&[("b.py", "zwei\n"), ("c.py", "one\n")])));
    }

    /// Whatever a model writes is judged, never a panic.
    #[test]
    fn spoiled_patches_are_refused_or_applied() {
        let files = workspace(&[("a.py", "one\ntwo\nthree\n"), ("b.py", "x\n")]);
        let patch = "diff --git a/a.py b/c.py\nrename from a.py\nrename to c.py\n--- a/a.py\n+++ b/c.py\n@@ -1,3 +1,4 @@\n one\n\
                     -two\n+zwei\n+drei\n three\n--- a/b.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n\\ No newline at end of file\n";
        let pieces = [
            "@@ -0,0 +1,99999999999 @@\n",
            "--- ",
            "+++ b/",
            "\"a/\\",
            "9",
            "\n",
            "-",
            "+",
            " ",
            "diff --git ",
            "ä",
            "\r\n",
            "\0",
        ];
        let mut state = 1u64;
        let mut next = |below: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % below
        };
        for _ in 0..20_000 {
            let mut letters: Vec<char> = patch.chars().collect();
            for _ in 0..=next(4) {
                let start = next(letters.len());
                let end = (start + next(12)).min(letters.len());
                letters.splice(start..end, pieces[next(pieces.len())].chars());
            }
            let spoiled: String = letters.into_iter().collect();
            if let Err(reason) = apply_patch(&files, &spoiled) {
                assert!(!reason.is_empty(), "{spoiled}");
            }
        }
    }

    #[test]
    fn what_is_no_text_is_refused() {
        let files = workspace(&[("a.py", "one\n"), ("b.py", "")]);
        let reason = |patch: &str| apply_patch(&files, patch).unwrap_err();
        let git = |rest: &str| format!("diff --git a/x b/x\n{rest}");
        assert!(
            reason(&git("new file mode 120000\n--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+/etc\n")).contains("x a symbolic link")
        );
        assert!(reason(&git("new file mode 160000\n--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+S\n")).contains("no plain file"));
        assert!(
            reason(&git("new file mode 100644\nindex 0..1\nGIT binary patch\nliteral 1\n")).contains("binary contents for x")
        );
        assert!(reason(&git("index 0..1\nBinary files a/x and b/x differ\n")).contains("binary contents for x"));
        assert!(reason("Binary files a/x and b/x differ\n").contains("binary"));
        assert!(reason(&git("copy from a.py\ncopy to x\n")).contains("copies a file"));
        assert!(reason("diff --git a/a.py b/b.py\nrename from a.py\nrename to b.py\n").contains("b.py, which exists"));
        assert!(reason("--- a/a.py\n+++ b/a.py\n@@ -1,9 +1 @@\n-one\n").contains("middle of a hunk"));
        assert!(reason("diff --git \"a/\\9\" \"b/\\9\"\nrename from \"\\9\"\n").contains("badly quoted"));
        assert!(reason("@@ -1 +1 @@\n-one\n+two\n").contains("before any file header"));
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
