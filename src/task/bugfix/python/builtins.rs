//! The builtin functions and the methods that skeletons call.

use std::rc::Rc;

use super::evaluate::{Fault, Machine, items_of, sort_by_rank};
use super::value::Value;

impl Machine<'_> {
    /// Builtins that make an iterator in Python make a list here: skeletons only loop over them.
    pub(super) fn call_builtin(&mut self, name: &str, arguments: Vec<Value>) -> Result<Value, Fault> {
        match (name, &arguments[..]) {
            ("len", [value]) => Ok(Value::Int(items_of(value)?.len() as i64)),
            ("abs", [value]) => value.as_int().ok_or(Fault::Raised)?.checked_abs().map(Value::Int).ok_or(Fault::Beyond),
            ("sum", [items]) => sum(&items_of(items)?, 0),
            ("sum", [items, start]) => sum(&items_of(items)?, start.as_int().ok_or(Fault::Beyond)?),
            ("min" | "max", [items]) => extreme(name, items_of(items)?),
            ("min" | "max", [_, _, ..]) => extreme(name, arguments),
            ("any", [items]) => Ok(Value::Bool(items_of(items)?.iter().any(Value::truthy))),
            ("all", [items]) => Ok(Value::Bool(items_of(items)?.iter().all(Value::truthy))),
            ("sorted", [items]) => {
                let keyed = items_of(items)?.into_iter().map(|item| (item.clone(), item)).collect();
                Ok(Value::list(sort_by_rank(keyed, false)?))
            }
            ("reversed", [items]) => Ok(Value::list(items_of(items)?.into_iter().rev().collect())),
            ("list", []) => Ok(Value::list(Vec::new())),
            ("list", [items]) => Ok(Value::list(items_of(items)?)),
            ("range", _) => range(&arguments),
            ("enumerate", [items]) => Ok(enumerate(items_of(items)?, 0)),
            ("enumerate", [items, start]) => Ok(enumerate(items_of(items)?, start.as_int().ok_or(Fault::Raised)?)),
            ("zip", [left, right]) => {
                let pairs = items_of(left)?.into_iter().zip(items_of(right)?);
                Ok(Value::list(pairs.map(|(a, b)| Value::Tuple([a, b].into())).collect()))
            }
            ("str", [Value::Text(text)]) => Ok(Value::Text(Rc::clone(text))),
            ("str", [value]) => Ok(Value::text(value.to_string())),
            ("int", [Value::Text(text)]) => match text.trim().parse() {
                Ok(number) => Ok(Value::Int(number)),
                // Python also reads forms such as `1_000`; digits alone are certain.
                Err(_) if text.contains('_') => Err(Fault::Beyond),
                Err(_) => Err(Fault::Raised),
            },
            ("int", [value]) => value.as_int().map(Value::Int).ok_or(Fault::Raised),
            ("bool", [value]) => Ok(Value::Bool(value.truthy())),
            _ => Err(Fault::Beyond),
        }
    }
}

fn sum(items: &[Value], start: i64) -> Result<Value, Fault> {
    let mut total = start;
    for item in items {
        total = total.checked_add(item.as_int().ok_or(Fault::Raised)?).ok_or(Fault::Beyond)?;
    }
    Ok(Value::Int(total))
}

/// The first of the smallest (largest) items.
fn extreme(name: &str, items: Vec<Value>) -> Result<Value, Fault> {
    let keyed = items.into_iter().map(|item| (item.clone(), item)).collect();
    sort_by_rank(keyed, name == "max")?.into_iter().next().ok_or(Fault::Raised)
}

fn range(arguments: &[Value]) -> Result<Value, Fault> {
    let numbers = arguments.iter().map(|value| value.as_int().ok_or(Fault::Raised)).collect::<Result<Vec<_>, _>>()?;
    let (mut at, stop, step) = match numbers[..] {
        [stop] => (0, stop, 1),
        [start, stop] => (start, stop, 1),
        [start, stop, step] => (start, stop, step),
        _ => return Err(Fault::Raised),
    };
    if step == 0 {
        return Err(Fault::Raised);
    }
    let mut items = Vec::new();
    while (step > 0 && at < stop) || (step < 0 && at > stop) {
        if items.len() >= 10_000 {
            return Err(Fault::Beyond);
        }
        items.push(Value::Int(at));
        at += step;
    }
    Ok(Value::list(items))
}

