"""What all training of a run has cost: multiplications, bytes, storage, and the time of its rounds. Pure."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from subfleet.journal.records import ClientRow, RunResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Mean and standard deviation of some times, which are all that there are, and how many they are."""

    mean_s: float
    deviation_s: float
    count: int

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Timing | None":
        """Of these; None of none."""
        known = tuple(seconds)
        if not known:
            return None
        return cls(mean_s=statistics.fmean(known), deviation_s=statistics.pstdev(known), count=len(known))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCosts:
    """What all training of a run has cost.

    Trainings that came to no update, and tries of a round that left nothing to aggregate, have cost what nobody knows.

    Attributes:
        forward_macs: multiply-accumulates of the forward passes over all samples in all epochs.
        training_macs: three times these.
        bytes_down: payload bytes published to clients in all rounds: weights, new programs, tasks, messages.
        bytes_up: payload bytes received from them.
        storage_bytes: of all tensors that the server had to keep from one round to the next, where they were most.
        rounds: seconds of the rounds, each from its announcement until its aggregate was evaluated; None where nobody
            has measured any.
        clients: seconds of the clients' parts, each from the sending of its task until its update was stored.
        expected_clients: seconds that these were expected to take, by cost estimates and by the paces and links that
            clients tell; None where no client tells any.
        expected_rounds: the same of rounds, the slowest client of each deciding.
        paced: fraction of the trainings whose client has told its pace; of the others, links alone count.
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
    """What a run has cost so far."""
    rounds = result.rounds
    rows = [row for record in rounds for row in record.clients]
    trained = _list_trained(rows)
    expected = [[row.expected_s for row in _list_trained(record.clients) if row.expected_s > 0] for record in rounds]
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


def _list_trained(rows: Sequence[ClientRow]) -> list[ClientRow]:
    return [row for row in rows if row.sample_passes]
