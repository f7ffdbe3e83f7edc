//! Runs parsed functions: statements, names, operators.

use std::collections::HashMap;
use std::rc::Rc;

use super::parse::{Expression, Function, Statement, parse_module};
use super::value::Value;

/// Why an evaluation gave no value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Python would raise an exception here.
    Raised,
    /// More than this evaluator does: an unknown construct, a number beyond 64 bits, too many steps.
    Beyond,
}

/// Statements and expressions one call may take; a loop that a wrong bound makes endless stops here.
const STEP_LIMIT: u32 = 20_000;
/// Nested calls one call may take.
const DEPTH_LIMIT: u32 = 40;

type Locals = HashMap<String, Value>;

/// The functions of all modules of a task. They share one name space, so their names must differ.
#[derive(Debug)]
pub struct Program {
    functions: HashMap<String, Rc<Function>>,
}

impl Program {
    /// Parses each module; the message names what is beyond the evaluator.
    pub fn parse<'a>(modules: impl IntoIterator<Item = &'a str>) -> Result<Program, String> {
        let mut functions = HashMap::new();
        for module in modules {
            for function in parse_module(module)? {
                functions.insert(function.name.clone(), Rc::new(function));
            }
        }
        Ok(Program { functions })
    }

    /// Calls a function with fresh limits.
    pub fn call(&self, name: &str, arguments: Vec<Value>) -> Result<Value, Fault> {
        Machine { functions: &self.functions, steps: 0, depth: 0 }.call_function(name, arguments)
    }
}

enum Flow {
    Next,
    Break,
    Continue,
    Return(Value),
}

pub(super) struct Machine<'a> {
    functions: &'a HashMap<String, Rc<Function>>,
    steps: u32,
    depth: u32,
}

