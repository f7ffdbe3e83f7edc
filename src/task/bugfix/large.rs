//! The skeletons of the `large` level: functions as one meets them, in one file or two.
//!
//! Each place that can be wrong lies in one line. A wrong value that no input could tell from the right one is of no use; a test
//! asks that every value of every slot makes a task.

use super::inputs::Input;
use super::skeleton::{COMPARISONS, Kind, Skeleton, SlotTemplate, fixed, free};

const ITEMS: &[&str] = &["items", "values", "records", "numbers"];
const TEXTS: &[&str] = &["text", "line", "message", "content"];
const LIMITS: &[&str] = &["limit", "bound", "threshold", "cutoff"];
const MEMBERS: &[&str] = &["item", "value", "entry", "current"];
const COUNTS: &[&str] = &["count", "amount", "size", "width"];
const WORDS: &[&str] = &["red", "green", "blue", "gray", "teal"];

pub const SKELETONS: &[Skeleton] = &[
    Skeleton {
        name: "chunks",
        files: &[(
            "batches.py",
            "\
def $f($items, $size):
    chunks = []
    pending = @initial
    for $x in $items:
        pending.append($x)
        if len(pending) @full $size:
            chunks.append(pending)
            @reset
    if @rest:
        chunks.append(pending)
    return chunks
",
        )],
        issue: "`$f($items, $size)` should cut $items into consecutive lists of length $size; only the last may be shorter.",
        names: &[("$f", &["make_batches", "split_evenly", "chunk_list"]), ("$items", ITEMS), ("$size", COUNTS), ("$x", MEMBERS)],
        slots: &[
            fixed("@initial", Kind::WrongInitial, &[("[]", ""), ("[0]", "")]),
            fixed("@full", Kind::Comparison, &[("==", ""), (">", ""), ("!=", "")]),
            fixed("@reset", Kind::MissingStep, &[("pending = []", ""), ("pass", "")]),
            fixed("@rest", Kind::Negation, &[("pending", ""), ("not pending", "")]),
        ],
        arguments: &[("$items", Input::Ints(0, 7, 1, 9)), ("$size", Input::Int(1, 4))],
    },
    Skeleton {
        name: "running_totals",
        files: &[(
            "ledger.py",
            "\
def $f($items):
    totals = []
    total = @initial
    for $x in $items:
        total @add $x
        totals.append(@shown)
        @after
    return totals
",
        )],
        issue: "`$f($items)` should return, for each position, the sum of $items up to and including it.",
        names: &[("$f", &["running_totals", "accumulate_all", "prefix_sums"]), ("$items", ITEMS), ("$x", MEMBERS)],
        slots: &[
            fixed("@initial", Kind::WrongInitial, &[("0", ""), ("1", "")]),
            fixed("@add", Kind::Operator, &[("+=", ""), ("-=", ""), ("*=", "")]),
            fixed("@shown", Kind::Variable, &[("total", ""), ("$x", "")]),
            fixed("@after", Kind::EarlyReturn, &[("continue", ""), ("return totals", "")]),
        ],
        arguments: &[("$items", Input::Ints(1, 6, -4, 9))],
    },
    Skeleton {
        name: "window_sums",
        files: &[(
            "windows.py",
            "\
def $f($items, $width):
    sums = []
    for start in range(@stop):
        window = $items[@window]
        sums.append(@measure(window))
    return sums
",
        )],
        issue: "`$f($items, $width)` should return the @measure of every window of $width neighbouring $items, from left to right.",
        names: &[("$f", &["window_values", "slide_over", "rolling_stats"]), ("$items", ITEMS), ("$width", COUNTS)],
        slots: &[
            fixed(
                "@stop",
                Kind::Bound,
                &[("len($items) - $width + 1", ""), ("len($items) - $width", ""), ("len($items) - 1", ""), ("len($items)", "")],
            ),
            fixed(
                "@window",
                Kind::Slice,
                &[("start:start + $width", ""), ("start:$width", ""), ("start:start + $width - 1", ""), ("start:", "")],
            ),
            free("@measure", Kind::Method, &[("sum", "sum"), ("max", "largest value"), ("min", "smallest value")]),
        ],
        arguments: &[("$items", Input::Ints(3, 7, 0, 9)), ("$width", Input::Int(2, 3))],
    },
    Skeleton {
        name: "bisect",
        files: &[(
            "search.py",
            "\
def $f($items, $target):
    low = @low
    high = @high
    while low < high:
        middle = (low + high) // 2
        if $items[middle] @compare $target:
            low = middle + 1
        else:
            high = middle
    return @returned
",
        )],
        issue: "`$f($items, $target)` should return the position of the first of the ascending $items that is @compare $target, \
                or their number if there is none.",
        names: &[("$f", &["find_position", "lower_bound", "locate"]), ("$items", ITEMS), ("$target", LIMITS)],
        slots: &[
            fixed("@low", Kind::WrongInitial, &[("0", ""), ("1", "")]),
            fixed("@high", Kind::Bound, &[("len($items)", ""), ("len($items) - 1", "")]),
            SlotTemplate {
                name: "@compare",
                kind: Kind::Comparison,
                values: &[("<", "at least"), ("<=", "above"), (">", "")],
                rights: 2,
            },
            fixed("@returned", Kind::Variable, &[("low", ""), ("low + 1", ""), ("$items[low - 1]", "")]),
        ],
        arguments: &[("$items", Input::SortedInts(1, 7, 0, 9)), ("$target", Input::Int(0, 9))],
    },
    Skeleton {
        name: "clamp_scores",
        files: &[
            (
                "limits.py",
                "\
def clamp(number, low, high):
    if number @under low:
        return low
    if number > high:
        return @top
    return number
",
            ),
            (
                "scores.py",
                "\
from limits import clamp


def $f($items, $floor, $ceiling):
    result = []
    for $x in $items:
        @store(clamp($x, @order))
    return result
",
            ),
        ],
        issue: "`$f($items, $floor, $ceiling)` in scores.py should return $items with everything under $floor raised to it and \
                everything over $ceiling lowered to it.",
        names: &[
            ("$f", &["limit_scores", "squeeze", "bounded"]),
            ("$items", ITEMS),
            ("$floor", &["floor", "lowest", "minimum"]),
            ("$ceiling", &["ceiling", "highest", "maximum"]),
            ("$x", MEMBERS),
        ],
        slots: &[
            fixed("@under", Kind::Comparison, &[("<", ""), (">", ""), ("==", "")]),
            fixed("@top", Kind::Variable, &[("high", ""), ("low", ""), ("number", "")]),
            fixed("@order", Kind::SwappedArguments, &[("$floor, $ceiling", ""), ("$ceiling, $floor", "")]),
            fixed("@store", Kind::Method, &[("result.append", ""), ("result.extend", "")]),
        ],
        arguments: &[("$items", Input::Ints(1, 6, 0, 12)), ("$floor", Input::Int(1, 4)), ("$ceiling", Input::Int(6, 10))],
    },
    Skeleton {
        name: "most_common",
        files: &[(
            "wordcount.py",
            "\
def $f($text):
    counts = {}
    for word in $text.@fold().split():
        counts[word] = counts.get(word, 0) + @step
    best = None
    for word in counts:
        if best is None @join counts[word] @compare counts[best]:
            best = word
    return best
",
        )],
        issue: "`$f($text)` should return the word that occurs most often in $text, in lower case and with case ignored; of several \
                the one seen first; `None` if there is no word.",
        names: &[("$f", &["most_common", "top_word", "favourite"]), ("$text", TEXTS)],
        slots: &[
            fixed("@fold", Kind::Method, &[("lower", ""), ("upper", ""), ("strip", "")]),
            fixed("@step", Kind::Constant, &[("1", ""), ("0", "")]),
            fixed("@join", Kind::Condition, &[("or", ""), ("and", "")]),
            fixed("@compare", Kind::Comparison, &[(">", ""), (">=", ""), ("<", ""), ("==", "")]),
        ],
        arguments: &[("$text", Input::Joined(0, 6, " ", &["red", "Red", "blue", "green", "BLUE"]))],
    },
    Skeleton {
        name: "merge_spans",
        files: &[(
            "spans.py",
            "\
def $f($spans):
    merged = []
    for low, high in @ordered:
        if merged and low @touch merged[-1][@end]:
            merged[-1] = (merged[-1][0], @widest(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged
",
        )],
        issue: "`$f($spans)` gets (low, high) pairs and should return them in ascending order with overlapping or touching pairs \
                merged into one.",
        names: &[("$f", &["merge_spans", "join_ranges", "coalesce"]), ("$spans", &["spans", "ranges", "pairs"])],
        slots: &[
            fixed("@ordered", Kind::MissingStep, &[("sorted($spans)", ""), ("$spans", "")]),
            fixed("@touch", Kind::Comparison, &[("<=", ""), ("<", ""), (">=", ""), ("==", "")]),
            fixed("@end", Kind::Index, &[("1", ""), ("0", "")]),
            fixed("@widest", Kind::Method, &[("max", ""), ("min", "")]),
        ],
        arguments: &[("$spans", Input::Spans(1, 5, 0, 12))],
    },
    Skeleton {
        name: "balanced",
        files: &[(
            "brackets.py",
            "\
def $f($text):
    depth = @initial
    for mark in $text:
        if mark == \"(\":
            depth += 1
        elif mark == \")\":
            depth @down 1
        if depth @compare 0:
            return @early
    return depth @finish 0
",
        )],
        issue: "`$f($text)` should tell whether the round brackets in $text are balanced: none is closed before it was opened, and \
                none stays open.",
        names: &[("$f", &["is_balanced", "brackets_match", "well_formed"]), ("$text", TEXTS)],
        slots: &[
            fixed("@initial", Kind::WrongInitial, &[("0", ""), ("1", "")]),
            fixed("@down", Kind::Operator, &[("-=", ""), ("+=", "")]),
            fixed("@compare", Kind::Comparison, &[("<", ""), ("<=", ""), (">", "")]),
            fixed("@early", Kind::Boolean, &[("False", ""), ("True", "")]),
            fixed("@finish", Kind::Comparison, &[("==", ""), (">=", ""), ("!=", "")]),
        ],
        arguments: &[("$text", Input::Joined(0, 6, "", &["(", ")", "()", "x", ")("]))],
    },
    Skeleton {
        name: "run_lengths",
        files: &[(
            "encoding.py",
            "\
def $f($text):
    parts = []
    index = 0
    while index < len($text):
        start = index
        while index < len($text) and $text[index] == $text[start]:
            index += 1
        parts.append($text[@letter] + str(@length))
    return @mark.join(parts)
",
        )],
        issue: "`$f($text)` should encode $text by run lengths: each run of equal letters becomes the letter and its length, so that \
                `'aab'` becomes `'a2b1'`.",
        names: &[("$f", &["encode_runs", "compress", "squash"]), ("$text", TEXTS)],
        slots: &[
            fixed("@letter", Kind::Index, &[("start", ""), ("index", ""), ("0", "")]),
            fixed("@length", Kind::Bound, &[("index - start", ""), ("index - start + 1", ""), ("index", "")]),
            fixed("@mark", Kind::Constant, &[("\"\"", ""), ("\" \"", "")]),
        ],
        arguments: &[("$text", Input::Joined(0, 5, "", &["a", "aa", "b", "bbb", "c"]))],
    },
    Skeleton {
        name: "initials",
        files: &[(
            "names.py",
            "\
def $f($text, $length):
    letters = []
    for word in $text.split():
        if len(word) @compare $length:
            letters.append(word[@index].@case())
    return \"\".join(@letters)
",
        )],
        issue: "`$f($text, $length)` should return the first letters, as capitals, of the words of $text whose length is @compare \
                $length, in the order of the words.",
        names: &[("$f", &["initials", "acronym", "short_form"]), ("$text", TEXTS), ("$length", COUNTS)],
        slots: &[
            free("@compare", Kind::Comparison, COMPARISONS),
            fixed("@index", Kind::Index, &[("0", ""), ("-1", ""), ("1", "")]),
            fixed("@case", Kind::Method, &[("upper", ""), ("lower", ""), ("strip", "")]),
            fixed("@letters", Kind::Slice, &[("letters", ""), ("letters[1:]", ""), ("letters[::-1]", "")]),
        ],
        arguments: &[
            ("$text", Input::Joined(1, 5, " ", &["to", "old", "river", "of", "stone", "the", "blue"])),
            ("$length", Input::Int(2, 5)),
        ],
    },
    Skeleton {
        name: "order_total",
        files: &[
            (
                "pricing.py",
                "\
def discounted(price, percent):
    return price @less price * percent // 100
",
            ),
            (
                "orders.py",
                "\
from pricing import discounted


def $f($orders, $percent, $limit):
    total = @initial
    for name, price in $orders:
        if price @compare $limit:
            price = discounted(@order)
        total @add price
    return @returned
",
            ),
        ],
        issue: "`$f($orders, $percent, $limit)` in orders.py should add up the prices of the (name, price) pairs, each price that is \
                @compare $limit reduced by $percent percent (what is taken off is rounded down).",
        names: &[
            ("$f", &["order_total", "invoice_sum", "amount_due"]),
            ("$orders", &["orders", "lines", "basket"]),
            ("$percent", &["percent", "rate", "rebate"]),
            ("$limit", LIMITS),
        ],
        slots: &[
            fixed("@less", Kind::Operator, &[("-", ""), ("+", "")]),
            fixed("@initial", Kind::WrongInitial, &[("0", ""), ("$percent", "")]),
            free("@compare", Kind::Comparison, COMPARISONS),
            fixed("@order", Kind::SwappedArguments, &[("price, $percent", ""), ("$percent, price", "")]),
            fixed("@add", Kind::Operator, &[("+=", ""), ("-=", "")]),
            fixed("@returned", Kind::Variable, &[("total", ""), ("total - price", "")]),
        ],
        arguments: &[
            ("$orders", Input::Pairs(1, 4, WORDS, 1, 9)),
            ("$percent", Input::Int(10, 60)),
            ("$limit", Input::Int(3, 7)),
        ],
    },
    Skeleton {
        name: "group_words",
        files: &[(
            "grouping.py",
            "\
def $f($words, $least):
    groups = {}
    for word in $words:
        if len(word) @compare $least:
            continue
        key = word[@index]
        if key @known groups:
            groups[key] = @empty
        @collect
    return groups
",
        )],
        issue: "`$f($words, $least)` should group the words that have at least $least letters by their first letter: a dictionary from \
                letter to the list of words, all in the order in which they occur.",
        names: &[
            ("$f", &["group_words", "index_words", "by_letter"]),
            ("$words", &["words", "names", "labels"]),
            ("$least", LIMITS),
        ],
        slots: &[
            fixed("@compare", Kind::Comparison, &[("<", ""), ("<=", ""), (">", ""), (">=", "")]),
            fixed("@index", Kind::Index, &[("0", ""), ("-1", "")]),
            fixed("@known", Kind::Negation, &[("not in", ""), ("in", "")]),
            fixed("@empty", Kind::WrongInitial, &[("[]", ""), ("[word]", "")]),
            fixed("@collect", Kind::MissingStep, &[("groups[key].append(word)", ""), ("pass", "")]),
        ],
        arguments: &[
            ("$words", Input::Texts(1, 6, &["red", "rose", "blue", "gray", "go", "bay", "green"])),
            ("$least", Input::Int(3, 4)),
        ],
    },
    Skeleton {
        name: "distinct",
        files: &[(
            "unique.py",
            "\
def $f($items, $count):
    seen = []
    result = []
    for $x in $items:
        if $x @known seen:
            @remember
            result.append(@kept)
    return result[@slice]
",
        )],
        issue: "`$f($items, $count)` should return the first $count different values of $items, in the order of their first occurrence.",
        names: &[("$f", &["first_distinct", "unique_head", "dedupe"]), ("$items", ITEMS), ("$count", COUNTS), ("$x", MEMBERS)],
        slots: &[
            fixed("@known", Kind::Negation, &[("not in", ""), ("in", "")]),
            fixed("@remember", Kind::MissingStep, &[("seen.append($x)", ""), ("pass", "")]),
            fixed("@kept", Kind::Variable, &[("$x", ""), ("$count", "")]),
            fixed("@slice", Kind::Slice, &[(":$count", ""), ("$count:", ""), (":$count + 1", ""), (":-$count", "")]),
        ],
        arguments: &[("$items", Input::Ints(2, 8, 0, 5)), ("$count", Input::Int(1, 3))],
    },
    Skeleton {
        name: "column_sums",
        files: &[(
            "table.py",
            "\
def $f($rows):
    sums = []
    for column in range(@columns):
        total = @initial
        for row in $rows:
            total @add row[@cell]
        @store
    return sums
",
        )],
        issue: "`$f($rows)` gets a list of rows of equal length and should return the list of the sums of its columns.",
        names: &[("$f", &["column_sums", "add_columns", "totals_across"]), ("$rows", &["rows", "table", "matrix", "grid"])],
        slots: &[
            fixed("@columns", Kind::Bound, &[("len($rows[0])", ""), ("len($rows)", ""), ("len($rows[0]) - 1", "")]),
            fixed("@initial", Kind::WrongInitial, &[("0", ""), ("1", "")]),
            fixed("@add", Kind::Operator, &[("+=", ""), ("-=", ""), ("*=", "")]),
            fixed("@cell", Kind::Index, &[("column", ""), ("0", ""), ("-1", "")]),
            fixed("@store", Kind::EarlyReturn, &[("sums.append(total)", ""), ("return [total]", "")]),
        ],
        arguments: &[("$rows", Input::Rows(1, 4, 0, 9))],
    },
    Skeleton {
        name: "rotate",
        files: &[(
            "rotation.py",
            "\
def $f($items, $count):
    if @empty:
        return []
    shift = $count @wrap len($items)
    return @rotated
",
        )],
        issue: "`$f($items, $count)` should return $items rotated to the @rotated by $count places; a rotation by their number, or of \
                an empty list, changes nothing.",
        names: &[("$f", &["rotate", "shift_round", "cycle_by"]), ("$items", ITEMS), ("$count", &["places", "steps", "distance"])],
        slots: &[
            fixed("@empty", Kind::Negation, &[("not $items", ""), ("$items", "")]),
            fixed("@wrap", Kind::Operator, &[("%", ""), ("//", ""), ("-", "")]),
            SlotTemplate {
                name: "@rotated",
                kind: Kind::Slice,
                values: &[
                    ("$items[shift:] + $items[:shift]", "left"),
                    ("$items[-shift:] + $items[:-shift]", "right"),
                    ("$items[shift:]", ""),
                    ("$items[:shift] + $items[shift:]", ""),
                ],
                rights: 2,
            },
        ],
        arguments: &[("$items", Input::Ints(0, 6, 1, 9)), ("$count", Input::Int(0, 9))],
    },
    Skeleton {
        name: "settings",
        files: &[(
            "settings.py",
            "\
def $f($text):
    result = {}
    for part in $text.split(@mark):
        if \"=\" @present part:
            name, value = part.split(\"=\")
            name = @clean
            result[name] = @stored
    return result
",
        )],
        issue: "`$f($text)` should read `name=value` settings separated by semicolons into a dictionary of strings, blanks around names and \
                values removed; parts without `=` are skipped and a later setting wins.",
        names: &[("$f", &["read_settings", "parse_options", "load_pairs"]), ("$text", TEXTS)],
        slots: &[
            fixed("@mark", Kind::Constant, &[("\";\"", ""), ("\",\"", ""), ("\"=\"", "")]),
            fixed("@present", Kind::Negation, &[("in", ""), ("not in", "")]),
            fixed("@clean", Kind::MissingStep, &[("name.strip()", ""), ("name", ""), ("name.lstrip()", "")]),
            fixed("@stored", Kind::Variable, &[("value.strip()", ""), ("name", ""), ("value", ""), ("part.strip()", "")]),
        ],
        arguments: &[("$text", Input::Joined(1, 4, ";", &["a=1", " b = 2", "c", "d =x ", "a= 3", "none"]))],
    },
    Skeleton {
        name: "prime",
        files: &[(
            "primes.py",
            "\
def $f($number):
    if $number @small 2:
        return @tiny
    divisor = @first
    while divisor * divisor @bound $number:
        if $number % divisor @divides 0:
            return False
        divisor += @step
    return True
",
        )],
        issue: "`$f($number)` should tell whether $number is a prime number.",
        names: &[("$f", &["is_prime", "indivisible", "check_prime"]), ("$number", &["number", "candidate", "n"])],
        slots: &[
            fixed("@small", Kind::Comparison, &[("<", ""), ("==", ""), (">", "")]),
            fixed("@tiny", Kind::Boolean, &[("False", ""), ("True", "")]),
            fixed("@first", Kind::WrongInitial, &[("2", ""), ("1", ""), ("3", "")]),
            fixed("@bound", Kind::Comparison, &[("<=", ""), ("<", ""), (">", "")]),
            fixed("@divides", Kind::Comparison, &[("==", ""), ("!=", ""), (">", "")]),
            fixed("@step", Kind::Constant, &[("1", ""), ("2", "")]),
        ],
        arguments: &[("$number", Input::Int(0, 30))],
    },
    Skeleton {
        name: "best_of",
        files: &[(
            "ranking.py",
            "\
def $f($scores, $count, $least):
    kept = [$x for $x in $scores if $x @compare $least]
    ranked = sorted(kept, reverse=@descending)
    chosen = ranked[@slice]
    return @measure(chosen)
",
        )],
        issue: "`$f($scores, $count, $least)` should return the sum of the $count largest of those $scores that are @compare $least.",
        names: &[
            ("$f", &["best_of", "top_sum", "score_total"]),
            ("$scores", &["scores", "points", "marks"]),
            ("$count", COUNTS),
            ("$least", LIMITS),
            ("$x", MEMBERS),
        ],
        slots: &[
            SlotTemplate {
                name: "@compare",
                kind: Kind::Comparison,
                values: &[(">", "above"), (">=", "at least"), ("<", "below"), ("<=", "at most")],
                rights: 4,
            },
            fixed("@descending", Kind::Boolean, &[("True", ""), ("False", "")]),
            fixed("@slice", Kind::Slice, &[(":$count", ""), ("$count:", ""), (":$count + 1", ""), ("1:$count", "")]),
            fixed("@measure", Kind::Method, &[("sum", ""), ("len", "")]),
        ],
        arguments: &[("$scores", Input::Ints(2, 7, 0, 9)), ("$count", Input::Int(1, 3)), ("$least", Input::Int(2, 6))],
    },
    Skeleton {
        name: "best_gain",
        files: &[(
            "prices.py",
            "\
def $f($prices):
    best = @initial
    lowest = $prices[@first]
    for price in $prices:
        lowest = @keep(lowest, price)
        gain = @gain
        if gain @compare best:
            best = gain
            @after
    return best
",
        )],
        issue: "`$f($prices)` should return the largest gain from buying at one of the $prices and selling at the same or a later one; 0 \
                if prices only fall.",
        names: &[("$f", &["best_gain", "max_profit", "largest_rise"]), ("$prices", &["prices", "quotes", "rates", "values"])],
        slots: &[
            fixed("@initial", Kind::WrongInitial, &[("0", ""), ("1", ""), ("$prices[0]", "")]),
            fixed("@first", Kind::Index, &[("0", ""), ("-1", "")]),
            fixed("@keep", Kind::Method, &[("min", ""), ("max", "")]),
            fixed("@gain", Kind::SwappedArguments, &[("price - lowest", ""), ("lowest - price", "")]),
            fixed("@compare", Kind::Comparison, &[(">", ""), ("<", ""), ("==", "")]),
            fixed("@after", Kind::EarlyReturn, &[("continue", ""), ("return best", "")]),
        ],
        arguments: &[("$prices", Input::Ints(1, 7, 0, 9))],
    },
    Skeleton {
        name: "palindromes",
        files: &[
            (
                "wordtools.py",
                "\
def folded(word):
    return @fold


def mirrored(word):
    return word == word[@slice]
",
            ),
            (
                "palindromes.py",
                "\
from wordtools import folded, mirrored


def $f($words, $least):
    count = @initial
    for word in $words:
        if len(word) @compare $least @join mirrored(folded(word)):
            count += @step
    return count
",
            ),
        ],
        issue: "`$f($words, $least)` in palindromes.py should count the words whose length is @compare $least and that read the same in both \
                directions, with case ignored.",
        names: &[
            ("$f", &["count_palindromes", "mirror_count", "tally"]),
            ("$words", &["words", "names", "labels"]),
            ("$least", LIMITS),
        ],
        slots: &[
            fixed("@fold", Kind::MissingStep, &[("word.lower()", ""), ("word", "")]),
            fixed("@slice", Kind::Slice, &[("::-1", ""), ("::1", ""), ("1::-1", "")]),
            fixed("@initial", Kind::WrongInitial, &[("0", ""), ("1", "")]),
            free("@compare", Kind::Comparison, COMPARISONS),
            fixed("@join", Kind::Condition, &[("and", ""), ("or", "")]),
            fixed("@step", Kind::Constant, &[("1", ""), ("2", "")]),
        ],
        arguments: &[
            ("$words", Input::Texts(1, 6, &["Anna", "level", "abc", "noon", "Bob", "go", "wow", "river", "aa"])),
            ("$least", Input::Int(2, 4)),
        ],
    },
    Skeleton {
        name: "stock",
        files: &[(
            "stock.py",
            "\
def $f($stock, $orders):
    missing = []
    for name, wanted in $orders:
        left = $stock.get(name, @default)
        if wanted @compare left:
            missing.append(@reported)
        else:
            $stock[name] = @remaining
    return missing
",
        )],
        issue: "`$f($stock, $orders)` gets a dictionary of stock and (name, wanted) pairs. It should serve the orders in turn, taking what is \
                wanted out of the stock, and return the names of the orders for which not enough is left (those take nothing).",
        names: &[
            ("$f", &["serve_orders", "find_shortages", "unfilled"]),
            ("$stock", &["stock", "store", "shelf"]),
            ("$orders", &["orders", "requests", "demands"]),
        ],
        slots: &[
            fixed("@default", Kind::Constant, &[("0", ""), ("1", ""), ("wanted", "")]),
            fixed("@compare", Kind::Comparison, &[(">", ""), (">=", ""), ("<", "")]),
            fixed("@reported", Kind::Variable, &[("name", ""), ("wanted", ""), ("left", "")]),
            fixed("@remaining", Kind::SwappedArguments, &[("left - wanted", ""), ("wanted - left", ""), ("left", "")]),
        ],
        arguments: &[("$stock", Input::Counts(WORDS, 0, 5)), ("$orders", Input::Pairs(1, 5, WORDS, 1, 4))],
    },
];
