//! Holds the code to the map of the house in `src/lib.rs`: an import runs only downward, files stay readable, every room
//! says what it is for, and `unsafe` stays where it was agreed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Imports between rooms of one floor that are agreed, as (from, to). `types` may be imported by all.
const AGREED_ON_ONE_FLOOR: &[(&str, &str)] = &[("cli", "config"), ("cli", "report")];

/// Where `unsafe` may stand: SIMD, the GPU's driver, memory maps, system calls.
const UNSAFE_MAY_STAND_IN: &[&str] = &["src/device/cpu", "src/device/cuda", "src/model/weights", "src/sandbox/linux"];

const MOST_LINES: usize = 700;

/// A rule that a line breaks, as `file:line: what`.
type Offences = Vec<String>;

#[test]
fn imports_run_only_downward() {
    let floors = floors(&read(Path::new("src/lib.rs")));
    assert!(floors.len() >= 10, "the map in src/lib.rs was not understood: {floors:?}");
    report(source_files("src").iter().flat_map(|path| import_offences(path, &read(path), &floors)).collect());
}

#[test]
fn unsafe_stands_only_where_agreed() {
    report(source_files("src").iter().flat_map(|path| unsafe_offences(path, &read(path))).collect());
}

#[test]
fn files_stay_readable() {
    let files = ["src", "tests", "benches"].into_iter().flat_map(source_files);
    report(files.filter_map(|path| length_offence(&path, &read(&path))).collect());
}

#[test]
fn every_room_is_on_the_map_and_says_what_it_is_for() {
    let floors = floors(&read(Path::new("src/lib.rs")));
    let mut offences = Offences::new();
    for entry in std::fs::read_dir(root().join("src")).expect("src can be listed") {
        let path = entry.expect("src can be listed").path();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if path.is_dir() && !floors.contains_key(&name) {
            offences.push(format!("src/{name}: a room that src/lib.rs does not list"));
        }
    }
    for room in floors.keys() {
        let text = read(Path::new(&format!("src/{room}/mod.rs")));
        if !text.starts_with("//! ") {
            offences.push(format!("src/{room}/mod.rs:1: begins with `//!` and what the room is for"));
        }
    }
    report(offences);
}

