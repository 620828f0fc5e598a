"""Class names: their natural order, their indices in a run, and invalid names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subfleet.protocol.class_names import (
    MAX_NAMES_BYTES,
    check_class_names,
    find_class_indices,
    format_class_names,
    parse_class_names,
    sort_naturally,
)
from subfleet.protocol.errors import ProtocolError

NUMBERS = st.lists(st.integers(0, 10**6), min_size=1, max_size=20, unique=True)
WORDS = st.lists(st.from_regex(r"[a-z0-9]{1,6}", fullmatch=True), min_size=1, max_size=20, unique=True)


@pytest.mark.slow
@given(numbers=NUMBERS, data=st.data())
def test_numbers_are_in_the_order_of_numbers_however_they_are_listed(numbers: list[int], data: st.DataObject) -> None:
    expected = tuple(str(number) for number in sorted(numbers))
    assert sort_naturally(data.draw(st.permutations([str(number) for number in numbers]))) == expected


@pytest.mark.slow
@given(names=WORDS, data=st.data())
def test_other_names_are_in_the_order_of_their_characters(names: list[str], data: st.DataObject) -> None:
    mixed = [*names, "x-ray"]
    assert sort_naturally(data.draw(st.permutations(mixed))) == tuple(sorted(mixed))


def test_the_folder_2_comes_before_the_folder_10() -> None:
    assert sort_naturally(["10", "2", "1"]) == ("1", "2", "10")
    assert sort_naturally(["10", "02", "1"]) == ("1", "02", "10")


@pytest.mark.parametrize("names", [["2", "02"], ["0", "00", "1"], ["10", "010", "9"]])
def test_two_names_of_one_number_are_refused(names: list[str]) -> None:
    with pytest.raises(ValueError, match="are the same number; keep one of the names"):
        sort_naturally(names)


@pytest.mark.slow
@given(classes=WORDS, data=st.data())
def test_a_name_has_its_index_in_the_run_whatever_else_a_device_holds(classes: list[str], data: st.DataObject) -> None:
    held = data.draw(st.lists(st.sampled_from(classes), unique=True))
    indices = find_class_indices(held, classes, len(classes))
    assert [classes[index] for index in indices] == held
    with pytest.raises(ValueError, match="the run has no class 'Unknown': its classes are "):
        find_class_indices([*held, "Unknown"], classes, len(classes))


def test_where_a_run_names_none_the_number_of_a_class_is_its_name() -> None:
    assert find_class_indices(("7", "8", "9"), (), 10) == (7, 8, 9)
    assert find_class_indices(("12",), (), 0) == (12,)
    for odd in ("10", "07", "-1", "1.0", "seven", "²"):
        with pytest.raises(ValueError, match=f"has no class '{odd}': its classes are the numbers 0 to 9"):
            find_class_indices(("7", odd), (), 10)


def test_a_list_of_unknown_names_is_cut_short() -> None:
    with pytest.raises(ValueError, match=r"'n9' and 10 more: its classes are 'a'$"):
        find_class_indices([f"n{number}" for number in range(20)], ("a",), 1)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a", ""], "has '', but a name must be 1 to 64 printable characters"),
        (["a" * 65], "1 to 64 printable"),
        (["a\n"], "printable"),
        (["\ud800"], "printable"),
        ([" a"], "without leading or trailing spaces"),
        (["a", "b", "a"], "has 'a' twice"),
        ([f"{number:064}" for number in range(1000)], f"may take at most {MAX_NAMES_BYTES}; shorten the names"),
    ],
)
def test_names_that_cannot_be_shown_told_apart_or_sent_are_refused(names: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_class_names(names)


@pytest.mark.slow
@given(names=st.lists(st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8), unique=True))
def test_names_round_trip_through_the_text_in_a_model(names: list[str]) -> None:
    assert parse_class_names(format_class_names(names)) == tuple(names)


@pytest.mark.slow
@given(text=st.one_of(st.text(max_size=40), st.sampled_from(["[1]", '["a","a"]', '{"a":1}', "[" * 9999])))
def test_any_other_text_is_a_protocol_error(text: str) -> None:
    try:
        names = parse_class_names(text)
    except ProtocolError:
        return
    check_class_names(names)
