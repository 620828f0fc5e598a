"""Partitions: each sample has one owner, each client has samples, and the same seed gives the same split."""

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subfleet.emulation.partitions import partition
from subfleet.protocol.errors import ConfigError, DataError, MissingExtraError
from subfleet.settings.samples import Partition, PartitionSettings
from subfleet.tasks import Dataset

pytestmark = pytest.mark.slow
"""Splitting loads flwr-datasets."""

CLASSES = 6
PARTITIONS = get_args(Partition)


def samples(labels: Sequence[int], owners: Sequence[int] | None = None) -> Dataset:
    return Dataset(
        inputs=np.arange(len(labels), dtype=np.float32)[:, None],
        labels=np.array(labels, np.int64),
        owners=None if owners is None else np.array(owners, np.int64),
    )


def many_samples(count: int = 600, owners: int = 20) -> Dataset:
    random = np.random.default_rng(0)
    return samples(random.integers(0, CLASSES, count).tolist(), random.integers(-1, owners, count).tolist())


def parts_of(dataset: Dataset, name: str, clients: int, **changes: float) -> tuple[npt.NDArray[np.int64], ...]:
    chosen = replace(PartitionSettings(name=name), **changes)  # type: ignore[arg-type]
    return partition(dataset, chosen, clients=clients, seed=7)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_sample_goes_to_exactly_one_client_or_the_split_is_refused(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 80))
    owners = data.draw(st.lists(st.integers(-1, 8), min_size=count, max_size=count))
    dataset = samples(data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count)), owners)
    chosen = PartitionSettings(
        name=data.draw(st.sampled_from(PARTITIONS)),
        alpha=data.draw(st.sampled_from([1e-5, 0.01, 0.5, 100.0])),
        min_samples=data.draw(st.integers(0, 3)),
        classes_per_client=data.draw(st.integers(1, 6)),
        shards_per_client=data.draw(st.integers(1, 4)),
    )
    clients, seed = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 2**32))
    try:
        parts = partition(dataset, chosen, clients=clients, seed=seed)
    except ConfigError:
        return
    assert len(parts) == clients
    assert all(len(part) and (np.diff(part) > 0).all() for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(count))
    repeated = partition(dataset, chosen, clients=clients, seed=seed)
    assert all(np.array_equal(first, second) for first, second in zip(parts, repeated, strict=True))


@pytest.mark.parametrize("name", PARTITIONS)
def test_another_seed_gives_another_split(name: Partition) -> None:
    dataset = many_samples()
    first = parts_of(dataset, name, 8)
    other = partition(dataset, PartitionSettings(name=name), clients=8, seed=8)
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_iid_shares_are_equal() -> None:
    assert {len(part) for part in parts_of(many_samples(603), "iid", 8)} == {75, 76}


def test_a_smaller_alpha_is_more_unequal_and_the_least_count_is_kept() -> None:
    dataset = many_samples()
    spread = []
    for alpha in (0.1, 100.0):
        parts = parts_of(dataset, "dirichlet", 5, alpha=alpha, min_samples=30)
        assert min(len(part) for part in parts) >= 30
        shares = [np.bincount(dataset.classes()[part], minlength=CLASSES) / len(part) for part in parts]
        spread.append(np.std(shares, axis=0).mean())
    assert spread[0] > 3 * spread[1]


def test_pathological_clients_hold_exactly_so_many_classes() -> None:
    dataset = many_samples()
    for part in parts_of(dataset, "pathological", 9, classes_per_client=2):
        assert len(np.unique(dataset.classes()[part])) == 2


def test_pathological_clients_as_many_as_classes_share_all_of_them() -> None:
    for seed in range(5):
        chosen = PartitionSettings(name="pathological", classes_per_client=1)
        parts = partition(many_samples(), chosen, clients=CLASSES, seed=seed)
        assert sum(len(part) for part in parts) == 600


