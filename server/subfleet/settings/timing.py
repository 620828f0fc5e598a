"""How long anything of a run may take, and the clock by which resource logs are read."""

from dataclasses import dataclass
from typing import Annotated

from subfleet.protocol.bounds import Range, checked

__all__ = ["Deadlines", "LogClock"]

Seconds = Annotated[float, Range(above=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class LogClock:
    """A logical clock: round r reads replayed resource logs at `start_s + (r - 1) * step_s`.

    A try that folds nothing takes a step as well: so much later its round is tried again, and so are all rounds after
    it. A step of 0 reads the same moment for ever.
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
        retry_s: for a round in which nothing was folded, from the end of its first try: so long it is tried again, or,
            under a logical clock, so many seconds of the logs.
        pause_s: before it is tried again for the first time; each further pause is twice as long as the one before.
        longest_pause_s: at most.
    """

    join_s: Seconds = 600.0
    measure_s: Seconds = 30.0
    round_s: Seconds = 600.0
    evaluate_s: Seconds = 300.0
    deploy_s: Seconds = 300.0
    lease_s: Seconds = 30.0
    forget_s: Seconds = 3600.0
    linger_s: Annotated[float, Range(least=0)] = 5.0
    retry_s: Seconds = 3600.0
    pause_s: Seconds = 1.0
    longest_pause_s: Seconds = 60.0
