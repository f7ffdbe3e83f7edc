//! What is wrong is refused with one line that names it, exit code 2 or 1, and nothing half-written.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::harness::{learner, result, run, succeed, text};

/// Runs, expects a refusal of one line holding all `words`, and that `--out` was not created.
fn refuse(arguments: &[&str], words: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let mut all = vec!["--out", out.to_str().unwrap()];
    all.extend(arguments);
    let output = run(&all);
    let said = text(&output.stderr);
    assert!(matches!(output.status.code(), Some(1 | 2)), "{arguments:?}: {}\n{said}", output.status);
    assert_eq!(said.trim_end().lines().count(), 1, "{arguments:?}: {said}");
    for word in words {
        assert!(said.contains(word), "{arguments:?}: {word:?} is not in {said}");
    }
    assert!(!out.exists(), "{arguments:?} left something behind");
}

/// A run that does next to nothing.
const SHORTEST: [&str; 5] =
    ["rft.candidates=0", "rl.steps=0", "evaluate.tasks=1", "evaluate.samples=1", "evaluate.structure_tasks=0"];

/// A model directory as the program itself writes it.
fn model(folder: &Path) -> PathBuf {
    let run = folder.join("run");
    let mut arguments = vec!["--recipe", "smoke", "--out", run.to_str().unwrap()];
    SHORTEST.iter().for_each(|setting| arguments.extend(["--set", setting]));
    succeed(&arguments);
    let checkpoints = std::fs::read_dir(run.join("checkpoints")).unwrap();
    checkpoints.flatten().map(|entry| entry.path()).next().expect("a checkpoint was written")
}

#[test]
fn settings() {
    refuse(&["--recipe", "nonesuch"], &["nonesuch", "quickstart"]);
    refuse(&["--set", "rl.stepps=3"], &["stepps"]);
    refuse(&["--set", "rl.group_size=1"], &["rl.group_size"]);
    refuse(&["--device", "tpu"], &["tpu", "cpu"]);
    refuse(&["--config", "/nonexistent.toml"], &["/nonexistent.toml"]);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.toml");
    std::fs::write(&file, "[rl]\nsteps = = 3\n").unwrap();
    refuse(&["--config", file.to_str().unwrap()], &["run.toml", "line 2"]);
}

#[test]
fn models() {
    let folder = tempfile::tempdir().unwrap();
    let good = model(folder.path());
    refuse(&["--model", "/nonexistent"], &["/nonexistent"]);
    let broken = |name: &str, change: &dyn Fn(&Path)| {
        let copy = folder.path().join(name);
        std::fs::create_dir(&copy).unwrap();
        for file in ["config.json", "model.safetensors", "tokenizer.json"] {
            std::fs::copy(good.join(file), copy.join(file)).unwrap();
        }
        change(&copy);
        copy.display().to_string()
    };
    let edit = |path: &Path, from: &str, to: &str| {
        let text = std::fs::read_to_string(path).unwrap();
        assert!(text.contains(from), "{from} in {text}");
        std::fs::write(path, text.replace(from, to)).unwrap();
    };
    let no_weights = broken("no-weights", &|copy| std::fs::remove_file(copy.join("model.safetensors")).unwrap());
    refuse(&["--model", &no_weights], &["model.safetensors"]);
    let no_tokenizer = broken("no-tokenizer", &|copy| std::fs::remove_file(copy.join("tokenizer.json")).unwrap());
    refuse(&["--model", &no_tokenizer], &["tokenizer.json"]);
    let more_layers = broken("missing", &|copy| {
        edit(&copy.join("config.json"), "\"num_hidden_layers\": 1", "\"num_hidden_layers\": 2");
    });
    refuse(&["--model", &more_layers], &["model.layers.1."]);
    let truncated = broken("truncated", &|copy| {
        let weights = std::fs::read(copy.join("model.safetensors")).unwrap();
        std::fs::write(copy.join("model.safetensors"), &weights[..weights.len() / 2]).unwrap();
    });
    refuse(&["--model", &truncated], &["model.safetensors"]);
    let unknown = broken("unknown", &|copy| edit(&copy.join("config.json"), "\"qwen3\"", "\"mamba\""));
    refuse(&["--model", &unknown], &["config.json", "mamba"]);
}

#[test]
fn tasks() {
    let folder = tempfile::tempdir().unwrap();
    let good = folder.path().join("good.jsonl");
    succeed(&[
        "tasks",
        "make",
        "--level",
        "small",
        "--split",
        "train",
        "--count",
        "4",
        "--seed",
        "9",
        "--out",
        good.to_str().unwrap(),
        "-q",
    ]);
    let lines: Vec<String> = std::fs::read_to_string(&good).unwrap().lines().map(str::to_owned).collect();
    assert_eq!(lines.len(), 4);
    let file = folder.path().join("tasks.jsonl");
    let check = |content: String, words: &[&str]| {
        std::fs::write(&file, content).unwrap();
        refuse(&["--tasks", file.to_str().unwrap()], words);
    };
    check(format!("{}\n{{\"id\": \n", lines[0]), &["tasks.jsonl:2"]);
    check(format!("{}\n{}\n{}\n", lines[0], lines[1], lines[0]), &["tasks.jsonl:3", "line 1"]);
    check(lines[0].replace("\"issue\"", "\"isue\""), &["tasks.jsonl:1", "issue"]);
    check(String::new(), &["tasks.jsonl"]);
    refuse(&["--tasks", "/nonexistent.jsonl"], &["/nonexistent.jsonl"]);
}