impl Machine<'_> {
    /// A function of the program, else a builtin.
    pub(super) fn call_function(&mut self, name: &str, arguments: Vec<Value>) -> Result<Value, Fault> {
        let Some(function) = self.functions.get(name).map(Rc::clone) else {
            return self.call_builtin(name, arguments);
        };
        if function.parameters.len() != arguments.len() {
            return Err(Fault::Raised);
        }
        self.depth += 1;
        if self.depth > DEPTH_LIMIT {
            return Err(Fault::Beyond);
        }
        let mut locals: Locals = function.parameters.iter().cloned().zip(arguments).collect();
        let flow = self.block(&function.body, &mut locals)?;
        self.depth -= 1;
        Ok(if let Flow::Return(value) = flow { value } else { Value::None })
    }

    fn step(&mut self) -> Result<(), Fault> {
        self.steps += 1;
        if self.steps > STEP_LIMIT { Err(Fault::Beyond) } else { Ok(()) }
    }

    fn block(&mut self, statements: &[Statement], locals: &mut Locals) -> Result<Flow, Fault> {
        for statement in statements {
            match self.statement(statement, locals)? {
                Flow::Next => {}
                flow => return Ok(flow),
            }
        }
        Ok(Flow::Next)
    }

    fn statement(&mut self, statement: &Statement, locals: &mut Locals) -> Result<Flow, Fault> {
        self.step()?;
        match statement {
            Statement::Pass => {}
            Statement::Break => return Ok(Flow::Break),
            Statement::Continue => return Ok(Flow::Continue),
            Statement::Return(None) => return Ok(Flow::Return(Value::None)),
            Statement::Return(Some(value)) => return Ok(Flow::Return(self.value(value, locals)?)),
            Statement::Expression(expression) => {
                self.value(expression, locals)?;
            }
            Statement::Assign(target, value) => {
                let value = self.value(value, locals)?;
                self.assign(target, value, locals)?;
            }
            Statement::Update(target, operator, value) => {
                let old = self.value(target, locals)?;
                let value = self.value(value, locals)?;
                let new = match (&old, operator.as_str()) {
                    // `list += items` changes the list itself.
                    (Value::List(list), "+") => {
                        list.borrow_mut().extend(items_of(&value)?);
                        old
                    }
                    _ => binary(operator, &old, &value)?,
                };
                self.assign(target, new, locals)?;
            }
            Statement::If(branches, otherwise) => {
                for (condition, block) in branches {
                    if self.value(condition, locals)?.truthy() {
                        return self.block(block, locals);
                    }
                }
                return self.block(otherwise, locals);
            }
            Statement::While(condition, body) => {
                while self.value(condition, locals)?.truthy() {
                    match self.block(body, locals)? {
                        Flow::Break => break,
                        Flow::Return(value) => return Ok(Flow::Return(value)),
                        Flow::Next | Flow::Continue => {}
                    }
                }
            }
            Statement::For(target, iterable, body) => {
                for item in items_of(&self.value(iterable, locals)?)? {
                    self.assign(target, item, locals)?;
                    match self.block(body, locals)? {
                        Flow::Break => break,
                        Flow::Return(value) => return Ok(Flow::Return(value)),
                        Flow::Next | Flow::Continue => {}
                    }
                }
            }
        }
        Ok(Flow::Next)
    }

    fn assign(&mut self, target: &Expression, value: Value, locals: &mut Locals) -> Result<(), Fault> {
        match target {
            Expression::Name(name) => {
                locals.insert(name.clone(), value);
                Ok(())
            }
            Expression::Tuple(targets) => {
                let items = items_of(&value)?;
                if items.len() != targets.len() {
                    return Err(Fault::Raised);
                }
                targets.iter().zip(items).try_for_each(|(target, item)| self.assign(target, item, locals))
            }
            Expression::Index(object, index) => {
                let (object, index) = (self.value(object, locals)?, self.value(index, locals)?);
                match &object {
                    Value::List(items) => {
                        let position = position(&index, items.borrow().len())?;
                        items.borrow_mut()[position] = value;
                        Ok(())
                    }
                    Value::Dict(entries) => {
                        if !index.hashable() {
                            return Err(Fault::Raised);
                        }
                        let mut entries = entries.borrow_mut();
                        match entries.iter_mut().find(|(key, _)| key.equals(&index)) {
                            Some(entry) => entry.1 = value,
                            None => entries.push((index, value)),
                        }
                        Ok(())
                    }
                    _ => Err(Fault::Raised),
                }
            }
            _ => Err(Fault::Beyond),
        }
    }

    pub(super) fn value(&mut self, expression: &Expression, locals: &mut Locals) -> Result<Value, Fault> {
        self.step()?;
        match expression {
            Expression::Constant(value) => Ok(value.clone()),
            // A name that is read before it is assigned raises NameError or UnboundLocalError.
            Expression::Name(name) => locals.get(name).cloned().ok_or(Fault::Raised),
            Expression::List(items) => Ok(Value::list(self.values(items, locals)?)),
            Expression::Tuple(items) => Ok(Value::Tuple(self.values(items, locals)?.into())),
            Expression::Dict(entries) => {
                let dict = Value::Dict(Rc::default());
                for (key, value) in entries {
                    let (key, value) = (self.value(key, locals)?, self.value(value, locals)?);
                    if !key.hashable() {
                        return Err(Fault::Raised);
                    }
                    if let Value::Dict(entries) = &dict {
                        entries.borrow_mut().push((key, value));
                    }
                }
                Ok(dict)
            }
            Expression::Negative(operand) => {
                let number = self.value(operand, locals)?.as_int().ok_or(Fault::Raised)?;
                number.checked_neg().map(Value::Int).ok_or(Fault::Beyond)
            }
            Expression::Not(operand) => Ok(Value::Bool(!self.value(operand, locals)?.truthy())),
            Expression::And(left, right) => {
                let left = self.value(left, locals)?;
                if left.truthy() { self.value(right, locals) } else { Ok(left) }
            }
            Expression::Or(left, right) => {
                let left = self.value(left, locals)?;
                if left.truthy() { Ok(left) } else { self.value(right, locals) }
            }
            Expression::Binary(operator, left, right) => {
                let (left, right) = (self.value(left, locals)?, self.value(right, locals)?);
                binary(operator, &left, &right)
            }
            Expression::Compare(first, rest) => {
                let mut left = self.value(first, locals)?;
                for (operator, right) in rest {
                    let right = self.value(right, locals)?;
                    if !compare(operator, &left, &right)? {
                        return Ok(Value::Bool(false));
                    }
                    left = right;
                }
                Ok(Value::Bool(true))
            }
            Expression::Choice(condition, then, otherwise) => {
                let chosen = if self.value(condition, locals)?.truthy() { then } else { otherwise };
                self.value(chosen, locals)
            }
            Expression::Call { function, arguments, keywords } => {
                let values = self.values(arguments, locals)?;
                if keywords.is_empty() {
                    return self.call_function(function, values);
                }
                self.call_with_keywords(function, values, keywords, locals)
            }
            Expression::Method { object, name, arguments } => {
                let object = self.value(object, locals)?;
                let arguments = self.values(arguments, locals)?;
                super::builtins::call_method(&object, name, &arguments)
            }
            Expression::Index(object, index) => {
                let (object, index) = (self.value(object, locals)?, self.value(index, locals)?);
                subscript(&object, &index)
            }
            Expression::Slice(object, bounds) => {
                let object = self.value(object, locals)?;
                let mut numbers = [None; 3];
                for (number, bound) in numbers.iter_mut().zip(bounds) {
                    if let Some(bound) = bound {
                        *number = match self.value(bound, locals)? {
                            Value::None => None,
                            value => Some(value.as_int().ok_or(Fault::Raised)?),
                        };
                    }
                }
                slice(&object, numbers)
            }
            Expression::Comprehension { element, target, iterable, condition } => {
                // Its names are its own: it reads the function's, and leaves none behind.
                let mut inner = locals.clone();
                let mut items = Vec::new();
                for item in items_of(&self.value(iterable, locals)?)? {
                    self.assign(target, item, &mut inner)?;
                    let wanted = match condition {
                        Some(condition) => self.value(condition, &mut inner)?.truthy(),
                        None => true,
                    };
                    if wanted {
                        items.push(self.value(element, &mut inner)?);
                    }
                }
                Ok(Value::list(items))
            }
        }
    }

    fn values(&mut self, expressions: &[Expression], locals: &mut Locals) -> Result<Vec<Value>, Fault> {
        expressions.iter().map(|expression| self.value(expression, locals)).collect()
    }

    /// `sorted`, `min` and `max` with `key` (the name of a function) and `reverse`.
    fn call_with_keywords(
        &mut self,
        function: &str,
        mut arguments: Vec<Value>,
        keywords: &[(String, Expression)],
        locals: &mut Locals,
    ) -> Result<Value, Fault> {
        let (mut key, mut reverse) = (None, false);
        for (name, value) in keywords {
            match (name.as_str(), value) {
                ("key", Expression::Name(function)) => key = Some(function.clone()),
                ("reverse", value) => reverse = self.value(value, locals)?.truthy(),
                _ => return Err(Fault::Beyond),
            }
        }
        let (Some(items), true) = (arguments.pop(), arguments.is_empty()) else { return Err(Fault::Beyond) };
        let mut keyed = Vec::new();
        for item in items_of(&items)? {
            let rank = match &key {
                Some(key) => self.call_function(key, vec![item.clone()])?,
                None => item.clone(),
            };
            keyed.push((rank, item));
        }
        match (function, reverse) {
            ("sorted", _) => Ok(Value::list(sort_by_rank(keyed, reverse)?)),
            ("min", false) => sort_by_rank(keyed, false)?.into_iter().next().ok_or(Fault::Raised),
            ("max", false) => sort_by_rank(keyed, true)?.into_iter().next().ok_or(Fault::Raised),
            _ => Err(Fault::Beyond),
        }
    }
}

