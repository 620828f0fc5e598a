"""What a run keeps of its model, as one flat mapping and back."""

import pytest
import torch

from subfleet.elastic.model_state import ModelState, packed, unpacked
from subfleet.protocol.errors import ConfigError, ProtocolError
from subfleet.protocol.subnet import Explicit, Prefix, SubnetSpec

SIZES = (
    SubnetSpec(axes=(("stem", Prefix(size=3)),), blocks=("one", "two"), name="w1/2"),
    SubnetSpec(axes=(("stem", Explicit(indices=(0, 2))),), name="é"),
)
STATE = ModelState(
    shared={"a": torch.tensor([1.0]), "b": torch.tensor([2.0])},
    copies={"ada": {"a": torch.tensor([3.0])}, "bob": {"b": torch.tensor([4.0])}},
    moments={"mean": {"b": torch.tensor([5.0])}},
    sizes=SIZES,
)


def test_a_state_that_is_packed_is_the_same_when_it_is_unpacked() -> None:
    back = unpacked(packed(STATE))
    assert (back.shared, back.copies, back.moments, back.sizes) == (
        STATE.shared,
        STATE.copies,
        STATE.moments,
        SIZES,
    )
    assert packed(ModelState(shared=STATE.shared)).keys() == {"a", "b"}


def test_what_is_done_to_all_tensors_is_done_to_copies_and_moments_too() -> None:
    changed = STATE.mapped(lambda tensors: {name: -tensor for name, tensor in tensors.items()})
    expected = {name: -tensor.float() for name, tensor in packed(STATE).items() if not name.startswith("sizes")}
    assert {name: tensor for name, tensor in packed(changed).items() if not name.startswith("sizes")} == expected
    assert changed.sizes == SIZES


def test_its_bytes_are_those_of_all_its_tensors() -> None:
    other = ModelState(shared={"a": torch.zeros(5)}, kept={"norms": torch.zeros(3, dtype=torch.float64)})
    assert STATE.tensor_bytes == 5 * 4
    whole = STATE.with_network("m1", other)
    assert whole.tensor_bytes == 5 * 4 + 5 * 4 + 3 * 8
    assert whole.tensor_bytes == sum(one.nbytes for name, one in packed(whole).items() if "json" not in name)


def test_what_is_no_packed_state_is_refused() -> None:
    with pytest.raises(ConfigError, match="must name copies, moments, networks or tensors"):
        unpacked({"elsewhere/a": torch.zeros(1)})
    with pytest.raises(ProtocolError):
        unpacked({"sizes/json": torch.tensor([91, 49, 93], dtype=torch.uint8)})
