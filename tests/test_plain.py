"""JSON for other programs: whatever is in a value, a strict reader takes its text."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipwise.plain import as_json, bound, four_digits, no_less, plain, rounded_up

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inside: st.lists(inside) | st.lists(inside).map(tuple) | st.dictionaries(st.text(), inside),
    max_leaves=8,
)


def refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def same(value: Any, read: Any) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return read is None
    if isinstance(value, (list, tuple)):
        return len(value) == len(read) and all(map(same, value, read))
    if isinstance(value, dict):
        return list(value) == list(read) and all(map(same, value.values(), read.values()))
    return bool(value == read)


@given(VALUES, st.sampled_from([None, 2]))
def test_a_strict_reader_reads_everything_but_nan_and_infinity_which_are_null(value: Any, indent: int | None) -> None:
    text = as_json(value, indent)
    assert same(value, json.loads(text, parse_constant=refuse)) and same(value, plain(value))
    assert text.endswith("\n") and (indent or text.count("\n") == 1)


@given(st.floats(0, exclude_min=True, allow_infinity=False))
def test_an_epsilon_is_never_printed_below_what_was_spent(epsilon: float) -> None:
    printed = float(rounded_up(epsilon))
    assert epsilon <= printed <= max(epsilon * 1.0101, epsilon + 0.001) or epsilon < 1e-300


@given(st.floats(1e-300, 1, exclude_max=True))
def test_a_delta_is_never_printed_below_the_one_that_epsilon_was_computed_at(delta: float) -> None:
    assert delta <= float(no_less(delta)) <= delta * 1.00001


@pytest.mark.parametrize(
    ("delta", "printed"), [(1e-5, "1e-05"), (1 / 30000, "3.33334e-05"), (0.02, "0.02"), (1.0000001e-5, "1.00001e-05")]
)
def test_a_delta_has_six_digits_at_most(delta: float, printed: str) -> None:
    assert no_less(delta) == printed


@pytest.mark.parametrize(
    ("epsilon", "printed"),
    [(1.280446, "1.281"), (2.99975, "3.000"), (3.0, "3.000"), (1e-9, "1e-09"), (0.012341, "0.0124"), (0.0, "0"),
     (2345678.0, "2.35e+06"), (math.inf, "inf")],
)  # fmt: skip
def test_an_epsilon_has_as_many_digits_as_say_something(epsilon: float, printed: str) -> None:
    assert rounded_up(epsilon) == printed


@pytest.mark.parametrize(
    ("value", "printed"),
    [(0.83441, "0.8344"), (9999.4, "9999"), (9999.9, "10000"), (72018.3, "72020"), (1234567.0, "1235000"),
     (-72018.3, "-72020"), (2.5e-7, "2.5e-07"), (1e20, "1e+20"), (math.nan, "nan"), (math.inf, "inf")],
)  # fmt: skip
def test_a_price_is_printed_without_an_exponent(value: float, printed: str) -> None:
    assert four_digits(value) == printed


@pytest.mark.parametrize(
    ("value", "claimed", "shown"),
    [(7.0411, "7.05", "7.04"), (3.0, "3.00", "3.00"), (123.4, "124", "123"), (math.inf, "∞", "∞"), (None, "–", "–")],
)
def test_an_audit_claims_no_less_and_shows_no_more_than_is_so(value: float | None, claimed: str, shown: str) -> None:
    assert (bound(value, up=True), bound(value)) == (claimed, shown)
