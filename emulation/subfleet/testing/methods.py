"""The contract of federated methods."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from subfleet.elastic.maps import nested_maps
from subfleet.elastic.model_state import pack_state, unpack_state
from subfleet.elastic.network import Family, Network
from subfleet.elastic.technique_settings import DistillationSettings
from subfleet.methods import AnyMethod
from subfleet.methods.aggregator import Participant, keep_aggregate
from subfleet.methods.assigner import Draw
from subfleet.methods.describing import MethodInfo, Setting, list_departures
from subfleet.methods.roles import ClosedRound, Trainee
from subfleet.methods.selector import AvailableClient, LastUpdate, SelectionContext
from subfleet.methods.techniques import Techniques
from subfleet.protocol.readings import Budget
from subfleet.protocol.registry import problem_with_record
from subfleet.protocol.schema import canonical_json, from_plain, parse_json
from subfleet.protocol.submodel import Architecture
from subfleet.rounds.context import RunContext
from subfleet.testing.assignments import assert_estimate_fits, assert_fits, draw_budget, draw_question
from subfleet.testing.outside_evaluation import draw_samples, evaluate_outside, examine
from subfleet.testing.rounds import (
    MODEL,
    SEED,
    changes_whole_model,
    compute_logits,
    draw_state,
    find_held,
    list_clients,
    make_assignee,
    make_context,
    play,
    view_model,
    with_steps,
)
from subfleet.testing.submodels import have_same_bits

_SETTINGS = (
    Setting(),
    Setting(norm="batch", techniques=Techniques(norms="recalibrated")),
    Setting(norm="layer", scaler=True, techniques=Techniques(norms="bank")),
    Setting(learnable_steps=True, techniques=Techniques(distillation=DistillationSettings())),
)
_MOST_BYTES = 2**20
"""Limit for the JSON text of parameters."""
_BUDGETS = 40
"""Number of budgets that are drawn for a method."""


class MethodContract:
    """Tests that every method passes; pytest runs those of a subclass.

    Attributes:
        method: the method, with parameters that make a round short.
        model: a small network.
    """

    method: AnyMethod
    model: Family = MODEL

    def moved_architecture(self, network: Network, architecture: Architecture) -> Architecture:
        """The submodel that the update of a trained submodel changes; it must agree with `Aggregator.transform`."""
        exchange = self.method.roles().assigner.exchange
        if exchange is None:
            return architecture
        return exchange(
            network, Participant(client_id="", architecture=architecture, size=network.size_of(architecture)), {}
        ).moved

    def test_it_is_a_record_that_says_what_it_is(self) -> None:
        """A frozen dataclass with a name, a description, and a default for every parameter."""
        kind = type(self.method)
        problem = problem_with_record(kind, self.method.TYPE, ("INFO", "roles"))
        assert not problem, problem
        assert isinstance(self.method.INFO, MethodInfo), "INFO must be a MethodInfo"
        assert self.method.INFO.title, "INFO.title is empty"
        assert self.method.INFO.paper, "INFO.paper is empty"
        assert isinstance(kind(), kind)

    def test_its_parameters_survive_json(self) -> None:
        """A resumed run has the same method."""
        written = canonical_json(self.method)
        again = from_plain(type(self.method), parse_json(written, max_bytes=_MOST_BYTES))
        assert again == self.method, f"{self.method} is read back as {again}"
        assert canonical_json(again) == written, "its JSON differs the second time"

    def test_departures_are_sentences(self) -> None:
        """They are joined by semicolons, and always the same."""
        for setting in _SETTINGS:
            departures = list_departures(self.method, setting)
            assert departures == list_departures(self.method, setting), "INFO.departures differ the second time"
            for text in departures:
                is_sentence = text == text.strip() and text.isprintable() and len(text.split()) > 1
                assert is_sentence, f"{text!r} must be a sentence on one line"
                assert "; " not in text, f"{text!r} has a semicolon, but departures are joined by semicolons"
                assert not text.endswith("."), f"{text!r} ends with a full stop, but is joined to others"

    def test_roles_are_pure(self) -> None:
        """Equal calls have equal results, records do not change, and no global generator is used."""
        written = canonical_json(self.method)
        generators = _read_generators()
        first, second = (self._list_answers() for _ in range(2))
        assert first == second, "equal calls have different results"
        assert canonical_json(self.method) == written, "a role has changed the parameters of the method"
        assert _read_generators() == generators, "a global generator was used; use Draw.stream"

    def test_a_round_with_learning_rate_0_changes_nothing(self, tmp_path: Path) -> None:
        """Bit for bit; if the whole model is transformed after a round, its outputs stay the same."""
        context = make_context(self.method, self.model)
        context = replace(context, roles=with_steps(context.roles, distillation=None))
        state = draw_state(context.network)
        clients = [replace(client, scale=0.0) for client in list_clients(context)]
        aggregated = play(context, state, clients, tmp_path).state
        if changes_whole_model(context):
            before, after = (torch.tensor(compute_logits(context, model.shared)) for model in (state, aggregated))
            torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-4)
            return
        assert have_same_bits(aggregated.shared, state.shared), "the model changed, although no client did"
        for client in clients:
            same = have_same_bits(view_model(context, aggregated, client), view_model(context, state, client))
            assert same, f"the model of {client.name} changed"

    def test_elements_that_no_client_has_keep_their_bits(self, tmp_path: Path) -> None:
        """And some elements of the clients' models change."""
        context = make_context(self.method, self.model)
        if changes_whole_model(context):
            context = replace(context, roles=with_steps(context.roles, after_round=keep_aggregate, distillation=None))
        state, clients = draw_state(context.network), list_clients(context)[:2]
        least = context.roles.aggregator.min_contributors(context.network)
        clients = [*clients, *(replace(clients[0], name=f"other{number}") for number in range(len(clients), least))]
        for round_number in (1, 2):
            aggregated = play(context, state, clients, tmp_path, round_number)
            assert not aggregated.refused, f"updates were refused: {dict(aggregated.refused)}"
            held = find_held(context, clients, round_number, self.moved_architecture)
            for name, tensor in aggregated.state.shared.items():
                free = ~held[name]
                assert torch.equal(tensor[free], state.shared[name][free]), f"{name!r} changed where no client has it"
            changed = any(
                not torch.equal(
                    view_model(context, aggregated.state, client)[name], view_model(context, state, client)[name]
                )
                for client in clients
                for name in state.shared
            )
            assert changed, "nothing changed, although every client did"

    def test_its_accuracy_is_that_of_the_trained_model(self, tmp_path: Path) -> None:
        """Accuracy and untrained fraction agree with an independent evaluation of the checkpoint."""
        context = make_context(self.method, self.model)
        context = replace(context, roles=with_steps(context.roles, distillation=None))
        first = draw_state(context.network)
        clients, samples, state = list_clients(context), draw_samples(context.network), first
        for round_number in (1, 2):
            aggregated = play(context, state, clients, tmp_path, round_number)
            if not aggregated.state.shared:
                return  # its first network has retired
            reported, measured = (
                examine(context, aggregated, samples),
                evaluate_outside(context, first, aggregated, samples),
            )
            assert abs(reported.evaluation.accuracy - measured.accuracy) < 1e-9, (
                f"the accuracy of {reported.model.description} is {measured.accuracy}"
            )
            untrained = measured.untrained
            words = f"{untrained:.1%} of {reported.model.description} is untrained"
            assert abs(reported.model.untrained - untrained) < 1e-9, words
            if context.roles.aggregator.model != "whole" and not changes_whole_model(context):
                assert not untrained, f"{untrained:.1%} of the evaluated model is untrained"
            state = aggregated.state

    def test_the_order_of_clients_does_not_matter_and_the_state_survives_a_crash(self, tmp_path: Path) -> None:
        """Bit for bit, over two rounds."""
        context = make_context(self.method, self.model)
        state, clients = draw_state(context.network), list_clients(context)
        there = play(context, state, clients, tmp_path).state
        back = play(context, unpack_state(pack_state(state)), clients[::-1], tmp_path).state
        assert have_same_bits(pack_state(there), pack_state(back)), "the model depends on the order of updates"
        again = unpack_state(pack_state(there))
        first, second = (play(context, start, clients, tmp_path, 2).state for start in (there, again))
        assert have_same_bits(pack_state(first), pack_state(second)), "the next round differs after a restart"

    def test_selection_is_repeatable_and_memory_survives_a_crash(self) -> None:
        """It selects the requested number of available clients, and its memory is the same after a restart."""
        context = make_context(self.method, self.model)
        roles, memory = context.roles, context.roles.memory.initial
        for number in range(1, 4):
            clients = _draw_clients(context, number)
            question = SelectionContext(clients=clients, count=3, round=number, seed=SEED, memory=memory)
            selection = roles.selector.select(question)
            assert selection == roles.selector.select(question), "equal calls have different results"
            names = set(selection.clients)
            assert names <= {client.client_id for client in clients}, "a client was selected that is not available"
            assert len(selection.clients) == len(names) == 3, f"{len(names)} clients were selected instead of 3"
            everyone = roles.selector.select(replace(question, count=0))
            assert len(set(everyone.clients)) == len(clients), "with count 0, all clients must be selected"
            for trainee in (_make_trainee(context, name, number, selection.memory) for name in sorted(names)):
                _assert_trains(context, trainee)
            later = [client for client in _draw_clients(context, number + 1) if client.client_id in names]
            updates = {client.client_id: client.past for client in later if client.past is not None}
            closed = ClosedRound(round=number, clients=updates)
            memory = selection.memory
            if roles.memory.remember is not None:
                memory = roles.memory.remember(_store_and_read(selection.memory), closed)
                assert memory == roles.memory.remember(selection.memory, closed), (
                    "its memory of the round differs after a restart"
                )
            assert memory == _store_and_read(memory), f"{memory} is read back as {_store_and_read(memory)}"

    def test_placed_submodels_keep_their_size(self) -> None:
        """Programs and costs do not depend on the position in the model."""
        context = make_context(self.method, self.model)
        for size, draw in ((size, draw) for size in context.space for draw in _list_draws(context)):
            placed = context.roles.assigner.place(context.network, size, draw)
            context.network.check(placed)
            placed_id = context.network.size_of(placed).architecture_id
            assert placed_id == size.architecture_id, f"{size.name!r} has another size after `place`"
            student = context.roles.training.student(context.network, size, draw)
            if student is not None:
                assert nested_maps(context.network, size, student), f"the student of {size.name!r} is not a part of it"
                fewer = context.network.parameter_count(student) < context.network.parameter_count(size)
                assert fewer, f"the student of {size.name!r} is not smaller"

    def test_assigned_submodels_fit_the_budget(self) -> None:
        """Memory, disk, compute, downlink and uplink; the largest budget always gets a submodel."""
        context = make_context(self.method, self.model)
        generator = random.Random(SEED)  # noqa: S311 - tries choices, keeps no secret
        needs = sorted({candidate.training_memory_bytes["onnx"] for candidate in context.first.candidates})
        least = draw_question(context, generator, Budget(memory_bytes=min(needs) - 1, downlink_bytes=0, uplink_bytes=0))
        assert context.roles.assigner.assign(replace(least, written={})).candidate is None, (
            "a submodel was assigned to an insufficient budget"
        )
        plenty = make_assignee(context, "a")
        assert context.roles.assigner.assign(plenty).candidate is not None, (
            "no submodel was assigned to the largest budget"
        )
        smallest = min(context.first.candidates, key=lambda candidate: candidate.order)
        assert context.roles.assigner.assign(replace(plenty, below=smallest)).candidate is None, (
            "a submodel was assigned below the smallest"
        )
        for _ in range(_BUDGETS):
            waiting = draw_question(context, generator, draw_budget(context, generator))
            assigned = context.roles.assigner.assign(waiting)
            candidate = assigned.candidate if assigned.placed is None else waiting.estimate(assigned.placed)
            if candidate is not None:
                assert_fits(context, waiting, candidate)
            if assigned.requested is not None:
                assert_estimate_fits(context.first.estimate(assigned.requested.program.size), waiting.budget)

    def _list_answers(self) -> list[Any]:
        context = make_context(self.method, self.model)
        answers: list[Any] = [context.space, [context.training(number) for number in (1, 2)]]
        for client, number in ((client, number) for client in list_clients(context)[:3] for number in (1, 2)):
            question = make_assignee(context, client.name, round_number=number)
            answers.append(context.roles.assigner.assign(question))
            if context.roles.assigner.propose is not None:
                answers.append(context.roles.assigner.propose(question))
        for size, draw in ((size, draw) for size in context.space[:3] for draw in _list_draws(context)):
            answers += [
                context.roles.assigner.place(context.network, size, draw),
                context.roles.training.student(context.network, size, draw),
            ]
        return answers


