"""The costs of a run's training: multiply-accumulates, bytes, storage, and times. Pure."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from subfleet.journal.records import RunResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Mean, standard deviation (of the whole population) and number of times."""

    mean_s: float
    deviation_s: float
    count: int

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Timing | None":
        """The timing of these seconds; None without any."""
        known = tuple(seconds)
        if not known:
            return None
        return cls(mean_s=statistics.fmean(known), deviation_s=statistics.pstdev(known), count=len(known))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCosts:
    """The costs of a run's training.

    The costs of trainings without an update, and of attempts that aggregated nothing, are unknown and not included.

    Attributes:
        forward_macs: multiply-accumulates of the forward passes over all samples in all epochs.
        training_macs: three times these.
        bytes_down: payload bytes published to clients in all rounds: weights, new programs, tasks, messages.
        bytes_up: payload bytes received from them.
        storage_bytes: of all tensors that the server kept from one round to the next, at most.
        rounds: seconds of the rounds, each from its announcement until its model was evaluated; None if none was
            measured.
        clients: seconds of the clients' parts, each from the sending of its task until its update was stored.
        expected_clients: the same, estimated from costs and the reported paces and links of clients; None if no client
            reports any.
        expected_rounds: the same of rounds, by the slowest client of each.
        paced: fraction of the trainings with a reported pace; for the others, only links count.
    """

    forward_macs: int = 0
    training_macs: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    storage_bytes: int = 0
    rounds: Timing | None = None
    clients: Timing | None = None
    expected_rounds: Timing | None = None
    expected_clients: Timing | None = None
    paced: float = 0.0


def sum_costs(result: RunResult) -> RunCosts:
    """The costs of a run so far."""
    rounds = result.rounds
    rows = [row for record in rounds for row in record.clients]
    trained = [row for row in rows if row.sample_passes]
    expected = [
        [row.expected_s for row in record.clients if row.sample_passes and row.expected_s > 0] for record in rounds
    ]
    return RunCosts(
        forward_macs=sum(row.forward_macs * row.sample_passes for row in trained),
        training_macs=sum(row.training_macs for row in trained),
        bytes_down=sum(row.bytes_down for row in rows),
        bytes_up=sum(row.bytes_up for row in rows),
        storage_bytes=max((record.model_bytes for record in rounds), default=0),
        rounds=Timing.of(record.seconds for record in rounds if record.seconds is not None),
        clients=Timing.of(row.took_s for row in trained if row.took_s is not None),
        expected_rounds=Timing.of(max(each) for each in expected if each),
        expected_clients=Timing.of(seconds for each in expected for seconds in each),
        paced=sum(row.expected_training_s > 0 for row in trained) / len(trained) if trained else 0.0,
    )
