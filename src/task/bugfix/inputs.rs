//! Random arguments for the functions under test.

use super::python::Value;
use crate::types::Key;

/// What to draw for one argument. Ranges include both ends.
#[derive(Clone, Copy, Debug)]
pub enum Input {
    Int(i64, i64),
    /// List of integers: shortest, longest, smallest, largest.
    Ints(usize, usize, i64, i64),
    /// Ascending list of integers, the same four bounds.
    SortedInts(usize, usize, i64, i64),
    /// One of these strings.
    Text(&'static [&'static str]),
    /// List of strings from a pool: shortest, longest, pool.
    Texts(usize, usize, &'static [&'static str]),
    /// Strings joined by a mark: fewest, most, mark, pool.
    Joined(usize, usize, &'static str, &'static [&'static str]),
    /// List of `(text, integer)` tuples: shortest, longest, pool, smallest, largest.
    Pairs(usize, usize, &'static [&'static str], i64, i64),
    /// List of `(low, high)` tuples with `low <= high`: shortest, longest, smallest, largest.
    Spans(usize, usize, i64, i64),
    /// List of lists of equal length: fewest rows, most rows, smallest, largest; one to three columns.
    Rows(usize, usize, i64, i64),
    /// Dictionary from strings of a pool to integers: pool, smallest, largest; each key is there with probability 0.7.
    Counts(&'static [&'static str], i64, i64),
}

impl Input {
    pub fn draw(&self, key: &mut Key) -> Value {
        match *self {
            Input::Int(low, high) => int(key, low, high),
            Input::Ints(shortest, longest, low, high) => list(key, shortest, longest, |key| int(key, low, high)),
            Input::SortedInts(shortest, longest, low, high) => {
                let mut numbers: Vec<i64> = (0..length(key, shortest, longest)).map(|_| number(key, low, high)).collect();
                numbers.sort_unstable();
                Value::list(numbers.into_iter().map(Value::Int).collect())
            }
            Input::Text(pool) => Value::text(key.choose(pool)),
            Input::Texts(shortest, longest, pool) => list(key, shortest, longest, |key| Value::text(key.choose(pool))),
            Input::Joined(fewest, most, mark, pool) => {
                let parts: Vec<&str> = (0..length(key, fewest, most)).map(|_| *key.choose(pool)).collect();
                Value::text(parts.join(mark))
            }
            Input::Pairs(shortest, longest, pool, low, high) => {
                list(key, shortest, longest, |key| Value::Tuple([Value::text(key.choose(pool)), int(key, low, high)].into()))
            }
            Input::Spans(shortest, longest, low, high) => list(key, shortest, longest, |key| {
                let (a, b) = (number(key, low, high), number(key, low, high));
                Value::Tuple([Value::Int(a.min(b)), Value::Int(a.max(b))].into())
            }),
            Input::Rows(fewest, most, low, high) => {
                let columns = 1 + key.below(3);
                list(key, fewest, most, |key| list(key, columns, columns, |key| int(key, low, high)))
            }
            Input::Counts(pool, low, high) => {
                let mut entries = Vec::new();
                for word in pool {
                    if key.chance(0.7) {
                        entries.push((Value::text(word), int(key, low, high)));
                    }
                }
                Value::Dict(std::rc::Rc::new(std::cell::RefCell::new(entries)))
            }
        }
    }
}

fn length(key: &mut Key, shortest: usize, longest: usize) -> usize {
    shortest + key.below(longest - shortest + 1)
}

fn number(key: &mut Key, low: i64, high: i64) -> i64 {
    low + key.below((high - low + 1) as usize) as i64
}

fn int(key: &mut Key, low: i64, high: i64) -> Value {
    Value::Int(number(key, low, high))
}

fn list(key: &mut Key, shortest: usize, longest: usize, item: impl Fn(&mut Key) -> Value) -> Value {
    let count = length(key, shortest, longest);
    Value::list((0..count).map(|_| item(key)).collect())
}
