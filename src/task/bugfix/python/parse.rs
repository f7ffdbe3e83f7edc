//! Source text to syntax tree: lines by indentation, expressions by recursive descent.

use super::value::Value;

#[derive(Clone, Debug)]
pub struct Function {
    pub name: String,
    pub parameters: Vec<String>,
    pub body: Vec<Statement>,
}

#[derive(Clone, Debug)]
pub enum Statement {
    Expression(Expression),
    Assign(Expression, Expression),
    /// `target op= value`
    Update(Expression, String, Expression),
    /// Conditions with their blocks, then the block of `else`.
    If(Vec<(Expression, Vec<Statement>)>, Vec<Statement>),
    For(Expression, Expression, Vec<Statement>),
    While(Expression, Vec<Statement>),
    Return(Option<Expression>),
    Break,
    Continue,
    Pass,
}

#[derive(Clone, Debug)]
pub enum Expression {
    Constant(Value),
    Name(String),
    List(Vec<Expression>),
    Tuple(Vec<Expression>),
    Dict(Vec<(Expression, Expression)>),
    Negative(Box<Expression>),
    Not(Box<Expression>),
    Binary(String, Box<Expression>, Box<Expression>),
    /// `a < b <= c`: the first operand, then each operator with its right operand.
    Compare(Box<Expression>, Vec<(String, Expression)>),
    And(Box<Expression>, Box<Expression>),
    Or(Box<Expression>, Box<Expression>),
    /// `then if condition else otherwise`, in the order condition, then, otherwise.
    Choice(Box<Expression>, Box<Expression>, Box<Expression>),
    Call {
        function: String,
        arguments: Vec<Expression>,
        keywords: Vec<(String, Expression)>,
    },
    Method {
        object: Box<Expression>,
        name: String,
        arguments: Vec<Expression>,
    },
    Index(Box<Expression>, Box<Expression>),
    /// `object[start:stop:step]`
    Slice(Box<Expression>, [Option<Box<Expression>>; 3]),
    /// `[element for target in iterable if condition]`, also without brackets as the only argument of a call.
    Comprehension {
        element: Box<Expression>,
        target: Box<Expression>,
        iterable: Box<Expression>,
        condition: Option<Box<Expression>>,
    },
}

/// All functions of a module; its imports are skipped (a program's modules share one name space, see `Program`).
pub fn parse_module(source: &str) -> Result<Vec<Function>, String> {
    let lines: Vec<(usize, &str)> = source
        .lines()
        .map(|line| (line.len() - line.trim_start().len(), line.trim()))
        .filter(|(_, text)| {
            !text.is_empty() && !text.starts_with('#') && !text.starts_with("from ") && !text.starts_with("import ")
        })
        .collect();
    let mut lines = Lines { lines, next: 0 };
    let mut functions = Vec::new();
    while let Some((_, text)) = lines.peek() {
        let header = text.strip_prefix("def ").and_then(|rest| rest.strip_suffix("):")).ok_or_else(|| unexpected(text))?;
        let (name, parameters) = header.split_once('(').ok_or_else(|| unexpected(text))?;
        let parameters = parameters.split(',').map(str::trim).filter(|name| !name.is_empty()).map(String::from).collect();
        lines.next += 1;
        functions.push(Function { name: name.to_string(), parameters, body: lines.block(0)? });
    }
    Ok(functions)
}

fn unexpected(text: &str) -> String {
    format!("beyond the evaluator: {text}")
}

struct Lines<'a> {
    /// Indentation and text of each line.
    lines: Vec<(usize, &'a str)>,
    next: usize,
}

impl<'a> Lines<'a> {
    fn peek(&self) -> Option<(usize, &'a str)> {
        self.lines.get(self.next).copied()
    }

    /// The statements indented deeper than `outer`, all to the same depth.
    fn block(&mut self, outer: usize) -> Result<Vec<Statement>, String> {
        let mut statements = Vec::new();
        let Some((depth, text)) = self.peek().filter(|(depth, _)| *depth > outer) else {
            return Err("a block is empty".into());
        };
        while let Some((found, text)) = self.peek().filter(|(found, _)| *found >= depth) {
            if found != depth {
                return Err(unexpected(text));
            }
            self.next += 1;
            statements.push(self.statement(depth, text)?);
        }
        if statements.is_empty() { Err(unexpected(text)) } else { Ok(statements) }
    }

