"""Small tables of a run's file: deadlines, clock, evaluations, outliers, and what the run takes from other runs."""

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from subfleet.protocol.bounds import Condition, Length, Range, checked
from subfleet.protocol.limits import Amount, Count, Positive, PositiveAmount
from subfleet.protocol.schema import ADDED_LATER
from subfleet.settings.fingerprint import CHANGEABLE

Outliers = Literal["auto", "scale", "exclude", "report", "off"]
FIRST = "first"
"""Stands for the network that a run begins with; its id is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class LogClock:
    """A logical clock: the n-th attempt of the run reads replayed resource logs at `start_s + (n - 1) * step_s`.

    Without repeated attempts, n is the number of the round. With a step of 0 all attempts read the same time.
    """

    start_s: float = 0.0
    step_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Deadlines:
    """Time limits in seconds.

    Attributes:
        join_s: until enough clients are present, and until one of them answers the announcement of a round.
        measure_s: for the clients' telemetry at the start of a round.
        round_s: from the assignment of tasks to the end of the round.
        evaluate_s: for clients to evaluate the model after a round.
        deploy_s: for clients to fetch their models after the last round.
        lease_s: without a message for this long, a client counts as gone; a run that waits for all clients waits this
            long for a client that has disconnected.
        forget_s: a client that never took part is forgotten after this time without a message.
        linger_s: after the end of the run, for clients to learn of it.
        attempts_s: for repeated attempts of a round in which nothing was aggregated, from the end of the first attempt;
            with a logical clock, in seconds of the logs.
        pause_s: before the first repetition; each further pause is twice as long.
        longest_pause_s: limit of the pauses.
    """

    join_s: PositiveAmount = 600.0
    measure_s: PositiveAmount = 30.0
    round_s: PositiveAmount = 600.0
    evaluate_s: PositiveAmount = 300.0
    deploy_s: PositiveAmount = 300.0
    lease_s: PositiveAmount = 30.0
    forget_s: PositiveAmount = 3600.0
    linger_s: Amount = 5.0
    attempts_s: PositiveAmount = 3600.0
    pause_s: PositiveAmount = 1.0
    longest_pause_s: PositiveAmount = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class AsynchronousSettings:
    """Asynchronous rounds, in which no device waits for another (FedBuff: Nguyen et al., AISTATS 2022).

    Attributes:
        buffer: number of updates that make the next version of the model, each of another device.
        concurrency: number of devices that have a task at the same time.
        staleness: the factor on the change of an update that began n versions ago: "inverse_sqrt" is 1 / sqrt(1 + n),
            "none" is 1.
        max_staleness: an update that began more versions ago is refused.
    """

    buffer: Positive = 10
    concurrency: Positive = 20
    staleness: Literal["inverse_sqrt", "none"] = "inverse_sqrt"
    max_staleness: Positive = 20

    def compute_factor(self, staleness: int) -> float:
        """The factor on a change, above 0 and at most 1 (section 5.1 of the paper).

        Args:
            staleness: versions of the model between the one that the update began with and the one that it changes.
        """
        return 1 / math.sqrt(1 + staleness) if self.staleness == "inverse_sqrt" else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Evaluations:
    """When devices evaluate the model on held-out data of their own.

    Attributes:
        every: number of rounds between evaluations; 0 for no evaluations between rounds.
        last: also evaluate after the last round.
        per_class: count the samples and the correct predictions of each class.
    """

    every: Annotated[int, Range(least=0, words="a number of rounds, or 0 for none between rounds")] = 0
    last: bool = True
    per_class: bool = False

    def is_due(self, round_number: int, total_rounds: int) -> bool:
        """Whether devices evaluate after a round."""
        return (self.last and round_number >= total_rounds) or (self.every > 0 and round_number % self.every == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class OutlierSettings:
    """When an update is an outlier, when a round has diverged, and what follows.

    Attributes:
        outliers: "scale" multiplies an outlier and its weight by a factor below 1; "exclude" leaves it out, and its
            client for some rounds; "report" only reports it; "off" does not look for outliers. With "scale" and
            "exclude", a round that diverged is aggregated again without its most suspicious updates. "auto" is
            "report" in an emulated fleet without attackers, else "scale".
        change_factor: an update is an outlier if its change is larger than this multiple of the usual change, or of
            the change that its training explains; above 1.
        remembered_rounds: number of past rounds that define the usual change if a round has fewer than four updates.
        loss_factor: a round has diverged if its evaluation loss is larger than this multiple of the previous loss, or
            of the loss of guessing if that is larger; 0 only checks that losses are finite.
        exclusion_rounds: number of rounds that a client is excluded for after an excluded update.
        spoiled_attempts: the run fails after this many consecutive diverged attempts.
    """

    outliers: Outliers = field(default="auto", metadata=ADDED_LATER)
    change_factor: Annotated[
        float, Range(above=1, words="above 1; with outliers 'report' or 'off' every change counts as it is")
    ] = 5.0
    remembered_rounds: Positive = 5
    loss_factor: Annotated[
        float,
        Condition(accepts=lambda factor: factor == 0 or 1 < factor < math.inf, words="above 1, or 0 for no limit"),
    ] = 10.0
    exclusion_rounds: Count = 3
    spoiled_attempts: Positive = 3

    @property
    def alters(self) -> bool:
        """Whether outliers are scaled or excluded."""
        return self.outliers not in ("report", "off")

    def for_emulation(self, *, attacked: bool) -> "OutlierSettings":
        """The settings for an emulated fleet: without attackers, "auto" only reports."""
        return self if attacked or self.outliers != "auto" else replace(self, outliers="report")


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class ModelOf:
    """A network of a finished run, to be used as the model of another run.

    Attributes:
        run: name of the other run's folder in the same parent folder, or a path with a slash.
        network: id of the network, or "first" for the one that the run began with; or "smallest", "middle" or
            "largest" by the number of parameters among the networks in use at the end. Of two in the middle, the
            smaller one.
        weights: also take the network's final weights.
    """

    run: Annotated[str, Length(least=1)]
    network: Annotated[str, Length(least=1)] = "largest"
    weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstWeights:
    """The initial weights of a run, if they are not drawn.

    Attributes:
        file: `model.safetensors` of another run.
        sha256: of its content, which is part of the run's settings.
        network: id of the network in that file; empty for the one that its run began with.
        order: "given"; or the order of the indices of each axis in which narrow submodels keep the most important ones:
            "importance" by the L1 norm of their weights, "activations" by what they contribute for the server's samples
            (`subfleet.elastic.activations`). The network computes the same.
    """

    file: str = field(metadata=CHANGEABLE)
    sha256: str
    network: str = ""
    order: Literal["given", "importance", "activations"] = field(default="given", metadata=ADDED_LATER)
