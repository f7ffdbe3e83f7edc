//! The catalogue of hostile programs (`hostile/`) and of honest neighbours (`controls/`): each file declares its verdict in its
//! head, and this module reads the heads.
//!
//! ```text
//! # item 13: what it tries
//! # verdict: cpu_timeout; has TEXT; lacks TEXT; truncated       of the run and its output; `exited 0 or wall_timeout` is a choice
//! # tier B: exited 1; has TEXT; because REASON                  only where tier B differs
//! # control: FILE; limits: cpu_seconds=0.5; runs: 2 at once     the neighbour that must pass; what differs from `limits()`
//! ```
//! An honest program has no control; `needs: node` leaves it out on a machine without that program.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use learner::sandbox::{Limits, Request, RunResult, RunVerdict, Sandbox, Tier};
use learner::types::Workspace;

/// Printed by a program that got what it must not get, and by nothing else.
const REACHED: &str = "REACHED";

pub struct Program {
    pub file: String,
    pub item: u32,
    pub tries: String,
    /// In tier A and in tier B.
    pub declared: [Declared; 2],
    /// Why the tiers differ.
    pub because: Option<String>,
    pub control: Option<String>,
    pub limits: Limits,
    pub runs: Runs,
    pub needs: Option<String>,
    source: String,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Declared {
    /// One of these: the name of a verdict, and the exit code or signal where it has one.
    pub verdicts: Vec<(String, Option<i32>)>,
    pub has: Vec<String>,
    pub lacks: Vec<String>,
    pub truncated: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Runs {
    InTurn(usize),
    AtOnce(usize),
}

/// Small, so that a hostile program reaches them soon; time is large, so that a busy machine does not turn into a verdict.
pub fn limits() -> Limits {
    Limits {
        wall_seconds: 60.0,
        cpu_seconds: 30.0,
        memory_bytes: 64 << 20,
        processes: 32,
        file_bytes: 8 << 20,
        workspace_bytes: 16 << 20,
        output_bytes: 64 << 10,
    }
}

pub fn hostile() -> Vec<Program> {
    programs("hostile")
}

pub fn controls() -> Vec<Program> {
    programs("controls")
}

fn programs(folder: &str) -> Vec<Program> {
    let folder = folder_of(folder);
    let mut programs: Vec<Program> = std::fs::read_dir(&folder).unwrap().map(|entry| read(&entry.unwrap().path())).collect();
    programs.sort_by(|left, right| left.file.cmp(&right.file));
    programs
}

fn folder_of(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sandbox").join(name)
}

fn read(path: &Path) -> Program {
    let file = path.file_name().unwrap().to_str().unwrap().to_string();
    let source = std::fs::read_to_string(path).unwrap();
    parse(file, source).unwrap_or_else(|wrong| panic!("{}: {wrong}", path.display()))
}

fn parse(file: String, source: String) -> Result<Program, String> {
    let head = source.lines().map_while(|line| line.strip_prefix("# ").or(line.strip_prefix("// ")));
    let mut program = Program {
        file,
        item: 0,
        tries: String::new(),
        declared: Default::default(),
        because: None,
        control: None,
        limits: limits(),
        runs: Runs::InTurn(1),
        needs: None,
        source: source.clone(),
    };
    let mut differs = None;
    for line in head {
        let (key, rest) = line.split_once(": ").ok_or_else(|| format!("no key in {line:?}"))?;
        match key {
            "verdict" => program.declared[0] = declared(rest, &mut program.because)?,
            "tier B" => differs = Some(declared(rest, &mut program.because)?),
            _ if key.starts_with("item ") => {
                program.item = key["item ".len()..].parse().map_err(|_| format!("no number in {key:?}"))?;
                program.tries = rest.to_string();
            }
            _ => line.split("; ").try_for_each(|clause| program.take(clause))?,
        }
    }
    if program.item == 0 || program.declared[0].verdicts.is_empty() {
        return Err("an item and a verdict are needed".to_string());
    }
    if differs.is_some() != program.because.is_some() {
        return Err("a verdict of tier B comes with a reason, and a reason with a verdict".to_string());
    }
    program.declared[1] = differs.unwrap_or_else(|| program.declared[0].clone());
    Ok(program)
}

fn declared(clauses: &str, because: &mut Option<String>) -> Result<Declared, String> {
    let mut declared = Declared::default();
    for (index, clause) in clauses.split("; ").enumerate() {
        match clause.split_once(' ') {
            _ if index == 0 => {
                declared.verdicts = clause.split(" or ").map(verdict).collect::<Result<_, _>>()?;
            }
            Some(("has", text)) => declared.has.push(text.to_string()),
            Some(("lacks", text)) => declared.lacks.push(text.to_string()),
            Some(("because", text)) => *because = Some(text.to_string()),
            None if clause == "truncated" => declared.truncated = true,
            _ => return Err(format!("unknown clause {clause:?}")),
        }
    }
    Ok(declared)
}

fn verdict(words: &str) -> Result<(String, Option<i32>), String> {
    let (name, number) = match words.split_once(' ') {
        Some((name, number)) => (name, Some(number.parse().map_err(|_| format!("no number in {words:?}"))?)),
        None => (words, None),
    };
    let known = ["wall_timeout", "cpu_timeout", "memory_limit", "process_limit", "output_limit", "disk_limit"];
    let with_number = ["exited", "signaled"];
    let right = if number.is_some() { with_number.contains(&name) } else { known.contains(&name) };
    if right { Ok((name.to_string(), number)) } else { Err(format!("no verdict: {words:?}")) }
}

impl Program {
    fn take(&mut self, clause: &str) -> Result<(), String> {
        match clause.split_once(": ") {
            Some(("control", file)) => self.control = Some(file.to_string()),
            Some(("needs", name)) => self.needs = Some(name.to_string()),
            Some(("runs", count)) => {
                let (number, at_once) = (count.trim_end_matches(" at once"), count.ends_with(" at once"));
                let number = number.parse().map_err(|_| format!("no number in {count:?}"))?;
                self.runs = if at_once { Runs::AtOnce(number) } else { Runs::InTurn(number) };
            }
            Some(("limits", list)) => {
                let mut limits = serde_json::to_value(&self.limits).map_err(|error| error.to_string())?;
                for pair in list.split(", ") {
                    let (name, value) = pair.split_once('=').ok_or_else(|| format!("no value in {pair:?}"))?;
                    let place = limits.get_mut(name).ok_or_else(|| format!("no limit {name:?}"))?;
                    *place = value.parse().map_err(|_| format!("no number in {pair:?}"))?;
                }
                self.limits = serde_json::from_value(limits).map_err(|error| error.to_string())?;
            }
            _ => return Err(format!("unknown clause {clause:?}")),
        }
        Ok(())
    }

    pub fn declared(&self, tier: Tier) -> &Declared {
        &self.declared[usize::from(tier == Tier::B)]
    }

    pub fn can_run_here(&self) -> bool {
        let compiler = self.file.ends_with(".c").then_some("cc");
        [compiler, self.needs.as_deref()].into_iter().flatten().all(|name| {
            let missing =
                !std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).any(|place| place.join(name).is_file());
            if missing {
                println!("left out: {}: this machine has no {name}", self.file);
            }
            !missing
        })
    }

    pub fn run(&self, sandbox: &Sandbox, environment: &BTreeMap<String, String>) -> RunResult {
        let (files, argv): (Workspace, Vec<&str>) = match self.file.rsplit_once('.') {
            Some((_, "py")) => (self.as_file(), vec!["python3", &self.file]),
            Some((_, "sh")) => (self.as_file(), vec!["sh", &self.file]),
            _ => (
                Workspace::from([("program.base64".to_string(), compiled(&self.file))]),
                vec!["sh", "-c", "base64 -d program.base64 > program && chmod +x program && exec ./program"],
            ),
        };
        let argv = argv.into_iter().map(str::to_string).collect();
        sandbox.run(&Request {
            argv,
            files,
            environment: environment.clone(),
            limits: Some(self.limits.clone()),
            ..Request::default()
        })
    }

    fn as_file(&self) -> Workspace {
        Workspace::from([(self.file.clone(), self.source.clone())])
    }

    /// What of the declaration does not hold for a result; empty if all does.
    pub fn offences(&self, result: &RunResult) -> Vec<String> {
        let declared = self.declared(result.tier);
        let (stdout, stderr) = (String::from_utf8_lossy(&result.stdout), String::from_utf8_lossy(&result.stderr));
        let mut offences = Vec::new();
        let number = match result.verdict {
            RunVerdict::Exited => result.exit_code,
            RunVerdict::Signaled => result.signal,
            _ => None,
        };
        if !declared.verdicts.contains(&(result.verdict.name().to_string(), number)) {
            offences.push(format!("{:?} {number:?} instead of {:?}", result.verdict, declared.verdicts));
        }
        offences.extend(declared.has.iter().filter(|text| !stdout.contains(*text)).map(|text| format!("no {text:?}")));
        let forbidden = declared.lacks.iter().map(String::as_str).chain([REACHED]);
        offences
            .extend(forbidden.filter(|text| stdout.contains(text) || stderr.contains(text)).map(|text| format!("has {text:?}")));
        if declared.truncated != result.truncated {
            offences.push(format!("truncated: {}", result.truncated));
        }
        // One verdict: whatever ended at a limit has not succeeded.
        if result.succeeded() && result.verdict != RunVerdict::Exited {
            offences.push("two verdicts".to_string());
        }
        if !offences.is_empty() {
            let tail = |bytes: &[u8]| String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(600)..]).into_owned();
            let (out, err) = (tail(&result.stdout), tail(&result.stderr));
            offences.push(format!("exit {:?} signal {:?}\n{out}\n{err}", result.exit_code, result.signal));
        }
        offences
    }
}

/// The programs in C, compiled once, in base64: files of a run are text.
fn compiled(file: &str) -> String {
    static PROGRAMS: OnceLock<BTreeMap<String, String>> = OnceLock::new();
    let programs = PROGRAMS.get_or_init(|| {
        let place = tempfile::tempdir().unwrap();
        let compile = |program: &Program| {
            let (source, output) = (folder_of("hostile").join(&program.file), place.path().join("program"));
            let compiled = Command::new("cc").arg("-O1").arg("-o").args([&output, &source]).status().unwrap();
            assert!(compiled.success(), "cc {}", program.file);
            let encoded = Command::new("base64").arg("-w0").arg(&output).output().unwrap();
            (program.file.clone(), String::from_utf8(encoded.stdout).unwrap())
        };
        hostile().iter().filter(|program| program.file.ends_with(".c")).map(compile).collect()
    });
    programs[file].clone()
}
