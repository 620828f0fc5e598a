"""What a search between two rounds has come to: a record for each generation of paths."""

import statistics
from dataclasses import dataclass

from subfleet.rounds.actions import CloseGeneration

__all__ = ["GenerationRecord", "generation_record", "generation_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRecord:
    """A generation of paths that was scored.

    Attributes:
        round: after which the search was.
        number: of the generation in that search, from 1.
        tier: of devices that its paths are for.
        paths: how many they are.
        best: the highest score among them; best_path: the operators of that path, in the order of the choices.
        mean: of their scores.
        seconds: from when it was asked for until it was scored.
    """

    round: int
    number: int
    tier: int
    paths: int
    best: float
    best_path: tuple[str, ...]
    mean: float
    seconds: float


def generation_record(close: CloseGeneration) -> GenerationRecord:
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
    )


def generation_text(record: GenerationRecord) -> str:
    """A generation in a sentence."""
    return (
        f"search after round {record.round}, generation {record.number}: {record.paths} paths of tier {record.tier}, "
        f"best score {record.best:.4f}, mean {record.mean:.4f}, in {record.seconds:.1f} s"
    )
