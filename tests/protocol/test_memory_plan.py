import pytest

from subfleet.protocol.errors import InvalidError, ProtocolError
from subfleet.protocol.memory_plan import MemoryPlan, Packing, PackingWidth, compute_peak_bytes
from subfleet.protocol.schema import from_plain, to_plain

PLAN = MemoryPlan(
    weights_bytes=1,
    optimiser_bytes=10,
    fed_bytes=100,
    activation_bytes=1000,
    workspace_bytes=10**4,
    runtime_bytes=10**5,
)


def test_the_peak_is_the_sum_of_all_parts() -> None:
    assert PLAN.peak_bytes == 111_111
    assert MemoryPlan().peak_bytes == 0


def test_a_plan_crosses_the_wire() -> None:
    assert from_plain(MemoryPlan, to_plain(PLAN)) == PLAN


def test_no_part_is_below_zero() -> None:
    with pytest.raises(InvalidError, match="fed_bytes is -1, but must be 0 or more"):
        MemoryPlan(fed_bytes=-1)
    with pytest.raises(ProtocolError, match="workspace_bytes"):
        from_plain(MemoryPlan, {**to_plain(PLAN), "workspace_bytes": -5})


def test_a_plan_has_a_size_for_each_width() -> None:
    packings = (Packing(width=8, more_bytes=-10), Packing(width=32, more_bytes=5))
    plan = MemoryPlan(weights_bytes=100, packings=packings)
    assert [compute_peak_bytes(plan.peak_bytes, packings, width) for width in (None, 4, 8, 16, 32)] == [
        100,
        100,
        90,
        100,
        105,
    ]
    assert from_plain(MemoryPlan, to_plain(plan)) == plan


@pytest.mark.parametrize("widths", [(8, 8), (16,), (4, 16, 64)])
def test_each_width_occurs_once_and_the_default_width_never(widths: tuple[PackingWidth, ...]) -> None:
    with pytest.raises(InvalidError, match=r"names must be unique|have the width 16"):
        MemoryPlan(packings=tuple(Packing(width=width, more_bytes=0) for width in widths))


def test_no_width_has_a_negative_size() -> None:
    with pytest.raises(InvalidError, match="must leave 0 or more"):
        MemoryPlan(weights_bytes=10, packings=(Packing(width=8, more_bytes=-11),))
