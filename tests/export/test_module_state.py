"""State that a network keeps between runs: it is carried, harmless, or refused by name."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from export.step_rig import example, load_values, next_inputs, run, step_of_module
from torch import Tensor, nn
from torch.nn import functional

from subfleet.export.programs import write_program
from subfleet.export.steps import SampleSpec, inference_step
from subfleet.export.steps.module_calls import call_with_state
from subfleet.export.steps.state_snapshot import StateSnapshot
from subfleet.export.tracing import canonical_graph
from subfleet.protocol.errors import ExportError


class Keeping(nn.Module):
    """Two layers, and between them a function of the test.

    Args:
        has: Sets the network's state.
        between: Transforms the activations; it also gets the network.
    """

    def __init__(self, has: Callable[[Any], object], between: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.body, self.head, self.between = nn.Linear(4, 4), nn.Linear(4, 3), between
        has(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.between(self, self.body(x)))
        return logits


def _average(old: Tensor | None, y: Tensor) -> Tensor:
    return y.detach()[0] if old is None else old * 0.9 + y.detach()[0] * 0.1


def _set_mean(net: Any, y: Tensor) -> Any:
    net.mean = _average(net.mean, y)
    return y - net.mean


def _set_item(holder: str, key: Any) -> Callable[[Any, Tensor], Any]:
    def between(net: Any, y: Tensor) -> Any:
        container = getattr(net, holder)
        container[key] = _average(container[key], y)
        return y - container[key]

    return between


def _set_in_place(net: Any, y: Tensor) -> Any:
    net.state["mean"].mul_(0.9).add_(y.detach()[0])
    return y - net.state["mean"]


def _set_of_object(net: Any, y: Tensor) -> Any:
    net.own.mean = _average(net.own.mean, y)
    return y - net.own.mean


def _set_data(net: Any, y: Tensor) -> Any:
    net.mean.data = _average(net.mean, y)
    return y - net.mean


def _set_through_data(net: Any, y: Tensor) -> Any:
    net.mean.data.mul_(0.9).add_(y.detach()[0])
    return y - net.mean


def _warm(net: Any, y: Tensor) -> Any:
    net.steps += 1
    return y * min(1.0, net.steps / 10)


def _norm(net: Any) -> None:
    net.norm, net.scale = nn.BatchNorm1d(4), torch.ones(4)


def _slower_mean(net: Any, y: Tensor) -> Any:
    net.norm.momentum *= 0.9
    return net.norm(y)


def _wider_epsilon(net: Any, y: Tensor) -> Any:
    net.norm.eps *= 2.0
    return net.norm(y)


def _larger_scale(net: Any, y: Tensor) -> Any:
    net.scale = net.scale * 2
    return functional.batch_norm(y, None, None, net.scale, None, training=True)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * -ctx.factor, None


def _reversed(net: Any, y: Tensor) -> Any:
    net.steps += 1
    reversed_: Tensor = _Reversed.apply(y, net.steps / 10)  # type: ignore[no-untyped-call] # PyTorch leaves it untyped
    return reversed_


def _replace_parameter(net: Any, y: Tensor) -> Any:
    net.mean = nn.Parameter(_average(net.mean, y))
    return y - net.mean.detach()


def _delete(net: Any, y: Tensor) -> Any:
    mean = _average(net.mean, y)
    del net.mean
    net.mean = mean
    return y - mean


def _share_buffer(net: Any) -> None:
    mean = torch.zeros(4)
    net.body.register_buffer("mean", mean)
    net.head.register_buffer("mean", mean)


def _bank_and_row(net: Any) -> None:
    net.register_buffer("mean", torch.zeros(2, 4))
    net.row = net.mean[0]


def _write_bank(net: Any, y: Tensor) -> Any:
    net.mean.mul_(0.9).add_(y.detach()[:2])
    return y - net.mean[0]


def _untie(net: Any, y: Tensor) -> Any:
    net.head.mean = _average(net.head.mean, y)
    return y - net.head.mean


def _buffer(value: Tensor | None, *, persistent: bool = True) -> Callable[[Any], object]:
    def has(net: Any) -> None:
        net.register_buffer("mean", None if value is None else value.clone(), persistent=persistent)

    return has


def _attributes(**values: Any) -> Callable[[Any], object]:
    return lambda net: vars(net).update(values)


ZEROS = torch.zeros(4)
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a buffer of None": (lambda: Keeping(_buffer(None), _set_mean), "state 'mean'.*instead of None"),
    "an attribute of None": (lambda: Keeping(_attributes(mean=None), _set_mean), "state 'mean'.*buffer from the start"),
    "a counter": (lambda: Keeping(_attributes(steps=0), _warm), r"number 'steps'.*such as torch\.zeros"),
    "a counter on the way back": (lambda: Keeping(_attributes(steps=0), _reversed), "number 'steps'"),
    "a norm's momentum": (lambda: Keeping(_norm, _slower_mean), r"number 'norm\.momentum'"),
    "a norm's epsilon": (lambda: Keeping(_norm, _wider_epsilon), r"number 'norm\.eps'"),
    "a norm's scale": (lambda: Keeping(_norm, _larger_scale), "tensor 'scale'"),
    "a dict": (
        lambda: Keeping(_attributes(state={"mean": ZEROS.clone()}), _set_item("state", "mean")),
        r"tensor \"state\['mean'\]\".*self\.register_buffer",
    ),
    "a dict in place": (
        lambda: Keeping(_attributes(state={"mean": ZEROS.clone()}), _set_in_place),
        r"tensor \"state\['mean'\]\".*self\.register_buffer",
    ),
    "a list": (lambda: Keeping(_attributes(means=[ZEROS.clone()]), _set_item("means", 0)), r"tensor 'means\[0\]'"),
    "an object": (
        lambda: Keeping(_attributes(own=SimpleNamespace(mean=ZEROS.clone())), _set_of_object),
        r"tensor 'own\.mean'",
    ),
    "a layer in a list": (
        lambda: Keeping(
            _attributes(hidden=[Keeping(_buffer(ZEROS), _set_mean)]), lambda net, y: y + net.hidden[0](y).mean()
        ),
        r"tensor 'hidden\[0\]\.mean'",
    ),
    "data of a constant": (lambda: Keeping(_buffer(ZEROS, persistent=False), _set_data), "its tensor 'mean'"),
    "in place by data": (lambda: Keeping(_buffer(ZEROS, persistent=False), _set_through_data), "its tensor 'mean'"),
    "data of a buffer": (lambda: Keeping(_buffer(ZEROS), _set_data), r"sets \.data of its 'mean'.*copy_"),
    "a deleted buffer": (lambda: Keeping(_buffer(ZEROS), _delete), "deletes its 'mean' while.*without del"),
    "a buffer of two": (lambda: Keeping(_share_buffer, _untie), "buffer 'head.mean'.*same tensor as 'body.mean'"),
    "a parameter": (
        lambda: Keeping(lambda net: net.register_parameter("mean", nn.Parameter(ZEROS.clone())), _replace_parameter),
        "replaces its parameter 'mean'.*register 'mean' as a buffer",
    ),
    "the transpose of a parameter": (
        lambda: Keeping(lambda net: setattr(net, "tied", net.body.weight.detach().t()), lambda net, y: y @ net.tied),
        "tensor 'tied', which shares the memory of 'body.weight'.*compute it in forward",
    ),
    "a parameter in a list": (
        lambda: Keeping(lambda net: setattr(net, "refs", [net.body.weight]), lambda net, y: y @ net.refs[0]),
        "the memory of 'body.weight'",
    ),
    "a row of a buffer that changes": (
        lambda: Keeping(_bank_and_row, lambda net, y: _write_bank(net, y) + net.row),
        "tensor 'row', which shares the memory of 'mean'",
    ),
    "a row of a buffer": (
        lambda: Keeping(
            _bank_and_row, lambda net, y: y - net.row
        ),
        "tensor 'row', which shares the memory of 'mean'",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_state_that_no_step_carries_is_refused_by_name(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(ExportError, match=reason):
        canonical_graph(step_of_module(make(), (4,)))


@pytest.mark.slow
def test_state_in_a_closure_is_refused() -> None:
    kept = [torch.zeros(4)]

    def between(_net: Any, y: Tensor) -> Any:
        kept[0] = _average(kept[0], y)
        return y - kept[0]

    with pytest.raises(ExportError, match=r"changes its tensor 'between\.kept\[0\]'"):
        canonical_graph(step_of_module(Keeping(lambda _net: None, between), (4,)))


def _log(net: Any, y: Tensor) -> Any:
    net.steps += 1
    net.last = y
    net.seen = _average(net.seen, y)
    net.history.append(float(net.steps))
    net.log["mean"] = y.mean()
    return y


def _cache(net: Any, y: Tensor) -> Any:
    if net.mask is None or net.mask.shape != y.shape[-1:]:
        net.mask = torch.linspace(0.5, 1.5, y.shape[-1])
    return y * net.mask


HARMLESS: dict[str, Callable[[], nn.Module]] = {
    "a log": lambda: Keeping(_attributes(steps=0, last=None, seen=None, history=[], log={}), _log),
    "a cache": lambda: Keeping(_attributes(mask=None), _cache),
    "constants in a dict": lambda: Keeping(
        _attributes(tables={"a": (torch.arange(4.0),)}), lambda net, y: y * net.tables["a"][0]
    ),
    "parameters in a list": lambda: Keeping(lambda net: setattr(net, "refs", [net.body.weight]), lambda _net, y: y),
    "a row that is not read": lambda: Keeping(_bank_and_row, _write_bank),
    "nothing": lambda: Keeping(_attributes(none=torch.zeros(0)), lambda net, y: y + net.none.sum()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HARMLESS)
def test_values_that_the_next_run_ignores_are_not_state(name: str) -> None:
    """Results equal plain PyTorch's, also in the second step."""
    module = HARMLESS[name]()
    step = step_of_module(module, (4,))
    canonical_graph(step)
    canonical_graph(inference_step(module, SampleSpec(shape=(4,)), batch_size=4))
    inputs = example(step) | {"sample_mask": torch.ones(4, dtype=torch.float64)}
    results = [run(step, inputs)]
    results.append(run(step, inputs | next_inputs(results[0])))
    plain = load_values(HARMLESS[name](), inputs)
    optimiser = torch.optim.SGD(plain.parameters(), lr=float(inputs["learning_rate"]))
    for result in results:
        loss = functional.cross_entropy(plain(inputs["input"]), inputs["label"])
        torch.testing.assert_close(result["loss"], loss.detach(), atol=1e-6, rtol=1e-6)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call] # PyTorch leaves it untyped
        optimiser.step()


