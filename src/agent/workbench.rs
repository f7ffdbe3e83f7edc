//! The files of one episode as the agent sees and changes them.
//!
//! The tree lives in the learner, not in the sandbox: a program that the agent starts gets a copy, so nothing it does can
//! change what is viewed, edited or handed in.

use std::collections::BTreeMap;

use super::tools::Call;
use crate::types::Workspace;

/// What a call leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Answer at once.
    Observe(String),
    /// Not a call that these files allow, with the reason.
    Refuse(String),
    /// Run the visible tests on [`Workbench::files`].
    RunTests,
    /// Grade [`Workbench::files`].
    Grade,
}

/// The original files and at most one pending edit for each.
///
/// An edit replaces a line of the ORIGINAL file and a new edit of that file replaces the earlier one, so that a wrong
/// guess needs no undoing.
#[derive(Clone, Debug)]
pub struct Workbench<'a> {
    original: &'a Workspace,
    edits: BTreeMap<&'a str, (usize, String)>,
}

impl<'a> Workbench<'a> {
    pub fn new(original: &'a Workspace) -> Workbench<'a> {
        Workbench { original, edits: BTreeMap::new() }
    }

    pub fn call(&mut self, call: &Call) -> Action {
        match call {
            Call::View { path: None } if self.original.len() != 1 => {
                Action::Observe(self.original.keys().cloned().collect::<Vec<_>>().join("\n"))
            }
            Call::View { path } => match self.find(path.as_deref()) {
                Ok(path) => Action::Observe(number_lines(&self.file(path))),
                Err(reason) => Action::Refuse(reason),
            },
            Call::Edit { path, line, text } => self.edit(path.as_deref(), *line, text),
            Call::Run => Action::RunTests,
            Call::Submit => Action::Grade,
        }
    }

    /// All files with the pending edits made.
    pub fn files(&self) -> Workspace {
        self.original.keys().map(|path| (path.clone(), self.file(path))).collect()
    }

    fn edit(&mut self, path: Option<&str>, line: usize, text: &str) -> Action {
        let path = match self.find(path) {
            Ok(path) => path,
            Err(reason) => return Action::Refuse(reason),
        };
        let lines = self.original[path].lines().count();
        if line == 0 || line > lines {
            return Action::Refuse(format!("{path} has no line {line}: it has lines 1 to {lines}"));
        }
        self.edits.insert(path, (line, text.to_owned()));
        Action::Observe("done".into())
    }

    fn find(&self, path: Option<&str>) -> Result<&'a str, String> {
        match path {
            Some(path) => match self.original.get_key_value(path) {
                Some((path, _)) => Ok(path),
                None => Err(format!("no file {path:?}")),
            },
            None if self.original.len() == 1 => Ok(self.original.keys().next().map(String::as_str).unwrap_or_default()),
            None => Err("which file? add <parameter=path>".into()),
        }
    }

    fn file(&self, path: &str) -> String {
        let original = &self.original[path];
        let Some((line, text)) = self.edits.get(path) else { return original.clone() };
        let mut edited = String::with_capacity(original.len() + text.len());
        for (index, old) in original.split_inclusive('\n').enumerate() {
            if index + 1 == *line {
                edited.push_str(text);
                if old.ends_with('\n') {
                    edited.push('\n');
                }
            } else {
                edited.push_str(old);
            }
        }
        edited
    }
}

/// `N|text` for each line, counted from 1: the form in which edits are given back.
fn number_lines(text: &str) -> String {
    text.lines().enumerate().map(|(index, line)| format!("{}|{line}", index + 1)).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one_file() -> Workspace {
        Workspace::from([("solution.py".into(), "def f(a):\n    return a + 1\n".into())])
    }

    fn edit(line: usize, text: &str) -> Call {
        Call::Edit { path: None, line, text: text.into() }
    }

    #[test]
    fn a_new_edit_replaces_the_earlier_one() {
        let original = one_file();
        let mut bench = Workbench::new(&original);
        assert_eq!(bench.call(&Call::View { path: None }), Action::Observe("1|def f(a):\n2|    return a + 1".into()));
        assert_eq!(bench.call(&edit(1, "def f(b):")), Action::Observe("done".into()));
        assert_eq!(bench.call(&edit(2, "    return a - 1")), Action::Observe("done".into()));
        assert_eq!(bench.files()["solution.py"], "def f(a):\n    return a - 1\n");
        assert_eq!(bench.call(&Call::View { path: None }), Action::Observe("1|def f(a):\n2|    return a - 1".into()));
    }

    #[test]
    fn edits_outside_the_file_are_refused_and_change_nothing() {
        let original = one_file();
        let mut bench = Workbench::new(&original);
        for line in [0, 3, usize::MAX] {
            assert!(matches!(bench.call(&edit(line, "x")), Action::Refuse(_)));
        }
        assert!(matches!(bench.call(&Call::View { path: Some("../etc/passwd".into()) }), Action::Refuse(_)));
        assert_eq!(bench.files(), original);
    }

    #[test]
    fn several_files_need_a_path_and_a_bare_view_lists_them() {
        let original = Workspace::from([("a.py".into(), "1".into()), ("b.py".into(), "x\ny".into())]);
        let mut bench = Workbench::new(&original);
        assert_eq!(bench.call(&Call::View { path: None }), Action::Observe("a.py\nb.py".into()));
        assert!(matches!(bench.call(&edit(1, "2")), Action::Refuse(_)));
        bench.call(&Call::Edit { path: Some("a.py".into()), line: 1, text: "2".into() });
        bench.call(&Call::Edit { path: Some("b.py".into()), line: 2, text: "z".into() });
        assert_eq!(bench.files(), Workspace::from([("a.py".into(), "2".into()), ("b.py".into(), "x\nz".into())]));
    }
}
