"""Whole fleets with encoded updates: the bytes that are sent, and the resulting models."""

import math
from dataclasses import replace

import pytest
from emulation.batch_cases import LARGE_BYTES, MODEL, client, config, experiment, part

from subfleet.elastic.update_form import update_bytes
from subfleet.emulation.batch.figures import compute_batch_figures
from subfleet.emulation.batch.run import BatchResult, run_batch
from subfleet.emulation.gathering import EmulatedDevice, GatheredRun
from subfleet.export.pool import ExportPool
from subfleet.journal.records import ClientRow
from subfleet.methods.anycostfl import AnycostFL
from subfleet.protocol.update_codecs import AnyUpdateCodec, Qsgd, TopK, TopKQsgd, Uncompressed
from subfleet.serving.run_context import create_context
from subfleet.settings.fleet import LabelShuffling

pytestmark = [pytest.mark.slow, pytest.mark.export]

MAX_OTHER_BYTES = 8000
"""An upper bound of the other bytes of a round: telemetry, acks, heartbeats and headers."""


def rows(result: BatchResult) -> list[ClientRow]:
    return [row for record in result.rounds for row in record.clients]


@pytest.fixture(scope="module")
def plain(exports: ExportPool) -> BatchResult:
    return run_batch(experiment(), exports)


@pytest.mark.parametrize("codec", [Qsgd(), TopK(), TopKQsgd()], ids=lambda codec: codec.TYPE)
def test_updates_have_the_size_of_their_codec_and_the_fleet_learns(
    exports: ExportPool, plain: BatchResult, codec: AnyUpdateCodec
) -> None:
    gathered = experiment(update_codec=codec)
    result = run_batch(gathered, exports)
    network = create_context(gathered.run, "run").network
    architectures = {
        submodel.architecture.architecture_id: submodel.architecture
        for by_round in result.trained.values()
        for submodel in by_round.values()
    }
    for row, before in zip(rows(result), rows(plain), strict=True):
        assert row.status == "aggregated"
        assert row.architecture_id == before.architecture_id, "memory is the limit, so that architectures stay the same"
        assert row.update_bytes == update_bytes(network, architectures[row.architecture_id], codec)
        assert row.update_bytes < row.weight_bytes * {"qsgd": 0.27, "top_k": 0.14, "top_k_qsgd": 0.07}[codec.TYPE]
        assert 0 <= row.bytes_up - row.update_bytes < MAX_OTHER_BYTES
        saved = before.update_bytes - row.update_bytes
        assert before.bytes_up - row.bytes_up == pytest.approx(saved, abs=1000), (
            "the messages are the same, and the blob is smaller"
        )
        assert row.bytes_down == pytest.approx(before.bytes_down, abs=1000)
    first, *_, last = (record.loss for record in result.rounds)
    assert first is not None
    assert last is not None
    assert last < first
    assert result.model != plain.model
    assert compute_batch_figures(gathered, result)["violations"] == 0


def test_the_same_seed_gives_the_same_rounding(exports: ExportPool) -> None:
    first, second = (run_batch(experiment(update_codec=Qsgd(levels=3)), exports) for _ in range(2))
    assert first.model == second.model


def test_learning_rate_0_changes_no_bit_of_the_model(exports: ExportPool) -> None:
    training = replace(config().training, learning_rate=0.0)
    models = {
        run_batch(experiment(training=training, rounds=1, update_codec=codec), exports).model
        for codec in (Uncompressed(), Qsgd(), TopK(), TopKQsgd())
    }
    assert len(models) == 1


def test_running_statistics_are_the_same_with_any_codec(exports: ExportPool) -> None:
    """They do not depend on the encoding of updates in the round in which they are measured."""
    import torch
    from safetensors.torch import load

    model = replace(MODEL, norm="batch")
    exact, rounded = (
        load(run_batch(experiment(model=model, rounds=1, update_codec=codec), exports).model)
        for codec in (None, Qsgd(levels=1))
    )
    measured = [name for name in exact if "running" in name]
    assert measured
    assert all(torch.equal(exact[name], rounded[name]) for name in measured)
    assert not all(torch.equal(exact[name], rounded[name]) for name in exact)


def test_an_attacker_encodes_what_it_sends(exports: ExportPool) -> None:
    base = experiment(update_codec=Qsgd())
    honest = replace(base.devices[-1], attack=LabelShuffling(strength=0.0))
    fleet = replace(base, devices=(*base.devices[:-1], honest))
    assert run_batch(fleet, exports).model == run_batch(base, exports).model


def on_uplinks(method: AnycostFL, *uplink_bytes: int) -> GatheredRun:
    """Clients with uplinks that carry this many bytes in a round."""
    settings = config(method=method, rounds=1, min_clients=len(uplink_bytes))
    clients = tuple(
        _on_uplink(client(f"client{index}", index, LARGE_BYTES), link_bytes)
        for index, link_bytes in enumerate(uplink_bytes)
    )
    return GatheredRun(run=settings, devices=clients, evaluation=part(10))


def _on_uplink(device: EmulatedDevice, link_bytes: int) -> EmulatedDevice:
    rows = tuple(replace(row, reading=replace(row.reading, uplink_bps=8.0 * link_bytes)) for row in device.log.rows)
    return replace(device, log=replace(device.log, rows=rows))


def test_anycostfl_gives_weak_uplinks_more_than_it_could_without_its_codec(exports: ExportPool) -> None:
    full_bytes = create_context(config(), "run").first.candidates[-1].weight_bytes
    links = (math.ceil(0.06 * full_bytes), math.ceil(0.2 * full_bytes), full_bytes)
    uncompressed, coded = (
        rows(run_batch(on_uplinks(AnycostFL(steps=2, codec=codec), *links), exports))
        for codec in (None, TopKQsgd(fraction=0.1))
    )
    assert [row.status.partition(":")[0] for row in uncompressed] == ["skipped", "skipped", "aggregated"]
    assert [row.architecture for row in coded] == ["w1"] * 3, "each of them sends the whole model"
    weak, middling, strong = coded
    assert weak.update_bytes < middling.update_bytes < strong.update_bytes < full_bytes
    for row in coded:
        assert row.uplink_budget_bytes is not None
        assert 0.9 * min(row.uplink_budget_bytes, strong.update_bytes) < row.update_bytes <= row.uplink_budget_bytes
        assert row.bytes_up > row.update_bytes