def test_recurrent_layers_keep_nothing() -> None:
    """They list their parameters again in each run; tracing twice to test this would take long."""
    module = nn.GRU(4, 3)
    before = StateSnapshot(module)
    parameters = {name: part.detach().clone() for name, part in module.named_parameters()}
    call_with_state(module, parameters, lambda: module(torch.zeros(2, 1, 4)))
    assert before.changes() == []


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        yield from _tensors(part)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a dict", "a list", "an object", "a layer in a list", "a log", "a cache"])
def test_a_module_is_left_as_it_was(name: str) -> None:
    """Even when it is refused, no fake tensor stays in it."""
    module = (HARMLESS | {key: make for key, (make, _) in REFUSED.items()})[name]()
    layers = [module, *(layer for layer in getattr(module, "hidden", []))]
    namespaces = [vars(holder) for holder in (*layers, *filter(None, [getattr(module, "own", None)]))]
    before = [(dict(namespace), list(map(id, _tensors(namespace)))) for namespace in namespaces]
    if name in HARMLESS:
        canonical_graph(step_of_module(module, (4,)))
    else:
        with pytest.raises(ExportError):
            step_of_module(module, (4,))
    assert [(namespace, list(map(id, _tensors(namespace)))) for namespace in namespaces] == before
    assert all(type(tensor) in {Tensor, nn.Parameter} for namespace in namespaces for tensor in _tensors(namespace))
    assert getattr(module, "history", []) == []


