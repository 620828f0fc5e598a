"""What every federated method keeps, as tests to be subclassed."""

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
    ask,
    changes_whole_model,
    compute_logits,
    draw_state,
    find_held,
    list_clients,
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
"""Longer is no settings."""
_BUDGETS = 40
"""Drawn for a method."""


class MethodContract:
    """What every method must keep; subclass it, and pytest runs it.

    Attributes:
        method: the method, with parameters with which a round takes a moment.
        model: a small network that it is tried on.
    """

    method: AnyMethod
    model: Family = MODEL

    def moved_architecture(self, network: Network, architecture: Architecture) -> Architecture:
        """The submodel that an update of another moves; it must agree with `Aggregator.transform`."""
        exchange = self.method.roles().assigner.exchange
        if exchange is None:
            return architecture
        return exchange(
            network, Participant(client_id="", architecture=architecture, size=network.size_of(architecture)), {}
        ).moved

    def test_it_is_a_record_that_says_what_it_is(self) -> None:
        """A frozen dataclass with a name and a description, whose parameters all have defaults."""
        kind = type(self.method)
        problem = problem_with_record(kind, self.method.TYPE, ("INFO", "roles"))
        assert not problem, problem
        assert isinstance(self.method.INFO, MethodInfo), "INFO must be a MethodInfo"
        assert self.method.INFO.title, "INFO.title is empty"
        assert self.method.INFO.paper, "INFO.paper is empty"
        assert isinstance(kind(), kind)
        for path in self.method.INFO.parameters:
            first = path.partition(".")[0]
            assert first in kind.__dataclass_fields__, f"INFO names {path!r}, which is no parameter"

    def test_its_parameters_survive_json(self) -> None:
        """A run that is taken up has the very method that it was begun with."""
        written = canonical_json(self.method)
        again = from_plain(type(self.method), parse_json(written, max_bytes=_MOST_BYTES))
        assert again == self.method, f"{again} was read of what {self.method} wrote"
        assert canonical_json(again) == written, "it writes itself otherwise the second time"

    def test_departures_are_sentences(self) -> None:
        """They are joined by semicolons, and the same whenever they are asked for."""
        for setting in _SETTINGS:
            departures = list_departures(self.method, setting)
            assert departures == list_departures(self.method, setting), "INFO.departures differ the second time"
            for text in departures:
                well = text == text.strip() and text.isprintable() and len(text.split()) > 1
                assert well, f"{text!r} is no sentence on one line"
                assert "; " not in text, f"{text!r} has a semicolon, by which departures are joined"
                assert not text.endswith("."), f"{text!r} ends with a full stop, but is joined with others"

    def test_roles_are_pure(self) -> None:
        """The same answers twice, by records that stay as they are, and no draw from a generator that others use."""
        written = canonical_json(self.method)
        generators = _read_generators()
        first, second = (self._answers() for _ in range(2))
        assert first == second, "the same question has two answers"
        assert canonical_json(self.method) == written, "the method's parameters were changed by its roles"
        assert _read_generators() == generators, "a generator was drawn from that is everybody's; take Draw.stream"

    def test_a_round_with_learning_rate_0_changes_nothing_for_anybody(self, tmp_path: Path) -> None:
        """Bit for bit; where the whole model is transformed after a round, its outputs stay."""
        context = make_context(self.method, self.model)
        context = replace(context, roles=with_steps(context.roles, distillation=None))
        state = draw_state(context.network)
        clients = [replace(client, scale=0.0) for client in list_clients(context)]
        aggregated = play(context, state, clients, tmp_path).state
        if changes_whole_model(context):
            before, after = (torch.tensor(compute_logits(context, one.shared)) for one in (state, aggregated))
            torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-4)
            return
        assert have_same_bits(aggregated.shared, state.shared), "the model moved, although nobody learned"
        for client in clients:
            same = have_same_bits(view_model(context, aggregated, client), view_model(context, state, client))
            assert same, f"the copy of {client.name} moved"

    def test_what_nobody_held_keeps_its_bits(self, tmp_path: Path) -> None:
        """And something moves for the clients that trained."""
        context = make_context(self.method, self.model)
        if changes_whole_model(context):
            context = replace(context, roles=with_steps(context.roles, after_round=keep_aggregate, distillation=None))
        state, clients = draw_state(context.network), list_clients(context)[:2]
        least = context.roles.aggregator.min_contributors(context.network)
        clients = [*clients, *(replace(clients[0], name=f"other{number}") for number in range(len(clients), least))]
        for round_number in (1, 2):
            aggregated = play(context, state, clients, tmp_path, round_number)
            assert not aggregated.refused, f"updates were refused: {dict(aggregated.refused)}"
            kept = find_held(context, clients, round_number, self.moved_architecture)
            for name, tensor in aggregated.state.shared.items():
                free = ~kept[name]
                assert torch.equal(tensor[free], state.shared[name][free]), f"{name!r} moved where nobody held it"
            moved = any(
                not torch.equal(
                    view_model(context, aggregated.state, client)[name], view_model(context, state, client)[name]
                )
                for client in clients
                for name in state.shared
            )
            assert moved, "nothing moved, although everybody learned"

    def test_its_accuracy_is_that_of_what_devices_have_trained(self, tmp_path: Path) -> None:
        """By the checkpoint, of whose model every number was trained by somebody, or is told to be untrained."""
        context = make_context(self.method, self.model)
        context = replace(context, roles=with_steps(context.roles, distillation=None))
        first = draw_state(context.network)
        clients, samples, state = list_clients(context), draw_samples(context.network), first
        for round_number in (1, 2):
            aggregated = play(context, state, clients, tmp_path, round_number)
            if not aggregated.state.shared:
                return  # its first network has retired
            told, found = examine(context, aggregated, samples), evaluate_outside(context, first, aggregated, samples)
            assert abs(told.evaluation.accuracy - found.accuracy) < 1e-9, (
                f"{told.model.description} has the accuracy {found.accuracy}"
            )
            share = found.untrained
            words = f"{share:.1%} of {told.model.description} are as they were drawn"
            assert abs(told.model.untrained - share) < 1e-9, words
            if context.roles.aggregator.model != "whole" and not changes_whole_model(context):
                assert not share, f"{share:.1%} of what is evaluated was trained by nobody"
            state = aggregated.state

    def test_the_order_of_clients_does_not_matter_and_the_state_survives_a_crash(self, tmp_path: Path) -> None:
        """To the last bit, over two rounds."""
        context = make_context(self.method, self.model)
        state, clients = draw_state(context.network), list_clients(context)
        there = play(context, state, clients, tmp_path).state
        back = play(context, unpack_state(pack_state(state)), clients[::-1], tmp_path).state
        assert have_same_bits(pack_state(there), pack_state(back)), (
            "the model depends on the order in which updates came"
        )
        again = unpack_state(pack_state(there))
        one, other = (play(context, start, clients, tmp_path, 2).state for start in (there, again))
        assert have_same_bits(pack_state(one), pack_state(other)), "the model is another one after it was stored"

    def test_clients_are_chosen_of_those_that_can_and_what_is_remembered_survives_a_crash(self) -> None:
        """As many as are wanted; and what it remembers of a round is the same by what is read of the journal."""
        context = make_context(self.method, self.model)
        roles, memory = context.roles, context.roles.memory.initial
        for number in range(1, 4):
            clients = _draw_clients(context, number)
            asked = SelectionContext(clients=clients, count=3, round=number, seed=SEED, memory=memory)
            found = roles.selector.select(asked)
            assert found == roles.selector.select(asked), "the same question has two answers"
            chosen = set(found.clients)
            assert chosen <= {one.client_id for one in clients}, "a client was chosen that cannot take part"
            assert len(found.clients) == len(chosen) == 3, f"{len(chosen)} clients were chosen, but 3 are wanted"
            everyone = roles.selector.select(replace(asked, count=0))
            assert len(set(everyone.clients)) == len(clients), "with count 0 all take part"
            for trainee in (_make_trainee(context, name, number, found.memory) for name in sorted(chosen)):
                _assert_trains(context, trainee)
            past = {one.client_id: one.past for one in _draw_clients(context, number + 1) if one.client_id in chosen}
            closed = ClosedRound(round=number, clients={name: one for name, one in past.items() if one is not None})
            memory = found.memory
            if roles.memory.remember is not None:
                memory = roles.memory.remember(_store_and_read(found.memory), closed)
                assert memory == roles.memory.remember(found.memory, closed), (
                    "it remembers something else after a crash"
                )
            assert memory == _store_and_read(memory), f"{memory} is not what is read of what it writes"

    def test_places_keep_the_size(self) -> None:
        """Programs and costs are those of the size, wherever it lies in the model."""
        context = make_context(self.method, self.model)
        for size, draw in ((size, draw) for size in context.space for draw in _list_draws(context)):
            placed = context.roles.assigner.place(context.network, size, draw)
            context.network.check(placed)
            found = context.network.size_of(placed).architecture_id
            assert found == size.architecture_id, f"{size.name!r} has another size where it is placed"
            student = context.roles.training.student(context.network, size, draw)
            if student is not None:
                assert nested_maps(context.network, size, student), f"the student of {size.name!r} is not part of it"
                fewer = context.network.parameter_count(student) < context.network.parameter_count(size)
                assert fewer, f"the student of {size.name!r} is not smaller"

    def test_sizes_fit_the_budget(self) -> None:
        """Memory, disk, compute and both directions of the link; the largest budget always gets a size."""
        context = make_context(self.method, self.model)
        generator = random.Random(SEED)  # noqa: S311 - tries choices, keeps no secret
        needs = sorted({one.training_memory_bytes["onnx"] for one in context.candidates})
        least = draw_question(context, generator, Budget(memory_bytes=min(needs) - 1, downlink_bytes=0, uplink_bytes=0))
        assert context.roles.assigner.assign(replace(least, written={})).candidate is None, (
            "a size was given for no budget"
        )
        plenty = ask(context, "a")
        assert context.roles.assigner.assign(plenty).candidate is not None, "no size was given for the largest budget"
        smallest = min(context.candidates, key=lambda candidate: candidate.order)
        assert context.roles.assigner.assign(replace(plenty, below=smallest)).candidate is None, (
            "a size was given below the smallest"
        )
        for _ in range(_BUDGETS):
            waiting = draw_question(context, generator, draw_budget(context, generator))
            assigned = context.roles.assigner.assign(waiting)
            candidate = assigned.candidate if assigned.placed is None else waiting.estimate(assigned.placed)
            if candidate is not None:
                assert_fits(context, waiting, candidate)
            if assigned.requested is not None:
                assert_estimate_fits(context.estimate(assigned.requested.program.size), waiting.budget)

    def _answers(self) -> list[Any]:
        context = make_context(self.method, self.model)
        answers: list[Any] = [context.space, [context.training(number) for number in (1, 2)]]
        for client, number in ((client, number) for client in list_clients(context)[:3] for number in (1, 2)):
            question = ask(context, client.name, round_number=number)
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
    """Some that were aggregated before, each in a round of its own, and in the first round none."""
    generator = random.Random(round_number)  # noqa: S311 - draws cases, keeps no secret
    found = []
    for place, name in enumerate("abcdefgh"):
        past = LastUpdate(
            round=max(1, round_number - place % 3),
            size=context.space[place % len(context.space)],
            architecture=context.space[place % len(context.space)],
            sample_count=place + 1,
            epochs=1,
            loss=generator.uniform(0, 3),
            square_loss=generator.uniform(9, 10),
            change_norm=generator.uniform(0, 1),
            train_s=generator.uniform(0, 1),
            took_s=generator.uniform(0, 5),
        )
        found.append(
            AvailableClient(
                client_id=name,
                sample_count=place + 1,
                budget=Budget(memory_bytes=2**40),
                expected_training_s=generator.uniform(0, 5),
                expected_uplink_s=generator.choice([0.0, 1.0]),
                past=past if round_number > 1 and place % 4 else None,
            )
        )
    return tuple(found)


