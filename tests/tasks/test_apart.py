"""Splitting samples off: the requested number, each sample once, and every class even in sorted files."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from subfleet.tasks import Dataset


def sorted_classes(count: int, classes: int) -> Dataset:
    """Samples sorted by class; the sizes of the classes differ by one sample at most."""
    labels = (np.arange(count, dtype=np.int64) * classes) // count
    return Dataset(inputs=np.arange(count, dtype=np.float32)[:, None], labels=labels)


@given(data=st.data())
def test_every_sample_is_on_one_side(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 300))
    size = data.draw(st.integers(1, count - 1))
    rest, apart = sorted_classes(count, min(count, 3)).split_off(size)
    assert (len(apart), len(rest)) == (size, count - size)
    values = np.concatenate([rest.inputs[:, 0], apart.inputs[:, 0]])
    assert sorted(values.tolist()) == list(range(count))
    assert np.array_equal(rest.inputs[:, 0], np.sort(rest.inputs[:, 0]))


@given(classes=st.integers(1, 12), class_size=st.integers(5, 20), share=st.sampled_from([0.2, 0.3, 0.5]))
def test_a_file_in_the_order_of_its_classes_gives_each_its_share(classes: int, class_size: int, share: float) -> None:
    """The last samples of a sorted file alone would contain only some of the classes."""
    data = sorted_classes(classes * class_size, classes)
    _, apart = data.split_off(round(share * len(data)))
    counts = np.bincount(apart.labels, minlength=classes)
    assert np.all(np.abs(counts - share * class_size) <= 1)
