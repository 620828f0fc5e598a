"""The code of the page on methods with memory fulfils the method contract and does what the page says."""

import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from matrices import mostly_long
from safetensors.torch import load
from server.server_rig import World, config, fleet

from subfleet.elastic.model_state import unpack_state
from subfleet.methods.aggregator import Participant
from subfleet.protocol.task import Train
from subfleet.testing import MethodContract
from subfleet.testing.rounds import MODEL, DrawnClient, draw_change, draw_state, make_context, play, with_steps
from subfleet.testing.submodels import have_same_bits

PAGE = Path(__file__).parents[3] / "docs/reference/methods-that-remember.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The code of the page, as a module."""
    path = tmp_path_factory.mktemp("page") / "written_on_the_page.py"
    path.write_text("\n\n".join(BLOCKS), encoding="utf-8")
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[path.stem] = module
    module_spec.loader.exec_module(module)
    yield module
    del sys.modules[path.stem]


PROMISES = [name for name in dir(MethodContract) if name.startswith("test_")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Rota", "Growing"])
@pytest.mark.parametrize("promise", PROMISES)
def test_the_methods_pass_the_contract(promise: str, name: str, page: ModuleType, tmp_path: Path) -> None:
    class Contract(MethodContract):
        method = getattr(page, name)()

    test: Any = getattr(Contract(), promise)
    test(tmp_path) if "tmp_path" in test.__code__.co_varnames else test()


@pytest.mark.slow
def test_every_client_has_a_turn_and_waiting_clients_train_longer(page: ModuleType, tmp_path: Path) -> None:
    settings = config(rounds=6, clients_per_round=1, seed=3, deploy_targets=(), method=page.Rota(most=3))
    world = World(tmp_path, settings, fleet())
    tasks: dict[tuple[int, str], int] = {}
    world.run()
    for device in world.devices.values():
        for task in device.tasks:
            assert isinstance(task.work, Train)
            tasks[task.round, task.client_id] = task.work.settings.epochs
    assert Counter(name for _, name in tasks) == dict.fromkeys(world.devices, 2)
    last = dict.fromkeys(world.devices, 0)
    for (number, name), epochs in sorted(tasks.items()):
        assert epochs == settings.training.epochs * min(3, number - last[name])
        last[name] = number


@pytest.mark.slow
@pytest.mark.parametrize("kills", mostly_long([0, 5, 8], 5))
def test_a_network_grows_out_of_the_last_one_whoever_is_killed(kills: int, page: ModuleType, tmp_path: Path) -> None:
    """With a bound of 1 every change counts as turning: round 2 ends with a network of twice the width, and so on."""
    method = page.Growing(turning=1.0)
    worlds = [World(tmp_path / name, config(rounds=5, method=method), fleet()) for name in ("alone", "killed")]
    for world, every in zip(worlds, (0, kills), strict=True):
        turn = 0
        while not world.server.finished:
            world.turn()
            turn += 1
            assert turn < 4000
            if every and turn % every == 0:
                world.kill_server()
    results = [world.server.result() for world in worlds]
    assert worlds[0].model_bytes() == worlds[1].model_bytes()
    assert results[0].networks == results[1].networks
    lineages = [network.lineage for network in results[0].networks]
    assert [(lineage.id, lineage.parent, lineage.born_round, lineage.retired_round) for lineage in lineages] == [
        ("", None, 0, 2),
        ("times2", "", 2, 4),
        ("times4", "times2", 4, None),
    ]
    for result in results:
        assert [row.architecture for row in result.rounds[-1].clients] == ["times4 full"] * len(worlds[0].devices)
        assert {(deployment.architecture, deployment.status) for deployment in result.deployed} == {
            ("times4 full", "deployed")
        }
        assert all(record.loss is not None and record.loss < 100 for record in result.rounds)
    for world in worlds:
        programs = {
            task.programs[0].blob.sha256: task.architecture.network
            for device in world.devices.values()
            for task in device.tasks
            if isinstance(task.work, Train)
        }
        served = {path.name for path in (world.folder / "state/blobs").rglob("*") if path.is_file()}
        served_networks = {network_id for sha256, network_id in programs.items() if sha256 in served}
        assert served_networks <= {"times4"}
        assert served_networks or world is worlds[1], (
            "a server that was killed requests programs again when it needs them"
        )
        assert set(programs.values()) == {"", "times2", "times4"}
    state = unpack_state(load(worlds[0].model_bytes()))
    assert state.network_ids == ("times4",), "a checkpoint has no weights of retired networks"


@pytest.mark.slow
def test_the_maps_on_the_page_go_with_any_method(page: ModuleType, tmp_path: Path) -> None:
    """Without training nothing changes; with it, only the elements that the client's copies stand for."""
    model = replace(MODEL, norm="batch")
    context = make_context(page.Rota(), model)
    context = replace(context, roles=with_steps(context.roles, exchange=page.copied))
    state, client = draw_state(context.network), DrawnClient(name="ada", size=0)
    still = play(context, state, [replace(client, scale=0.0)], tmp_path / "still")
    assert have_same_bits(still.state.shared, state.shared)
    moved = play(context, state, [client], tmp_path / "moved").state.shared
    size = context.space[0]
    pair = page.copied(context.network, Participant(client_id="ada", architecture=size, size=size), {})
    expected = pair.up(draw_change(context, client, 1))
    assert expected.keys() == context.network.shapes(pair.moved).keys()
    for name, tensor in state.shared.items():
        torch.testing.assert_close(moved[name] - tensor, expected.get(name, torch.zeros(())).expand_as(tensor))