/// Stable, also when reversed; raises where two ranks have no order.
pub(super) fn sort_by_rank(mut keyed: Vec<(Value, Value)>, reverse: bool) -> Result<Vec<Value>, Fault> {
    let mut comparable = true;
    keyed.sort_by(|(a, _), (b, _)| {
        let order = a.compare(b).unwrap_or_else(|| {
            comparable = false;
            std::cmp::Ordering::Equal
        });
        if reverse { order.reverse() } else { order }
    });
    if comparable { Ok(keyed.into_iter().map(|(_, item)| item).collect()) } else { Err(Fault::Raised) }
}

/// What a `for` loop sees, copied: a skeleton never changes what it iterates over.
pub(super) fn items_of(value: &Value) -> Result<Vec<Value>, Fault> {
    match value {
        Value::List(items) => Ok(items.borrow().clone()),
        Value::Tuple(items) => Ok(items.to_vec()),
        Value::Text(text) => Ok(text.chars().map(|c| Value::text(c.to_string())).collect()),
        Value::Dict(entries) => Ok(entries.borrow().iter().map(|(key, _)| key.clone()).collect()),
        _ => Err(Fault::Raised),
    }
}

fn binary(operator: &str, left: &Value, right: &Value) -> Result<Value, Fault> {
    if let (Some(a), Some(b)) = (left.as_int(), right.as_int()) {
        let number = match operator {
            "+" => a.checked_add(b),
            "-" => a.checked_sub(b),
            "*" => a.checked_mul(b),
            "//" | "%" if b == 0 => return Err(Fault::Raised),
            "//" => a.checked_div(b).map(|quotient| quotient - i64::from(a % b != 0 && (a < 0) != (b < 0))),
            "%" => a.checked_rem(b).map(|rest| if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }),
            "**" => u32::try_from(b).ok().and_then(|exponent| a.checked_pow(exponent)),
            _ => None,
        };
        return number.map(Value::Int).ok_or(Fault::Beyond);
    }
    match (operator, left, right) {
        ("+", Value::Text(a), Value::Text(b)) => Ok(Value::text(format!("{a}{b}"))),
        ("+", Value::List(a), Value::List(b)) => Ok(Value::list([&a.borrow()[..], &b.borrow()[..]].concat())),
        ("+", Value::Tuple(a), Value::Tuple(b)) => Ok(Value::Tuple([&a[..], &b[..]].concat().into())),
        ("*", Value::Text(text), count) | ("*", count, Value::Text(text)) => Ok(Value::text(text.repeat(repeat_count(count)?))),
        ("*", Value::List(items), count) | ("*", count, Value::List(items)) => {
            let count = repeat_count(count)? * items.borrow().len();
            Ok(Value::list(items.borrow().iter().cycle().take(count).cloned().collect()))
        }
        // The left side of `%` formats.
        ("%", Value::Text(_), _) => Err(Fault::Beyond),
        _ => Err(Fault::Raised),
    }
}

