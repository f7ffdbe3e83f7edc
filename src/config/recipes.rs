//! The recipes that come with the program, and where each of their settings comes from.
//!
//! A recipe of something published says behind every value where it stands: `# [paper table 3] a remark`. The words in brackets begin
//! with one of [`Source`]'s; after a colon stands a reason.

use std::fmt;

use serde::Serialize;

use super::text::Text;

/// Name and text of every recipe, the default first.
pub const RECIPES: [(&str, &str); 8] = [
    ("quickstart", include_str!("../../recipes/quickstart.toml")),
    ("smoke", include_str!("../../recipes/smoke.toml")),
    ("deepswe", include_str!("../../recipes/deepswe.toml")),
    ("nebius", include_str!("../../recipes/nebius.toml")),
    ("nebius-rft", include_str!("../../recipes/nebius-rft.toml")),
    ("nebius-stage1", include_str!("../../recipes/nebius-stage1.toml")),
    ("nebius-stage2", include_str!("../../recipes/nebius-stage2.toml")),
    ("dapo", include_str!("../../recipes/dapo.toml")),
];

/// Recipes of our own, whose comments name no sources.
pub const OWN: [&str; 2] = ["quickstart", "smoke"];

pub fn recipe(name: &str) -> Option<&'static str> {
    RECIPES.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}

/// What a recipe says of itself: the comment at its head, line by line.
pub fn about(text: &str) -> Vec<&str> {
    text.lines().map_while(|line| line.strip_prefix('#')).map(str::trim).collect()
}

/// Who says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// The paper.
    Paper,
    /// The model card.
    Card,
    /// What the authors wrote on the web.
    Blog,
    /// The released training script.
    Script,
    /// A default of the trainer that the script runs in.
    Trainer,
    /// A configuration that others published for it.
    Example,
    /// Nobody: the value is ours.
    Unstated,
    /// We decided otherwise, or it is about this program alone.
    Ours,
}

impl Source {
    const ALL: [Source; 8] = [
        Source::Paper,
        Source::Card,
        Source::Blog,
        Source::Script,
        Source::Trainer,
        Source::Example,
        Source::Unstated,
        Source::Ours,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Source::Paper => "paper",
            Source::Card => "card",
            Source::Blog => "blog",
            Source::Script => "script",
            Source::Trainer => "trainer",
            Source::Example => "example",
            Source::Unstated => "unstated",
            Source::Ours => "ours",
        }
    }

    /// How a table marks it: `?` not stated, `*` our choice.
    pub fn mark(self) -> &'static str {
        match self {
            Source::Unstated => "?",
            Source::Ours => "*",
            _ => "",
        }
    }
}

/// A source as a comment gives it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cited {
    pub source: Source,
    /// `table 3`, or empty.
    pub place: String,
    /// The reason or the remark, or empty.
    pub note: String,
}

impl fmt::Display for Cited {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.source.name())?;
        if self.place.is_empty() { Ok(()) } else { write!(formatter, " {}", self.place) }
    }
}

impl Cited {
    /// Reads `[paper table 3] remark`, `[ours: reason]`. None if the comment is not of that form, or a choice of ours gives no reason.
    pub fn read(comment: &str) -> Option<Cited> {
        let (inside, remark) = comment.strip_prefix('[')?.split_once(']')?;
        let (name, reason) = inside.split_once(':').unwrap_or((inside, ""));
        let (word, place) = name.split_once(' ').unwrap_or((name, ""));
        let source = Source::ALL.into_iter().find(|source| source.name() == word)?;
        let note = [reason.trim(), remark.trim()].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("; ");
        (source.mark().is_empty() || !reason.trim().is_empty()).then(|| Cited { source, place: place.trim().into(), note })
    }
}

/// A setting that a recipe gives.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Setting {
    /// Its whole name.
    pub key: String,
    /// In TOML.
    pub value: String,
    #[serde(flatten)]
    pub cited: Option<Cited>,
    #[serde(skip)]
    pub line: usize,
}

/// Every setting of a recipe, in the order of its lines.
///
/// # Errors
/// The text is no TOML.
pub fn settings(text: &str) -> Result<Vec<Setting>, Vec<String>> {
    let Text { table, places } = Text::read(text)?;
    let mut found = Vec::new();
    super::text::each_value("", &toml::Value::Table(table), &mut |key, value| {
        if let Some(place) = places.get(key) {
            let cited = place.comment.as_deref().and_then(Cited::read);
            found.push(Setting { key: key.to_owned(), value: super::text::written(value), cited, line: place.line });
        }
    });
    found.sort_by_key(|setting| setting.line);
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_name_their_source() {
        let read = |comment| Cited::read(comment).map(|cited| (cited.source, cited.place, cited.note));
        assert_eq!(read("[paper table 3] T_max"), Some((Source::Paper, "table 3".into(), "T_max".into())));
        assert_eq!(read("[script]"), Some((Source::Script, String::new(), String::new())));
        assert_eq!(read("[unstated: verl's] more"), Some((Source::Unstated, String::new(), "verl's; more".into())));
        for wrong in ["script", "[scribt]", "[ours]", "[unstated] why", "", "[paper"] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn every_setting_of_a_published_recipe_has_a_source() {
        for (name, text) in RECIPES.iter().filter(|(name, _)| !OWN.contains(name)) {
            let settings = settings(text).unwrap();
            assert!(settings.len() > 20 && !about(text).is_empty(), "{name}");
            for Setting { key, cited, line, .. } in settings {
                assert!(cited.is_some(), "recipes/{name}.toml:{line}: {key} has no source");
            }
        }
    }
}
