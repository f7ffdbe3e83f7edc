//! The six skeletons of the `small` level: functions of three to six lines that a policy of half a million parameters learns to
//! repair in minutes. Every name is one token of the quick start's tokenizer.

use super::inputs::Input;
use super::skeleton::{COMPARISONS, Kind, OPERATORS, Skeleton, fixed, free};

const FUNCTIONS: &[&str] = &["scan", "make", "find", "pick", "calc", "work", "solve", "apply"];
const LISTS: &[&str] = &["rows", "nums", "items"];
const SCALARS: &[&str] = &["a", "b", "c", "k"];
const TOTALS: &[&str] = &["n", "t"];
const MEMBERS: &[&str] = &["x", "y"];

const NUMBERS: Input = Input::Ints(1, 5, 0, 6);
const LIMIT: Input = Input::Int(1, 5);

pub const SKELETONS: &[Skeleton] = &[
    Skeleton {
        name: "count",
        files: &[(
            "solution.py",
            "\
def $f($list, $a):
    $n = @start
    for $x in $list:
        if $x @compare $a:
            $n += @step
    return @returned
",
        )],
        issue: "$f($list, $a): count of $list @compare $a",
        names: &[("$f", FUNCTIONS), ("$list", LISTS), ("$a", SCALARS), ("$n", TOTALS), ("$x", MEMBERS)],
        slots: &[
            fixed("@start", Kind::Constant, &[("0", ""), ("1", "")]),
            free("@compare", Kind::Comparison, COMPARISONS),
            fixed("@step", Kind::Constant, &[("1", ""), ("2", "")]),
            fixed("@returned", Kind::Variable, &[("$n", ""), ("$a", "")]),
        ],
        arguments: &[("$list", NUMBERS), ("$a", LIMIT)],
    },
    Skeleton {
        name: "sum",
        files: &[(
            "solution.py",
            "\
def $f($list, $a):
    $n = @start
    for $x in $list:
        if $x @compare $a:
            $n @update @added
    return @returned
",
        )],
        issue: "$f($list, $a): sum of $list @compare $a",
        names: &[("$f", FUNCTIONS), ("$list", LISTS), ("$a", SCALARS), ("$n", TOTALS), ("$x", MEMBERS)],
        slots: &[
            fixed("@start", Kind::Constant, &[("0", ""), ("1", "")]),
            free("@compare", Kind::Comparison, COMPARISONS),
            fixed("@update", Kind::Operator, &[("+=", ""), ("-=", "")]),
            fixed("@added", Kind::Variable, &[("$x", ""), ("$a", "")]),
            fixed("@returned", Kind::Variable, &[("$n", ""), ("$a", "")]),
        ],
        arguments: &[("$list", NUMBERS), ("$a", LIMIT)],
    },
    Skeleton {
        name: "combine",
        files: &[(
            "solution.py",
            "\
def $f($a, $b):
    $n = @left @operator @right
    return $n
",
        )],
        issue: "$f($a, $b): $a @operator $b",
        names: &[("$f", FUNCTIONS), ("$a", SCALARS), ("$b", SCALARS), ("$n", TOTALS)],
        slots: &[
            fixed("@left", Kind::Variable, &[("$a", ""), ("$b", "")]),
            free("@operator", Kind::Operator, OPERATORS),
            fixed("@right", Kind::Variable, &[("$b", ""), ("$a", "")]),
        ],
        arguments: &[("$a", Input::Int(0, 6)), ("$b", Input::Int(0, 6))],
    },
    Skeleton {
        name: "any",
        files: &[(
            "solution.py",
            "\
def $f($list, $a):
    for $x in $list:
        if $x @compare $a:
            return @found
    return @missing
",
        )],
        issue: "$f($list, $a): true if any of $list @compare $a",
        names: &[("$f", FUNCTIONS), ("$list", LISTS), ("$a", SCALARS), ("$x", MEMBERS)],
        slots: &[
            free("@compare", Kind::Comparison, COMPARISONS),
            fixed("@found", Kind::Boolean, &[("True", ""), ("False", "")]),
            fixed("@missing", Kind::Boolean, &[("False", ""), ("True", "")]),
        ],
        arguments: &[("$list", Input::Ints(1, 3, 0, 6)), ("$a", LIMIT)],
    },
    Skeleton {
        name: "item",
        files: &[(
            "solution.py",
            "\
def $f($list, $a):
    $x = $list[@index]
    return $x @operator $a
",
        )],
        issue: "$f($list, $a): @index of $list @operator $a",
        names: &[("$f", FUNCTIONS), ("$list", LISTS), ("$a", SCALARS), ("$x", MEMBERS)],
        slots: &[
            free("@index", Kind::Index, &[("0", "first"), ("1", "second"), ("-1", "last")]),
            free("@operator", Kind::Operator, OPERATORS),
        ],
        arguments: &[("$list", Input::Ints(2, 5, 0, 6)), ("$a", Input::Int(0, 5))],
    },
    Skeleton {
        name: "member",
        files: &[(
            "solution.py",
            "\
def $f($list, $a, $b):
    if @tested @in $list:
        return $b
    return 0
",
        )],
        issue: "$f($list, $a, $b): $b if $a @in $list else 0",
        names: &[("$f", FUNCTIONS), ("$list", LISTS), ("$a", SCALARS), ("$b", SCALARS)],
        slots: &[
            free("@in", Kind::Negation, &[("in", "in"), ("not in", "not in")]),
            fixed("@tested", Kind::Variable, &[("$a", ""), ("$b", "")]),
        ],
        arguments: &[("$list", Input::Ints(1, 5, 0, 6)), ("$a", Input::Int(0, 6)), ("$b", Input::Int(1, 6))],
    },
];
