"""Unknown clients are explored, and one that never reports is not selected again and again for its silence."""

from collections import Counter
from collections.abc import Collection
from itertools import pairwise
from typing import Any

import pytest

from subfleet.methods.oort import Oort, OortMemory
from subfleet.methods.power_of_choice import PowerOfChoice
from subfleet.methods.pyramidfl import PyramidFL
from subfleet.methods.roles import ClosedRound
from subfleet.methods.selector import AvailableClient, LastUpdate, SelectionContext
from subfleet.protocol.readings import Budget
from subfleet.protocol.schema import from_plain, to_plain
from subfleet.protocol.submodel import Architecture

OORT = Oort(model="smallest")
KINDS = (OORT, PyramidFL(oort=OORT), PowerOfChoice())
NAMES = tuple(f"c{index:02d}" for index in range(20))


def past(round_number: int) -> LastUpdate:
    return LastUpdate(
        round=round_number,
        size=Architecture(),
        architecture=Architecture(),
        sample_count=10,
        epochs=1,
        loss=1.0,
        square_loss=1.0,
        change_norm=1.0,
        train_s=0.0,
        took_s=0.0,
    )


def make_client(name: str, known: LastUpdate | None = None) -> AvailableClient:
    return AvailableClient(
        client_id=name, sample_count=10, budget=Budget(memory_bytes=1), expected_training_s=1.0, past=known
    )


def play_rounds(
    kind: Any, *, silent: Collection[str], rounds: int = 40, count: int = 5
) -> tuple[list[tuple[str, ...]], Any]:
    """Return the clients selected in each round out of 20, some of which never answer, and the final memory."""
    roles, last, chosen = kind.roles(), dict[str, LastUpdate](), list[tuple[str, ...]]()
    memory = roles.memory.initial
    for number in range(1, rounds + 1):
        clients = tuple(make_client(name, last.get(name)) for name in NAMES)
        selection = roles.selector.select(SelectionContext(clients=clients, count=count, round=number, memory=memory))
        assert len(set(selection.clients)) == len(selection.clients) == count
        # As it is restored from the journal.
        memory = from_plain(type(roles.memory.initial), to_plain(selection.memory))
        updates = {name: past(number) for name in selection.clients if name not in silent}
        last |= updates
        if roles.memory.remember is not None:
            memory = roles.memory.remember(memory, ClosedRound(round=number, clients=updates))
        chosen.append(selection.clients)
    return chosen, memory


@pytest.mark.parametrize("count", [3, 5, 10])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.TYPE)
def test_a_silent_client_is_chosen_no_more_often_than_its_turn(kind: Any, count: int) -> None:
    """Oort selects it in one round of eleven, Power-of-choice 1.5 times as often as if all took turns."""
    times = Counter(name for names in play_rounds(kind, silent={"c07"}, count=count)[0] for name in names)
    assert 1 <= times["c07"] <= (1.5 * 40 * count / 20 + 1 if isinstance(kind, PowerOfChoice) else 4)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.TYPE)
def test_silent_clients_leave_room_for_others_in_every_round(kind: Any) -> None:
    silent = {"c03", "c07", "c11"}
    for names in play_rounds(kind, silent=silent)[0]:
        assert set(names) - silent


@pytest.mark.parametrize("kind", KINDS[:2], ids=lambda kind: kind.TYPE)
def test_where_no_client_answers_all_are_explored_before_any_is_explored_again(kind: Any) -> None:
    chosen, _ = play_rounds(kind, silent=NAMES)
    assert {name for names in chosen[:4] for name in names} == set(NAMES)


def test_an_explored_client_waits_for_ten_rounds() -> None:
    chosen, memory = play_rounds(OORT, silent={"c07"}, rounds=60)
    rounds = [number for number, names in enumerate(chosen, start=1) if "c07" in names]
    assert [later - earlier for earlier, later in pairwise(rounds)] == [11] * (len(rounds) - 1)
    assert memory.explorations == {"c07": rounds[-1]}
    assert play_rounds(OORT, silent={"c07"}, rounds=rounds[0])[1].explorations == {"c07": rounds[0]}, (
        "a client that answered is not waiting"
    )


def test_waiting_clients_are_explored_where_there_are_no_others() -> None:
    memory = OortMemory(percentile=30.0, explorations={"ada": 4, "bob": 4})
    clients = (make_client("ada"), make_client("bob"), make_client("cyd", past(3)))
    for count, expected in ((1, {"cyd"}), (3, {"ada", "bob", "cyd"}), (0, {"ada", "bob", "cyd"})):
        selection = OORT.select(SelectionContext(clients=clients, count=count, round=5, memory=memory))
        assert set(selection.clients) == expected
    newcomer = OORT.select(SelectionContext(clients=(*clients, make_client("dan")), count=2, round=5, memory=memory))
    assert set(newcomer.clients) == {"cyd", "dan"}
    later = OORT.select(SelectionContext(clients=clients, count=1, round=15, memory=memory))
    assert set(later.clients) < {"ada", "bob"}
    assert later.memory.explorations == dict.fromkeys(later.clients, 15)


def test_a_round_that_is_tried_again_explores_others() -> None:
    clients = tuple(make_client(name) for name in NAMES)
    first = OORT.select(SelectionContext(clients=clients, count=10, round=1, memory=OORT.roles().memory.initial))
    again = OORT.select(SelectionContext(clients=clients, count=10, round=1, attempt=1, memory=first.memory))
    assert set(first.clients) | set(again.clients) == set(NAMES)


def test_a_journal_of_an_earlier_release_is_read() -> None:
    plain = to_plain(OortMemory(percentile=30.0))
    del plain["explorations"]
    assert from_plain(OortMemory, plain) == OortMemory(percentile=30.0)
