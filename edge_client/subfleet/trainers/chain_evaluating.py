"""How good each path of a population is on a device's held-out data (FedorAS, section 3.2)."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from subfleet.protocol.chains import Link
from subfleet.protocol.errors import LoadError, MemoryLimitError, ProtocolError, TrainingError
from subfleet.protocol.evaluating import EvaluationResult
from subfleet.protocol.paths import PathScore
from subfleet.protocol.programs import EvaluateJob, Role
from subfleet.trainers.chain_layout import places_of
from subfleet.trainers.chain_programs import LoadedChain, OpenPieces
from subfleet.trainers.chain_session import ChainSession, Path
from subfleet.trainers.chain_training import loaded_chain
from subfleet.trainers.evaluating import LabelSums, batches_of, check_batch_size
from subfleet.trainers.evaluation_layout import EvaluationLayout
from subfleet.trainers.job_data import read_data
from subfleet.trainers.job_files import read_weights
from subfleet.trainers.kept import Host
from subfleet.trainers.sessions import Array

__all__ = ["evaluate_paths"]


def evaluate_paths(
    job: EvaluateJob, stopped: Callable[[], bool], *, target: str, open_pieces: OpenPieces, slot: Host
) -> EvaluationResult:
    """Evaluate a population of paths, as they are; see `evaluate_job` for what counts as memory.

    Each batch goes along all paths before the next one is read. Of a path there are its features at two links at a
    time, so that a population takes no more memory than its largest path.

    Args:
        job: what to evaluate; its settings name the population.
        stopped: asked between paths.
        target: what the chain must be written for.
        open_pieces: the runtime of its programs.
        slot: the process that it runs in.

    Raises:
        MemoryLimitError: a path has no room, or the process grew beyond the limit.
        MemoryError: the system refused memory below the limit.
        LoadError: the runtime refuses an operator of the population.
        TrainingError: a program failed, was stopped, or tells what cannot be.
        DataError: the data do not fit the chain.
        ProtocolError: chain, population, weights and settings do not fit each other.
        FileError: a file of the job cannot be read.
    """
    dataset = read_data(job, target)
    with loaded_chain(job, target=target, open_pieces=open_pieces, slot=slot) as (loaded, watch):
        layout = loaded.layout.for_evaluation
        check_batch_size(job, layout)
        links = loaded.layout.chain.kept(dict(job.choices))
        paths = [_path(links, operators) for operators in job.settings.population]
        drawn = _with_room(job, loaded, links, paths)
        if loaded.hold(drawn, job.program_path, target, drops=not slot.shared) != drawn:
            why = next(iter(loaded.refused.values()))
            raise LoadError(f"a path of the population cannot be run: {why}")
        weights = read_weights(job.weights_path, loaded.layout.weights(links))
        session = ChainSession(loaded.layout, loaded.runs, places_of(links), weights)
        del weights
        slot.release()  # what loading left behind would stay beneath the steps' peak
        sums = [LabelSums(layout, job.settings) for _ in paths]
        for fed, labels, _ in batches_of(dataset, layout):
            for path, own in zip(paths, sums, strict=True):
                if stopped():
                    raise TrainingError("evaluating was stopped; its task must be taken up anew")
                own.add(session.evaluate(path, _by_role(layout, fed)), labels)
                watch.check()
            del fed  # before the next one is made
        session.finish()
        loaded.runtime.rest()
    results = [one.result(sample_count=len(dataset), measured_peak_bytes=watch.growth_bytes()) for one in sums]
    return EvaluationResult(
        loss=fmean(one.loss for one in results),
        accuracy=fmean(one.accuracy for one in results),
        sample_count=len(dataset),
        label_count=results[0].label_count,
        measured_peak_bytes=watch.growth_bytes(),
        scores=tuple(PathScore(loss=one.loss, accuracy=one.accuracy) for one in results),
    )


def _path(links: Sequence[Link], operators: Sequence[str]) -> Path:
    """A path by the operators of its choices."""
    choices = [link.name for link in links if link.open]
    if len(operators) != len(choices):
        raise ProtocolError(f"a path names {len(operators)} operators, but the subspace has {len(choices)} choices")
    named = dict(zip(choices, operators, strict=True))
    path = tuple(place for place in places_of(links) if place.operator.name == named.get(place.link, ""))
    if len(path) != len(links):
        known = {(place.link, place.operator.name) for place in path}
        odd = next(one for one in named.items() if one not in known)
        raise ProtocolError(f"a path names the operator {odd[1]!r:.80} of {odd[0]!r:.80}, which the subspace lacks")
    return path


def _with_room(job: EvaluateJob, loaded: LoadedChain, links: Sequence[Link], paths: Sequence[Path]) -> tuple[Link, ...]:
    """The links with what the population goes through, where its largest path has room."""
    used = {(place.link, place.operator.name) for path in paths for place in path}
    drawn = tuple(
        Link(name=link.name, operators=tuple(one for one in link.operators if (link.name, one.name) in used))
        for link in links
    )
    room = loaded.layout.chain.room(links)
    for path in paths:
        own = (place.operator for place in path)
        needed_bytes = room.held_bytes + max(one.kept_bytes + one.peak_bytes for one in own)
        if needed_bytes > job.memory_limit_bytes:
            raise MemoryLimitError(needed_bytes=needed_bytes, limit_bytes=job.memory_limit_bytes)
    return drawn


def _by_role(layout: EvaluationLayout, fed: Mapping[str, Array]) -> Mapping[Role, Array]:
    return {value.role: fed[value.name] for value in (layout.input, layout.label, layout.sample_mask)}
