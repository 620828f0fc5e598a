"""What a method looks for beside the loop: it takes seconds, and reads a state that nothing changes."""

import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait

from subfleet.elastic.model_state import ModelState
from subfleet.folding.path_scoring import scored_generation
from subfleet.protocol.errors import SubfleetError
from subfleet.protocol.loading import cause_of
from subfleet.rounds.beginning import beginning_of
from subfleet.rounds.events import Failed, Ready
from subfleet.rounds.exploring import explored
from subfleet.rounds.requests import (
    BeginningMade,
    BeginningWanted,
    GenerationMade,
    GenerationWanted,
    SearchMade,
    SearchWanted,
)
from subfleet.rounds.state import RunState
from subfleet.rounds.terms import Terms
from subfleet.tasks import Dataset

__all__ = ["Lookout", "looked_for"]

_Wanted = SearchWanted | BeginningWanted | GenerationWanted
_Made = SearchMade | BeginningMade | GenerationMade
_LOG = logging.getLogger(__name__)


class Lookout:
    """One thread that searches, and finds what a run begins with; one turn after the other.

    Args:
        terms: of the run.
        validation: samples that paths of a supernet are scored on; None where there are none.
    """

    def __init__(self, terms: Terms, validation: Dataset | None = None) -> None:
        self._terms = terms
        self._validation = validation
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="subfleet-search")
        self._work: dict[_Wanted, Future[_Made]] = {}

    def begin(self, wanted: _Wanted, state: RunState, model: ModelState) -> None:
        """Begin to look for it; what is under way is not begun again.

        Args:
            wanted: what is asked for.
            state: in which that was decided.
            model: of that state.
        """
        if wanted not in self._work:
            self._work[wanted] = self._pool.submit(self._looked_for, wanted, state, model)

    def events(self) -> tuple[Ready | Failed, ...]:
        """What has been found, or could not be, since the last call."""
        done = [wanted for wanted, work in self._work.items() if work.done()]
        return tuple(self._event(wanted, self._work.pop(wanted)) for wanted in done)

    def finish(self) -> None:
        """Wait until what was begun is found; `events` then has it."""
        wait(self._work.values())

    def close(self) -> None:
        """Let the thread end; what it is looking for can be looked for again."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _event(self, wanted: _Wanted, work: "Future[_Made]") -> Ready | Failed:
        try:
            return Ready(made=work.result())
        except Exception as error:  # noqa: BLE001  # whatever it is, what was asked for fails, and not the run
            known = isinstance(error, SubfleetError)
            reason = f"the search failed: {error if known else cause_of(error)}"
            _LOG.warning("%s was asked for, but %s", wanted, reason, exc_info=None if known else error)
            return Failed(wanted=wanted, reason=reason)

    def _looked_for(self, wanted: _Wanted, state: RunState, model: ModelState) -> _Made:
        if isinstance(wanted, GenerationWanted):
            return scored_generation(self._terms, state, wanted, model, self._validation)
        return looked_for(self._terms, state, wanted)


def looked_for(terms: Terms, state: RunState, wanted: SearchWanted | BeginningWanted) -> SearchMade | BeginningMade:
    """What comes of a look at a state."""
    if isinstance(wanted, SearchWanted):
        return explored(terms, state, wanted)
    return beginning_of(terms, state, wanted)
