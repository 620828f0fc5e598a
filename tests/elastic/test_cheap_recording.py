"""Large networks are recorded without computing all of their numbers, with the same result, and copied cheaply."""

import copy
from collections.abc import Callable

import pytest
import torch
from elastic.elastic_cases import MLP
from torch import Tensor

from subfleet.elastic.building import build_module, init_state, network_of, record_of
from subfleet.elastic.families import preset
from subfleet.elastic.recording.cheap_products import compute_cheaply
from subfleet.elastic.recording.record import pack_record
from subfleet.elastic.recording.recorder import record_module
from subfleet.elastic.undrawn import Undrawn

ATEN = torch.ops.aten


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[object, ...], int]] = {
    "mm": (ATEN.mm.default, (draw(300, 200), draw(200, 150)), 1),
    "bmm": (ATEN.bmm.default, (draw(8, 90, 100), draw(8, 100, 80)), 2),
    "addmm": (ATEN.addmm.default, (draw(150), draw(300, 200), draw(200, 150)), 1),
    "convolution": (
        ATEN.convolution.default,
        (draw(2, 16, 24, 24), draw(48, 16, 3, 3), draw(48), [2, 2], [1, 1], [1, 1], False, [0, 0], 1),
        1,
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_one_output_of_a_large_product_stands_for_the_others(name: str) -> None:
    function, args, dim = PRODUCTS[name]
    expected, actual = function(*args), compute_cheaply(function, args, {})
    assert (actual.shape, actual.stride()) == (expected.shape, expected.stride())
    first = expected.narrow(dim, 0, 1)
    torch.testing.assert_close(actual, first.expand_as(expected), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(actual, expected), "the product is too small to be computed cheaply"


def test_small_products_and_grouped_convolutions_are_computed() -> None:
    small = (draw(30, 20), draw(20, 15))
    assert torch.equal(compute_cheaply(ATEN.mm.default, small, {}), ATEN.mm.default(*small))
    grouped = (draw(2, 64, 64, 64), draw(64, 1, 5, 5), None, [1, 1], [2, 2], [1, 1], False, [0, 0], 64)
    assert torch.equal(compute_cheaply(ATEN.convolution.default, grouped, {}), ATEN.convolution.default(*grouped))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 5), (2, 6, 5, 3)])
def test_a_norm_without_memory_has_the_shapes_of_one_that_ran(shape: tuple[int, ...], training: bool) -> None:
    channels = [torch.ones(6, device="meta") for _ in range(4)]
    for source in (
        torch.empty(shape, device="meta"),
        torch.empty(shape[::-1], device="meta").permute(*range(len(shape))[::-1]),
    ):
        args = (source, *channels, training, 0.1, 1e-5)
        expected = ATEN.native_batch_norm.default(*args)
        actual = compute_cheaply(ATEN.native_batch_norm.default, args, {})
        assert [(part.shape, part.stride(), part.dtype) for part in actual] == [
            (part.shape, part.stride(), part.dtype) for part in expected
        ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "vit_tiny"])
def test_a_record_without_memory_is_the_same(name: str) -> None:
    family = preset(name, input_shape=(3, 32, 32), class_count=10)
    with torch.device("meta"), Undrawn():
        empty = family.module()
    records = [record_module(module, family.input_shape) for module in (empty, family.module())]
    assert pack_record(records[0]) == pack_record(records[1])


@pytest.mark.slow
def test_a_long_run_without_memory_is_the_same_over_symbols() -> None:
    family = preset("char_lstm", input_shape=(20,), class_count=80)
    with torch.device("meta"), Undrawn():
        empty = family.module()
    records = [record_module(module, family.input_shape, symbols=80) for module in (empty, family.module())]
    assert pack_record(records[0]) == pack_record(records[1])


def test_copies_of_a_module_share_its_record_and_no_tensor() -> None:
    network, inputs = network_of(MLP), draw(3, *MLP.input_shape)
    module = build_module(network, network.full_architecture()).eval()
    module.load_state_dict(init_state(network, 0))
    copied, before = copy.deepcopy(module), module(inputs)
    assert torch.equal(copied(inputs), before)
    for parameter in copied.parameters():
        parameter.detach().zero_()
    assert torch.equal(module(inputs), before)
    record = record_of(MLP)
    assert copy.deepcopy(record) is record
