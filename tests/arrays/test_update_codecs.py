"""Codecs of updates: decoded values, sizes, and refusals."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from matrices import examples

from subfleet.arrays.codecs import (
    UPDATE_CODECS,
    count_encoded_bytes,
    decode_change,
    draw_rounding_numbers,
    encode_changes,
)
from subfleet.arrays.codecs.coders import QsgdCoder, Uniform
from subfleet.protocol.errors import ProtocolError, TrainingError
from subfleet.protocol.update_codecs import AnyUpdateCodec, Qsgd, TopK, TopKQsgd, Uncompressed

Floats = npt.NDArray[np.float32]

CODECS: tuple[AnyUpdateCodec, ...] = (
    Uncompressed(),
    Qsgd(),
    Qsgd(levels=1, bucket_size=3),
    Qsgd(levels=5, bucket_size=64),
    TopK(fraction=0.2),
    TopK(fraction=1.0),
    TopKQsgd(fraction=0.2),
    TopKQsgd(fraction=1.0, levels=3, bucket_size=7),
)
FLOATS = st.floats(-(2.0**100), 2.0**100, width=32)


def uniform(tensor: str) -> Uniform:
    return draw_rounding_numbers(tensor, seed=1, round_number=2, client_id="ada")


def encode(codec: AnyUpdateCodec, values: Floats) -> npt.NDArray[np.generic]:
    return encode_changes(codec, {"w": values}, exact=(), uniform=uniform)["w"]


def round_trip(codec: AnyUpdateCodec, values: Floats) -> Floats:
    return decode_change(codec, "w", encode(codec, values), values.shape, exact=False)


def constant(number: float) -> Uniform:
    return lambda count: np.full(count, number)


def normal(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_the_table_names_every_codec() -> None:
    assert list(UPDATE_CODECS) == [kind.TYPE for kind in (Uncompressed, Qsgd, TopK, TopKQsgd)]


@pytest.mark.slow
@examples(30)
@given(codec=st.sampled_from(CODECS), values=st.lists(FLOATS, max_size=200), seed=st.integers(0, 100))
@example(codec=TopKQsgd(fraction=1.0, levels=3, bucket_size=7), values=[1.3e-44, 1.3e-44], seed=0)
def test_decoded_changes_have_the_shape_and_are_close(codec: AnyUpdateCodec, values: list[float], seed: int) -> None:
    change = np.random.default_rng(seed).permutation(np.array(values, np.float32)).reshape(1, -1)
    encoded = encode(codec, change)
    assert encoded.nbytes == count_encoded_bytes(codec, change.size) <= change.nbytes
    decoded = decode_change(codec, "w", encoded, change.shape, exact=False)
    assert decoded.dtype == np.float32
    assert decoded.shape == change.shape
    assert np.isfinite(decoded).all()
    assert not decoded[change == 0].any()
    assert not (decoded * change.astype(np.float64) < 0).any(), "a sign has changed"
    # The norm is sent as a float32, which has no finer steps than this, however small it is.
    bound = np.linalg.norm(change.astype(np.float64)) * (1 + 1e-6) + np.finfo(np.float32).smallest_subnormal
    assert (np.abs(decoded) <= bound).all()


@pytest.mark.parametrize("codec", CODECS)
def test_zero_changes_stay_zero(codec: AnyUpdateCodec) -> None:
    for shape in ((1000,), (3, 5, 7), (1,), (), (0, 4)):
        zeros = np.zeros(shape, np.float32)
        assert round_trip(codec, zeros).tobytes() == zeros.tobytes()


@pytest.mark.parametrize("codec", [Qsgd(levels=7, bucket_size=16), TopKQsgd(fraction=0.5, levels=7)])
def test_values_that_did_not_change_stay_so_among_others(codec: AnyUpdateCodec) -> None:
    values = normal(40, 50)
    values[::3] = 0
    assert round_trip(codec, values)[::3].tobytes() == np.zeros_like(values[::3]).tobytes()
    assert round_trip(codec, values).any()


@pytest.mark.slow
@examples(25)
@given(
    levels=st.integers(1, 127),
    bucket_size=st.integers(1, 40),
    values=st.lists(FLOATS.filter(lambda value: value == 0 or abs(value) > 1e-30), min_size=1, max_size=60),
)
def test_rounding_keeps_the_mean(levels: int, bucket_size: int, values: list[float]) -> None:
    """The two outcomes of each value, weighted by the probabilities of the threshold, average to the value."""
    coder, change = QsgdCoder(levels, bucket_size), np.array(values, np.float32)

    def outcome(number: float) -> npt.NDArray[np.float64]:
        return coder.decode(coder.encode(change, constant(number)), len(change)).astype(np.float64)

    away, towards = outcome(0.0), outcome(1 - 2**-53)
    norms = np.array(
        [
            np.linalg.norm(change[index - index % bucket_size :][:bucket_size].astype(np.float64))
            for index in range(len(change))
        ]
    )
    tolerance = 1e-6 * norms
    step = norms / levels
    assert (np.abs(np.abs(away - towards) - np.where(away == towards, 0, step)) <= tolerance).all()
    for index in np.flatnonzero(away != towards):
        probability = (change[index] - towards[index]) / (away[index] - towards[index])
        # The threshold is there, up to the rounding of float32.
        assert outcome(max(0.0, probability - 1e-4))[index] == away[index]
        assert outcome(min(1 - 2**-53, probability + 1e-4))[index] == towards[index]
    same = away == towards
    assert (np.abs(away[same] - change[same]) <= tolerance[same]).all()


def test_values_on_a_level_are_not_rounded() -> None:
    values = np.array([3.0, -4.0, 0.0, 0.0, 5.0], np.float32)
    for number in (0.0, 0.999):
        coder = QsgdCoder(5, 4)
        np.testing.assert_array_equal(coder.decode(coder.encode(values, constant(number)), 5), values)


def test_the_largest_magnitudes_are_sent_and_of_equal_ones_the_first() -> None:
    values = np.array([1, -3, 2, 0.5, -2, 2, 0, 0.1] + [0.0] * 12, np.float32)
    expected = np.zeros(20, np.float32)
    expected[[1, 2, 4]] = [-3, 2, -2]
    np.testing.assert_array_equal(round_trip(TopK(fraction=0.15), values), expected)
    np.testing.assert_array_equal(round_trip(TopK(fraction=0.001), values)[1], -3)


def test_the_whole_fraction_is_exact() -> None:
    values = normal(30, 7)
    np.testing.assert_array_equal(round_trip(TopK(fraction=1.0), values), values)


GOLDEN = np.array([[0.0, 3.0, 0.0, 0.0, -4.0, 0.0, 0.0, 0.0], [0, 0, 0, 0, 0, 0, 0, 12.0]], np.float32)


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        (Uncompressed(), GOLDEN.tobytes().hex()),
        # Scales 5 and 12, then a level and 5 more of each value in 4 bits.
        (Qsgd(levels=5, bucket_size=8), "0000a04000004041585515555555555a"),
        # A bitmap of positions 1, 4 and 15 of 16, then three floats.
        (TopK(fraction=0.15), "480100004040000080c000004041"),
        # The same positions; scales 5 and 12, then 8, 1 and 10 in 4 bits.
        (TopKQsgd(fraction=0.15, levels=5, bucket_size=2), "48010000a0400000404181a0"),
    ],
)
def test_the_bytes_are_golden(codec: AnyUpdateCodec, expected: str) -> None:
    assert encode(codec, GOLDEN).tobytes().hex() == expected
    np.testing.assert_array_equal(round_trip(codec, GOLDEN), GOLDEN)


def test_the_random_numbers_are_golden_and_differ_by_seed_round_client_and_tensor() -> None:
    first = uniform("w")(3)
    np.testing.assert_array_equal(first, RANDOM)
    variants: list[dict[str, Any]] = [{"seed": 2}, {"round_number": 3}, {"client_id": "bob"}, {"tensor": "v"}]
    for variant in variants:
        origin: dict[str, Any] = {"seed": 1, "round_number": 2, "client_id": "ada", "tensor": "w", **variant}
        assert not (draw_rounding_numbers(**origin)(3) == first).any()


RANDOM = [0.7557450644428304, 0.03377539533400875, 0.8228773835180583]


@pytest.mark.parametrize(
    ("levels", "bits"), [(1, 2), (2, 3), (3, 3), (4, 4), (7, 4), (8, 5), (31, 6), (63, 7), (64, 8), (127, 8)]
)
def test_a_value_takes_as_few_bits_as_its_levels_allow(levels: int, bits: int) -> None:
    assert count_encoded_bytes(Qsgd(levels=levels, bucket_size=1000), 1000) == math.ceil(1000 * bits / 8) + 4
    values = normal(1000)
    assert encode(Qsgd(levels=levels, bucket_size=1000), values).nbytes == math.ceil(1000 * bits / 8) + 4


def test_running_statistics_and_incompressible_tensors_are_sent_uncompressed() -> None:
    changes = {"mean": normal(100), "bias": normal(1), "w": normal(100)}
    encoded = encode_changes(Qsgd(), changes, exact={"mean"}, uniform=uniform)
    assert [encoded[name].dtype for name in ("mean", "bias", "w")] == [np.float32, np.float32, np.uint8]
    for name, exact in (("mean", True), ("bias", False)):
        decoded = decode_change(Qsgd(), name, encoded[name], changes[name].shape, exact=exact)
        np.testing.assert_array_equal(decoded, changes[name])


def test_values_of_every_magnitude_are_written() -> None:
    tiny, huge = np.float32(1e-45), np.finfo(np.float32).max
    for codec in (Qsgd(bucket_size=1), Qsgd(), TopKQsgd(fraction=0.5)):
        for value in (tiny, huge, -huge):
            values = np.zeros(64, np.float32)
            values[5] = value
            assert round_trip(codec, values)[5] == value
    with pytest.raises(TrainingError, match="too large to be quantised; lower the learning rate"):
        encode(Qsgd(), np.full(64, huge, np.float32))


def _with(change: Callable[[npt.NDArray[np.uint8]], None], codec: AnyUpdateCodec) -> npt.NDArray[np.generic]:
    content = np.array(encode(codec, GOLDEN)).view(np.uint8)
    change(content)
    return content


def _put(index: int, content: bytes) -> Callable[[npt.NDArray[np.uint8]], None]:
    def put(array: npt.NDArray[np.uint8]) -> None:
        array[index : index + len(content)] = np.frombuffer(content, np.uint8)

    return put


QSGD = Qsgd(levels=5, bucket_size=8)


@pytest.mark.parametrize(
    ("codec", "damaged", "message"),
    [
        (QSGD, _with(_put(0, np.float32(np.inf).tobytes()), QSGD), "a scale .* must be a finite number"),
        (QSGD, _with(_put(0, np.float32(np.nan).tobytes()), QSGD), "a scale .* must be a finite number"),
        (QSGD, _with(_put(4, np.float32(-1).tobytes()), QSGD), "a scale .* must be a finite number"),
        (QSGD, _with(_put(8, b"\xff"), QSGD), "a level of quantised values is above 5"),
        (Qsgd(levels=64), np.full(4 + 16, 200, np.uint8), "a scale|a level"),
        (QSGD, encode(QSGD, GOLDEN)[:-1], r"is uint8 of shape \(15,\), but must be uint8 of shape \(16,\)"),
        (QSGD, np.zeros(2**20, np.uint8), r"but must be uint8 of shape \(16,\)"),
        (QSGD, encode(QSGD, GOLDEN).reshape(4, 4), r"of shape \(4, 4\), but must be"),
        (QSGD, encode(QSGD, GOLDEN).view(np.int8), "is int8 of shape"),
        (QSGD, GOLDEN, r"is float32 of shape \(2, 8\), but must be uint8"),
        (Uncompressed(), encode(QSGD, GOLDEN), r"is uint8 of shape \(16,\), but must be float32 of shape \(2, 8\)"),
        (
            TopK(fraction=0.15),
            _with(_put(0, b"\xff"), TopK(fraction=0.15)),
            "the number of packed marks is 9, but must be 3",
        ),
    ],
)
def test_damaged_values_are_refused(codec: AnyUpdateCodec, damaged: npt.NDArray[np.generic], message: str) -> None:
    with pytest.raises(ProtocolError, match=message) as caught:
        decode_change(codec, "w", damaged, GOLDEN.shape, exact=False)
    assert "'w'" in str(caught.value)


@pytest.mark.slow
@examples(50)
@given(codec=st.sampled_from(CODECS[1:]), size=st.integers(1, 300), data=st.data())
def test_any_bytes_are_read_or_refused(codec: AnyUpdateCodec, size: int, data: st.DataObject) -> None:
    count = count_encoded_bytes(codec, size)
    if count == 4 * size:
        return
    content = np.frombuffer(data.draw(st.binary(min_size=count, max_size=count)), np.uint8)
    try:
        values = decode_change(codec, "w", content, (size,), exact=False)
    except ProtocolError:
        return
    assert values.shape == (size,)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (Qsgd, {"levels": 0}, "levels is 0, but must be from 1 to 127"),
        (Qsgd, {"levels": 128}, "levels is 128"),
        (Qsgd, {"bucket_size": 0}, "bucket_size is 0, but must be from 1"),
        (TopK, {"fraction": 0.0}, "fraction is 0.0, but must be from 1e-06 to 1"),
        (TopK, {"fraction": math.nan}, "fraction is nan"),
        (TopKQsgd, {"fraction": 1.5}, "fraction is 1.5"),
        (TopKQsgd, {"levels": 200}, "levels is 200"),
    ],
)
def test_settings_that_make_no_sense_are_refused(kind: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**fields)
