import dataclasses
import json

import pytest
from hypothesis import given
from protocol.message_strategies import SPECS

from subfleet.protocol.schema import canonical_json, from_plain
from subfleet.protocol.subnet import Explicit, Full, Prefix, Roll, SubnetSpec


@pytest.mark.slow
@given(spec=SPECS)
def test_a_spec_comes_back_with_its_id_and_its_hash(spec: SubnetSpec) -> None:
    again = from_plain(SubnetSpec, json.loads(canonical_json(spec)))
    assert again == spec
    assert hash(again) == hash(spec)
    assert again.spec_id == spec.spec_id


@pytest.mark.slow
@given(spec=SPECS)
def test_the_display_name_takes_no_part_in_the_id(spec: SubnetSpec) -> None:
    assert dataclasses.replace(spec, name=f"{spec.name}!").spec_id == spec.spec_id
    assert dataclasses.replace(spec, blocks=(*spec.blocks, "one more block")).spec_id != spec.spec_id


def test_an_axis_that_is_not_named_is_whole() -> None:
    spec = SubnetSpec(axes=(("a", Prefix(size=2)),))
    assert spec.index_set("a") == Prefix(size=2)
    assert spec.index_set("b") == Full()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Prefix(size=0), "must be 1 or more"),
        (lambda: Roll(start=-1, size=1), "start is -1, but must be 0 or more"),
        (lambda: Explicit(indices=()), "indices is empty, but must have 1 or more"),
        (lambda: Explicit(indices=(1, 1)), "must be different numbers of 0 or more"),
        (lambda: SubnetSpec(axes=(("b", Full()), ("a", Full()))), "sorted by name"),
        (lambda: SubnetSpec(axes=(("a", Full()), ("a", Full()))), "each once"),
        (lambda: SubnetSpec(blocks=("a", "a")), "must name each once"),
        (lambda: SubnetSpec(choices=(("a", ("x",)), ("a", ("y",)))), "must name each once"),
        (lambda: SubnetSpec(choices=(("a", ("x", "x")),)), "must name each once"),
        (lambda: SubnetSpec(choices=(("a", ()),)), r"choices\[0\]\[1\] is empty, but must have 1 or more"),
    ],
)
def test_what_cannot_be_is_refused(make: object, words: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.slow
@given(one=SPECS, other=SPECS)
def test_subnets_stand_in_the_order_of_their_identities(one: SubnetSpec, other: SubnetSpec) -> None:
    assert (one < other) == (one.spec_id < other.spec_id)
    assert not one < dataclasses.replace(one, name=f"{one.name}!")
