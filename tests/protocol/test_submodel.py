import dataclasses
import json

import pytest
from hypothesis import given
from protocol.message_strategies import ARCHITECTURES

from subfleet.protocol.schema import canonical_json, from_plain
from subfleet.protocol.submodel import Architecture, Explicit, Full, Prefix, Roll


@pytest.mark.slow
@given(architecture=ARCHITECTURES)
def test_an_architecture_comes_back_with_its_id_and_its_hash(architecture: Architecture) -> None:
    again = from_plain(Architecture, json.loads(canonical_json(architecture)))
    assert again == architecture
    assert hash(again) == hash(architecture)
    assert again.architecture_id == architecture.architecture_id


@pytest.mark.slow
@given(architecture=ARCHITECTURES)
def test_the_display_name_is_not_part_of_the_id(architecture: Architecture) -> None:
    assert (
        dataclasses.replace(architecture, name=f"{architecture.name}!").architecture_id == architecture.architecture_id
    )
    assert (
        dataclasses.replace(architecture, blocks=(*architecture.blocks, "one more block")).architecture_id
        != architecture.architecture_id
    )


def test_an_axis_that_is_not_named_is_whole() -> None:
    architecture = Architecture(axes=(("a", Prefix(size=2)),))
    assert architecture.make_index_set("a") == Prefix(size=2)
    assert architecture.make_index_set("b") == Full()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Prefix(size=0), "must be 1 or more"),
        (lambda: Roll(start=-1, size=1), "start is -1, but must be 0 or more"),
        (lambda: Explicit(indices=()), "indices is empty, but must have 1 or more"),
        (lambda: Explicit(indices=(1, 1)), "must be different numbers of 0 or more"),
        (lambda: Architecture(axes=(("b", Full()), ("a", Full()))), "sorted by name"),
        (lambda: Architecture(axes=(("a", Full()), ("a", Full()))), "each once"),
        (lambda: Architecture(blocks=("a", "a")), "names must be unique"),
        (lambda: Architecture(choices=(("a", ("x",)), ("a", ("y",)))), "names must be unique"),
        (lambda: Architecture(choices=(("a", ("x", "x")),)), "names must be unique"),
        (lambda: Architecture(choices=(("a", ()),)), r"choices\[0\]\[1\] is empty, but must have 1 or more"),
    ],
)
def test_impossible_architectures_are_refused(make: object, words: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.slow
@given(first=ARCHITECTURES, second=ARCHITECTURES)
def test_architectures_are_ordered_by_their_ids(first: Architecture, second: Architecture) -> None:
    assert (first < second) == (first.architecture_id < second.architecture_id)
    assert not first < dataclasses.replace(first, name=f"{first.name}!")