    fn statement(&mut self, depth: usize, text: &str) -> Result<Statement, String> {
        if let Some(condition) = header(text, "if") {
            let mut branches = vec![(expression(condition)?, self.block(depth)?)];
            let mut otherwise = Vec::new();
            while let Some((_, text)) = self.peek().filter(|(found, _)| *found == depth) {
                if let Some(condition) = header(text, "elif") {
                    self.next += 1;
                    branches.push((expression(condition)?, self.block(depth)?));
                } else if text == "else:" {
                    self.next += 1;
                    otherwise = self.block(depth)?;
                    break;
                } else {
                    break;
                }
            }
            return Ok(Statement::If(branches, otherwise));
        }
        if let Some(clause) = header(text, "for") {
            let mut parser = Parser::new(clause)?;
            let target = parser.targets()?;
            parser.expect("in")?;
            let iterable = parser.expressions()?;
            parser.end()?;
            return Ok(Statement::For(target, iterable, self.block(depth)?));
        }
        if let Some(condition) = header(text, "while") {
            return Ok(Statement::While(expression(condition)?, self.block(depth)?));
        }
        simple_statement(text)
    }
}

/// The part of `keyword PART:` between keyword and colon.
fn header<'a>(text: &'a str, keyword: &str) -> Option<&'a str> {
    text.strip_prefix(keyword)?.strip_prefix(' ')?.strip_suffix(':')
}

fn simple_statement(text: &str) -> Result<Statement, String> {
    match text {
        "break" => return Ok(Statement::Break),
        "continue" => return Ok(Statement::Continue),
        "pass" => return Ok(Statement::Pass),
        "return" => return Ok(Statement::Return(None)),
        _ => {}
    }
    if let Some(value) = text.strip_prefix("return ") {
        return Ok(Statement::Return(Some(expression(value)?)));
    }
    let mut parser = Parser::new(text)?;
    let left = parser.expressions()?;
    let statement = match parser.peek() {
        None => Statement::Expression(left),
        Some("=") => {
            parser.next += 1;
            Statement::Assign(left, parser.expressions()?)
        }
        Some(operator @ ("+=" | "-=" | "*=" | "//=" | "%=")) => {
            let operator = operator.trim_end_matches('=').to_string();
            parser.next += 1;
            Statement::Update(left, operator, parser.expressions()?)
        }
        Some(_) => return Err(unexpected(text)),
    };
    parser.end()?;
    Ok(statement)
}

fn expression(text: &str) -> Result<Expression, String> {
    let mut parser = Parser::new(text)?;
    let expression = parser.expressions()?;
    parser.end()?;
    Ok(expression)
}

const OPERATORS: [&str; 26] = [
    "//=", "**", "//", "+=", "-=", "*=", "%=", "==", "!=", ">=", "<=", "+", "-", "*", "%", "=", ">", "<", "(", ")", "[", "]",
    "{", "}", ",", ":",
];

/// The tokens of one line. A string literal is kept with its opening quote as mark.
fn tokens(text: &str) -> Result<Vec<String>, String> {
    let mut tokens = Vec::new();
    let mut rest = text.trim_start();
    while let Some(first) = rest.chars().next() {
        let length = if first.is_ascii_alphanumeric() || first == '_' {
            rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len())
        } else if first == '"' || first == '\'' {
            let end = rest[1..].find(first).ok_or_else(|| unexpected(text))?;
            tokens.push(format!("\"{}", &rest[1..1 + end]));
            rest = rest[end + 2..].trim_start();
            continue;
        } else if first == '.' {
            1
        } else if first == '#' {
            break;
        } else {
            OPERATORS.iter().find(|operator| rest.starts_with(**operator)).ok_or_else(|| unexpected(text))?.len()
        };
        tokens.push(rest[..length].to_string());
        rest = rest[length..].trim_start();
    }
    Ok(tokens)
}

type Arguments = (Vec<Expression>, Vec<(String, Expression)>);

struct Parser {
    tokens: Vec<String>,
    next: usize,
}

impl Parser {
    fn new(text: &str) -> Result<Parser, String> {
        Ok(Parser { tokens: tokens(text)?, next: 0 })
    }

    fn peek(&self) -> Option<&str> {
        self.tokens.get(self.next).map(String::as_str)
    }

    fn take(&mut self, token: &str) -> bool {
        let found = self.peek() == Some(token);
        self.next += usize::from(found);
        found
    }

