"""Records of a run: a row per client and round, a record per round, and a result at its end."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from subfleet.journal.evaluations import EvaluationRecord
from subfleet.journal.networks import GenerationRecord, NetworkRecord, TuningRecord, build_tuning_record
from subfleet.methods.aggregator import EvaluatedModel
from subfleet.protocol.schema import ADDED_LATER
from subfleet.protocol.task_kinds import METRICS, format_metrics
from subfleet.protocol.training import TRAINING_MACS_PER_FORWARD
from subfleet.rounds.selection import NOT_DRAWN

__all__ = ["ClientRow", "RoundRecord", "RunObserver"]

_FLOAT_BYTES = 4
_NOT_DRAWN = f"skipped: {NOT_DRAWN}"
_BESIDE = ("accuracy", "r2")
"""Metrics that are shown beside another headline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRow:
    """One client in one round.

    Attributes:
        device: name of its device profile.
        runtime: the program target that it ran; empty without a task.
        architecture: display name of its submodel; empty without one.
        architecture_id: identity of its submodel.
        parameters: of its submodel.
        memory_free_bytes: free memory as the device reported it for this round; None is unknown.
        budget_bytes: the fraction of it that the device gave to training.
        downlink_budget_bytes: bytes that may travel to it in a round; None if it reported no rate.
        uplink_budget_bytes: bytes that may travel from it in a round; None if it reported no rate.
        disk_budget_bytes: bytes of its disk that a task may take; None if unknown.
        disk_bytes: bytes of its disk that its task takes at most; 0 without a task.
        update_bytes: of its update as its task's codec writes it, without the container's header; 0 without a task.
        planned_peak_bytes: peak memory planned by the program.
        measured_peak_bytes: peak memory in training as the device measured it; None if not measured.
        bytes_down, bytes_up: payload bytes published to this client during the round, and received from it.
        seconds: from the task's arrival on the device to its update; None if not measured.
        loss: mean loss of its last local epoch; None without an update.
        sample_count: number of samples that it claims to have trained on.
        weight: of its update in the round's mean; 0 if it was not aggregated.
        share: its fraction of the weights of the round, 0 to 1.
        lowered: why its update counts less than it claims; empty if it counts in full.
        outlier: how its update differs from the others, or why it was left out; empty if it does not differ.
        scale: factor of its update and its weight, above 0 and at most 1.
        status: "aggregated", "refused: <reason>", "missing: <reason>" or "skipped: <reason>".
        refusals: why it refused tasks of this round, in order, joined by "; "; it may have done a smaller one then.
        requested: display name of the submodel that its search preferred, but that had no program yet.
        data_warning: how its inputs differ from the evaluation data; empty if they do not, as far as is known.
        limit: what kept it from a larger submodel: "memory", "disk", "link", "compute", "runtime" or "program" if that
            alone excludes a larger one; several joined by "+" if every larger one exceeds more than one; "method" if a
            larger one would have fitted; empty if it has the largest.
        parameters_lost: fraction of the preferred submodel's parameters that it did not get, 0 to 1.
        network: id of the network of its submodel; empty for the first network.
        forward_macs: multiply-accumulates of one sample's forward pass through its submodel, plus the nested submodel
            of self-distillation; of a supernet, the mean over the paths that it drew.
        sample_passes: samples of its training, times epochs; 0 if it trained nothing, as far as is known.
        took_s: from sending its task until its update was stored, by the server's clock; None without an update, or if
            not measured.
        expected_training_s: estimated seconds of its training by its reported pace; 0 without a pace or training.
        expected_downlink_s, expected_uplink_s: the same of the weights to it, and of the update from it, by its link.
        training_joules: energy of its training, by its profile's power; None if unknown.
        staleness: how many versions its update's model was behind the newest; 0 without an update.
    """

    client_id: str
    device: str
    runtime: str = ""
    architecture: str
    architecture_id: str
    parameters: int = 0
    memory_free_bytes: int | None = None
    budget_bytes: int = 0
    downlink_budget_bytes: int | None = None
    uplink_budget_bytes: int | None = None
    update_bytes: int = 0
    planned_peak_bytes: int = 0
    measured_peak_bytes: int | None = None
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float | None = None
    loss: float | None = None
    sample_count: int = 0
    status: str
    requested: str = ""
    parameters_lost: float = 0.0
    refusals: str = ""
    weight: float = 0.0
    share: float = 0.0
    lowered: str = ""
    outlier: str = ""
    scale: float = 1.0
    limit: str = ""
    network: str = ""
    forward_macs: int = 0
    sample_passes: int = 0
    took_s: float | None = None
    expected_training_s: float = 0.0
    expected_downlink_s: float = 0.0
    expected_uplink_s: float = 0.0
    data_warning: str = ""
    disk_budget_bytes: int | None = None
    disk_bytes: int = 0
    staleness: int = field(default=0, metadata=ADDED_LATER)
    training_joules: float | None = field(default=None, metadata=ADDED_LATER)

    @property
    def training_macs(self) -> int:
        """Multiply-accumulates of its training: three times those of its forward passes."""
        return TRAINING_MACS_PER_FORWARD * self.forward_macs * self.sample_passes

    @property
    def expected_s(self) -> float:
        """Estimated seconds of its part of the round."""
        return self.expected_downlink_s + self.expected_training_s + self.expected_uplink_s

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that travelled to it, without the container's header."""
        return _FLOAT_BYTES * self.parameters

    @property
    def utilisation(self) -> float | None:
        """The fraction of its tightest budget, memory or a link, that its task used; None without a task."""
        if not self.planned_peak_bytes or not self.budget_bytes:
            return None
        moved = ((self.weight_bytes, self.downlink_budget_bytes), (self.update_bytes, self.uplink_budget_bytes))
        return max(
            self.planned_peak_bytes / self.budget_bytes,
            *(size_bytes / link_bytes if link_bytes else 0.0 for size_bytes, link_bytes in moved),
        )

    @property
    def why_left_out(self) -> str:
        """Why it was left out, in a few words that other clients share; empty if it was aggregated."""
        stage, _, reason = self.status.partition(": ")
        if stage == "aggregated":
            return ""
        if stage == "refused":
            reason = reason.partition(":")[0]
        return f"{stage}: {self.limit if stage == 'skipped' and self.limit else reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """A finished round: the quality of the model on the evaluation data, and a row for each client with a part in it.

    Attributes:
        idle: the numbers of further clients that were present, by why they had nothing to do: they were not drawn, or
            not available.
        accuracy: fraction of correctly predicted labels; None if the task has no accuracy.
        loss: mean of the plain objective over the labels; None if there is no model.
        seconds: from its announcement until its model was evaluated; None if not measured.
        programs_written: training programs that were written in the round.
        calibrated: whether devices measured the running statistics of norms, and trained nothing.
        failed_attempts: number of earlier attempts of the round, which aggregated nothing; `seconds` are of the last
            attempt.
        model_bytes: of all tensors that the server kept after the round: of every network in use, of personalised
            copies, of the server optimiser, and of the method's memory.
        metrics: further metrics of the run's kind of task, by their names in `subfleet.protocol.task_kinds.METRICS`.
        headline: the metric that the model is judged by.
        model: the model that metrics and loss describe; None is the global one.
    """

    round: int
    accuracy: float | None
    loss: float | None
    seconds: float | None
    log_time_s: float | None
    clients: tuple[ClientRow, ...]
    idle: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    programs_written: int = 0
    calibrated: bool = False
    failed_attempts: int = 0
    model_bytes: int = 0
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    headline: str = "accuracy"
    model: EvaluatedModel | None = None

    @property
    def model_description(self) -> str:
        """The model that metrics and loss describe, in words."""
        return "the model" if self.model is None else self.model.description

    @property
    def quality(self) -> str:
        """The quality of the model in words: the headline, and usual metrics beside it."""
        shown = (self.headline, *_BESIDE)
        return format_metrics({name: value for name, value in self.all_metrics.items() if name in shown})

    @property
    def all_metrics(self) -> dict[str, float]:
        """The known metrics, the headline first."""
        known = {**({} if self.accuracy is None else {"accuracy": self.accuracy}), **self.metrics}
        names = dict.fromkeys((self.headline, *METRICS, *known))
        return {name: known[name] for name in names if name in known}

    @property
    def value(self) -> float | None:
        """The value of the headline; None if unknown."""
        return self.all_metrics.get(self.headline)

    def without_peaks(self) -> "RoundRecord":
        """The record without measured memory, which means nothing if devices share a process."""
        return replace(self, clients=tuple(replace(row, measured_peak_bytes=None) for row in self.clients))

    def without_losses(self) -> "RoundRecord":
        """The record without losses of clients, which mean nothing if nothing is trained."""
        return replace(self, clients=tuple(replace(row, loss=None) for row in self.clients))

    def without_measurements(self) -> "RoundRecord":
        """The record without measurements of devices; see `RunResult.without_measurements`."""
        unknown: Any = dict.fromkeys(("seconds", "took_s", "training_joules", "measured_peak_bytes"))
        rows = tuple(replace(row, **unknown) for row in self.clients)
        return replace(self, seconds=None, clients=rows)

    @property
    def due(self) -> int:
        """The number of clients that should have taken part: all that were not left out by drawing others."""
        return len(self.clients) + sum(self.idle.values()) - self.not_drawn

    @property
    def not_drawn(self) -> int:
        """The number of clients that could have taken part, but were not drawn."""
        return self.idle.get(_NOT_DRAWN, 0)

    @property
    def aggregated(self) -> tuple[ClientRow, ...]:
        """The clients with an aggregated update."""
        return tuple(row for row in self.clients if row.status == "aggregated")

    @property
    def participation(self) -> float:
        """The fraction of due clients that were aggregated, 0 to 1."""
        return compute_participation((self,))

    @property
    def left_out(self) -> str:
        """Counts of the reasons of the others, such as "9 skipped: memory; 1 missing: no answer came"."""
        counted = Counter(row.why_left_out for row in self.clients if row.why_left_out)
        counted.update({why: count for why, count in self.idle.items() if why != _NOT_DRAWN})
        return "; ".join(
            f"{count} {why}" for why, count in sorted(counted.items(), key=lambda item: (-item[1], item[0]))
        )


def compute_participation(rounds: Iterable[RoundRecord]) -> float:
    """The fraction of due clients that were aggregated, over all rounds; 0 without any."""
    counts = [(len(record.aggregated), record.due) for record in rounds]
    due = sum(count for _, count in counts)
    return sum(count for count, _ in counts) / due if due else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedModel:
    """A client's own model for inference.

    Attributes:
        path: the model file in the server's state folder.
        architecture: display name of the submodel.
        max_abs_diff: largest difference from PyTorch when the file was written; None is unknown.
        quantised_accuracy: of a model in 8-bit integers, on evaluation samples; else None.
        float_accuracy: of the same model in float32, on the same samples.
        status: "deployed" if the client has confirmed it, else why not.
    """

    client_id: str
    target: str
    path: Path
    architecture: str
    max_abs_diff: float | None
    status: str
    quantised_accuracy: float | None = None
    float_accuracy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended.

    Attributes:
        finished: whether it has ended; a stopped run can be continued.
        accuracy: of the model after the last aggregated round; None without one, or if the task has no accuracy.
        rounds: every finished round, including those before a restart.
        deployed: each client's models, one per target.
        model_path: the last checkpoint; None if no round was aggregated.
        supernet_path: the checkpoint of the last round of a searched supernet; None without one.
        method: its name in a configuration.
        method_status: "exact" if the run followed the method's paper, else how it differed, and which clients' updates
            counted less or not at all.
        networks: of the run, the first one first.
        evaluations: by devices on held-out samples, in order.
        generations: of searches between rounds, in order.
        ended_early: why it ended before its configured number of rounds; empty if it did not.
        programs_from: the first attempt in which each written program could be given, as `Run.programs_from` takes
            them.
        memory_limit: what limited the memory of client processes; empty without any, or without limits.
    """

    run_id: str
    method: str
    method_status: str
    finished: bool
    accuracy: float | None
    rounds: tuple[RoundRecord, ...]
    deployed: tuple[DeployedModel, ...]
    model_path: Path | None
    supernet_path: Path | None = None
    networks: tuple[NetworkRecord, ...] = ()
    evaluations: tuple[EvaluationRecord, ...] = ()
    generations: tuple[GenerationRecord, ...] = ()
    ended_early: str = ""
    programs_from: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    memory_limit: str = ""

    def without_peaks(self) -> "RunResult":
        """The result without peaks of memory, which mean nothing if devices share a process."""
        return replace(self, rounds=tuple(record.without_peaks() for record in self.rounds))

    def without_measurements(self) -> "RunResult":
        """The result without seconds and peaks of memory, which mean nothing if devices share a process or a clock."""
        return replace(
            self,
            rounds=tuple(record.without_measurements() for record in self.rounds),
            evaluations=tuple(record.without_measurements() for record in self.evaluations),
            generations=tuple(replace(record, seconds=None) for record in self.generations),
        )

    @property
    def headline(self) -> str:
        """The metric that its model is judged by."""
        return self.rounds[-1].headline if self.rounds else "accuracy"

    @property
    def quality(self) -> str:
        """How good its model is, in words; empty where no round was aggregated."""
        return self.rounds[-1].quality if self.rounds else ""

    @property
    def participation(self) -> float:
        """The fraction of selected clients that were aggregated, over all rounds."""
        return compute_participation(self.rounds)

    @property
    def tuning(self) -> TuningRecord | None:
        """The ranks of the networks that the last search found; None without one."""
        return build_tuning_record(self.generations, self.networks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a run within a round.

    Attributes:
        round: the open round.
        round_count: of the run.
        answered: devices with a finished task of this round, whatever its outcome.
        devices: number of devices that take part.
        left_s: estimated seconds until the end of the last round; None before one complete round.
        away: devices without an answer that are away: name, reason and time of the last sign of life.
    """

    round: int
    round_count: int
    answered: int
    devices: int
    left_s: float | None
    away: tuple[str, ...] = ()


class RunObserver(Protocol):
    """Observes a run. Called from the server's one thread; errors of an observer are logged and do not end the run.

    An observer may also have `evaluated(record: EvaluationRecord)`, called when devices have evaluated the model after
    a round (without it, `say` is called), and `progressed(progress: Progress)`, called when a round has begun, a device
    has finished its task, or an awaited device is away.
    """

    def say(self, text: str) -> None:
        """Show a sentence."""
        ...

    def round_finished(self, record: RoundRecord) -> None:
        """A round was aggregated and evaluated."""
        ...


def select_fields(record: object, *names: str) -> dict[str, Any]:
    """The named fields of a record, with which another record is built; empty without a record."""
    return {} if record is None else {name: getattr(record, name) for name in names}
