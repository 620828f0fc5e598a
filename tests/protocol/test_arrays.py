import json
import math
import struct

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matrices import examples

from subfleet.arrays import compute_change, decode_arrays, encode_arrays
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.tensors import Tensor, encode_container

safetensors_numpy = pytest.importorskip("safetensors.numpy", reason="install the export extra for this comparison")

Array = npt.NDArray[np.generic]
_TYPES = ("?", "u1", "i1", "<i2", "<f2", "<i4", "<f4", "<i8", "<f8")


@st.composite
def _arrays(draw: st.DrawFn) -> Array:
    dtype = np.dtype(draw(st.sampled_from(_TYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    size = int(np.prod(shape)) * dtype.itemsize
    raw = draw(st.binary(min_size=size, max_size=size))
    if dtype == np.bool_:
        raw = bytes(byte & 1 for byte in raw)
    return np.frombuffer(raw, dtype=dtype).reshape(shape)


_SETS = st.dictionaries(st.text(min_size=1, max_size=6).filter(lambda n: n != "__metadata__"), _arrays(), max_size=5)


def _equal(left: dict[str, Array], right: dict[str, Array]) -> bool:
    return set(left) == set(right) and all(
        (left[name].dtype, left[name].shape, left[name].tobytes())
        == (right[name].dtype, right[name].shape, right[name].tobytes())
        for name in left
    )


@pytest.mark.slow
@examples(50)
@given(arrays=_SETS, metadata=st.none() | st.just({"key": "value"}))
def test_the_bytes_are_those_of_the_safetensors_package(arrays: dict[str, Array], metadata: dict[str, str]) -> None:
    encoded, expected = encode_arrays(arrays, metadata), safetensors_numpy.save(arrays, metadata)
    assert encoded == expected
    assert _equal(safetensors_numpy.load(encoded), arrays)
    assert _equal(decode_arrays(expected), arrays)


def test_arrays_that_are_not_contiguous_are_written_in_order() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert _equal(decode_arrays(encode_arrays({"a": array.T})), {"a": np.ascontiguousarray(array.T)})
    big = array.astype(">f4")
    with pytest.raises(ProtocolError, match="array 'a' has type"):
        encode_arrays({"a": big})


def test_decoded_arrays_cannot_be_written() -> None:
    array = decode_arrays(encode_arrays({"a": np.zeros(3, dtype=np.float32)}))["a"]
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_a_type_that_numpy_lacks_is_refused() -> None:
    with pytest.raises(ProtocolError, match="dtype is 'BF16'"):
        decode_arrays(encode_container([Tensor(name="a", dtype="BF16", shape=(1,), data=b"xx")]))


def test_a_change_is_exactly_zero_where_nothing_changed() -> None:
    old = {"a": np.array([1.0, 2.0], dtype=np.float32), "b": np.array(3.0, dtype=np.float32)}
    new = {"a": np.array([1.0, 2.5], dtype=np.float32), "b": np.array(3.0, dtype=np.float32)}
    assert _equal(
        compute_change(new, old), {"a": np.array([0.0, 0.5], dtype=np.float32), "b": np.array(0.0, dtype=np.float32)}
    )


@pytest.mark.parametrize("new", [{}, {"a": np.zeros(3)}, {"a": np.zeros(2), "b": np.zeros(1)}])
def test_a_change_between_different_tensors_is_refused(new: dict[str, Array]) -> None:
    with pytest.raises(ProtocolError, match="same names and shapes"):
        compute_change(new, {"a": np.zeros(2)})


@pytest.mark.parametrize("shape", [[1] * 33, [1] * 100, [0, 2**47, 2**47]])
def test_a_shape_that_no_array_can_have_is_refused(shape: list[int]) -> None:
    size = 4 * math.prod(shape)
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    with pytest.raises(ProtocolError, match=r"dimensions, but must have at most 32|which is too large for an array"):
        decode_arrays(struct.pack("<Q", len(header)) + header + bytes(size))