    fn expect(&mut self, token: &str) -> Result<(), String> {
        if self.take(token) { Ok(()) } else { Err(self.stuck()) }
    }

    fn end(&self) -> Result<(), String> {
        if self.next == self.tokens.len() { Ok(()) } else { Err(self.stuck()) }
    }

    fn stuck(&self) -> String {
        unexpected(&self.tokens[self.next.min(self.tokens.len())..].join(" "))
    }

    /// `a` or the tuple `a, b`.
    fn expressions(&mut self) -> Result<Expression, String> {
        let first = self.choice()?;
        self.tuple_after(first, Parser::choice)
    }

    /// The names before `in`.
    fn targets(&mut self) -> Result<Expression, String> {
        let first = self.postfix()?;
        self.tuple_after(first, Parser::postfix)
    }

    fn tuple_after(
        &mut self,
        first: Expression,
        member: fn(&mut Parser) -> Result<Expression, String>,
    ) -> Result<Expression, String> {
        if self.peek() != Some(",") {
            return Ok(first);
        }
        let mut members = vec![first];
        while self.take(",") {
            members.push(member(self)?);
        }
        Ok(Expression::Tuple(members))
    }

    fn choice(&mut self) -> Result<Expression, String> {
        let then = self.or()?;
        if !self.take("if") {
            return Ok(then);
        }
        let condition = self.or()?;
        self.expect("else")?;
        Ok(Expression::Choice(Box::new(condition), Box::new(then), Box::new(self.choice()?)))
    }

    fn or(&mut self) -> Result<Expression, String> {
        let mut left = self.and()?;
        while self.take("or") {
            left = Expression::Or(Box::new(left), Box::new(self.and()?));
        }
        Ok(left)
    }

    fn and(&mut self) -> Result<Expression, String> {
        let mut left = self.not()?;
        while self.take("and") {
            left = Expression::And(Box::new(left), Box::new(self.not()?));
        }
        Ok(left)
    }

    fn not(&mut self) -> Result<Expression, String> {
        if self.take("not") { Ok(Expression::Not(Box::new(self.not()?))) } else { self.comparison() }
    }

    fn comparison(&mut self) -> Result<Expression, String> {
        let first = self.sum()?;
        let mut rest = Vec::new();
        while let Some(operator) = self.comparison_operator() {
            rest.push((operator, self.sum()?));
        }
        Ok(if rest.is_empty() { first } else { Expression::Compare(Box::new(first), rest) })
    }

    fn comparison_operator(&mut self) -> Option<String> {
        let following = self.tokens.get(self.next + 1).map(String::as_str);
        let (operator, length) = match (self.peek()?, following) {
            ("not", Some("in")) => ("not in", 2),
            ("is", Some("not")) => ("is not", 2),
            (operator @ ("<" | "<=" | ">" | ">=" | "==" | "!=" | "in" | "is"), _) => (operator, 1),
            _ => return None,
        };
        let operator = operator.to_string();
        self.next += length;
        Some(operator)
    }

    fn sum(&mut self) -> Result<Expression, String> {
        self.chain(&["+", "-"], Parser::product)
    }

    fn product(&mut self) -> Result<Expression, String> {
        self.chain(&["*", "//", "%"], Parser::unary)
    }

    fn chain(
        &mut self,
        operators: &[&str],
        operand: fn(&mut Parser) -> Result<Expression, String>,
    ) -> Result<Expression, String> {
        let mut left = operand(self)?;
        while let Some(operator) = self.peek().filter(|token| operators.contains(token)).map(String::from) {
            self.next += 1;
            left = Expression::Binary(operator, Box::new(left), Box::new(operand(self)?));
        }
        Ok(left)
    }

    fn unary(&mut self) -> Result<Expression, String> {
        if self.take("-") {
            return Ok(Expression::Negative(Box::new(self.unary()?)));
        }
        let base = self.postfix()?;
        if self.take("**") {
            return Ok(Expression::Binary("**".into(), Box::new(base), Box::new(self.unary()?)));
        }
        Ok(base)
    }

