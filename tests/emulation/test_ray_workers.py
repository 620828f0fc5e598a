"""A batch on a Ray cluster of two nodes: the same bits, also when a node goes away."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from emulation.test_workers import play

from subfleet.emulation.batch.ray_workers import RayPool
from subfleet.export.pool import ExportPool
from subfleet.journal.guarding import Unobserved
from subfleet.journal.records import RoundRecord
from subfleet.protocol.errors import ConfigError, MissingExtraError
from subfleet.settings.fleet import HostSettings


class Remover(Unobserved):
    """Removes a node of a cluster after the first round."""

    def __init__(self, cluster: Any, node: Any) -> None:
        self.removed = 0
        self._cluster, self._node = cluster, node

    def round_finished(self, record: RoundRecord) -> None:
        if record.round == 1:
            self._cluster.remove_node(self._node, allow_graceful=False)
            self.removed += 1


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    made = pytest.importorskip("ray.cluster_utils").Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    yield made
    made.shutdown()


@pytest.mark.long
@pytest.mark.export
def test_a_cluster_of_two_nodes_gives_the_same_bits_and_so_does_one_that_loses_a_node(
    cluster: Any, exports: ExportPool
) -> None:
    remover = Remover(cluster, cluster.add_node(num_cpus=1))
    alone = play(exports, HostSettings(type="batch"))
    spread = play(exports, HostSettings(type="batch", ray=cluster.address), remover)
    assert remover.removed == 1
    assert spread.model == alone.model
    assert spread.rounds == alone.rounds


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"subfleet\[ray\]"):
        RayPool("auto")


@pytest.mark.long
def test_a_missing_cluster_is_one_sentence() -> None:
    pytest.importorskip("ray")
    with pytest.raises(ConfigError, match="no Ray cluster at 'auto'"):
        RayPool("auto")


def test_only_one_kind_of_workers_trains() -> None:
    with pytest.raises(ConfigError, match="only one of them can train"):
        HostSettings(type="batch", workers=2, ray="auto")