fn enumerate(items: Vec<Value>, start: i64) -> Value {
    Value::list((start..).zip(items).map(|(index, item)| Value::Tuple([Value::Int(index), item].into())).collect())
}

pub(super) fn call_method(object: &Value, name: &str, arguments: &[Value]) -> Result<Value, Fault> {
    match object {
        Value::Text(text) => text_method(text, name, arguments),
        Value::List(items) => match (name, arguments) {
            ("append", [item]) => {
                items.borrow_mut().push(item.clone());
                Ok(Value::None)
            }
            ("extend", [more]) => {
                let more = items_of(more)?;
                items.borrow_mut().extend(more);
                Ok(Value::None)
            }
            ("pop", []) => items.borrow_mut().pop().ok_or(Fault::Raised),
            ("pop", [index]) if index.as_int() == Some(0) => {
                if items.borrow().is_empty() {
                    Err(Fault::Raised)
                } else {
                    Ok(items.borrow_mut().remove(0))
                }
            }
            ("count", [item]) => Ok(Value::Int(items.borrow().iter().filter(|found| found.equals(item)).count() as i64)),
            ("index", [item]) => {
                items.borrow().iter().position(|found| found.equals(item)).map(|at| Value::Int(at as i64)).ok_or(Fault::Raised)
            }
            _ => Err(Fault::Beyond),
        },
        Value::Dict(entries) => {
            let entries = entries.borrow();
            let get = |key: &Value| entries.iter().find(|(found, _)| found.equals(key)).map(|(_, value)| value.clone());
            match (name, arguments) {
                ("get", [key]) if key.hashable() => Ok(get(key).unwrap_or(Value::None)),
                ("get", [key, default]) if key.hashable() => Ok(get(key).unwrap_or_else(|| default.clone())),
                ("keys", []) => Ok(Value::list(entries.iter().map(|(key, _)| key.clone()).collect())),
                ("values", []) => Ok(Value::list(entries.iter().map(|(_, value)| value.clone()).collect())),
                ("items", []) => {
                    let pairs = entries.iter().map(|(key, value)| Value::Tuple([key.clone(), value.clone()].into()));
                    Ok(Value::list(pairs.collect()))
                }
                _ => Err(Fault::Beyond),
            }
        }
        _ => Err(Fault::Beyond),
    }
}

/// Methods of ASCII text.
fn text_method(text: &str, name: &str, arguments: &[Value]) -> Result<Value, Fault> {
    let all = |holds: fn(char) -> bool| Ok(Value::Bool(!text.is_empty() && text.chars().all(holds)));
    match (name, arguments) {
        ("lower", []) => Ok(Value::text(text.to_ascii_lowercase())),
        ("upper", []) => Ok(Value::text(text.to_ascii_uppercase())),
        ("strip", []) => Ok(Value::text(text.trim())),
        ("lstrip", []) => Ok(Value::text(text.trim_start())),
        ("rstrip", []) => Ok(Value::text(text.trim_end())),
        ("isdigit", []) => all(|c| c.is_ascii_digit()),
        ("isalpha", []) => all(|c| c.is_ascii_alphabetic()),
        ("split", []) => Ok(Value::list(text.split_whitespace().map(Value::text).collect())),
        ("split", [Value::Text(mark)]) if !mark.is_empty() => Ok(Value::list(text.split(&**mark).map(Value::text).collect())),
        ("join", [items]) => {
            let parts: Option<Vec<String>> = items_of(items)?
                .iter()
                .map(|item| if let Value::Text(part) = item { Some(part.to_string()) } else { None })
                .collect();
            parts.map(|parts| Value::text(parts.join(text))).ok_or(Fault::Raised)
        }
        ("startswith", [Value::Text(part)]) => Ok(Value::Bool(text.starts_with(&**part))),
        ("endswith", [Value::Text(part)]) => Ok(Value::Bool(text.ends_with(&**part))),
        ("count", [Value::Text(part)]) if !part.is_empty() => Ok(Value::Int(text.matches(&**part).count() as i64)),
        ("find", [Value::Text(part)]) => Ok(Value::Int(text.find(&**part).map_or(-1, |at| at as i64))),
        ("rfind", [Value::Text(part)]) => Ok(Value::Int(text.rfind(&**part).map_or(-1, |at| at as i64))),
        ("replace", [Value::Text(from), Value::Text(to)]) if !from.is_empty() => Ok(Value::text(text.replace(&**from, to))),
        _ => Err(Fault::Beyond),
    }
}
