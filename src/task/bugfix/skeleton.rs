//! What a skeleton is: the text of a small program with names to choose and places that can be wrong.

use super::inputs::Input;

/// A family of tasks that differ in names, in which of several right values a place has, and in the bug.
///
/// In `files` and `issue`, `$name` stands for a chosen name and `@slot` for the value of a slot (in the issue: its words). The
/// function under test is always `$f`.
#[derive(Debug)]
pub struct Skeleton {
    pub name: &'static str,
    /// Path and text of each file.
    pub files: &'static [(&'static str, &'static str)],
    /// What the function is meant to do.
    pub issue: &'static str,
    /// Pool of each `$name`; no two placeholders of a task get the same name.
    pub names: &'static [(&'static str, &'static [&'static str])],
    pub slots: &'static [SlotTemplate],
    /// The arguments of `$f`: placeholder and what to draw.
    pub arguments: &'static [(&'static str, Input)],
}

/// A place in one line of one file.
#[derive(Debug)]
pub struct SlotTemplate {
    pub name: &'static str,
    pub kind: Kind,
    /// Code and words of each value; the code may hold `$names`.
    pub values: &'static [(&'static str, &'static str)],
    /// How many of `values`, from the first, may be the right one. Any other value may be the wrong one.
    pub rights: usize,
}

/// What sort of mistake a wrong value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Constant,
    Comparison,
    Operator,
    Variable,
    Boolean,
    Index,
    Negation,
    Method,
    Bound,
    Slice,
    SwappedArguments,
    MissingStep,
    WrongInitial,
    EarlyReturn,
    Condition,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Kind::Constant => "constant",
            Kind::Comparison => "comparison",
            Kind::Operator => "operator",
            Kind::Variable => "variable",
            Kind::Boolean => "boolean",
            Kind::Index => "index",
            Kind::Negation => "negation",
            Kind::Method => "method",
            Kind::Bound => "bound",
            Kind::Slice => "slice",
            Kind::SwappedArguments => "swapped_arguments",
            Kind::MissingStep => "missing_step",
            Kind::WrongInitial => "wrong_initial",
            Kind::EarlyReturn => "early_return",
            Kind::Condition => "condition",
        }
    }
}

/// A slot whose first value alone is right; words are not needed, since the issue need not tell it apart.
pub const fn fixed(name: &'static str, kind: Kind, values: &'static [(&'static str, &'static str)]) -> SlotTemplate {
    SlotTemplate { name, kind, values, rights: 1 }
}

/// A slot each of whose values can be the right one; the issue says which.
pub const fn free(name: &'static str, kind: Kind, values: &'static [(&'static str, &'static str)]) -> SlotTemplate {
    SlotTemplate { name, kind, values, rights: values.len() }
}

pub const COMPARISONS: &[(&str, &str)] = &[(">", "above"), (">=", "at least"), ("<", "below"), ("<=", "at most")];
pub const OPERATORS: &[(&str, &str)] = &[("+", "plus"), ("-", "minus"), ("*", "times")];

/// Replaces each `$name` and `@slot` of `template` by what `value` gives for the placeholder with its mark; unknown
/// placeholders stay, so that a test can find them.
pub fn fill(template: &str, value: impl Fn(&str) -> Option<String>) -> String {
    let mut text = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(at) = rest.find(['$', '@']) {
        text.push_str(&rest[..at]);
        let end =
            rest[at + 1..].find(|c: char| !c.is_ascii_alphanumeric() && c != '_').map_or(rest.len(), |length| at + 1 + length);
        match value(&rest[at..end]) {
            Some(replacement) => text.push_str(&replacement),
            None => text.push_str(&rest[at..end]),
        }
        rest = &rest[end..];
    }
    text.push_str(rest);
    text
}
