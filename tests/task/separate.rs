//! What passes between tests and code that run in separate processes, and what does not.

use learner::sandbox::{self, RunVerdict, Sandbox, TestRequest, Tier};
use learner::types::{TestRunner, Workspace};

const CODE: &str = include_str!("separate/code.py");
const TESTS: &str = include_str!("separate/test_code.py");

/// The first that cannot pass: from here on every test must fail.
const FIRST_FAILURE: &str = "test_object_of_the_test";

fn files(files: &[(&str, &str)]) -> Workspace {
    files.iter().map(|(path, text)| (path.to_string(), text.to_string())).collect()
}

#[test]
fn what_passes_and_what_does_not() {
    sandbox::set_helper(env!("CARGO_BIN_EXE_learner"));
    let request = TestRequest {
        files: files(&[
            ("code_under_test.py", CODE),
            ("package/__init__.py", "from .core import f\n"),
            ("package/core.py", "def f():\n    return 'f'\n\n\nX = 5\n"),
        ]),
        test_files: files(&[
            ("test_code.py", TESTS),
            ("helpers.py", "def twice(x):\n    return 2 * x\n"),
            ("data/rows.txt", "one\n"),
        ]),
        tests: TESTS
            .lines()
            .filter_map(|line| line.strip_prefix("def test_")?.split_once('('))
            .map(|(name, _)| format!("test_code.py::test_{name}"))
            .collect(),
        runner: TestRunner::Separate,
        ..TestRequest::default()
    };
    let failing = request.tests.iter().position(|test| test.ends_with(FIRST_FAILURE)).expect("it is there");
    assert!(failing >= 8 && request.tests.len() - failing >= 8);
    for (tier, warm_interpreter) in [(Tier::A, true), (Tier::A, false), (Tier::B, true), (Tier::B, false)] {
        let settings = sandbox::Settings { tier: Some(tier), minimum_tier: Tier::B, warm_interpreter, ..Default::default() };
        let sandbox = match Sandbox::start(&settings) {
            Ok(sandbox) => sandbox,
            Err(error) => {
                println!("left out: {error}");
                continue;
            }
        };
        let run = sandbox.run_python_tests(&request);
        let said = String::from_utf8_lossy(&run.result.stderr);
        assert_eq!((&run.result.verdict, run.result.exit_code), (&RunVerdict::Exited, Some(1)), "{run:?}");
        for (index, test) in request.tests.iter().enumerate() {
            assert_eq!(run.outcomes.get(test), Some(&(index < failing)), "{test}, tier {tier}, warm {warm_interpreter}: {said}");
        }
        for words in ["Own of the tests cannot be handed", "equals anything", "both less and greater", "compared with plain data"]
        {
            assert!(said.contains(words), "{words:?} is not in {said}");
        }
    }
}
