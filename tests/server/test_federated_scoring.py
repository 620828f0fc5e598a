"""Generations that devices score: which devices are asked, how far they are trusted, and what happens without them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from server.coordinator_cases import (
    blob,
    refusal,
    select_requests,
    task,
)
from server.fake_device import CLASSES
from server.searching_cases import (
    BY_DEVICES,
    EVOLUTION,
    HELD_OUT,
    NOBODY,
    SCORING,
    Outcome,
    complete_generation,
    context_with,
    journal_in,
    report_scores,
    send_scoring_tasks,
    supernet_round,
)

from subfleet.journal.networks import describe_generation
from subfleet.journal.rows import build_generation_record
from subfleet.link.traffic import Traffic
from subfleet.methods.tier_search import TierMemory, TierSearch, list_network_tiers
from subfleet.protocol.answers import Evaluated
from subfleet.protocol.chains import Chain, Link, LinkOperator
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.readings import Budget
from subfleet.protocol.task import Evaluate
from subfleet.rounds.closing import resume_state
from subfleet.rounds.context import RunContext
from subfleet.rounds.coordinator import list_resume_actions, step
from subfleet.rounds.signals import CloseGeneration, Reply, Request, RequestDone, SendTask, Tick
from subfleet.rounds.state import RunState
from subfleet.rounds.work import EvaluationRequest, GenerationRequest, PreparedTask
from subfleet.search.queue import ProgramFacts
from subfleet.settings.sections import Deadlines
from subfleet.testing.rounds import SUPERNET


def change(event: RequestDone, **changes: Any) -> RequestDone:
    """The event of a proposed generation, with some fields changed."""
    return replace(event, result=replace(event.result, **changes))


def open_scoring(context: RunContext = BY_DEVICES, held_out: int = HELD_OUT, *, central: bool = True) -> Outcome:
    """Devices are asked for their first scores, at second 6."""
    state, actions = supernet_round(context, held_out)
    event = complete_generation(context, state, actions)
    return step(context, state, change(event, ticket="ab") if central else change(event, ticket="ab", scores=()), 6.0)


def test_devices_are_sent_the_smallest_supernet_that_holds_the_paths() -> None:
    state, actions = open_scoring()
    requests = select_requests(EvaluationRequest, actions)
    assert len(requests) == len(state.clients) == 2
    assert state.live.scores is not None
    assert state.live.scores.proposed.generation is not None
    paths = state.live.scores.proposed.generation.paths
    for index, (name, choice) in enumerate(BY_DEVICES.network.choices.items()):
        held = dict(requests[0].participant.architecture.choices).get(name, choice.operators)
        assert set(held) == {path[index] for path in paths}
    state = send_scoring_tasks(state, actions, BY_DEVICES, 6.0)
    works = [task(state, name).work for name in state.clients]
    assert all(isinstance(work, Evaluate) and work.settings.population == paths for work in works)


@pytest.mark.slow
@pytest.mark.parametrize(("share", "first"), [(1.0, 0.8), (0.5, 0.5)])
def test_scores_are_means_over_labels_of_all_rounds_and_rank_against_the_servers(share: float, first: float) -> None:
    """However many labels a device claims to have counted, it weighs no more than the permitted fraction of them."""
    context = context_with(replace(SCORING, scoring_rounds=2), max_client_fraction=share)
    state, actions = open_scoring(context)
    assert state.live.scores is not None
    central = state.live.scores.proposed.scores
    participants, record = list[set[str]](), None
    for now_s in (7.0, 8.0):
        state = send_scoring_tasks(state, actions, context, now_s)
        participants.append(set(state.clients))
        for number, name in enumerate(sorted(state.clients)):
            ranks = tuple(0.1 * (1 + sorted(central).index(score)) for score in central)
            answer = report_scores(state, context, name, ranks if number else (0.5,) * len(central), 2 if number else 8)
            state, actions = step(context, state, answer, now_s)
            assert [action.ack.status for action in actions if isinstance(action, Reply)] == ["accepted"]
        closes = [action for action in actions if isinstance(action, CloseGeneration)]
        record = closes[0] if closes else record
    assert record is not None
    expected = [first * 0.5 + (1 - first) * 0.1 * (1 + sorted(central).index(score)) for score in central]
    assert record.scores == pytest.approx(expected)
    assert record.devices is not None
    assert record.devices.ranks == pytest.approx((1.0, 1.0))
    assert (record.devices.answers, record.devices.labels, record.devices.closed) == (4, 20, 2)
    text = describe_generation(build_generation_record(record, Traffic()))
    assert "4 answers of devices in 2 rounds" in text
    assert text.endswith("Kendall's tau against the server's own scores 1.00, 1.00")
    assert state.generations == 1
    assert isinstance(state.memory, TierMemory)
    assert select_requests(GenerationRequest, actions) == [GenerationRequest(round=1, number=2)]


def _too_few(answer: Evaluated) -> Evaluated:
    return replace(answer, scores=answer.scores[1:])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_too_few, "there are scores of 2 paths, but 3 were to be scored"),
        (lambda answer: replace(answer, label_count=11), "11 labels were counted, but 10 samples have at most 10"),
        (lambda answer: replace(answer, sample_count=11), "11 samples were evaluated, but the client's profile has 10"),
    ],
)
def test_scores_are_trusted_no_further_than_known_counts(spoil: Callable[[Evaluated], Evaluated], words: str) -> None:
    state, actions = open_scoring()
    state = send_scoring_tasks(state, actions, BY_DEVICES, 6.0)
    name = min(state.clients)
    after, actions = step(BY_DEVICES, state, spoil(report_scores(state, BY_DEVICES, name, (0.1, 0.2, 0.3))), 7.0)
    (reply,) = [action.ack for action in actions if isinstance(action, Reply)]
    assert (reply.status, reply.reason) == ("refused", words)
    assert after.clients[name].stage == "out"


@pytest.mark.parametrize("central", [False, True])
def test_a_device_that_refuses_or_is_silent_delays_no_other(central: bool) -> None:
    context = context_with(SCORING, deadlines=Deadlines(evaluate_s=50.0))
    state, actions = open_scoring(context, central=central)
    state = send_scoring_tasks(state, actions, context, 6.0)
    first, second = sorted(state.clients)
    state, _ = step(context, state, refusal(context, state, first), 7.0)
    assert state.clients[first].stage == "refused"
    after, actions = step(context, state, report_scores(state, context, second, (0.1, 0.2, 0.3)), 8.0)
    assert [action.scores for action in actions if isinstance(action, CloseGeneration)] == [
        pytest.approx((0.1, 0.2, 0.3))
    ]
    assert after.generations == 1
    late, actions = step(context, state, Tick(), 57.0)  # no device has answered
    if central:
        assert state.live.scores is not None
        assert [action.scores for action in actions if isinstance(action, CloseGeneration)] == [
            state.live.scores.proposed.scores
        ]
    else:
        assert late.phase == "failed"
        assert late.failure.endswith(f"cannot be scored: {NOBODY}")


def test_a_tier_that_no_device_can_compute_has_no_network() -> None:
    """The search goes on for the other tiers, which have devices."""
    context = context_with(replace(SCORING, evolution=replace(EVOLUTION, evaluations=3)))
    state, actions = supernet_round(context)
    poor = {
        name: replace(
            client,
            offer=replace(
                client.offer,
                budget=Budget(memory_bytes=2**40, forward_macs=list_network_tiers(context.network, 2)[0].high_macs),
            ),
        )
        for name, client in state.last.items()
    }
    state, now_s, tiers = replace(state, last=MappingProxyType(poor)), 6.0, list[int]()
    for _ in range(3):
        event = change(complete_generation(context, state, actions), ticket="ab", scores=())
        state, actions = step(context, state, event, now_s)
        state = send_scoring_tasks(state, actions, context, now_s)
        for name in sorted(state.clients):
            state, actions = step(context, state, report_scores(state, context, name, (0.1, 0.2, 0.3)), now_s)
            tiers += [action.generation.tier for action in actions if isinstance(action, CloseGeneration)]
        if state.live.scores is not None:  # nobody could be asked
            now_s += context.config.deadlines.evaluate_s
            state, actions = step(context, state, Tick(), now_s)
        if state.phase != "search":
            break
    assert tiers == [1]
    assert [lineage.id for lineage in state.lineages] == ["", "t1"]


def test_a_device_does_not_score_operators_that_its_runtime_lacks() -> None:
    """A target that cannot write an operator has no link for it."""
    state, actions = open_scoring()
    program = ProgramRef(program_id="scores", target="onnx", blob=blob("scores"))
    request = select_requests(EvaluationRequest, actions)[0]
    links = tuple(
        Link(name=name, operators=(LinkOperator(name="none", piece="", prefix=""),))
        for name in BY_DEVICES.network.choices
    )
    facts = ProgramFacts(planned_peak_bytes=1000, chain=Chain(links=links, fixed_bytes=0, runtime_bytes=()))
    event = RequestDone(request=request, result=PreparedTask(program=program, weights=blob("w"), facts=facts))
    state, _ = step(BY_DEVICES, state, event, 6.0)
    client = state.clients[request.participant.client_id]
    assert (client.stage, client.reason) == (
        "skipped",
        "its runtime 'onnx' lacks an operator of its submodel",
    )


def test_a_search_without_held_out_samples_fails_at_its_deadlines() -> None:
    state, actions = open_scoring(held_out=0, central=False)
    now_s = 6.0
    while state.phase == "search":
        assert not select_requests(EvaluationRequest, actions)
        now_s += BY_DEVICES.config.deadlines.evaluate_s
        state, actions = step(BY_DEVICES, state, Tick(), now_s)
        if select_requests(GenerationRequest, actions):
            event = change(complete_generation(BY_DEVICES, state, actions), ticket="ab", scores=())
            state, actions = step(BY_DEVICES, state, event, now_s)
    assert state.phase == "failed"
    assert state.failure.endswith(NOBODY)


def test_a_restarted_server_has_the_generation_scored_in_new_tasks(tmp_path: Path) -> None:
    journal = journal_in(tmp_path, BY_DEVICES)
    state, actions = supernet_round(BY_DEVICES)
    journal.save(RunState(), state)
    before, event = state, complete_generation(BY_DEVICES, state, actions)
    state, actions = step(BY_DEVICES, state, change(event, ticket="ab"), 6.0)
    state = send_scoring_tasks(state, actions, BY_DEVICES, 6.0)
    journal.save(before, state)
    names = {task(state, name).task_id for name in state.clients}
    anew = resume_state(BY_DEVICES, journal.load(0.0))
    assert (anew.phase, anew.live.scores, dict(anew.clients)) == ("search", None, {})
    assert not any(isinstance(action, SendTask) for action in list_resume_actions(BY_DEVICES, anew))
    restarted = replace(
        anew, live=replace(anew.live, members=state.live.members), last=state.last
    )  # the participants are online again
    restarted, actions = step(BY_DEVICES, restarted, Tick(), 1.0)
    requests = [action for action in actions if isinstance(action, Request)]
    assert requests == [event.request]
    restarted, actions = step(BY_DEVICES, restarted, change(event, ticket="cd"), 2.0)
    restarted = send_scoring_tasks(restarted, actions, BY_DEVICES, 2.0)
    assert len(restarted.clients) == 2
    assert not names & {task(restarted, name).task_id for name in restarted.clients}


def test_running_statistics_are_measured_by_the_server_alone() -> None:
    with pytest.raises(ValueError, match="a supernet's running statistics fit no single path"):
        context_with(TierSearch(scoring="devices"), model=replace(SUPERNET, class_count=CLASSES, norm="batch"))
