"""Constraints of classes: what holds, what does not, and what is none."""

import pytest
from shardlight.framework.constraints import Constraint, ConstraintError

KNOWN = ("a", "b", "kind")


@pytest.mark.parametrize(
    ("text", "values", "holds"),
    [
        ("a % b == 0", {"a": 192, "b": 3}, True),
        ("a % b == 0", {"a": 192, "b": 5}, False),
        ("a % b == 0", {"a": 192, "b": 0}, False),
        ("a % b == 0", {"a": None, "b": 5}, True),
        ("a / b == 1.5 and a - b == 1 and a + b < 6 and a * b > 5 and -a < 0", {"a": 3, "b": 2}, True),
        ("0 < a < 1", {"a": 0.5}, True),
        ("0 < a < 1", {"a": 1.0}, False),
        ("0 < a < 1", {"a": "x"}, True),  # of another kind than numbers: its annotation says what it may be
        ("a is None or b > 1", {"a": None, "b": 0}, True),
        ("a is not None and b > 1", {"a": None, "b": 2}, False),
        ("not (kind == 'wide' and a // b < 2)", {"kind": "wide", "a": 3, "b": 2}, False),
        ("not (kind == 'wide' and a // b < 2)", {"kind": "slim", "a": 3, "b": 2}, True),
        ("not kind", {"kind": False}, True),
    ],
)
def test_what_a_constraint_says(text, values, holds):
    assert Constraint(text, KNOWN).holds(values) is holds


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a %", "it is not written as Python writes it"),
        ("a = 3", "it is not written as Python writes it"),
        ("c > 1", "there is no argument c"),
        ("a + b", "it compares no arguments"),
        ("1 < 2", "it compares no arguments"),
        ("a > 1 or b.c", "it may only have names"),
        ("len(a) > 1", "there is no argument len"),
        ("a(b) > 1", "it may only have names"),
        ("a ** b > 1", "it may only have names"),
        ("a in b", "it may only have names"),
        ("a[0] > 1", "it may only have names"),
        ("(lambda: a)() > 1", "it may only have names"),
        ("a > [b for kind in b]", "it may only have names"),
    ],
)
def test_what_is_no_constraint(text, why):
    with pytest.raises(ConstraintError, match=why):
        Constraint(text, KNOWN)


def test_numbers_near_by_fit_all_that_is_said_of_them():
    divides, even = Constraint("a % b == 0", KNOWN), Constraint("b % 2 == 0", KNOWN)
    values = {"a": 36, "b": 5}
    assert list(divides.nearest("b", values, [])) == [4, 6]
    assert list(divides.nearest("b", {"a": 36, "b": 8}, [even])) == [6, 12]
    assert list(divides.nearest("b", {"a": 37, "b": 2}, [even])) == []
    assert list(divides.nearest("a", values, [])) == [35, 40]
