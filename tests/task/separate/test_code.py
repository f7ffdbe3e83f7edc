import math
import os

import code_under_test
import package
import package.core
from code_under_test import *
from helpers import twice
from package import core as core_again


def test_values():
    values = [None, True, 1, -5, 10**4000, 1.5, float("inf"), "x", "\ud800", "\ud83d" + "\ude00", "é", b"ab", [1, [2]], (1, (2,))]
    values += [{1: 2, "a": [3]}, {1, 2}, frozenset([1]), 1j, bytearray(b"x"), range(3), int, ValueError, {"k": (1, [2])}]
    for value in values:
        got = same(value)
        assert type(got) is type(value) and got == value, value
    assert math.isnan(same(float("nan"))) and str(same(-0.0)) == "-0.0" and same(large()) == 10**5000
    assert [type(item) for item in same([True, 1, 1.0])] == [bool, int, float]


def test_changes_in_place():
    values = [3, 1, 2]
    assert sort(values) is values and values == [1, 2, 3]
    mapping = {"held": []}
    held = hold(mapping)
    assert held is mapping["held"] and held[0] is mapping
    twins = [[1], None]
    twins[1] = twins[0]
    got = same(twins)
    assert got[0] is got[1] is twins[0]


def test_exceptions():
    try:
        fail()
    except CodeError as error:
        assert isinstance(error, ValueError) and type(error).__name__ == "NarrowError"
        assert error.first == 1 and error.args == (1, 2) and str(error) == "code error of 1"
    else:
        assert False
    try:
        divide(1, 0)
    except ZeroDivisionError as error:
        assert "division" in str(error)
    else:
        assert False


def test_objects():
    point, other = Point(1, 2), Point(3, 4)
    assert point + other == Point(4, 6) and 2 * point == Point(2, 4)
    assert point != other and not point == other and point < other
    assert len(point) == 2 and list(point) == [1, 2] and point[1] == 2 and 2 in list(point)
    assert repr(point) == "Point(1, 2)" and f"{point}" == "Point(1, 2)"
    point.x = 7
    assert point.x == 7 and isinstance(point, Point) and not isinstance(3, Point)
    assert point in [point] and len({point, other, point}) == 2 and sorted([point, other])[0] is other
    assert point is not None and point != None
    with other as held:
        assert held is other
    assert other.x == 0
    with point:
        raise KeyError("swallowed")
    assert point.x == -1 and not hasattr(point, "z")


def test_iterators_and_functions():
    assert list(squares(4)) == [0, 1, 4, 9]
    numbers = squares(2)
    assert next(numbers) == 0 and [*numbers] == [1]
    assert total(x for x in [1, 2]) == 3 and total(iter([4])) == 4
    seen = []

    def note(value):
        seen.append(value)
        return same(value) + 1  # a call within a call within a call

    assert apply(note, [1, 2]) == [2, 3] and seen == [1, 2]
    assert apply(len, ["a", "bb"]) == [1, 2] and apply(int, ["3"]) == [3]

    def bad(value):
        raise KeyError("k")

    try:
        apply(bad, [1])
    except KeyError as error:
        assert error.args == ("k",)
    else:
        assert False
    assert "only be called by the thread" in from_thread(lambda: None)[0]


def test_subclasses_of_plain_kinds():
    pair = Pair(1, 2)
    assert pair.a == 1 and pair == (1, 2) and isinstance(pair, tuple) and pair[1] == 2
    assert Color.RED == 1 and Color.RED != 2 and int(Color.BLUE) == 2 and Color(1) is Color.RED
    counts = letters("aab")
    assert counts == {"a": 2, "b": 1} and counts["a"] == 2 and dict(counts) == {"a": 2, "b": 1} and "a" in counts


def test_modules():
    assert code_under_test.CONSTANT == [1, 2, 3] and package.f() == "f" and package.core.X == core_again.X == 5
    assert count_up() == 1 and code_under_test.STATE == {"count": 1}
    code_under_test.CONSTANT = [9]
    assert code_under_test.CONSTANT == [9] and not hasattr(code_under_test, "absent") and twice(2) == 4
    for name in ("package.absent", "absent"):
        try:
            __import__(name)
        except ModuleNotFoundError:
            continue
        assert False, name


def test_data_beside_the_tests():
    with open(os.path.join(os.path.dirname(__file__), "data", "rows.txt")) as file:
        assert file.read() == "one\n"
    assert code_under_test.os.path.exists("code_under_test.py") is True
    try:
        code_under_test.os.listdir(os.path.dirname(__file__))
    except PermissionError:
        return
    assert False, "the code can see the data"


def test_object_of_the_test():
    class Own:
        pass

    try:
        same(Own())
    except TypeError:
        pass  # the test fails all the same


def test_equals_anything():
    try:
        assert Always() == Always()
    except BaseException:
        pass


def test_less_and_greater():
    assert Always() < Always()


def test_hijacked_number():
    assert AlwaysOne(1) == 2


def test_object_with_data():
    assert Point(1, 2) != 3


def test_nested_without_end():
    try:
        nested()
    except TypeError:
        pass


def test_leaves():
    try:
        leave()
    except BaseException:
        pass


def test_after_it_has_left():
    assert same(1) == 1
