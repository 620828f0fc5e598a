"""What prices go by: layers with their kinds, thresholds between forms, and a runtime's objects."""

from dataclasses import replace

import pytest
from elastic.token_cases import VIT
from export.export_cases import MLP

from subfleet.elastic.families import network_of
from subfleet.export.memory.formulas import EITHER, STRIPES, Formula
from subfleet.export.memory.liveness import GIVEN_BACK
from subfleet.export.pricing.fitting import segment_at
from subfleet.export.pricing.layers import Layer, by_layer, layers_of
from subfleet.export.pricing.library import Library, requests_of
from subfleet.export.pricing.recording import GIVE, TAKE, TAKE_TOLD, Node, PlannedStep, Recording, Segment, segments_of
from subfleet.export.pricing.runtime_sizes import Between, RuntimeSizes
from subfleet.protocol.subnet import Prefix, SubnetSpec

Known = dict[tuple[int, ...], Segment]


def test_layers_are_told_by_their_tensors_names() -> None:
    assert by_layer(["a.weight", "a.bias", "position", "b.c.weight"]) == {
        "a": ["a.weight", "a.bias"],
        "position": ["position"],
        "b.c": ["b.c.weight"],
    }


@pytest.mark.parametrize(("one", "other"), [((2, 1), (1, 2)), ((2, 3), (3, 2))])
def test_two_heads_of_one_are_not_one_head_of_two(one: tuple[int, int], other: tuple[int, int]) -> None:
    """Their tensors have the same shapes, but what attention keeps does not."""
    network = network_of(VIT)
    axes = [next(name for name in sorted(network.axes) if name.endswith(end)) for end in ("head_dim", "heads")]
    wide, many = (
        SubnetSpec(axes=tuple((name, Prefix(size=size)) for name, size in zip(axes, sizes, strict=True)))
        for sizes in (one, other)
    )
    assert network.shapes(wide) == network.shapes(many)
    assert layers_of(network, wide) != layers_of(network, many)


def test_a_single_group_is_a_kind_of_its_own() -> None:
    network = network_of(MLP)
    name = next(name for name, axis in network.axes.items() if axis.kind != "class" and axis.size > axis.granularity)
    step = network.axes[name].granularity
    kinds = [
        [layer.kind for layer in layers_of(network, SubnetSpec(axes=((name, Prefix(size=size)),)))]
        for size in (step, 2 * step, network.axes[name].size)
    ]
    assert kinds[0] != kinds[1]
    assert kinds[1] == kinds[2]


SMALL_FORM = Segment(events=(), sizes=(), weight=1)


def wide_form(size: int) -> Segment:
    return Segment(events=((TAKE, 0), (GIVE, 0)), sizes=(size,), weight=1)


def test_a_form_is_told_beyond_a_threshold_that_all_products_agree_on() -> None:
    """Other axes are where they are; that the point lies between no two recordings of its form does not matter."""
    known: Known = {
        (2, 2): SMALL_FORM,
        (3, 8): SMALL_FORM,
        (4, 3): SMALL_FORM,
        (6, 2): wide_form(6 * 4),
        (8, 8): wide_form(8 * 4),
        (7, 5): wide_form(7 * 4),
    }
    assert segment_at(known, (2, 7)) == SMALL_FORM
    found = segment_at(known, (7, 2))
    assert found is not None
    assert found.sizes == (28,)


def test_nothing_is_told_on_a_threshold() -> None:
    known: Known = {
        (2, 2): SMALL_FORM,
        (3, 8): SMALL_FORM,
        (6, 2): wide_form(24),
        (8, 8): wide_form(32),
        (7, 5): wide_form(28),
    }
    assert segment_at(known, (5, 5)) is None


def test_nothing_is_told_where_products_disagree() -> None:
    known: Known = {(2, 2): SMALL_FORM, (8, 8): wide_form(32), (7, 7): wide_form(28), (3, 3): SMALL_FORM}
    assert segment_at(known, (2, 8)) is None
    assert segment_at(known, (3, 2)) == SMALL_FORM


def test_nothing_is_told_where_no_product_parts_the_forms() -> None:
    known: Known = {(2,): SMALL_FORM, (4,): wide_form(16), (6,): SMALL_FORM, (8,): wide_form(32)}
    assert segment_at(known, (7,)) is None