#[track_caller]
fn report(offences: Offences) {
    assert!(offences.is_empty(), "\n{}\n", offences.join("\n"));
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// All Rust files below `folder`, as paths relative to the root, in order. None if there is no such folder.
fn source_files(folder: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![PathBuf::from(folder)];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(root().join(&folder)).into_iter().flatten() {
            let entry = entry.expect("a folder can be listed");
            let path = folder.join(entry.file_name());
            if root().join(&path).is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    files
}

/// The floor of each room, from the lines `// Floor N: ...` and `pub mod room;` of `src/lib.rs`.
fn floors(map: &str) -> BTreeMap<String, u32> {
    let mut floors = BTreeMap::new();
    let mut floor = None;
    for line in map.lines() {
        if let Some(rest) = line.strip_prefix("// Floor ") {
            floor = rest.split(':').next().and_then(|number| number.parse().ok());
        } else if let Some(room) = line.strip_prefix("pub mod ").and_then(|rest| rest.strip_suffix(';')) {
            let floor = floor.unwrap_or_else(|| panic!("src/lib.rs: {room} stands before the first floor"));
            floors.insert(room.to_string(), floor);
        }
    }
    floors
}

/// Paths to other rooms that do not run downward. `path` is relative to the root.
fn import_offences(path: &Path, text: &str, floors: &BTreeMap<String, u32>) -> Offences {
    let parts: Vec<String> = path.components().map(|part| part.as_os_str().to_string_lossy().into_owned()).collect();
    // `src/main.rs` and `src/lib.rs` stand above all floors.
    let [_, room, ..] = &parts[..] else { return Offences::new() };
    if parts.len() == 2 {
        return Offences::new();
    }
    let Some(&own_floor) = floors.get(room) else { return vec![format!("{}: a room that is not on the map", path.display())] };
    let mut offences = Offences::new();
    for (line, target) in paths_from_the_root(text, module_depth(&parts)) {
        let what = match floors.get(&target) {
            None => Some(format!("`{target}` is no room of src/lib.rs")),
            Some(_) if target == *room || target == "types" => None,
            Some(&floor) if floor < own_floor => None,
            Some(&floor) if floor == own_floor => (!AGREED_ON_ONE_FLOOR.contains(&(room.as_str(), target.as_str())))
                .then(|| format!("{room} and {target} share floor {floor}: not an agreed import")),
            Some(floor) => Some(format!("{room} (floor {own_floor}) imports {target} (floor {floor}): upward")),
        };
        offences.extend(what.map(|what| format!("{}:{line}: {what}", path.display())));
    }
    offences
}

/// How many `super` lead from the module of a file to the crate's root: 1 for `src/room/mod.rs`, 2 for `src/room/file.rs`.
fn module_depth(parts: &[String]) -> usize {
    let is_mod = parts.last().is_some_and(|file| file == "mod.rs");
    parts.len() - 1 - usize::from(is_mod)
}

/// The first names of all paths that start at the crate's root, with their lines: `crate::a`, each of `crate::{a, b}`,
/// and as many `super::` as lead to the root, in imports and in code alike.
fn paths_from_the_root(text: &str, file_depth: usize) -> Vec<(usize, String)> {
    let tokens = tokens(text);
    let token = |index: usize| tokens.get(index).map_or("", |(_, token)| token.as_str());
    let mut found = Vec::new();
    let mut braces = 0;
    let mut inline_modules: Vec<usize> = Vec::new();
    let mut index = 0;
    while index < tokens.len() {
        match token(index) {
            "{" => {
                braces += 1;
                if index >= 2 && token(index - 2) == "mod" {
                    inline_modules.push(braces);
                }
            }
            "}" => {
                if inline_modules.last() == Some(&braces) {
                    inline_modules.pop();
                }
                braces = braces.saturating_sub(1);
            }
            "crate" if token(index + 1) == "::" => found.extend(first_names(&tokens, index + 2)),
            "super" if token(index + 1) == "::" => {
                let mut supers = 1;
                while token(index + 2 * supers) == "super" && token(index + 2 * supers + 1) == "::" {
                    supers += 1;
                }
                index += 2 * supers;
                if supers >= file_depth + inline_modules.len() {
                    found.extend(first_names(&tokens, index));
                }
                continue;
            }
            _ => {}
        }
        index += 1;
    }
    found
}

/// The name at `start`, or the first name of each entry if a `{...}` group starts there.
fn first_names(tokens: &[(usize, String)], start: usize) -> Vec<(usize, String)> {
    let Some((line, first)) = tokens.get(start) else { return Vec::new() };
    if first != "{" {
        return vec![(*line, first.clone())];
    }
    let mut names = Vec::new();
    let mut depth = 1;
    let mut at_start = true;
    for (line, token) in &tokens[start + 1..] {
        match token.as_str() {
            "{" => depth += 1,
            "}" => depth -= 1,
            "," if depth == 1 => at_start = true,
            name if at_start => {
                names.push((*line, name.to_string()));
                at_start = false;
            }
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    names
}

fn unsafe_offences(path: &Path, text: &str) -> Offences {
    if UNSAFE_MAY_STAND_IN.iter().any(|place| path.to_string_lossy().starts_with(place)) {
        return Offences::new();
    }
    let found = tokens(text).into_iter().filter(|(_, token)| token == "unsafe");
    found.map(|(line, _)| format!("{}:{line}: `unsafe` outside of {UNSAFE_MAY_STAND_IN:?}", path.display())).collect()
}

fn length_offence(path: &Path, text: &str) -> Option<String> {
    let lines = text.lines().count();
    (lines > MOST_LINES).then(|| format!("{}:{lines}: more than {MOST_LINES} lines: divide it", path.display()))
}

/// Names and punctuation with their lines; comments, strings and character literals are left out, `::` is one token.
fn tokens(text: &str) -> Vec<(usize, String)> {
    let characters: Vec<char> = text.chars().collect();
    let at = |index: usize| characters.get(index).copied().unwrap_or('\0');
    let is_name = |character: char| character.is_alphanumeric() || character == '_';
    let mut tokens = Vec::new();
    let (mut index, mut line) = (0, 1);
    while index < characters.len() {
        let start = index;
        if at(index) == '/' && at(index + 1) == '/' {
            while index < characters.len() && at(index) != '\n' {
                index += 1;
            }
        } else if at(index) == '/' && at(index + 1) == '*' {
            let mut depth = 0;
            while index < characters.len() {
                match (at(index), at(index + 1)) {
                    ('/', '*') => (depth, index) = (depth + 1, index + 2),
                    ('*', '/') => (depth, index) = (depth - 1, index + 2),
                    _ => index += 1,
                }
                if depth == 0 {
                    break;
                }
            }
        } else if let Some(end) = raw_string_end(&characters, index) {
            index = end;
        } else if at(index) == '"' {
            index += 1;
            while index < characters.len() && at(index) != '"' {
                index += if at(index) == '\\' { 2 } else { 1 };
            }
            index += 1;
        } else if at(index) == '\'' && (at(index + 1) == '\\' || at(index + 2) == '\'') {
            // A character literal; a lifetime has no closing quote right after one character.
            index += if at(index + 1) == '\\' { 3 } else { 2 };
            while index < characters.len() && at(index) != '\'' {
                index += 1;
            }
            index += 1;
        } else if is_name(at(index)) {
            while is_name(at(index)) {
                index += 1;
            }
            tokens.push((line, characters[start..index].iter().collect()));
        } else if at(index) == ':' && at(index + 1) == ':' {
            index += 2;
            tokens.push((line, "::".to_string()));
        } else {
            index += 1;
            if !at(start).is_whitespace() {
                tokens.push((line, at(start).to_string()));
            }
        }
        line += characters[start..index.min(characters.len())].iter().filter(|&&character| character == '\n').count();
    }
    tokens
}

/// If a raw string (`r"`, `r#"`, `br#"` ...) starts at `index`, the place after its end.
fn raw_string_end(characters: &[char], index: usize) -> Option<usize> {
    let after_prefix = match characters[index..] {
        ['b' | 'c', 'r', ..] => index + 2,
        ['r', ..] => index + 1,
        _ => return None,
    };
    let hashes = characters[after_prefix..].iter().take_while(|&&character| character == '#').count();
    let open = after_prefix + hashes;
    let part_of_a_name = index > 0 && (characters[index - 1].is_alphanumeric() || characters[index - 1] == '_');
    if part_of_a_name || characters.get(open) != Some(&'"') {
        return None;
    }
    let closes =
        |at: usize| characters[at] == '"' && characters[at + 1..].iter().take(hashes).filter(|&&c| c == '#').count() == hashes;
    let end = (open + 1..characters.len()).find(|&at| closes(at));
    Some(end.map_or(characters.len(), |at| at + 1 + hashes))
}

// The rules themselves are tried on planted offences.

fn offences_in(path: &str, text: &str) -> Offences {
    let map = "// Floor 0: words.\npub mod types;\npub mod text;\npub mod device;\n\n// Floor 1: model.\npub mod model;\n\
               // Floor 5: stages.\npub mod stage;\n// Floor 6: people.\npub mod cli;\npub mod config;\npub mod report;\n";
    import_offences(Path::new(path), text, &floors(map))
}

#[test]
fn planted_imports_are_found() {
    let upward = [
        "use crate::stage::Run;",
        "use crate::{text::Tokenizer, stage::{Run, rl}};",
        "pub use crate :: stage :: Run;",
        "fn f() { let run = crate::stage::Run::new(); }",
        "use super::super::stage::Run;",
        "use super::super::{stage, text};",
        "mod tests { use super::super::super::stage::Run; }",
        "macro_rules! m { () => { $crate::stage::run() } }",
        "// crate::types\n/* crate::types */ use crate::stage;",
    ];
    for text in upward {
        let offences = offences_in("src/model/forward.rs", text);
        assert_eq!(offences.len(), 1, "{text}: {offences:?}");
        assert!(offences[0].contains("model (floor 1) imports stage (floor 5): upward"), "{text}: {offences:?}");
    }
    assert!(offences_in("src/model/mod.rs", "use super::stage::Run;")[0].contains("upward"));
    let offences = offences_in("src/model/forward.rs", "use std::fs;\n\nuse crate::report::Reporter;\n");
    assert!(offences[0].starts_with("src/model/forward.rs:3: "), "{offences:?}");
    assert!(offences_in("src/text/mod.rs", "use crate::device::Buffer;")[0].contains("share floor 0"));
    assert!(offences_in("src/report/mod.rs", "use crate::cli::CliError;")[0].contains("share floor 6"));
    assert!(offences_in("src/model/mod.rs", "use crate::helpers::x;")[0].contains("no room"));
    assert!(offences_in("src/attic/mod.rs", "")[0].contains("not on the map"));
}

#[test]
fn what_is_allowed_passes() {
    let allowed = [
        ("src/model/forward.rs", "use crate::{device::Buffer, text, types::{Batch, Sample}, model::Config};"),
        ("src/model/forward.rs", "use super::config::Config; use super::super::text::Tokenizer; pub(crate) fn f() {}"),
        ("src/model/mod.rs", "mod config; use self::config::Config; mod tests { use super::*; use super::config; }"),
        (
            "src/model/forward.rs",
            "// use crate::stage;\n/// [`crate::stage::Run`]\n/* crate::stage /* crate::cli */ crate::cli */",
        ),
        (
            "src/model/forward.rs",
            r####"fn f<'a>(c: &'a str) { g("crate::stage", r#"crate::"stage"#, '"', '\'', b'"', "\"crate::cli"); }"####,
        ),
        ("src/text/mod.rs", "use crate::types::Task;"),
        ("src/cli/mod.rs", "use crate::config::RunFile; use crate::report::Reporter;"),
        ("src/main.rs", "use crate::anything::at_all;"),
    ];
    for (path, text) in allowed {
        assert_eq!(offences_in(path, text), Offences::new(), "{text}");
    }
}

#[test]
fn planted_unsafe_and_long_files_are_found() {
    let text = "// unsafe\nfn f() { let s = \"unsafe\"; unsafe { g() } }";
    assert_eq!(unsafe_offences(Path::new("src/text/mod.rs"), text).len(), 1);
    assert!(unsafe_offences(Path::new("src/text/mod.rs"), text)[0].starts_with("src/text/mod.rs:2: "));
    assert_eq!(unsafe_offences(Path::new("src/device/cpu/gemm.rs"), text), Offences::new());
    assert!(unsafe_offences(Path::new("src/text/mod.rs"), "fn unsafely() {}").is_empty());
    assert!(length_offence(Path::new("a.rs"), &"\n".repeat(MOST_LINES)).is_none());
    assert!(length_offence(Path::new("a.rs"), &"\n".repeat(MOST_LINES + 1)).is_some());
}
