//! `docs/configuration.md` is what the code says: keys and kinds from the settings types, defaults from their `Default`,
//! explanations from their doc comments. `BLESS=1 cargo test --test program configuration` writes it anew.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use learner::config::keys::{Key, keys};
use learner::config::shape::Shape;

#[test]
fn the_page_of_settings_is_what_the_code_says() {
    let (page, path) = (page(), root().join("docs/configuration.md"));
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(path, page).unwrap();
        return;
    }
    let written = std::fs::read_to_string(path).unwrap();
    let differs = page.lines().zip(written.lines()).find(|(new, old)| new != old);
    assert!(page == written, "docs/configuration.md is old; write it anew with BLESS=1. First difference: {differs:?}");
}

#[test]
fn every_key_is_explained_on_the_page() {
    for key in keys() {
        let explanation = key.explanation().unwrap_or_else(|| panic!("{} is not on the page", key.name));
        assert!(explanation.len() > 3 && !explanation.contains("[`"), "{}: {explanation:?}", key.name);
    }
}

const HEAD: &str = "\
# The run file

A run file says what a run does, in TOML. Every key has a default, so that a file holds only what differs; `learner config show`
prints all of them as they come out. Layers lie on top of each other, key by key: a recipe (`--recipe`, otherwise the quick start), then
each `--config FILE` in order, then flags such as `--model`, then each `--set KEY=VALUE`. The word `off` removes an optional setting
that an earlier layer has set.

`learner config check` lists everything that is wrong at once; `learner config diff A B` shows where two recipes or files differ;
`learner config keys WORD` prints the rows below that hold a word.

This page is made from the code (the settings types, their defaults and their doc comments) by `tests/program/configuration.rs`.
";

fn page() -> String {
    let mut sources = Sources::default();
    let mut page = HEAD.to_owned();
    for key in keys() {
        let section = !key.name.contains('.');
        let explanation = sources.explain(&key);
        if section {
            write!(page, "\n## `{}`\n\n", key.name).unwrap();
            page.push_str("| Key | Holds | Default | What it is |\n|---|---|---|---|\n");
        }
        let default = match key.default() {
            Ok(value) => format!("`{}`", value.replace('\n', " ")),
            Err(word) => word.to_owned(),
        };
        let holds = key.field.describe().replace('"', "`");
        let row = [format!("`{}`", key.name), holds, default, explanation].map(|cell| cell.replace('|', "\\|"));
        writeln!(page, "| {} |", row.join(" | ")).unwrap();
    }
    page
}

/// The doc comments of the source files met so far.
#[derive(Default)]
struct Sources(BTreeMap<PathBuf, String>);

impl Sources {
    /// What a field's doc comment says, or that of its type; and of a choice, what each word means.
    fn explain(&mut self, key: &Key) -> String {
        let name = key.name.rsplit('.').next().unwrap();
        let of_field = self.item(key.of).fields.get(name).cloned();
        let (of_type, words) = match &key.field.shape {
            Shape::Table(table) => (Some(self.item(table.type_name).doc), Vec::new()),
            Shape::List(of) => match &of.shape {
                Shape::Table(table) => (Some(self.item(table.type_name).doc), Vec::new()),
                _ => (None, Vec::new()),
            },
            Shape::Word(words, type_name) => {
                let item = self.item(type_name);
                let word = |word: &&str| {
                    item.fields.get(&word.replace('_', "")).filter(|doc| !doc.is_empty()).map(|doc| format!("`{word}`: {doc}"))
                };
                (Some(item.doc.clone()), words.iter().filter_map(word).collect())
            }
            _ => (None, Vec::new()),
        };
        let doc = of_field.filter(|doc| !doc.is_empty()).or(of_type).unwrap_or_default();
        assert!(!doc.is_empty(), "{} ({}): give it a doc comment", key.name, key.of);
        [vec![doc], words].concat().join("<br>")
    }

    fn item(&mut self, type_name: &str) -> Item {
        let (module, name) = type_name.rsplit_once("::").unwrap();
        let path = Path::new("src").join(module.split("::").skip(1).collect::<PathBuf>());
        let file = [path.with_extension("rs"), path.join("mod.rs")].into_iter().find(|path| root().join(path).exists());
        let file = file.unwrap_or_else(|| panic!("{type_name}: no file"));
        let text = self.0.entry(file.clone()).or_insert_with(|| std::fs::read_to_string(root().join(file)).unwrap());
        item(text, name)
    }
}

/// The doc comment of a type and of each of its fields or variants, the latter in lower case.
#[derive(Debug)]
struct Item {
    doc: String,
    fields: BTreeMap<String, String>,
}

/// Reads what rustfmt has laid out: a doc comment stands in lines of its own above what it is about.
fn item(text: &str, name: &str) -> Item {
    let begins = |line: &str| [format!("pub struct {name} {{"), format!("pub enum {name} {{")].iter().any(|start| line == start);
    let mut found = None;
    let mut doc = Vec::new();
    let mut fields = BTreeMap::new();
    for line in text.lines() {
        let trimmed = line.trim();
        if let Some(comment) = trimmed.strip_prefix("///") {
            doc.push(comment.trim());
        } else if trimmed.starts_with("#[") || trimmed.is_empty() {
            // Attributes stand between a comment and its field.
        } else if begins(line) {
            found = Some(plain(&doc.split_off(0)));
        } else if found.is_some() && line == "}" {
            break;
        } else {
            let comment = plain(&doc.split_off(0));
            let field = trimmed.strip_prefix("pub ").and_then(|field| field.split_once(':')).map(|(field, _)| field.to_owned());
            let variant = || trimmed.trim_end_matches(',').split(['(', '{', ' ']).next().unwrap_or_default().to_lowercase();
            if found.is_some() {
                fields.insert(field.unwrap_or_else(variant), comment);
            }
        }
    }
    Item { doc: found.unwrap_or_else(|| panic!("{name} is not found")), fields }
}

/// The first paragraph, in one line, without links.
fn plain(lines: &[&str]) -> String {
    let paragraph: Vec<&str> = lines.iter().copied().take_while(|line| !line.is_empty()).collect();
    paragraph.join(" ").replace("[`", "`").replace("`]", "`")
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}