def convolution(filters: int) -> Segment:
    """Layers of some width, whose kernel takes the whole image's patches where filters are more than places."""
    taken = Formula(kind=EITHER, numbers=(filters, 9, 36 * filters, 65_536))
    node = Node(
        inputs=("x", "a"),
        outputs=("loss",),
        requests=(("s", taken.size_bytes), ("s", GIVEN_BACK)),
        formulas={"s": taken},
    )
    step = PlannedStep(nodes=(node,), held={"a": "a.weight"}, given={}, batch="x", loss="loss")
    return segments_of(step, [["a.weight"]])[1]


@pytest.mark.parametrize(("filters", "taken"), [(5, 65_536), (9, 65_536), (10, 360), (12, 432)])
def test_a_block_of_either_size_is_told_on_both_sides_of_its_limit(filters: int, taken: int) -> None:
    known: Known = {(size,): convolution(size) for size in (2, 16)}
    found = segment_at(known, (filters,))
    assert found is not None
    empty = Segment(events=(), sizes=(), weight=0)
    assert requests_of((empty, found, empty, empty)) == [(0, taken), (0, GIVEN_BACK)]


def test_nothing_is_told_where_the_side_of_the_limit_is_open() -> None:
    """Both axes may be the number of filters."""
    known: Known = {(size, size): convolution(size) for size in (2, 16)}
    assert segment_at(known, (8, 8)) is not None
    assert segment_at(known, (8, 12)) is None


@pytest.mark.parametrize(
    ("numbers", "size_bytes"),
    [((1, 5, 16, 16), 4 * 16 * 6), ((1, 5, 17, 16), 4 * 32 * 6), ((3, 2, 1, 32), 4 * 3 * 32 * 3)],
)
def test_a_matrix_in_stripes_is_filled_up(numbers: tuple[int, ...], size_bytes: int) -> None:
    assert Formula(kind=STRIPES, numbers=numbers).size_bytes == size_bytes


def test_stripes_are_told_between_recordings() -> None:
    known: Known = {
        (size,): Segment(
            events=(), sizes=(), weight=1, formulas=(Formula(kind=STRIPES, numbers=(1, 3 * size, size, 16)),)
        )
        for size in (2, 40)
    }
    known = {key: replace(segment, events=((TAKE_TOLD, 0, STRIPES),)) for key, segment in known.items()}
    found = segment_at(known, (17,))
    assert found is not None
    assert found.formulas == (Formula(kind=STRIPES, numbers=(1, 51, 17, 16)),)
    assert found.formulas[0].size_bytes == 4 * 32 * 52


UNSEEN = (Layer(name="a", kind=(7,), sizes=(2,)),)


def recording(size: int, *, kind: int = 0, weight: int = 10, objects_bytes: int = 10**6) -> Recording:
    return Recording(
        layers=(Layer(name="a", kind=(kind,), sizes=(size,)),),
        tensor_count=2,
        segments=(Segment(events=(), sizes=(), weight=weight),),
        parameter_copies=3.0,
        buffer_copies=0,
        fed_bytes=0,
        passing_bytes=0,
        runtime_bytes=1000 * weight,
        objects_bytes=objects_bytes,
    )


def test_objects_are_told_by_programs_with_layers_of_the_same_kinds() -> None:
    sizes = RuntimeSizes(counts_nodes=True)
    sizes.add(recording(2, objects_bytes=10**6))
    sizes.add(recording(8, objects_bytes=1_010_000))
    sizes.add(recording(1, kind=1, objects_bytes=2 * 10**6))
    told = sizes.objects_bytes((Layer(name="a", kind=(0,), sizes=(5,)),), 10, 2)
    assert told is not None
    assert told.least < 10**6 < 1_010_000 < told.most < 1.05 * 10**6


def test_objects_of_a_recorded_program_are_its_own() -> None:
    sizes = RuntimeSizes(counts_nodes=True)
    sizes.add(recording(2, objects_bytes=10**6))
    told = sizes.objects_bytes((Layer(name="a", kind=(0,), sizes=(2,)),), 10, 2)
    assert told is not None
    assert 10**6 <= told.least == told.most <= 10**6 + 2**15