    fn postfix(&mut self) -> Result<Expression, String> {
        let mut value = self.atom()?;
        loop {
            if self.take("(") {
                let Expression::Name(function) = value else { return Err(self.stuck()) };
                let (arguments, keywords) = self.arguments()?;
                value = Expression::Call { function, arguments, keywords };
            } else if self.take(".") {
                let name = self.peek().ok_or_else(|| self.stuck())?.to_string();
                self.next += 1;
                self.expect("(")?;
                let (arguments, keywords) = self.arguments()?;
                if !keywords.is_empty() {
                    return Err(self.stuck());
                }
                value = Expression::Method { object: Box::new(value), name, arguments };
            } else if self.take("[") {
                value = self.subscript(value)?;
            } else {
                return Ok(value);
            }
        }
    }

    /// Everything between an open bracket behind `object` and its closing one.
    fn subscript(&mut self, object: Expression) -> Result<Expression, String> {
        let mut bounds: [Option<Box<Expression>>; 3] = [None, None, None];
        let mut colons = 0;
        loop {
            if self.take("]") {
                break;
            } else if self.take(":") {
                colons += 1;
                if colons > 2 {
                    return Err(self.stuck());
                }
            } else {
                bounds[colons] = Some(Box::new(self.choice()?));
            }
        }
        match (colons, bounds) {
            (0, [Some(index), _, _]) => Ok(Expression::Index(Box::new(object), index)),
            (0, _) => Err(self.stuck()),
            (_, bounds) => Ok(Expression::Slice(Box::new(object), bounds)),
        }
    }

    /// Positional and named arguments, up to the closing bracket.
    fn arguments(&mut self) -> Result<Arguments, String> {
        let (mut arguments, mut keywords) = (Vec::new(), Vec::new());
        while !self.take(")") {
            if self.tokens.get(self.next + 1).map(String::as_str) == Some("=") {
                let name = self.tokens[self.next].clone();
                self.next += 2;
                keywords.push((name, self.choice()?));
            } else {
                let argument = self.choice()?;
                arguments.push(self.comprehension_after(argument)?);
            }
            if self.peek() != Some(")") {
                self.expect(",")?;
            }
        }
        Ok((arguments, keywords))
    }

    /// `element`, or the comprehension that begins with it.
    fn comprehension_after(&mut self, element: Expression) -> Result<Expression, String> {
        if !self.take("for") {
            return Ok(element);
        }
        let target = Box::new(self.targets()?);
        self.expect("in")?;
        let iterable = Box::new(self.or()?);
        let condition = if self.take("if") { Some(Box::new(self.or()?)) } else { None };
        Ok(Expression::Comprehension { element: Box::new(element), target, iterable, condition })
    }

    fn atom(&mut self) -> Result<Expression, String> {
        let token = self.peek().ok_or_else(|| self.stuck())?.to_string();
        self.next += 1;
        let constant = |value| Ok(Expression::Constant(value));
        match token.as_str() {
            "None" => constant(Value::None),
            "True" => constant(Value::Bool(true)),
            "False" => constant(Value::Bool(false)),
            "(" => {
                let inner = self.expressions()?;
                self.expect(")")?;
                Ok(inner)
            }
            "[" => self.list(),
            "{" => self.dict(),
            _ if token.starts_with('"') => constant(Value::text(&token[1..])),
            _ if token.starts_with(|c: char| c.is_ascii_digit()) => {
                token.parse().map_err(|_| unexpected(&token)).and_then(|number| constant(Value::Int(number)))
            }
            _ if token.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') && !KEYWORDS.contains(&token.as_str()) => {
                Ok(Expression::Name(token))
            }
            _ => Err(unexpected(&token)),
        }
    }

    fn list(&mut self) -> Result<Expression, String> {
        let mut items = Vec::new();
        while !self.take("]") {
            let item = self.choice()?;
            let item = self.comprehension_after(item)?;
            if let Expression::Comprehension { .. } = item {
                self.expect("]")?;
                return Ok(item);
            }
            items.push(item);
            if self.peek() != Some("]") {
                self.expect(",")?;
            }
        }
        Ok(Expression::List(items))
    }

    fn dict(&mut self) -> Result<Expression, String> {
        let mut entries = Vec::new();
        while !self.take("}") {
            let key = self.choice()?;
            self.expect(":")?;
            entries.push((key, self.choice()?));
            if self.peek() != Some("}") {
                self.expect(",")?;
            }
        }
        Ok(Expression::Dict(entries))
    }
}

const KEYWORDS: [&str; 9] = ["if", "else", "for", "in", "and", "or", "not", "is", "lambda"];
