//! Every key of a run file: what it holds, what it is without being given, what it is for.
//!
//! Keys and kinds come from the settings types themselves (`shape.rs`), defaults from their `Default`, explanations from the
//! doc comments of their fields. A program does not carry its doc comments: `docs/configuration.md` is made of them by a test
//! (`tests/program/configuration.rs`) that fails when it is no longer what the code says, and that page is what is read here.

use std::sync::LazyLock;

use strsim::osa_distance;
use toml::{Table, Value};

use super::shape::{Field, Shape};
use super::text::{at, element_name, join, written as toml_text};
use super::{RunFile, StageTable};

/// The page that explains every key.
pub const PAGE: &str = include_str!("../../docs/configuration.md");

/// The whole run file as a tree of keys.
pub static ROOT: LazyLock<Field> = LazyLock::new(Field::of::<RunFile>);

/// A table of `[[stages]]`, in which what overrides a section has the keys of that section.
pub static STAGE: LazyLock<Field> = LazyLock::new(|| {
    let mut stage = Field::of::<StageTable>();
    if let Shape::Table(table) = &mut stage.shape {
        for (name, field) in &mut table.fields {
            if let Some(section) = ROOT.field(name) {
                field.shape = section.shape.clone();
            }
        }
    }
    stage
});

/// A key of the run file.
pub struct Key {
    /// With dots. A key of each table of a list: `stages[].name`.
    pub name: String,
    pub field: &'static Field,
    /// The settings struct that it is a field of.
    pub of: &'static str,
}

/// All keys in the order of their structs, tables before what they hold.
pub fn keys() -> Vec<Key> {
    let mut found = Vec::new();
    collect("", &ROOT, &mut found);
    found
}

fn collect(prefix: &str, field: &'static Field, found: &mut Vec<Key>) {
    let Shape::Table(table) = &field.shape else { return };
    for (name, field) in &table.fields {
        let name = join(prefix, name);
        found.push(Key { name: name.clone(), field, of: table.type_name });
        match &field.shape {
            Shape::List(of) => collect(&format!("{name}[]"), of, found),
            _ => collect(&name, field, found),
        }
    }
}

impl Key {
    /// What it is when it is not given, in TOML. `Err` says in a word why there is no such value.
    pub fn default(&self) -> Result<String, &'static str> {
        let defaults = Table::try_from(RunFile::default()).map_err(|_| "")?;
        let Some((table, key)) = self.name.rsplit_once('.') else { return written(defaults.get(&self.name), self.field) };
        match at(&defaults, table) {
            Some(table) => written(table.get(key), self.field),
            // In a table that is itself absent: what the table's type makes of a table without this key.
            None => within_absent_table(&defaults, table, key, self.field),
        }
    }

    /// From the page.
    pub fn explanation(&self) -> Option<String> {
        let start = format!("| `{}` |", self.name);
        let row = PAGE.lines().find(|line| line.starts_with(&start))?;
        let cell = row.trim_end_matches('|').replace("\\|", "\u{0}");
        let cell = cell.rsplit('|').next()?.trim().replace('\u{0}', "|");
        Some(cell.replace("<br>", "\n"))
    }
}

fn written(value: Option<&Value>, field: &Field) -> Result<String, &'static str> {
    match value {
        Some(Value::Table(_)) if !matches!(field.shape, Shape::Free(_)) => Err(""),
        Some(value) => Ok(toml_text(value)),
        // A list that is only written where it holds something.
        None if matches!(field.shape, Shape::List(_)) => Ok("[]".into()),
        None => Err("absent"),
    }
}

/// Fills in the table `path`, and any above it that are absent, with values for every key but `key`.
fn within_absent_table(defaults: &Table, path: &str, key: &str, field: &Field) -> Result<String, &'static str> {
    let mut filled = Value::Table(defaults.clone());
    let mut place = &mut filled;
    let mut known: &Field = &ROOT;
    for part in path.split('.') {
        let (part, listed) = part.strip_suffix("[]").map_or((part, false), |part| (part, true));
        known = known.field(part).ok_or("")?;
        let Value::Table(table) = place else { return Err("") };
        place = table.entry(part).or_insert_with(|| known.sample());
        if let (true, Shape::List(of)) = (listed, &known.shape) {
            known = of;
            *place = Value::Array(vec![of.sample()]);
            place = &mut place[0];
        }
    }
    // The innermost table has all keys now; without this one, is there a default?
    *place = known.sample();
    place.as_table_mut().ok_or("")?.remove(key);
    let Ok(run_file) = filled.try_into::<RunFile>() else { return Err("required") };
    let resolved = Value::try_from(run_file).map_err(|_| "")?;
    let table = path.split('.').try_fold(&resolved, |value, part| match part.strip_suffix("[]") {
        Some(part) => value.get(part)?.get(0),
        None => value.get(part),
    });
    written(table.and_then(|table| table.get(key)), field)
}

