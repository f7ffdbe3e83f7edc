//! The catalogue is whole: every item is a program, a test of our own side, or in the table of what cannot be shown here. And what
//! is written about the tiers is what the programs declare.

use std::collections::BTreeSet;
use std::path::Path;

use crate::catalogue::{Declared, Program, controls, hostile};

const ITEMS: std::ops::RangeInclusive<u32> = 1..=70;

/// What no program in the sandbox can show on this kernel or machine, and why. An item may have a program beside.
const NOT_SHOWN: &[(u32, &str)] = &[
    (19, "graphics cards: there is none to be kept from; that device names are out of reach is shown"),
    (20, "swap: this machine has none, so nothing can be pressed out to it; swapon is denied in 070-user-namespace.py"),
    (
        36,
        "a sleep that no signal ends: it takes a broken device or a file server that does not answer, and a run can mount neither; \
          that the supervisor gives up is shown by `no_program_can_choose_an_infrastructure_fault` in supervise.rs",
    ),
    (
        38,
        "a container's client that is killed while the process inside goes on: there is no container engine between us and a run",
    ),
    (70, "x32 system calls: this kernel has none to be reached; that they are killed is shown all the same"),
];

/// Items that are about our own side: the test that shows them, as `module::test` of this binary.
const OUR_SIDE: &[(u32, &str)] = &[
    (34, "ours::no_number_of_a_process_is_signalled_without_a_handle"),
    (37, "killed::everything_ends_with_the_learner"),
    (42, "ours::bytes_stay_bytes"),
    (43, "ours::no_output_drives_the_terminal_of_a_log"),
    (50, "collector::links_are_not_followed"),
    (51, "collector::nothing_moves_while_it_is_read"),
    (52, "collector::a_hard_link_leaves_the_snapshot_alone"),
    (53, "collector::what_is_no_file_is_not_opened"),
    (54, "collector::deep_and_closed_trees_are_read_and_removed"),
    (55, "collector::deep_and_closed_trees_are_read_and_removed"),
    (56, "collector::names_are_bytes"),
    (59, "collector::a_poisoned_repository_runs_nothing_of_ours"),
    (60, "ours::names_do_not_lead_out_of_the_tree"),
];

#[test]
fn no_item_is_left_out() {
    println!("not shown on this machine:");
    NOT_SHOWN.iter().for_each(|(item, why)| println!("  item {item}: {why}"));
    let shown = hostile().into_iter().map(|program| program.item).chain(OUR_SIDE.iter().map(|(item, _)| *item));
    let covered: BTreeSet<u32> = shown.chain(NOT_SHOWN.iter().map(|(item, _)| *item)).collect();
    let missing: Vec<u32> = ITEMS.filter(|item| !covered.contains(item)).collect();
    assert!(missing.is_empty(), "items without a program, a test or a reason: {missing:?}");
    assert!(covered.iter().all(|item| ITEMS.contains(item)), "{covered:?}");
}

#[test]
fn tests_of_our_side_exist() {
    for (item, name) in OUR_SIDE {
        let (module, test) = name.split_once("::").unwrap();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/sandbox/{module}.rs"));
        let source = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(source.contains(&format!("fn {test}()")), "item {item}: no test {test} in {}", path.display());
    }
}

#[test]
fn every_program_has_an_honest_neighbour() {
    let honest: BTreeSet<String> = controls().into_iter().map(|program| program.file).collect();
    for program in hostile() {
        let named = program.control.as_deref().unwrap_or("none");
        assert!(honest.contains(named), "{}: control {named} is no file of controls/", program.file);
        assert!(program.file.starts_with(&format!("{:03}-", program.item)), "{} is about item {}", program.file, program.item);
    }
    for control in controls() {
        assert!(
            control.control.is_none() && control.declared[0].verdicts == [("exited".to_string(), Some(0))],
            "{}",
            control.file
        );
    }
}

/// `docs/sandbox-tiers.md` holds this table; run with `WRITE_TIERS=1` to write it there.
#[test]
fn the_written_differences_are_the_declared_ones() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/sandbox-tiers.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let (begin, end) = ("<!-- differences: begin -->\n", "<!-- differences: end -->");
    let (before, rest) = text.split_once(begin).unwrap();
    let (written, after) = rest.split_once(end).unwrap();
    let mut table = "| item | program | tier A | tier B | why |\n|---|---|---|---|---|\n".to_string();
    for (folder, programs) in [("hostile", hostile()), ("controls", controls())] {
        for program in programs.iter().filter(|program| program.declared[0] != program.declared[1]) {
            table.push_str(&row(folder, program));
        }
    }
    if std::env::var_os("WRITE_TIERS").is_some() {
        std::fs::write(&path, format!("{before}{begin}{table}{end}{after}")).unwrap();
    } else {
        assert_eq!(written, table, "docs/sandbox-tiers.md is not what the programs declare: run this test with WRITE_TIERS=1");
    }
}

fn row(folder: &str, program: &Program) -> String {
    let words = |declared: &Declared| {
        let name = |(name, number): &(String, Option<i32>)| match number {
            Some(number) => format!("{name} {number}"),
            None => name.clone(),
        };
        declared.verdicts.iter().map(name).collect::<Vec<_>>().join(" or ")
    };
    let [a, b] = &program.declared;
    let why = program.because.as_deref().unwrap_or("");
    format!("| {} | `{folder}/{}`: {} | {} | {} | {why} |\n", program.item, program.file, program.tries, words(a), words(b))
}