def test_shards_are_runs_of_the_sorted_classes() -> None:
    dataset = samples([label for label in range(CLASSES) for _ in range(20)])
    for part in parts_of(dataset, "shard", 3, shards_per_client=2):
        assert np.bincount(dataset.classes()[part]).tolist().count(20) == 2


def test_shards_that_do_not_come_out_even_leave_no_sample_over() -> None:
    parts = parts_of(samples([0] * 10), "shard", 3, shards_per_client=1)
    assert sorted(len(part) for part in parts) == [2, 4, 4]


def test_owners_stay_together_and_ownerless_samples_are_distributed() -> None:
    dataset = many_samples()
    assert dataset.owners is not None
    parts = parts_of(dataset, "natural", 6)
    owners = [set(dataset.owners[part].tolist()) for part in parts]
    assert all(-1 in client_owners for client_owners in owners)
    dealt = [owner for client_owners in owners for owner in client_owners - {-1}]
    assert sorted(dealt) == list(range(20))
    ownerless = [np.count_nonzero(dataset.owners[part] == -1) for part in parts]
    assert max(ownerless) - min(ownerless) <= 1
    assert {len(client_owners) for client_owners in owners} <= {4, 5}, (
        "3 or 4 of 20 owners, and samples without an owner"
    )


def test_iid_and_natural_need_no_class() -> None:
    tokens = Dataset(
        inputs=np.zeros((12, 4), np.int64), labels=np.ones((12, 4), np.int64), owners=np.arange(12, dtype=np.int64) % 5
    )
    for name in ("iid", "natural"):
        assert sum(len(part) for part in parts_of(tokens, name, 3)) == 12
    with pytest.raises(DataError, match="one class for each sample"):
        parts_of(tokens, "dirichlet", 3)


@pytest.mark.parametrize(
    ("name", "clients", "words"),
    [
        ("dirichlet", 500, "cannot be split"),
        ("iid", 601, "use fewer clients"),
        ("pathological", 5, "use 6 clients or more"),
        ("natural", 21, "use 20 clients or fewer"),
    ],
)
def test_an_impossible_split_has_its_reason(name: str, clients: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parts_of(many_samples(), name, clients)


def test_no_owners_have_no_natural_partition() -> None:
    with pytest.raises(ConfigError, match="have no owners"):
        parts_of(samples([0, 1, 2]), "natural", 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alpha", 0.0),
        ("alpha", float("nan")),
        ("alpha", float("inf")),
        ("min_samples", -1),
        ("classes_per_client", 0),
        ("shards_per_client", 0),
    ],
)
def test_settings_out_of_range_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        PartitionSettings(**{"name": "iid", field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("clients", "seed"), [(0, 1), (2, -1)])
def test_counts_and_seeds_out_of_range_are_refused(clients: int, seed: int) -> None:
    with pytest.raises(ConfigError, match="clients and seed are"):
        partition(many_samples(), PartitionSettings(), clients=clients, seed=seed)


def test_without_flwr_datasets_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("flwr_datasets", "flwr_datasets.partitioner"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(MissingExtraError, match=r"subfleet\[emulation\]"):
        parts_of(many_samples(), "iid", 2)


def test_one_number_is_split_by_its_tenths_and_several_are_refused() -> None:
    numbers = np.random.default_rng(3).normal(size=(400, 1)).astype(np.float32)
    dataset = Dataset(inputs=np.zeros((400, 2), np.float32), labels=numbers)
    deciles = (numbers[:, 0].argsort().argsort() // 40).tolist()
    expected = parts_of(samples(deciles), "dirichlet", 5, alpha=0.3)
    for part, class_part in zip(parts_of(dataset, "dirichlet", 5, alpha=0.3), expected, strict=True):
        assert part.tolist() == class_part.tolist(), "as if each decile were a class"
    several = Dataset(inputs=np.zeros((400, 2), np.float32), labels=numbers.reshape(200, 2).repeat(2, 0))
    with pytest.raises(DataError, match="must be one class for each sample"):
        parts_of(several, "dirichlet", 5)
