import pytest

from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.memory import MemoryPlan
from subfleet.protocol.schema import from_plain, to_plain

PLAN = MemoryPlan(
    weights_bytes=1,
    optimiser_bytes=10,
    fed_bytes=100,
    activation_bytes=1000,
    workspace_bytes=10**4,
    runtime_bytes=10**5,
)


def test_the_peak_is_all_parts_at_once() -> None:
    assert PLAN.peak_bytes == 111_111
    assert MemoryPlan().peak_bytes == 0


def test_a_plan_crosses_the_wire() -> None:
    assert from_plain(MemoryPlan, to_plain(PLAN)) == PLAN


def test_no_part_is_below_zero() -> None:
    with pytest.raises(ProtocolError, match="fed_bytes is -1, but must be 0 or more"):
        MemoryPlan(fed_bytes=-1)
    with pytest.raises(ProtocolError, match="workspace_bytes"):
        from_plain(MemoryPlan, {**to_plain(PLAN), "workspace_bytes": -5})
