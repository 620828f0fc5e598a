"""Records of a search between two rounds: one for each generation of paths."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from subfleet.journal.networks import NetworkRecord
from subfleet.link.traffic import Traffic
from subfleet.protocol.task_kinds import better
from subfleet.rounds.live import GenerationScores
from subfleet.rounds.signals import CloseGeneration
from subfleet.search.path_evolution import kendall_tau


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesRecord:
    """The scoring of a generation by devices.

    Attributes:
        rounds: number of scoring rounds; answers: number of answers in all of them; labels: number of counted labels.
        supernet_bytes: of the weights that each device was sent: the smallest supernet that contains the paths.
        bytes_down: of all payloads to these devices; bytes_up: from them.
        ranks: after each scoring round, Kendall's tau of the scores so far and the server's own on its validation
            samples; None if nothing is ranked.
    """

    rounds: int
    answers: int
    labels: int
    supernet_bytes: int
    bytes_down: int
    bytes_up: int
    ranks: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRecord:
    """A scored generation of paths.

    Attributes:
        round: the round after which the search was.
        number: of the generation in that search, from 1.
        tier: the tier of devices that its paths are for.
        paths: number of paths.
        best: the highest score among them; best_path: the operators of that path, in the order of the choices.
        mean: of their scores.
        seconds: from its request until it was scored; None if not measured.
        devices: the scoring by devices; None if the server scored it.
    """

    round: int
    number: int
    tier: int
    paths: int
    best: float
    best_path: tuple[str, ...]
    mean: float
    seconds: float | None
    devices: DevicesRecord | None = None


def build_generation_record(close: CloseGeneration, traffic: Traffic) -> GenerationRecord:
    """The record of a scored generation."""
    generation = close.generation
    best = max(range(len(close.scores)), key=lambda place: close.scores[place])
    return GenerationRecord(
        round=close.round,
        number=generation.number,
        tier=generation.tier,
        paths=len(generation.paths),
        best=close.scores[best],
        best_path=generation.paths[best],
        mean=statistics.fmean(close.scores),
        seconds=close.seconds,
        devices=None if close.devices is None else _build_devices_record(close.devices, traffic),
    )


def _build_devices_record(scores: GenerationScores, traffic: Traffic) -> DevicesRecord:
    moved = [traffic.of(name) for name in scores.clients]
    return DevicesRecord(
        rounds=scores.closed,
        answers=scores.answers,
        labels=scores.labels,
        supernet_bytes=scores.supernet_bytes,
        bytes_down=sum(down for down, _ in moved),
        bytes_up=sum(up for _, up in moved),
        ranks=scores.ranks,
    )


def describe_generation(record: GenerationRecord) -> str:
    """A generation in one sentence."""
    told = (
        f"search after round {record.round}, generation {record.number}: {record.paths} paths of tier {record.tier}, "
        f"best score {record.best:.4f}, mean {record.mean:.4f}"
    )
    found = record.devices
    if found is None:
        return told
    ranks = ", ".join("-" if one is None else f"{one:.2f}" for one in found.ranks)
    return (
        f"{told}; {found.answers} answers of devices in {found.rounds} rounds, {found.supernet_bytes / 1e3:.0f} kB of "
        f"weights each, {found.bytes_down / 1e6:.2f} MB down and {found.bytes_up / 1e6:.2f} MB up"
        + (f"; Kendall's tau against the server's own scores {ranks}" if ranks else "")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningRecord:
    """The ranks of the networks that a search found, before and after further training.

    Attributes:
        networks: number of these networks that devices have evaluated since.
        tau: Kendall's tau of their scores in the search and of their evaluations; None if nothing is ranked.
    """

    networks: int
    tau: float | None


def build_tuning_record(
    generations: Sequence[GenerationRecord], networks: Sequence[NetworkRecord]
) -> TuningRecord | None:
    """The record of the networks found by a search, one for each tier; None without a search, or before its end.

    Args:
        generations: of the search.
        networks: of the run, in the order in which they appeared.
    """
    tiers = sorted({one.tier for one in generations})
    searched_round = generations[-1].round if generations else 0
    found = [one for one in networks if searched_round and one.lineage.born_round == searched_round]
    if not tiers or len(found) != len(tiers):
        return None
    best = [max(one.best for one in generations if one.tier == tier) for tier in tiers]
    pairs = zip(best, found, strict=True)
    known = [(score, better(one.metric) * one.own_mean) for score, one in pairs if one.own_mean is not None]
    tau = kendall_tau([score for score, _ in known], [result for _, result in known])
    return TuningRecord(networks=len(known), tau=tau)