class _Block(nn.Module):
    """Keeps a moving average in a buffer that it replaces or changes in place."""

    mean: Tensor

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.layer, self.in_place = nn.Linear(4, 4), in_place
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if self.in_place:
            self.mean.mul_(0.9).add_(y.detach()[0], alpha=0.1)
        else:
            self.mean = self.mean * 0.9 + y.detach()[0] * 0.1
        return torch.tanh(y - self.mean)


@pytest.mark.export
@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_a_recomputed_block_changes_is_carried(in_place: bool) -> None:
    module = nn.Sequential(nn.Sequential(_Block(in_place=in_place), _Block(in_place=in_place)), nn.Linear(4, 3))
    plain, recomputed = (step_of_module(module, (4,), recompute=recompute) for recompute in (False, True))
    inputs = example(plain)
    expected = run(plain, inputs)
    for name, actual in run(recomputed, inputs).items():
        torch.testing.assert_close(actual, expected[name], atol=1e-12, rtol=1e-12, msg=f"{name}: {{}}".format)
    program = write_program(recomputed, target="onnx", program_id="again")
    assert program.manifest.max_abs_diff < 1e-5


@pytest.mark.slow
def test_a_buffer_of_two_names_is_carried_where_one_of_them_is_not_kept() -> None:
    def has(net: Any) -> None:
        _share_buffer(net)
        net.body.register_buffer("mean", net.head.mean, persistent=False)

    def between(net: Any, y: Tensor) -> Any:
        net.head.mean.mul_(0.9).add_(y.detach()[0])
        return y - net.body.mean

    step = step_of_module(Keeping(has, between), (4,))
    canonical_graph(step)
    assert [value.name for value in step.outputs if value.role == "buffer"] == ["new.buffer.head.mean"]