fn repeat_count(value: &Value) -> Result<usize, Fault> {
    let count = value.as_int().ok_or(Fault::Raised)?.max(0);
    usize::try_from(count).ok().filter(|&count| count <= 1000).ok_or(Fault::Beyond)
}

fn compare(operator: &str, left: &Value, right: &Value) -> Result<bool, Fault> {
    let order = || left.compare(right).ok_or(Fault::Raised);
    match operator {
        "==" => Ok(left.equals(right)),
        "!=" => Ok(!left.equals(right)),
        "<" => Ok(order()?.is_lt()),
        "<=" => Ok(order()?.is_le()),
        ">" => Ok(order()?.is_gt()),
        ">=" => Ok(order()?.is_ge()),
        "in" => contains(right, left),
        "not in" => Ok(!contains(right, left)?),
        "is" | "is not" => match (left, right) {
            (Value::None, _) | (_, Value::None) => Ok(matches!((left, right), (Value::None, Value::None)) == (operator == "is")),
            _ => Err(Fault::Beyond),
        },
        _ => Err(Fault::Beyond),
    }
}

fn contains(container: &Value, item: &Value) -> Result<bool, Fault> {
    match (container, item) {
        (Value::Text(text), Value::Text(part)) => Ok(text.contains(&**part)),
        (Value::Text(_), _) => Err(Fault::Raised),
        (Value::Dict(_), item) if !item.hashable() => Err(Fault::Raised),
        _ => Ok(items_of(container)?.iter().any(|found| found.equals(item))),
    }
}

/// `index` in `0..length`, counted from the end if negative.
fn position(index: &Value, length: usize) -> Result<usize, Fault> {
    let index = index.as_int().ok_or(Fault::Raised)?;
    let index = if index < 0 { index + length as i64 } else { index };
    usize::try_from(index).ok().filter(|&index| index < length).ok_or(Fault::Raised)
}

fn subscript(object: &Value, index: &Value) -> Result<Value, Fault> {
    if let Value::Dict(entries) = object {
        let entries = entries.borrow();
        return entries.iter().find(|(key, _)| key.equals(index)).map(|(_, value)| value.clone()).ok_or(Fault::Raised);
    }
    let items = items_of(object)?;
    Ok(items[position(index, items.len())?].clone())
}

/// `object[start:stop:step]` with Python's clamping; a step of 0 raises.
fn slice(object: &Value, [start, stop, step]: [Option<i64>; 3]) -> Result<Value, Fault> {
    if let Value::Dict(_) = object {
        return Err(Fault::Raised);
    }
    let items = items_of(object)?;
    let length = items.len() as i64;
    let step = step.unwrap_or(1);
    if step == 0 {
        return Err(Fault::Raised);
    }
    // Positions just outside either end are legal: before the first when walking down, behind the last when walking up.
    let (lowest, highest) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let clamp = |bound: i64| (if bound < 0 { bound + length } else { bound }).clamp(lowest, highest);
    let mut at = start.map_or(if step > 0 { lowest } else { highest }, clamp);
    let stop = stop.map_or(if step > 0 { highest } else { lowest }, clamp);
    let mut taken = Vec::new();
    while (step > 0 && at < stop) || (step < 0 && at > stop) {
        taken.push(items[at as usize].clone());
        at += step;
    }
    Ok(match object {
        Value::Text(_) => Value::text(taken.iter().map(|c| if let Value::Text(c) = c { &**c } else { "" }).collect::<String>()),
        Value::Tuple(_) => Value::Tuple(taken.into()),
        _ => Value::list(taken),
    })
}