def _make_trainee(context: RunContext, name: str, round_number: int, memory: Any) -> Trainee:
    size = context.space[-1]
    tensors = tuple(context.network.shapes(size))
    draw = Draw(seed=SEED, round=round_number, client_id=name, memory=memory)
    return Trainee(draw=draw, size=size, tensors=tensors)


def _assert_trains(context: RunContext, trainee: Trainee) -> None:
    """Its training is that of the program which all of its size run, and it sends something."""
    general = context.training(trainee.draw.round)
    own = context.roles.training.for_client(general, trainee)
    numbers: dict[str, Any] = {"epochs": own.epochs, "local_steps": own.local_steps, "learning_rate": own.learning_rate}
    numbers |= {"proximal_mu": own.proximal_mu, "distillation_weight": own.distillation_weight}
    assert own == replace(general, **numbers), "local() changes what the program of the size has in it"
    if context.roles.training.sends is not None:
        sent = context.roles.training.sends(trainee)
        assert sent, "a client sends nothing"
        assert sent <= set(trainee.tensors), "a client is to send tensors that its submodel lacks"


def _store_and_read(memory: Any) -> Any:
    """As it is after the server was killed."""
    if memory is None:
        return None
    return from_plain(type(memory), parse_json(canonical_json(memory), max_bytes=2**24))


def _read_generators() -> tuple[object, ...]:
    """The states of the generators that a process has once."""
    return (random.getstate(), str(np.random.get_state()), torch.random.get_rng_state().tolist())
