"""From seats to the rows that people read."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from subfleet.elastic.update_form import update_bytes
from subfleet.journal.records import ClientRow, DeployedModel, RoundRecord
from subfleet.link.traffic import Traffic
from subfleet.rounds.actions import Close
from subfleet.rounds.state import Seat, Terms
from subfleet.rounds.weights import Weight, round_weights

__all__ = ["deployed_models", "round_record"]


def round_record(terms: Terms, close: Close, traffic: Traffic) -> RoundRecord:
    """The record of a closed round."""
    folded = [seat for seat in close.seats if seat.stage == "done"]
    weights = round_weights(terms.weigh(close.round), folded, terms.config.max_client_share)
    return RoundRecord(
        round=close.round,
        accuracy=close.accuracy,
        loss=close.loss,
        seconds=close.seconds,
        log_time_s=terms.config.log_time_s(close.turn),
        clients=tuple(_client_row(terms, seat, traffic, weights.get(seat.client_id)) for seat in close.seats),
        programs_written=close.exported,
        calibrated=terms.config.calibrates(close.round),
        retries=close.retries,
    )


def _client_row(terms: Terms, seat: Seat, traffic: Traffic, weight: Weight | None) -> ClientRow:
    candidate = terms.price(seat.size) if seat.size is not None else None
    down, up = traffic.of(seat.client_id)
    row = ClientRow(
        client_id=seat.client_id,
        device=seat.device,
        runtime=seat.runtime if candidate is not None else "",
        spec=candidate.spec.name if candidate is not None else "",
        spec_id=candidate.spec.spec_id if candidate is not None else "",
        parameters=candidate.parameters if candidate is not None else 0,
        memory_free_bytes=seat.memory_free_bytes,
        budget_bytes=seat.memory_budget_bytes,
        downlink_budget_bytes=seat.budget.downlink_bytes if seat.budget is not None else None,
        uplink_budget_bytes=seat.budget.uplink_bytes if seat.budget is not None else None,
        update_bytes=_update_bytes(terms, seat),
        planned_peak_bytes=seat.task.planned_peak_bytes if seat.task is not None else 0,
        measured_peak_bytes=seat.result.measured_peak_bytes if seat.result is not None else 0,
        bytes_down=down,
        bytes_up=up,
        seconds=seat.result.seconds if seat.result is not None else 0.0,
        loss=seat.result.loss if seat.result is not None else 0.0,
        sample_count=seat.result.sample_count if seat.result is not None else 0,
        status="folded" if seat.stage == "done" else f"{seat.stage}: {seat.reason}",
        refusals="; ".join(seat.refusals),
        weight=weight.counted if weight is not None else 0.0,
        share=weight.share if weight is not None else 0.0,
        lowered=weight.lowered if weight is not None else "",
        limit=seat.limit,
    )
    if seat.wanted is None or row.utilisation is None:
        return row
    wanted = terms.price(seat.wanted.program.size)
    lost = max(0.0, 1 - row.parameters / wanted.parameters)
    return replace(row, wanted=wanted.spec.name, parameters_lost=lost)


def _update_bytes(terms: Terms, seat: Seat) -> int:
    """Of the update that its task asks for; a score task asks for none."""
    if seat.task is None or seat.task.work != "train":
        return 0
    return update_bytes(terms.network, seat.task.spec, seat.task.update_codec, seat.task.sends)


def deployed_models(terms: Terms, seats: Iterable[Seat]) -> tuple[DeployedModel, ...]:
    """What the deploy phase made for each client."""
    return tuple(
        DeployedModel(
            client_id=seat.client_id,
            target=model.target,
            path=Path(model.file),
            spec=seat.size.name if seat.size is not None else "",
            spec_id=seat.size.spec_id if seat.size is not None else "",
            max_abs_diff=model.max_abs_diff,
            quantised_accuracy=model.quantised_accuracy,
            float_accuracy=model.float_accuracy,
            status="deployed" if seat.stage == "done" else f"{seat.stage}: {seat.reason}",
        )
        for seat in seats
        for model in seat.models
    )
