"""When things of a run happen: deadlines, the clock by which resource logs are read, evaluations on devices."""

from dataclasses import dataclass
from typing import Annotated

from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.limits import Amount, PositiveAmount

__all__ = ["Deadlines", "Evaluations", "LogClock"]


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class LogClock:
    """A logical clock: round r reads replayed resource logs at `start_s + (r - 1) * step_s`.

    A try that aggregates nothing takes a step as well: so much later its round is tried again, and so are all rounds
    after it. A step of 0 reads the same moment for ever.
    """

    start_s: float = 0.0
    step_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Deadlines:
    """How long anything may take, in seconds; nothing waits for ever.

    Attributes:
        join_s: for the wanted number of clients to be there, and for one of them to answer a round's announcement.
        measure_s: for the clients' telemetry at the start of a round.
        round_s: from the assignment of tasks to the close of the round.
        evaluate_s: for clients to evaluate the model after a round.
        deploy_s: for clients to fetch their models after the last round.
        lease_s: a client whose last sign of life is older than this is taken for gone; so long a strict run waits for
            one that has said goodbye.
        forget_s: a client that never took part and was silent for so long is forgotten.
        linger_s: after the end, for clients to hear of it.
        retry_s: for a round in which nothing was aggregated, from the end of its first try: so long it is tried again,
            or, under a logical clock, so many seconds of the logs.
        pause_s: before it is tried again for the first time; each further pause is twice as long as the one before.
        longest_pause_s: at most.
    """

    join_s: PositiveAmount = 600.0
    measure_s: PositiveAmount = 30.0
    round_s: PositiveAmount = 600.0
    evaluate_s: PositiveAmount = 300.0
    deploy_s: PositiveAmount = 300.0
    lease_s: PositiveAmount = 30.0
    forget_s: PositiveAmount = 3600.0
    linger_s: Amount = 5.0
    retry_s: PositiveAmount = 3600.0
    pause_s: PositiveAmount = 1.0
    longest_pause_s: PositiveAmount = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Evaluations:
    """When devices with held-out data evaluate the model that they would be given.

    Attributes:
        every: after how many rounds, 0 or more; 0 is not between rounds.
        last: also after the last round.
        per_class: they count the labels of each class, and those that were predicted rightly.
    """

    every: Annotated[int, Range(least=0, words="a number of rounds, or 0 for none between rounds")] = 0
    last: bool = True
    per_class: bool = False

    def due(self, round_number: int, total_rounds: int) -> bool:
        """Whether devices evaluate after a round."""
        return (self.last and round_number >= total_rounds) or (self.every > 0 and round_number % self.every == 0)