#[test]
fn directories() {
    let folder = tempfile::tempdir().unwrap();
    let run_directory = folder.path().join("run");
    let out = run_directory.to_str().unwrap();
    let checkpoint = model(folder.path());
    let said = |arguments: &[&str]| {
        let output = run(arguments);
        assert!(matches!(output.status.code(), Some(1 | 2)), "{arguments:?}: {}", output.status);
        let said = text(&output.stderr);
        assert_eq!(said.trim_end().lines().count(), 1, "{said}");
        said
    };
    assert!(said(&["--recipe", "smoke", "--out", out]).contains("--resume"));
    let mut other_seed = vec!["--recipe", "smoke", "--out", out, "--resume", "--seed", "77"];
    SHORTEST.iter().for_each(|setting| other_seed.extend(["--set", setting]));
    assert!(said(&other_seed).contains("run.seed was 0, given is 77"));
    assert!(said(&["--recipe", "smoke", "--out", checkpoint.to_str().unwrap()]).contains("holds no run"));
    assert!(said(&["--recipe", "smoke", "--out", "/proc/none"]).contains("/proc/none"));
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert!(said(&["--recipe", "smoke", "--out", file.join("run").to_str().unwrap()]).contains("file"));
}

#[test]
fn machines_without_python_or_with_too_weak_a_sandbox() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let output = learner(&["--recipe", "smoke", "--out", out.to_str().unwrap()]).env("PATH", folder.path()).output().unwrap();
    let said = text(&output.stderr);
    assert!(matches!(output.status.code(), Some(1 | 2)), "{said}");
    assert_eq!(said.trim_end().lines().count(), 1, "{said}");
    assert!(said.contains("python3"), "{said}");
    assert!(!out.exists());
    refuse(&["--recipe", "smoke", "--set", "sandbox.tier=b", "--set", "sandbox.minimum_tier=a"], &["sandbox"]);
}

/// A file system of its own, given back when dropped. Mounting one needs root.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(point: &Path, size: &str) -> Option<SmallDisk> {
        std::fs::create_dir(point).unwrap();
        let status = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs", point.to_str().unwrap()])
            .stderr(std::process::Stdio::null())
            .status();
        let mounted = status.is_ok_and(|status| status.success());
        if !mounted {
            println!("skipped: mounting a small file system needs root");
        }
        mounted.then(|| SmallDisk(point.to_path_buf()))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

#[test]
fn a_disk_too_small_is_refused_before_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(&folder.path().join("disk"), "1m") else { return };
    let out = disk.0.join("run");
    let output = run(&["--recipe", "smoke", "--out", out.to_str().unwrap()]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("free") && said.trim_end().lines().count() == 1, "{said}");
    assert!(!out.exists());
}

#[test]
fn a_disk_that_fills_up_ends_the_run_with_a_line_and_the_run_goes_on_once_there_is_room() {
    let folder = tempfile::tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(&folder.path().join("disk"), "64m") else { return };
    let (whole, out) = (folder.path().join("whole"), disk.0.join("run"));
    succeed(&["--recipe", "smoke", "--out", whole.to_str().unwrap()]);
    let child = learner(&["--recipe", "smoke", "--out", out.to_str().unwrap()])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let marked = || {
        std::fs::read_dir(out.join("checkpoints"))
            .is_ok_and(|list| list.flatten().any(|entry| entry.path().join("DONE").exists()))
    };
    while !marked() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let ballast = disk.0.join("ballast");
    let mut file = std::fs::File::create(&ballast).unwrap();
    while std::io::Write::write_all(&mut file, &[0; 1 << 16]).is_ok() {}
    let output = child.wait_with_output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(out.to_str().unwrap()) && said.trim_end().lines().count() == 1, "{said}");
    assert!(marked(), "the checkpoint from before is whole");
    drop(file);
    std::fs::remove_file(&ballast).unwrap();
    succeed(&["--resume", "--out", out.to_str().unwrap()]);
    assert_eq!(result(&out), result(&whole));
}

#[test]
fn two_learners_in_one_directory() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let mut first = learner(&["--recipe", "smoke", "--out", out.to_str().unwrap()])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    while !out.join("metrics.jsonl").exists() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let output = run(&["--resume", "--out", out.to_str().unwrap()]);
    let said = text(&output.stderr);
    first.kill().unwrap();
    first.wait().unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("another learner"), "{said}");
}