/// A key without a default, in a table that lacks it.
pub struct Lacking {
    /// Its whole name.
    pub name: String,
    pub field: &'static Field,
    /// The table, or the list of tables, that means nothing without it.
    pub part: String,
}

static REQUIRED: LazyLock<Vec<Key>> =
    LazyLock::new(|| keys().into_iter().filter(|key| key.default() == Err("required")).collect());

/// Takes out of a run file what is incomplete, and says what it lacks.
pub fn take_incomplete(run_file: &mut Value) -> Vec<Lacking> {
    let mut found: Vec<Lacking> = Vec::new();
    for key in REQUIRED.iter() {
        let Some((path, last)) = key.name.rsplit_once('.') else { continue };
        let part = path.split("[]").next().unwrap_or(path);
        let mut note = |table: &str| found.push(Lacking { name: join(table, last), field: key.field, part: part.to_owned() });
        let parts: Vec<&str> = path.split('.').collect();
        tables_without(run_file, "", &parts, last, &mut note);
    }
    found.iter().for_each(|lacking| remove(run_file, &lacking.part));
    found
}

fn remove(value: &mut Value, path: &str) {
    let (first, rest) = path.split_once('.').unwrap_or((path, ""));
    let Value::Table(table) = value else { return };
    match table.get_mut(first) {
        Some(inner) if !rest.is_empty() => remove(inner, rest),
        _ => drop(table.remove(first)),
    }
}

/// Calls `note` with the whole name of every table at `path` that has no key `last`.
fn tables_without(value: &Value, prefix: &str, path: &[&str], last: &str, note: &mut dyn FnMut(&str)) {
    let Some((first, rest)) = path.split_first() else {
        if value.get(last).is_none() {
            note(prefix);
        }
        return;
    };
    let (key, listed) = first.strip_suffix("[]").map_or((*first, false), |key| (key, true));
    let Some(inner) = value.get(key) else { return };
    let name = join(prefix, key);
    if !listed {
        return tables_without(inner, &name, rest, last, note);
    }
    for (index, element) in inner.as_array().into_iter().flatten().enumerate() {
        let own_name = element.get("name").and_then(Value::as_str);
        tables_without(element, &element_name(&name, index, own_name), rest, last, note);
    }
}

/// The key that was probably meant by `name`, whose table is known to hold `siblings`.
pub fn nearest(name: &str, siblings: &[&str]) -> Option<String> {
    let (table, last) = name.rsplit_once('.').unwrap_or(("", name));
    let close = |distance: usize, length: usize| distance <= 2.max(length / 3) && distance < length;
    let sibling = siblings.iter().map(|key| (osa_distance(last, key), *key)).min();
    if let Some((distance, key)) = sibling
        && close(distance, last.len())
    {
        return Some(join(table, key));
    }
    // The right word in the wrong table, or a slip in the table's own name.
    let all = keys();
    let same_word =
        all.iter().filter(|key| key.name.rsplit('.').next() == Some(last)).min_by_key(|key| osa_distance(name, &key.name));
    let slip = || all.iter().map(|key| (osa_distance(name, &key.name), key)).min_by_key(|(distance, _)| *distance);
    let found = same_word.or_else(|| slip().filter(|(distance, _)| close(*distance, name.len())).map(|(_, key)| key))?;
    Some(found.name.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_key_is_named() {
        let siblings = |table: &str| -> Vec<&str> {
            let fields = if table.is_empty() { &ROOT } else { ROOT.field(table).unwrap() }.fields();
            fields.iter().map(|(name, _)| *name).collect()
        };
        assert_eq!(nearest("rl.stepps", &siblings("rl")).as_deref(), Some("rl.steps"));
        assert_eq!(nearest("rl.gruop_size", &siblings("rl")).as_deref(), Some("rl.group_size"));
        assert_eq!(nearest("engin", &siblings("")).as_deref(), Some("engine"));
        assert_eq!(nearest("rl.temperature", &siblings("rl")).as_deref(), Some("engine.temperature"));
        assert_eq!(nearest("zzzzzz", &siblings("")), None);
    }

    #[test]
    fn defaults_come_from_the_types() {
        let all = keys();
        let default = |name: &str| all.iter().find(|key| key.name == name).unwrap_or_else(|| panic!("{name}")).default();
        assert_eq!(default("rl.group_size"), Ok("8".into()));
        assert_eq!(default("run.device"), Ok("\"cpu\"".into()));
        assert_eq!(default("model.directory"), Err("absent"));
        assert_eq!(default("rl"), Err(""));
    }
}
