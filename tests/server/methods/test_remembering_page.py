"""The page on methods that remember: its code is a method that keeps every promise, and does what the page says."""

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
from server.server_rig import World, config, fleet

from subfleet.methods.policies import Participant
from subfleet.testing import MethodContract
from subfleet.testing.rounds import MODEL, Client, change_of, first_state, play, terms_with
from subfleet.testing.subnets import same_bits

PAGE = Path(__file__).parents[3] / "docs/reference/methods-that-remember.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """What stands on it, as a module."""
    path = tmp_path_factory.mktemp("page") / "written_on_the_page.py"
    path.write_text("\n\n".join(BLOCKS), encoding="utf-8")
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[path.stem] = module
    found.loader.exec_module(module)
    yield module
    del sys.modules[path.stem]


PROMISES = [name for name in dir(MethodContract) if name.startswith("test_")]


@pytest.mark.slow
@pytest.mark.parametrize("promise", PROMISES)
def test_the_method_keeps_what_every_method_keeps(promise: str, page: ModuleType, tmp_path: Path) -> None:
    class Contract(MethodContract):
        method = page.Rota()

    test: Any = getattr(Contract(), promise)
    test(tmp_path) if "tmp_path" in test.__code__.co_varnames else test()


@pytest.mark.slow
def test_everybody_has_a_turn_and_whoever_waited_trains_longer(page: ModuleType, tmp_path: Path) -> None:
    settings = config(rounds=6, clients_per_round=1, seed=3, deploy_targets=(), method=page.Rota(most=3))
    world = World(tmp_path, settings, fleet())
    tasks: dict[tuple[int, str], int] = {}
    world.run()
    for device in world.devices.values():
        for task in device.tasks:
            assert task.training is not None
            tasks[task.round, task.client_id] = task.training.epochs
    assert Counter(name for _, name in tasks) == dict.fromkeys(world.devices, 2)
    last = dict.fromkeys(world.devices, 0)
    for (number, name), epochs in sorted(tasks.items()):
        assert epochs == settings.training.epochs * min(3, number - last[name])
        last[name] = number


@pytest.mark.slow
def test_the_maps_on_the_page_go_with_any_method(page: ModuleType, tmp_path: Path) -> None:
    """Nobody trains and nothing moves; and what moves is what the client's copies stand for."""
    model = replace(MODEL, norm="batch")
    terms = terms_with(page.Rota(), model)
    terms = replace(terms, policies=replace(terms.policies, exchange=page.copied))
    state, client = first_state(terms.network), Client(name="ada", size=0)
    still = play(terms, state, [replace(client, scale=0.0)], tmp_path / "still")
    assert same_bits(still.state.shared, state.shared)
    moved = play(terms, state, [client], tmp_path / "moved").state.shared
    size = terms.space[0]
    pair = page.copied(terms.network, Participant(client_id="ada", spec=size, size=size))
    expected = pair.up(change_of(terms, client, 1))
    assert expected.keys() == terms.network.shapes(pair.moved).keys()
    for name, tensor in state.shared.items():
        torch.testing.assert_close(moved[name] - tensor, expected.get(name, torch.zeros(())).expand_as(tensor))
