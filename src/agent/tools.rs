//! The text of a turn and the tool call in it.
//!
//! A call is a short form of the R2E-Gym style: `<function=NAME>` with `<parameter=KEY>VALUE</parameter>` inside, closed by
//! `</function>`. Text before the call is the agent's own thinking; after it nothing may follow but white space.

/// What the agent asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// Show a file with line numbers. The path may be left out when the task has one file.
    View { path: Option<String> },
    /// Replace a line of the original file: `line` counts from 1. A new edit of a file replaces the earlier one.
    Edit { path: Option<String>, line: usize, text: String },
    /// Run the visible tests.
    Run,
    /// Hand in the files as they stand.
    Submit,
}

/// Reads the one call of a turn.
///
/// # Errors
/// One line that tells the agent what is wrong with its turn.
pub fn parse_call(text: &str) -> Result<Call, String> {
    const OPEN: &str = "<function=";
    const CLOSE: &str = "</function>";
    let start = text.find(OPEN).ok_or("no tool call: expected <function=NAME>...</function>")?;
    let (name, rest) = text[start + OPEN.len()..].split_once('>').ok_or("the call's name is not closed by '>'")?;
    let (body, after) = rest.split_once(CLOSE).ok_or("the call is not closed by </function>")?;
    if !after.trim().is_empty() {
        return Err("something follows the call: one call a turn, at its end".into());
    }
    let mut parameters = parse_parameters(body)?;
    let mut take = |key: &str| parameters.iter().position(|(k, _)| *k == key).map(|at| parameters.remove(at).1);
    let call = match name {
        "view" => Call::View { path: take("path") },
        "edit" => {
            let path = take("path");
            let line = take("line").ok_or("edit needs <parameter=line>N|text</parameter>")?;
            let (number, text) = line.split_once('|').ok_or("the line parameter has no '|': write N|text")?;
            let line = number.trim().parse().map_err(|_| format!("{number:?} is no line number: write N|text"))?;
            Call::Edit { path, line, text: text.to_owned() }
        }
        "run" => Call::Run,
        "submit" => Call::Submit,
        _ => return Err(format!("no tool named {name:?}: there are view, edit, run and submit")),
    };
    match parameters.first() {
        Some((key, _)) => Err(format!("{name} has no parameter {key:?} or has it twice")),
        None => Ok(call),
    }
}

fn parse_parameters(mut body: &str) -> Result<Vec<(String, String)>, String> {
    let mut parameters = Vec::new();
    while !body.trim().is_empty() {
        let rest =
            body.trim_start().strip_prefix("<parameter=").ok_or("expected <parameter=KEY>VALUE</parameter> in the call")?;
        let (key, rest) = rest.split_once('>').ok_or("a parameter's name is not closed by '>'")?;
        let (value, rest) = rest.split_once("</parameter>").ok_or("a parameter is not closed by </parameter>")?;
        parameters.push((key.to_owned(), value.to_owned()));
        body = rest;
    }
    Ok(parameters)
}

/// The text of a call, as `parse_call` reads it.
pub fn render_call(call: &Call) -> String {
    let parameter = |key: &str, value: &str| format!("<parameter={key}>{value}</parameter>");
    let path = |path: &Option<String>| path.as_ref().map(|path| parameter("path", path)).unwrap_or_default();
    match call {
        Call::View { path: file } => format!("<function=view>{}</function>", path(file)),
        Call::Edit { path: file, line, text } => {
            format!("<function=edit>{}{}</function>", path(file), parameter("line", &format!("{line}|{text}")))
        }
        Call::Run => "<function=run></function>".into(),
        Call::Submit => "<function=submit></function>".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn calls_are_read_with_thinking_before_them_and_nothing_after() {
        assert_eq!(parse_call("<function=run></function>"), Ok(Call::Run));
        assert_eq!(parse_call("I look first.\n<function=view></function>\n"), Ok(Call::View { path: None }));
        assert_eq!(
            parse_call(
                "<function=edit><parameter=path>a/b.py</parameter><parameter=line>4|    if x > 1 | y:</parameter></function>"
            ),
            Ok(Call::Edit { path: Some("a/b.py".into()), line: 4, text: "    if x > 1 | y:".into() })
        );
    }

    #[test]
    fn every_malformed_call_is_refused_with_a_reason() {
        for text in [
            "",
            "submit",
            "<function=submit",
            "<function=submit>",
            "<function=submit></function> and more",
            "<function=submit></function><function=submit></function>",
            "<function=delete></function>",
            "<function=edit></function>",
            "<function=edit><parameter=line>no number|x</parameter></function>",
            "<function=edit><parameter=line>12</parameter></function>",
            "<function=edit><parameter=line>-1|x</parameter></function>",
            "<function=edit><parameter=line>1|x</function>",
            "<function=edit><parameter=line>1|x</parameter><parameter=line>2|x</parameter></function>",
            "<function=run>text</function>",
            "<function=run><parameter=command>ls</parameter></function>",
        ] {
            let reason = parse_call(text).expect_err(text);
            assert!(!reason.is_empty() && !reason.contains('\n'), "{text}: {reason}");
        }
    }

    proptest! {
        #[test]
        fn rendered_calls_read_back(line in 1usize..999, text in "[a-z =<>|+]{0,20}", path in proptest::option::of("[a-z]{1,8}\\.py")) {
            let call = Call::Edit { path: path.clone(), line, text };
            prop_assert_eq!(parse_call(&render_call(&call)), Ok(call));
            let call = Call::View { path };
            prop_assert_eq!(parse_call(&render_call(&call)), Ok(call));
        }

        #[test]
        fn any_text_is_parsed_or_refused(text in ".{0,80}") {
            let _ = parse_call(&text);
            let _ = parse_call(&format!("<function={text}></function>"));
        }
    }
}
