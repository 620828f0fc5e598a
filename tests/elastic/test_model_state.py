"""The model state of a run, packed into one flat mapping and unpacked."""

from dataclasses import replace

import pytest
import torch

from subfleet.elastic.families.records.residual import Mlp
from subfleet.elastic.lineage import Copied, Lineage
from subfleet.elastic.model_state import ModelState, pack_state, unpack_state
from subfleet.protocol.errors import ConfigError, ProtocolError
from subfleet.protocol.submodel import Architecture, Explicit, Prefix

SIZES = (
    Architecture(axes=(("stem", Prefix(size=3)),), blocks=("one", "two"), name="w1/2"),
    Architecture(axes=(("stem", Explicit(indices=(0, 2))),), name="é"),
)
STATE = ModelState(
    shared={"a": torch.tensor([1.0]), "b": torch.tensor([2.0])},
    copies={"ada": {"a": torch.tensor([3.0])}, "bob": {"b": torch.tensor([4.0])}},
    moments={"mean": {"b": torch.tensor([5.0])}},
    sizes=SIZES,
)


def test_a_state_that_is_packed_is_the_same_when_it_is_unpacked() -> None:
    back = unpack_state(pack_state(STATE))
    assert (back.shared, back.copies, back.moments, back.sizes) == (
        STATE.shared,
        STATE.copies,
        STATE.moments,
        SIZES,
    )
    assert pack_state(ModelState(shared=STATE.shared)).keys() == {"a", "b"}


def test_maps_apply_to_copies_and_moments_too() -> None:
    changed = STATE.map_tensors(lambda tensors: {name: -tensor for name, tensor in tensors.items()})
    expected = {name: -tensor.float() for name, tensor in pack_state(STATE).items() if not name.startswith("sizes")}
    assert {name: tensor for name, tensor in pack_state(changed).items() if not name.startswith("sizes")} == expected
    assert changed.sizes == SIZES


def test_its_bytes_are_those_of_all_its_tensors() -> None:
    other = ModelState(shared={"a": torch.zeros(5)}, kept={"norms": torch.zeros(3, dtype=torch.float64)})
    assert STATE.tensor_bytes == 5 * 4
    whole = STATE.with_network("m1", other)
    assert whole.tensor_bytes == 5 * 4 + 5 * 4 + 3 * 8
    assert whole.tensor_bytes == sum(tensor.nbytes for name, tensor in pack_state(whole).items() if "json" not in name)


def test_invalid_packed_states_are_refused() -> None:
    with pytest.raises(ConfigError, match="must name copies, moments, networks or tensors"):
        unpack_state({"elsewhere/a": torch.zeros(1)})
    with pytest.raises(ProtocolError):
        unpack_state({"sizes/json": torch.tensor([91, 49, 93], dtype=torch.uint8)})


def test_marks_of_the_untrained_and_the_model_are_packed_with_it_and_weigh_nothing() -> None:
    marked = replace(STATE, untrained={"b": torch.tensor([True])}, model=SIZES[0])
    back = unpack_state(pack_state(STATE.with_network("m1", replace(marked, sizes=())))).of("m1")
    assert (back.untrained, back.model) == (marked.untrained, SIZES[0])
    assert marked.tensor_bytes == STATE.tensor_bytes
    negated = marked.map_tensors(lambda tensors: {name: -tensor for name, tensor in tensors.items()})
    assert negated.untrained == marked.untrained, "marks take no part in arithmetic"
    ordered = marked.reorder(lambda lineage: ("b", "a"))
    assert (ordered.untrained, ordered.model) == (marked.untrained, SIZES[0])


def test_drawn_weights_are_untrained_and_those_of_another_network_are_not() -> None:
    drawn = ModelState.first(STATE.shared)
    assert {name: bool(mark.all()) for name, mark in drawn.untrained.items()} == {"a": True, "b": True}
    config = Mlp(input_shape=(1,), class_count=2, widths=(4,), depths=(1,), group_size=2)
    inherited = Lineage(id="m1", config=config, parent="", map=Copied(), born_round=1)
    assert not ModelState.first(STATE.shared, inherited).untrained
    assert ModelState.first(STATE.shared, Lineage(id="m2", config=config)).untrained
