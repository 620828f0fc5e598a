"""The graphs that each pass of the front end returns, for networks with in-place operations, constants and state."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from export.step_rig import example, run, step_of_module
from matrices import crossed
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from subfleet.export.canonical.checks import check_operators, is_functional
from subfleet.export.canonical.cleaning import clean, fold_constants
from subfleet.export.programs import write_program
from subfleet.export.steps import SampleSpec, Step, inference_step
from subfleet.export.targets import find_target
from subfleet.export.tracing import canonical_graph, capture_step, lower_graph
from subfleet.export.versions import TARGET_NAMES
from subfleet.protocol.errors import ExportError

aten = torch.ops.aten


class Inplace(nn.Module):
    """As in torchvision's ResNet: an in-place ReLU after a norm, and an in-place sum after another norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.second(x)
        y += x
        logits: Tensor = self.head(torch.relu_(y).mean((2, 3)))
        return logits


class Views(nn.Module):
    """Changes a tensor through views of it, and reads it under its other names afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y[:, :3].add_(y[:, 3:])
        y[:, 4] = 0.5
        y[:, 1::2] *= 2
        y.view(-1, 2, 3)[:, 1].sigmoid_()
        logits: Tensor = self.head(y) + y.sum(1, keepdim=True)
        return logits


class Constants(nn.Module):
    """Buffers of every kind, a plain tensor, and masks created in every run, as in transformers."""

    table: Tensor
    places: Tensor
    index: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.position, self.head = nn.Linear(4, 4), nn.Embedding(8, 4), nn.Linear(4, 3)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 4))
        self.register_buffer("places", torch.arange(8)[None], persistent=False)
        self.register_buffer("index", torch.tensor([3, 1, 0, 2]))
        self.scale = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x) * self.table + self.position(self.places[:, : x.shape[1]])
        causal = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        attended = (y @ y.transpose(1, 2) + causal).softmax(-1) @ y
        logits: Tensor = self.head((attended[..., self.index] * self.scale).mean(1))
        return logits


class Average(nn.Module):
    """Normalises by a moving average in a buffer that forward replaces or changes in place."""

    mean: Tensor

    def __init__(self, *, in_place: bool, persistent: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4, dtype=dtype), persistent=persistent)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if self.in_place:
            self.mean.mul_(0.9).add_(y.detach()[0], alpha=0.1)
        else:
            self.mean = self.mean * 0.9 + y[0] * 0.1
            self.mean = self.mean.detach()
        logits: Tensor = self.head(y - self.mean)
        return logits


class Checkpointed(nn.Module):
    """A block with dropout and a norm that the network itself recomputes in the backward pass."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.4), nn.Tanh())
        self.head = nn.Linear(4, 3)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.block, x, use_reentrant=False) if self.again else self.block(x)
        logits: Tensor = self.head(y)
        return logits


class Normed(nn.Module):
    """Three norms of the same size, two of them in a mode that the network sets.

    Args:
        within: Calls a function with its argument in that mode.
    """

    def __init__(self, within: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.head, self.within = nn.Linear(4, 3), within

    def forward(self, x: Tensor) -> Tensor:
        y = self.within(lambda x: self.second(torch.tanh(self.first(x))), x)
        logits: Tensor = self.head(self.third(y + x))
        return logits


def _checkpoint_selectively(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, [aten.mul.Tensor, aten.sum.dim_IntList])
    y: Tensor = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    return y


def _run_in_inference_mode(block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = block(x)
    return y.clone()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "in place": (Inplace, (2, 5, 5)),
    "views": (Views, (6,)),
    "constants": (Constants, (5, 4)),
    "average": (lambda: Average(in_place=False), (4,)),
    "average in place": (lambda: Average(in_place=True), (4,)),
    "checkpointed": (lambda: Checkpointed(again=True), (4,)),
    "norms, selectively checkpointed": (lambda: Normed(_checkpoint_selectively), (4,)),
    "norms in inference mode": (lambda: Normed(_run_in_inference_mode), (4,)),
}


def step_of(name: str) -> Step:
    make, shape = NETWORKS[name]
    return step_of_module(make(), shape)


def _assert_same(graph: fx.GraphModule, step: Step, tolerance: float) -> None:
    for node in graph.graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default  # files have no strides
    graph.recompile()
    inputs = step.example(torch.Generator().manual_seed(1))
    for value, actual, expected in zip(step.outputs, graph(*inputs), step.run(*inputs), strict=True):
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance, msg=f"{value.name}: {{}}".format)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_every_pass_keeps_its_promise_and_the_numbers(name: str) -> None:
    step = step_of(name)
    graph = capture_step(step)
    clean(graph)
    assert is_functional(graph)
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert not {aten.detach.default, aten.clone.default, aten.copy.default, aten.alias.default} & set(called)
    assert all(node.users for node in graph.graph.nodes if node.op == "call_function")
    _assert_same(graph, step, 0.0)

    fold_constants(graph)
    fixed = {node for node in graph.graph.nodes if node.op == "get_attr"}
    for node in graph.graph.nodes:
        if node.op == "call_function" and set(node.all_input_nodes) <= fixed:
            assert node.target in {aten.full.default, aten.expand.default}, node.format_node()
    constants = [getattr(graph, node.target) for node in fixed]
    assert len({(tensor.dtype, tuple(tensor.shape), tensor.numpy().tobytes()) for tensor in constants}) == len(
        constants
    )
    _assert_same(graph, step, 0.0)

    check_operators(graph)
    for target in ("onnx", "executorch"):
        low = lower_graph(graph, find_target(target).lowerings)
        assert is_functional(low)
        _assert_same(low, step, 2e-6)