def test_objects_of_other_kinds_are_as_open_as_the_line_is_off() -> None:
    even, uneven = RuntimeSizes(counts_nodes=True), RuntimeSizes(counts_nodes=True)
    for weight in (10, 20, 30, 40):
        even.add(recording(weight, kind=weight, weight=weight, objects_bytes=10**5 * weight))
        bent = 10**5 * weight + (200_000 if weight == 20 else 0)
        uneven.add(recording(weight, kind=weight, weight=weight, objects_bytes=bent))
    asked = (Layer(name="a", kind=(25,), sizes=(25,)),)
    tight, loose = even.objects_bytes(asked, 25, 2), uneven.objects_bytes(asked, 25, 2)
    assert tight is not None
    assert loose is not None
    assert tight.least <= 2_500_000 <= tight.most
    assert loose.most - loose.least > 200_000 > tight.most - tight.least


def test_a_runtime_that_does_not_count_has_none() -> None:
    sizes = RuntimeSizes(counts_nodes=True)
    sizes.add(recording(2, objects_bytes=0))
    assert sizes.objects_bytes((Layer(name="a", kind=(0,), sizes=(2,)),), 10, 2) == Between(least=0, most=0)


@pytest.mark.parametrize(("weight", "told"), [(10, 10_000), (30, 30_000), (20, 20_000)])
def test_what_is_written_lies_on_a_line(weight: int, told: int) -> None:
    sizes = RuntimeSizes(counts_nodes=True)
    for known in (10, 25, 30):
        sizes.add(recording(known, weight=known))
    found = sizes.written_bytes(UNSEEN, weight, 2)
    assert found is not None
    assert told <= found <= told + 1


def test_a_line_is_not_told_by_what_always_fits() -> None:
    """Two programs fit any line; and of another number of tensors these say nothing."""
    sizes = RuntimeSizes(counts_nodes=True)
    for known in (10, 30):
        sizes.add(recording(known, weight=known))
    assert sizes.written_bytes(UNSEEN, 20, 2) is None
    assert sizes.objects_bytes(UNSEEN, 20, 2) is None
    for known in (25, 40):
        sizes.add(recording(known, weight=known))
    assert sizes.written_bytes(UNSEEN, 20, 2) is not None
    assert sizes.objects_bytes(UNSEEN, 20, 2) is not None
    assert sizes.written_bytes(UNSEEN, 20, 3) is None
    assert sizes.objects_bytes(UNSEEN, 20, 3) is None


def test_nothing_is_told_where_programs_of_the_same_kinds_differ() -> None:
    """As where constants grow with the widths: the largest and the smallest say little of what lies between."""
    asked = (Layer(name="a", kind=(0,), sizes=(5,)),)
    for counts_nodes in (True, False):
        sizes = RuntimeSizes(counts_nodes=counts_nodes)
        sizes.add(recording(2, objects_bytes=10**6))
        assert sizes.objects_bytes(asked, 10, 2) is None
        sizes.add(recording(8, objects_bytes=1_200_000))
        assert sizes.objects_bytes(asked, 10, 2) is None


def test_weights_in_bytes_tell_no_line() -> None:
    sizes = RuntimeSizes(counts_nodes=False)
    for known in (10, 25, 30, 40):
        sizes.add(recording(known, weight=known))
    assert sizes.written_bytes(UNSEEN, 20, 2) is None
    assert sizes.objects_bytes(UNSEEN, 20, 2) is None
    assert sizes.written_bytes(UNSEEN, 25, 2) == 25_000


def chain_of(*widths: int) -> Recording:
    """Layers a, b, ... of some widths; the first one's backward segment also takes a block for the last layer."""
    count = len(widths)
    segments = [Segment(events=(), sizes=(), weight=1) for _ in range(1 + 3 * count)]
    taken = ((TAKE, 0), (GIVE, 0))
    segments[2 * count] = Segment(events=taken, sizes=(2**16 * widths[-1],), weight=1, layers=(0, count - 1))
    layers = tuple(Layer(name=name, kind=(0,), sizes=(width,)) for name, width in zip("abcdef", widths, strict=True))
    return replace(recording(2), layers=layers, segments=tuple(segments))


def test_a_segment_follows_from_every_layer_whose_nodes_run_in_it() -> None:
    """The last layer is no neighbour of the first, but where all widths are alike it seems to be any of them."""
    library = Library()
    for width in (2, 8, 16):
        library.add(chain_of(*[width] * 6))
    asked = chain_of(8, 8, 8, 8, 8, 4)
    assert library.segments(asked.layers) is None
    library.add(chain_of(8, 4, 8, 4, 2, 2))
    told = library.segments(asked.layers)
    assert told is not None
    assert told[12].sizes == asked.segments[12].sizes == (2**16 * 4,)
