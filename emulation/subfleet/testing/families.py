"""The contract of families of elastic networks."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from subfleet.elastic.axes import Dim, Product
from subfleet.elastic.building import build_module, init_state, network_of
from subfleet.elastic.families import FAMILIES
from subfleet.elastic.growing import can_deepen, deepen_cell
from subfleet.elastic.maps import extract, tensor_maps
from subfleet.elastic.network import Family, Network, TensorDecl
from subfleet.elastic.spaces import uniform_space
from subfleet.export.programs import export_program
from subfleet.export.requests import TrainRequest
from subfleet.protocol.registry import problem_with_record
from subfleet.protocol.schema import canonical_json, from_plain, parse_json
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings
from subfleet.testing.submodels import draw_submodels, find_held_elements, have_same_bits

_MOST_BYTES = 2**20
"""Limit for the JSON text of settings."""
_LOADS_NO_TORCH = """
import importlib, sys
importlib.import_module(sys.argv[1])
sys.exit("torch" in sys.modules)
"""


@cache
def _find_import_problem(module: str) -> str | None:
    """Import a module in a new process; returns its errors if that fails or loads torch."""
    paths = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", _LOADS_NO_TORCH, module]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False, timeout=120
    )
    return done.stderr if done.returncode else None


class FamilyContract:
    """Tests that every family passes; pytest runs those of a subclass.

    Attributes:
        family: settings of a network that is as small as possible.
        rates: width rates; the smallest submodel is exported.
        objective: of the exported programs.
    """

    family: Family
    rates: tuple[float, ...] = (0.5, 1.0)
    objective: ObjectiveSettings = ObjectiveSettings()

    def test_it_is_a_record_that_survives_json(self) -> None:
        """A frozen dataclass that can be stored in run files and programs."""
        kind = type(self.family)
        problem = problem_with_record(kind, self.family.TYPE, ("TAG", "module", "norm", "scaler"))
        assert not problem, problem
        assert FAMILIES.tag == self.family.TAG, f"TAG is {self.family.TAG!r}, but must be {FAMILIES.tag!r}"
        again = from_plain(kind, parse_json(canonical_json(self.family), max_bytes=_MOST_BYTES))
        assert again == self.family, f"{self.family} is read back as {again}"
        assert hash(again) == hash(self.family), "equal settings have different hashes"

    def test_reading_its_settings_loads_no_torch(self) -> None:
        """Only `module` imports torch."""
        module = type(self.family).__module__
        problem = _find_import_problem(module)
        assert problem is None, f"{module} loads torch when it is imported; {problem}"

    def test_the_declaration_has_the_shapes_of_the_whole_module(self) -> None:
        """The names, shapes and order of tensors."""
        network = network_of(self.family)
        declared = {name: decl.shape for name, decl in network.tensors.items()}
        assert list(declared.items()) == _list_shapes(build_module(network, network.full_architecture()))
        assert network.shapes(network.full_architecture()) == declared

    def test_every_submodels_module_has_exactly_the_shapes_of_its_maps(self) -> None:
        """Its outputs are finite and have a value for each class."""
        network = network_of(self.family)
        for architecture in draw_submodels(network):
            module, local = build_module(network, architecture), extract(network, architecture, init_state(network, 0))
            assert _list_shapes(module) == [(name, tuple(tensor.shape)) for name, tensor in local.items()], architecture
            assert _list_shapes(module) == list(network.shapes(architecture).items()), architecture
            outputs = module.eval()(_draw_inputs(network))
            assert outputs.shape[0] == len(_draw_inputs(network)), f"outputs have shape {tuple(outputs.shape)}"
            assert self.family.class_count in outputs.shape[1:], f"outputs have shape {tuple(outputs.shape)}"
            assert outputs.isfinite().all(), "outputs are not finite"

    def test_extract_after_scatter_is_the_identity(self) -> None:
        """A map writes and reads exactly the elements at kept indices."""
        network = network_of(self.family)
        for seed, architecture in enumerate(draw_submodels(network)):
            local = _draw_tensors(network, architecture, seed)
            full = {name: torch.full(decl.shape, torch.nan) for name, decl in network.tensors.items()}
            for name, tensor_map in tensor_maps(network, architecture).items():
                tensor_map.scatter(local[name], full[name].zero_())
            assert have_same_bits(extract(network, architecture, full), local), architecture
            written = {name: torch.zeros(decl.shape) for name, decl in network.tensors.items()}
            for name, tensor_map in tensor_maps(network, architecture).items():
                tensor_map.scatter(torch.ones_like(local[name]), written[name])
            held = find_held_elements(network, architecture)
            assert all(torch.equal(mask, held[name].float()) for name, mask in written.items()), architecture

    def test_first_weights_are_those_of_the_seed(self) -> None:
        """They do not depend on earlier draws, and do not use the global generator."""
        network = network_of(self.family)
        before = torch.random.get_rng_state()
        first, again, other = (init_state(network_of(self.family), seed) for seed in (7, 7, 8))
        build_module(network, network.full_architecture())
        assert torch.equal(before, torch.random.get_rng_state()), "the global generator was used"
        assert have_same_bits(first, again), "the same seed gives different weights"
        assert not have_same_bits(first, other), "another seed gives the same weights"

    def test_a_submodel_computes_the_same_whenever_it_is_built(self) -> None:
        """A module has no state of an earlier one."""
        network = network_of(self.family)
        for architecture in draw_submodels(network, count=2):
            first, second = (build_module(network, architecture).eval()(_draw_inputs(network)) for _ in range(2))
            assert torch.equal(first, second), architecture

    def test_a_block_that_is_inserted_leaves_all_others_as_they_are(self) -> None:
        """Other blocks keep names, shapes, axes and first weights; in a chain, the next layer reads the new axis."""
        before = network_of(self.family)
        cell = next((cell for cell in before.cells if can_deepen(before, cell)), None)
        if cell is None:
            pytest.skip("it has no block that another one can follow")
        after = network_of(deepen_cell(self.family, cell))
        assert {name: after.axes.get(name) for name in before.axes} == before.axes
        known = {block.name for block in before.blocks}
        (new,) = (block for block in after.blocks if block.name not in known)
        read = {new.gives: new.reads} if new.gives else {}
        kept = [replace(block, reads=read.get(block.reads, block.reads)) for block in after.blocks if block != new]
        assert kept == [*before.blocks]
        tensors = {name: after.tensors[name] for name in before.tensors}
        assert {name: _replace_axes(decl, read) for name, decl in tensors.items()} == before.tensors
        assert {decl.part for name, decl in after.tensors.items() if name not in before.tensors} == {new.name}
        first, grown = init_state(before, 7), init_state(after, 7)
        assert have_same_bits(first, {name: grown[name] for name in first}), "first weights differ"

    @pytest.mark.parametrize("target", ["onnx", "executorch"])
    def test_a_small_submodels_program_is_written_and_verified(self, target: str) -> None:
        """The program agrees with PyTorch; skipped if the tools of the target are not installed."""
        if importlib.util.find_spec(target) is None:
            pytest.skip(f"{target} is not installed")
        network = network_of(self.family)
        request = TrainRequest(
            model=self.family,
            architecture=uniform_space(network, self.rates)[0],
            target=target,
            batch_size=2,
            objective=self.objective,
            optimiser=OptimiserSettings(),
        )
        program = export_program(request)
        assert program.manifest.target == target
        trained = {value.name.partition(".")[2] for value in program.manifest.inputs if value.role == "parameter"}
        assert trained <= set(network.shapes(request.architecture)), (
            "the program trains tensors that the submodel lacks"
        )
        assert trained, "the program trains nothing"


def _replace_axes(decl: TensorDecl, names: Mapping[str, str]) -> TensorDecl:
    """The declaration of a tensor with other axes, by name."""

    def rename(dim: Dim) -> Dim:
        if isinstance(dim, Product):
            factors = (names.get(factor, factor) if isinstance(factor, str) else factor for factor in dim.factors)
            return Product(factors=tuple(factors))
        return dim if dim is None else names.get(dim, dim)

    return replace(decl, axes=tuple(map(rename, decl.axes)))


def _list_shapes(module: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(tensor.shape)) for name, tensor in module.state_dict().items()]


def _draw_inputs(network: Network) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    shape = (2, *network.config.input_shape)
    if network.symbols:
        return torch.randint(network.symbols, shape, generator=generator)
    return torch.randn(shape, generator=generator)


def _draw_tensors(network: Network, architecture: Architecture, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in network.shapes(architecture).items()}
