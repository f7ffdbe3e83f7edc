use learner::sandbox::*;
use std::time::Instant;
#[test]
fn speed() {
    set_helper(env!("CARGO_BIN_EXE_learner"));
    for tier in [Tier::A, Tier::B] {
        for warm in [true, false] {
            let settings = Settings { tier: Some(tier), warm_interpreter: warm, parallel: 4, ..Settings::default() };
            let start = Instant::now();
            let sandbox = Sandbox::start(&settings).unwrap();
            println!("{tier} start {:?} python {:?}", start.elapsed(), sandbox.python());
            let files = [
                ("m.py", "def f(x):\n    return x + 1\n"),
                ("t.py", "from m import f\ndef test_a():\n    assert f(1) == 2\ndef test_b():\n    assert f(1) == 3\n"),
            ];
            let request = TestRequest {
                files: files.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect(),
                tests: vec!["t.py::test_a".into(), "t.py::test_b".into()],
                limits: None,
            };
            let run = sandbox.run_python_tests(&request);
            println!("{run:?} {}", String::from_utf8_lossy(&run.result.stderr));
            for threads in [1, 2, 3, 4] {
                let count = if warm { 400 } else { 40 };
                let start = Instant::now();
                std::thread::scope(|scope| {
                    for _ in 0..threads {
                        scope.spawn(|| {
                            for _ in 0..count / threads {
                                let run = sandbox.run_python_tests(&request);
                                assert!(run.passed("t.py::test_a") && !run.passed("t.py::test_b"), "{run:?}");
                            }
                        });
                    }
                });
                println!("{tier} warm {warm} threads {threads}: {:.0}/s", count as f64 / start.elapsed().as_secs_f64());
            }
        }
    }
}
