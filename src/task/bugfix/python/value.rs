//! Python values, with Python's equality, order, truth and `repr`.

use std::cell::RefCell;
use std::cmp::Ordering;
use std::fmt;
use std::rc::Rc;

/// Lists and dictionaries are shared by reference, as in Python; a dictionary keeps the order of insertion.
#[derive(Clone, Debug)]
pub enum Value {
    None,
    Bool(bool),
    Int(i64),
    Text(Rc<str>),
    List(Rc<RefCell<Vec<Value>>>),
    Tuple(Rc<[Value]>),
    Dict(Rc<RefCell<Vec<(Value, Value)>>>),
}

impl Value {
    pub fn list(items: Vec<Value>) -> Value {
        Value::List(Rc::new(RefCell::new(items)))
    }

    pub fn text(text: impl AsRef<str>) -> Value {
        Value::Text(Rc::from(text.as_ref()))
    }

    /// The number that arithmetic sees: `True` is 1.
    pub fn as_int(&self) -> Option<i64> {
        match self {
            Value::Int(number) => Some(*number),
            Value::Bool(flag) => Some(i64::from(*flag)),
            _ => None,
        }
    }

    pub fn truthy(&self) -> bool {
        match self {
            Value::None => false,
            Value::Bool(flag) => *flag,
            Value::Int(number) => *number != 0,
            Value::Text(text) => !text.is_empty(),
            Value::List(items) => !items.borrow().is_empty(),
            Value::Tuple(items) => !items.is_empty(),
            Value::Dict(entries) => !entries.borrow().is_empty(),
        }
    }

    /// `==`: numbers by value whatever their type, containers by content.
    pub fn equals(&self, other: &Value) -> bool {
        if let (Some(a), Some(b)) = (self.as_int(), other.as_int()) {
            return a == b;
        }
        match (self, other) {
            (Value::None, Value::None) => true,
            (Value::Text(a), Value::Text(b)) => a == b,
            (Value::List(a), Value::List(b)) => sequences_equal(&a.borrow(), &b.borrow()),
            (Value::Tuple(a), Value::Tuple(b)) => sequences_equal(a, b),
            (Value::Dict(a), Value::Dict(b)) => {
                let (a, b) = (a.borrow(), b.borrow());
                a.len() == b.len()
                    && a.iter().all(|(key, value)| b.iter().any(|(other, found)| key.equals(other) && value.equals(found)))
            }
            _ => false,
        }
    }

    /// What the tests ask: the same type and equal.
    pub fn same(&self, other: &Value) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other) && self.equals(other)
    }

    /// The order of `<`; `None` where Python raises `TypeError`.
    pub fn compare(&self, other: &Value) -> Option<Ordering> {
        if let (Some(a), Some(b)) = (self.as_int(), other.as_int()) {
            return Some(a.cmp(&b));
        }
        match (self, other) {
            (Value::Text(a), Value::Text(b)) => Some(a.cmp(b)),
            (Value::List(a), Value::List(b)) => compare_sequences(&a.borrow(), &b.borrow()),
            (Value::Tuple(a), Value::Tuple(b)) => compare_sequences(a, b),
            _ => None,
        }
    }

    /// May be a dictionary's key.
    pub fn hashable(&self) -> bool {
        match self {
            Value::List(_) | Value::Dict(_) => false,
            Value::Tuple(items) => items.iter().all(Value::hashable),
            _ => true,
        }
    }
}

fn sequences_equal(a: &[Value], b: &[Value]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.equals(b))
}

fn compare_sequences(a: &[Value], b: &[Value]) -> Option<Ordering> {
    match a.iter().zip(b).find(|(a, b)| !a.equals(b)) {
        Some((a, b)) => a.compare(b),
        None => Some(a.len().cmp(&b.len())),
    }
}

/// Python's `repr`, for strings without control characters.
impl fmt::Display for Value {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::None => write!(out, "None"),
            Value::Bool(true) => write!(out, "True"),
            Value::Bool(false) => write!(out, "False"),
            Value::Int(number) => write!(out, "{number}"),
            Value::Text(text) if text.contains('\'') && !text.contains('"') => write!(out, "\"{}\"", text.replace('\\', "\\\\")),
            Value::Text(text) => write!(out, "'{}'", text.replace('\\', "\\\\").replace('\'', "\\'")),
            Value::List(items) => write_items(out, "[", &items.borrow(), "]"),
            Value::Tuple(items) if items.len() == 1 => write!(out, "({},)", items[0]),
            Value::Tuple(items) => write_items(out, "(", items, ")"),
            Value::Dict(entries) => {
                write!(out, "{{")?;
                for (index, (key, value)) in entries.borrow().iter().enumerate() {
                    write!(out, "{}{key}: {value}", if index > 0 { ", " } else { "" })?;
                }
                write!(out, "}}")
            }
        }
    }
}

fn write_items(out: &mut fmt::Formatter<'_>, open: &str, items: &[Value], close: &str) -> fmt::Result {
    write!(out, "{open}")?;
    for (index, item) in items.iter().enumerate() {
        write!(out, "{}{item}", if index > 0 { ", " } else { "" })?;
    }
    write!(out, "{close}")
}
