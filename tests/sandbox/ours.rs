//! What the catalogue asks of our own side: what we signal, how we keep output, where we lay files.

use std::path::{Path, PathBuf};

use learner::sandbox::{Request, RunVerdict};
use learner::types::Workspace;

use crate::catalogue::limits;
use crate::{TIERS, sandbox, shell, stdout, tight};

/// Item 34. A number may belong to another process by the time it is signalled. So runs are ended through handles, through
/// their namespace, or by their user id (`kill(-1)` as that user), and no other call of the sandbox sends a signal.
#[test]
fn no_number_of_a_process_is_signalled_without_a_handle() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/sandbox");
    for path in files(&folder).into_iter().filter(|path| path.extension().is_some_and(|extension| extension == "rs")) {
        let source = std::fs::read_to_string(&path).unwrap();
        let mut before = "";
        for (number, line) in source.lines().enumerate() {
            let by_number = line.contains("kill_process") || (line.contains("libc::kill(") && !line.contains("libc::kill(-1,"));
            // A child's number is its own for as long as its parent has not waited for it.
            let by_number = by_number && !before.contains("It is our own child, which nobody has waited for");
            before = line;
            assert!(!by_number, "{}:{}: {}", path.display(), number + 1, line.trim());
        }
    }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// Item 42: what a program wrote comes back byte for byte, up to what is kept, and half a character is cut by nobody.
#[test]
fn bytes_stay_bytes() {
    for sandbox in TIERS.into_iter().filter_map(|tier| sandbox(tier, false)) {
        let result = shell(&sandbox, "printf 'a\\000b\\377\\n\\342\\202'; printf '\\303' >&2; exit 7", tight());
        assert_eq!((&result.stdout[..], &result.stderr[..]), (&b"a\0b\xff\n\xe2\x82"[..], &b"\xc3"[..]));
        assert_eq!((result.exit_code, result.truncated), (Some(7), false));
        assert_eq!((result.stdout_total, result.stderr_total), (7, 1));
    }
}

/// Item 43: in what is printed for machines and kept in logs, one object of JSON, control characters are escaped.
#[test]
fn no_output_drives_the_terminal_of_a_log() {
    let script = r"printf '\033]0;title\007\033[2Jred\r\010\303\220'";
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_learner"))
        .args(["sandbox", "--json", "--", "sh", "-c", script])
        .output()
        .unwrap();
    assert!(output.stdout.iter().all(|&byte| byte == b'\n' || !byte.is_ascii_control()), "{:?}", output.stdout);
    let object: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(object["stdout"], "\u{1b}]0;title\u{7}\u{1b}[2Jred\r\u{8}\u{d0}");
}

/// Item 60: a file's name is relative and stays in the tree, or nothing is run; and that is said to be our caller's mistake.
#[test]
fn names_do_not_lead_out_of_the_tree() {
    for sandbox in TIERS.into_iter().filter_map(|tier| sandbox(tier, false)) {
        for name in ["../outside", "/tmp/outside", "a/../../outside", "", "a/", "a\0b"] {
            let files = Workspace::from([(name.to_string(), "x".to_string())]);
            let argv = ["sh", "-c", "echo has run"].map(str::to_string).to_vec();
            let result = sandbox.run(&Request { argv, files, limits: Some(limits()), ..Request::default() });
            assert!(result.verdict.infrastructure() && result.stdout.is_empty(), "{name:?}: {result:?}");
        }
    }
}

/// Item 29: a program that cannot be started is answered as a shell would, and is no trouble of ours.
#[test]
fn what_cannot_be_started_is_the_callers_mistake() {
    for sandbox in TIERS.into_iter().filter_map(|tier| sandbox(tier, false)) {
        for (program, code) in
            [("no-such-program", 127), ("/etc/passwd", 126), ("./empty", 126), ("/usr", 126), ("./script", 127)]
        {
            let files =
                [("empty", ""), ("script", "#!/no/such/interpreter\n")].map(|(name, text)| (name.to_string(), text.to_string()));
            let argv = vec![program.to_string()];
            let result = sandbox.run(&Request { argv, files: files.into(), limits: Some(limits()), ..Request::default() });
            // Files of a request are not executable.
            let code = if program == "./script" { 126 } else { code };
            assert_eq!((&result.verdict, result.exit_code), (&RunVerdict::Exited, Some(code)), "{program}: {result:?}");
        }
        assert_eq!(stdout(&shell(&sandbox, "echo the next run is as any", tight())), "the next run is as any\n");
    }
}

/// Item 49 and 63: the environment is the one that we give, and nothing of ours.
#[test]
fn the_environment_is_built_from_nothing() {
    for sandbox in TIERS.into_iter().filter_map(|tier| sandbox(tier, false)) {
        let result = shell(&sandbox, "env | cut -d= -f1 | sort | tr '\\n' ' '; cat; tty", tight());
        let names = "GIT_CONFIG_NOSYSTEM HOME LANG LC_ALL PATH PWD PYTHONDONTWRITEBYTECODE PYTHONHASHSEED TERM TMPDIR TZ ";
        assert!(stdout(&result).starts_with(names), "{}", stdout(&result));
    }
}