def _list_draws(context: RunContext) -> list[Draw]:
    memory = context.roles.memory.initial
    return [Draw(seed=SEED, round=number, client_id=name, memory=memory) for number in (1, 2, 7) for name in "ab"]


def _draw_clients(context: RunContext, round_number: int) -> tuple[AvailableClient, ...]:
    """Clients; from round 2 on, some were aggregated in an earlier round."""
    generator = random.Random(round_number)  # noqa: S311 - draws cases, keeps no secret
    clients = []
    for index, name in enumerate("abcdefgh"):
        past = LastUpdate(
            round=max(1, round_number - index % 3),
            size=context.space[index % len(context.space)],
            architecture=context.space[index % len(context.space)],
            sample_count=index + 1,
            epochs=1,
            loss=generator.uniform(0, 3),
            square_loss=generator.uniform(9, 10),
            change_norm=generator.uniform(0, 1),
            train_s=generator.uniform(0, 1),
            took_s=generator.uniform(0, 5),
        )
        clients.append(
            AvailableClient(
                client_id=name,
                sample_count=index + 1,
                budget=Budget(memory_bytes=2**40),
                expected_training_s=generator.uniform(0, 5),
                expected_uplink_s=generator.choice([0.0, 1.0]),
                past=past if round_number > 1 and index % 4 else None,
            )
        )
    return tuple(clients)


def _make_trainee(context: RunContext, name: str, round_number: int, memory: Any) -> Trainee:
    size = context.space[-1]
    tensors = tuple(context.network.shapes(size))
    draw = Draw(seed=SEED, round=round_number, client_id=name, memory=memory)
    return Trainee(draw=draw, size=size, tensors=tensors)


def _assert_trains(context: RunContext, trainee: Trainee) -> None:
    """Assert that its training settings fit the program of its submodel, and that it sends some tensors."""
    number = trainee.draw.round
    own = context.roles.training.for_client(context.training(number), trainee)
    assert own == context.local_training(number, trainee), "`for_client` changes settings that are part of the program"
    if context.roles.training.sends is not None:
        sent = context.roles.training.sends(trainee)
        assert sent, "a client must send at least one tensor"
        assert sent <= set(trainee.tensors), "a client must not send tensors that its submodel lacks"


def _store_and_read(memory: Any) -> Any:
    """The memory after a restart of the server."""
    if memory is None:
        return None
    return from_plain(type(memory), parse_json(canonical_json(memory), max_bytes=2**24))


def _read_generators() -> tuple[object, ...]:
    """The states of the global generators."""
    return (random.getstate(), str(np.random.get_state()), torch.random.get_rng_state().tolist())
