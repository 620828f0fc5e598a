"""From which turn on written programs count in what clients are given, and whether a round waits for some. Pure.

A program that is written in a turn counts from the next one on. How long that takes is a matter of speed. A strict run
waits for the programs that its devices wish for, so that speed takes no part in it, unless its method has rounds go on.
The turns are in the journal and in what a run leaves behind, and a run with the same ones plays the same rounds again.
"""

from collections.abc import Mapping

from subfleet.rounds.state import RunState
from subfleet.rounds.terms import Terms
from subfleet.rounds.written import WrittenProgram

__all__ = ["NEVER", "counting_turns", "counts", "counts_from", "waits_for_programs"]

NEVER = 0
"""In place of a turn: the program was not written in time for any."""


def counts_from(terms: Terms, written: WrittenProgram) -> int:
    """The turn from which a program counts; 0 for never."""
    return terms.config.programs_from.get(written.program.key, written.turn + 1)


def counts(terms: Terms, state: RunState, written: WrittenProgram) -> bool:
    """Whether a program may be given in this turn, as far as it is a matter of when it was written."""
    return NEVER < counts_from(terms, written) <= state.turn


def waits_for_programs(terms: Terms, state: RunState) -> bool:
    """Whether a round all of whose clients have answered stays open for programs that are being written."""
    told = terms.config.programs_from
    if told:
        return any(NEVER < told.get(one.key, NEVER) <= state.turn + 1 for one in state.queue)
    return bool(state.queue) and terms.config.strict and terms.roles.assigner.awaits_programs


def counting_turns(terms: Terms, state: RunState) -> Mapping[str, int]:
    """The turns from which programs count, by their keys, as `Run.programs_from` takes them."""
    found = {key: counts_from(terms, one) for key, one in state.written.items()}
    return dict(sorted({**{one.key: NEVER for one in state.queue}, **found}.items()))