@pytest.mark.export
@pytest.mark.parametrize(("name", "target"), crossed(NETWORKS, TARGET_NAMES, "average in place", "constants", "views"))
def test_such_networks_become_programs(name: str, target: str) -> None:
    """They used to be refused, or written with a constant instead of a moving average."""
    program = write_program(step_of(name), target=target, program_id="canonical")
    assert program.manifest.max_abs_diff < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_forward_changes_is_carried(in_place: bool) -> None:
    module = Average(in_place=in_place)
    step = step_of_module(module, (4,))
    assert [value.name for value in step.outputs if value.role == "buffer"] == ["new.buffer.mean"]
    inputs = example(step)
    results = run(step, inputs)
    module.double().load_state_dict({name: inputs[f"{kind}.{name}"] for name, kind in _kinds(module).items()})
    module(inputs["input"])
    torch.testing.assert_close(results["new.buffer.mean"], module.mean)
    assert not torch.equal(results["new.buffer.mean"], inputs["buffer.mean"])
    assert not results["new.buffer.mean"].requires_grad


def _kinds(module: nn.Module) -> dict[str, str]:
    buffers = dict(module.named_buffers())
    return {name: "buffer" if name in buffers else "parameter" for name in module.state_dict()}


def _counting_layer() -> nn.Module:
    """A layer that counts its runs in an integer buffer, as BatchNorm does."""
    module = nn.Linear(4, 3)
    module.register_buffer("mean", torch.zeros((), dtype=torch.int64))

    def count(_layer: nn.Module, _inputs: object) -> None:
        module.get_buffer("mean").add_(1)

    module.register_forward_pre_hook(count)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [Average(in_place=False, persistent=False), Average(in_place=True, persistent=False), _counting_layer()],
)
def test_a_constant_that_forward_changes_is_refused_by_name(module: nn.Module) -> None:
    with pytest.raises(ExportError, match=r"changes its tensor 'mean'.*make it a buffer with self\.register_buffer"):
        canonical_graph(step_of_module(module, (4,)))


@pytest.mark.slow
def test_a_buffer_that_changes_its_shape_is_refused_by_name() -> None:
    class Growing(nn.Linear):
        seen: Tensor

        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - PyTorch's name
            self.seen = torch.cat([self.seen, self.seen])
            return super().forward(input)

    module = Growing(4, 3)
    module.register_buffer("seen", torch.zeros(2))
    with pytest.raises(ExportError, match=r"its buffer 'seen' from torch.float32 \(2,\) to.*\(4,\)"):
        canonical_graph(step_of_module(module, (4,)))


@pytest.mark.slow
def test_attributes_that_forward_sets_are_not_state() -> None:
    """Old-style weight norm sets a plain tensor before each run; other modules store their last outputs."""

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.utils.weight_norm(nn.Linear(4, 3))
            self.seen: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.body(x)
            return self.seen

    with pytest.warns(FutureWarning, match="weight_norm"):
        module = Watched()
    before = module.body.weight
    step = step_of_module(module, (4,))
    canonical_graph(step)
    results = run(step, example(step))
    assert {"new.parameter.body.weight_g", "new.parameter.body.weight_v"} <= results.keys()
    assert module.seen is None
    assert module.body.weight is before


def test_a_checkpointed_block_draws_and_counts_once() -> None:
    plain = Checkpointed(again=False)
    again = Checkpointed(again=True)
    again.load_state_dict(plain.state_dict())
    step = step_of_module(again, (4,))
    assert sum(value.role == "random" for value in step.inputs) == 1
    inputs = example(step)
    expected = run(step_of_module(plain, (4,)), inputs)
    for name, actual in run(step, inputs).items():
        assert torch.equal(actual, expected[name]), name


@pytest.mark.slow
def test_randomness_and_types_of_its_own_are_refused() -> None:
    class Noisy(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - PyTorch's name
            return super().forward(torch.dropout(input, 0.5, train=True))

    class Precise(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - PyTorch's name
            return super().forward(input.double().square().float())

    with pytest.raises(ExportError, match=r"draws its own random numbers by aten\.\w+.*use nn\.Dropout"):
        canonical_graph(step_of_module(Noisy(4, 3), (4,)))
    with pytest.raises(ExportError, match=r"computes in torch\.float64 by aten\._to_copy.*only in torch\.float32"):
        canonical_graph(step_of_module(Precise(4, 3), (4,)))


def test_dead_code_is_gone_before_it_is_judged() -> None:
    class Careless(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - PyTorch's name
            torch.randn(3).double()
            return super().forward(input)

    check_operators(canonical_graph(step_of_module(Careless(4, 3), (4,))))


@pytest.mark.export
def test_an_inference_model_holds_constants_too() -> None:
    module = Constants()
    step = inference_step(module, SampleSpec(shape=(5, 4)), batch_size=2)
    graph = canonical_graph(step)
    assert is_functional(graph)
    _assert_same(graph, step, 0.0)


class Pooled(nn.Module):
    """ReLUs that a pool alone reads, a pool and another layer read, and a pool with overlapping windows reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(torch.relu(self.first(x)), 2)
        read_twice = torch.relu(self.second(x))
        x = functional.max_pool2d(read_twice, 2) + read_twice[:, :, ::2, ::2]
        x = functional.max_pool2d(torch.relu(x), 3, 2, 1)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def test_gradients_of_pooled_relus_are_masked_for_each_window() -> None:
    step = step_of_module(Pooled(), (2, 16, 16))
    graph = canonical_graph(step)
    masked = graph.graph.find_nodes(op="call_function", target=aten.threshold_backward.default)
    assert sorted(node.meta["val"].shape[-1] for node in masked) == [2, 8, 8]
    _assert_same(graph, step, 0.0)
