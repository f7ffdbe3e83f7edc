//! A run file's text: its keys, the line of each, and the comment behind it.

use std::collections::BTreeMap;

use toml::de::{DeTable, DeValue};
use toml::{Table, Value};

/// A text that was read.
pub struct Text {
    pub table: Table,
    /// Of every key, by its whole name.
    pub places: BTreeMap<String, Place>,
}

/// Where a key stands.
#[derive(Clone, Debug, PartialEq)]
pub struct Place {
    /// The first is 1.
    pub line: usize,
    /// What stands behind the value on the line where it ends, without `#`.
    pub comment: Option<String>,
}

impl Text {
    /// # Errors
    /// Everything that is no TOML, each as a line without the file's name.
    pub fn read(text: &str) -> Result<Text, Vec<String>> {
        let (document, errors) = DeTable::parse_recoverable(text);
        if !errors.is_empty() {
            let line = |error: &toml::de::Error| error.span().map_or(1, |span| line_of(text, span.start));
            // What follows on the same line only echoes the first fault.
            let mut lines: Vec<(usize, &str)> = errors.iter().map(|error| (line(error), error.message())).collect();
            lines.dedup_by_key(|(line, _)| *line);
            return Err(lines.iter().map(|(line, message)| format!("line {line}: {message}")).collect());
        }
        let table = text.parse::<Table>().map_err(|error| vec![error.message().to_owned()])?;
        let mut places = BTreeMap::new();
        note_table("", document.get_ref(), text, &mut places);
        Ok(Text { table, places })
    }
}

/// The value of a key by its whole name, in tables within tables.
pub fn at<'a>(table: &'a Table, path: &str) -> Option<&'a Value> {
    let (first, rest) = path.split_once('.').unwrap_or((path, ""));
    let value = table.get(first)?;
    if rest.is_empty() { Some(value) } else { at(value.as_table()?, rest) }
}

fn line_of(text: &str, offset: usize) -> usize {
    text[..offset].matches('\n').count() + 1
}

fn note_table(prefix: &str, table: &DeTable, text: &str, places: &mut BTreeMap<String, Place>) {
    for (key, value) in table {
        let name = join(prefix, key.get_ref());
        let comment = match value.get_ref() {
            // The span of a table with a header of its own is the header.
            DeValue::Table(_) => None,
            _ => comment_after(text, value.span().end),
        };
        places.insert(name.clone(), Place { line: line_of(text, key.span().start), comment });
        note_value(&name, value.get_ref(), text, places);
    }
}

fn note_value(name: &str, value: &DeValue, text: &str, places: &mut BTreeMap<String, Place>) {
    match value {
        DeValue::Table(table) => note_table(name, table, text, places),
        DeValue::Array(values) => {
            for (index, value) in values.iter().enumerate() {
                let own_name = value.get_ref().as_table().and_then(|table| table.get("name"));
                let element = element_name(name, index, own_name.and_then(|name| name.get_ref().as_str()));
                note_value(&element, value.get_ref(), text, places);
            }
        }
        _ => {}
    }
}

/// `prefix.key`, or the key alone at the top.
pub fn join(prefix: &str, key: &str) -> String {
    if prefix.is_empty() { key.to_owned() } else { format!("{prefix}.{key}") }
}

/// A table of a list goes by its own `name`, if it has one: `stages.warm-up`; otherwise by its place: `rejections[0]`.
pub fn element_name(list: &str, index: usize, own_name: Option<&str>) -> String {
    match own_name {
        Some(name) => join(list, name),
        None => format!("{list}[{index}]"),
    }
}

/// Calls `visit` with the whole name of everything that is no table, lists of tables looked into.
pub fn each_value(prefix: &str, value: &Value, visit: &mut dyn FnMut(&str, &Value)) {
    match value {
        Value::Table(table) => table.iter().for_each(|(key, value)| each_value(&join(prefix, key), value, visit)),
        Value::Array(values) if values.iter().any(Value::is_table) => {
            for (index, value) in values.iter().enumerate() {
                let own_name = value.get("name").and_then(Value::as_str);
                each_value(&element_name(prefix, index, own_name), value, visit);
            }
        }
        value => visit(prefix, value),
    }
}

/// A value in TOML, numbers as short as they can be: `1e-6`.
pub fn written(value: &Value) -> String {
    match value {
        Value::Float(number) if number.is_finite() => format!("{number:?}"),
        Value::Array(values) => format!("[{}]", values.iter().map(written).collect::<Vec<_>>().join(", ")),
        Value::Table(table) if table.is_empty() => "{}".into(),
        Value::Table(table) => {
            let pairs = table.iter().map(|(key, value)| format!("{key} = {}", written(value)));
            format!("{{ {} }}", pairs.collect::<Vec<_>>().join(", "))
        }
        value => value.to_string(),
    }
}

fn comment_after(text: &str, end: usize) -> Option<String> {
    let line = text[end..].lines().next()?;
    let (_, comment) = line.split_once('#')?;
    Some(comment.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_lines_and_comments() {
        let text = "\
[run]
name = \"a # b\"   # [ours: a name]

[rl]
clip = { low = 0.2, high = 0.3 } # [paper]
list = [
    1,
]  # [script] two
none = 3

[[stages]]
name = \"first\"
rl.steps = 4 # [card]
[[stages]]
rl.steps = 5
";
        let read = Text::read(text).unwrap();
        let place = |key: &str| (read.places[key].line, read.places[key].comment.as_deref());
        assert_eq!(place("run.name"), (2, Some("[ours: a name]")));
        assert_eq!(place("rl.list"), (6, Some("[script] two")));
        assert_eq!(place("rl.none"), (9, None));
        assert_eq!(place("rl.clip.high"), (5, Some("[paper]")));
        assert_eq!(place("stages.first.rl.steps"), (13, Some("[card]")));
        assert_eq!(place("stages[1].rl.steps"), (15, None));
        assert_eq!(read.table["rl"]["clip"]["low"].as_float(), Some(0.2));
    }

    #[test]
    fn every_fault_of_syntax_has_its_line() {
        let errors = Text::read("[rl]\nsteps = = 3\ngroup_size = 3\nname = \"open\n").err().unwrap();
        assert!(errors.len() >= 2, "{errors:?}");
        assert!(errors[0].starts_with("line 2: ") && errors.iter().any(|error| error.starts_with("line 4: ")), "{errors:?}");
    }
}
