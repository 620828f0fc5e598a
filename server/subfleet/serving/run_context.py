"""Creates the context of a run from its settings: the network, its search space and its cost estimates."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType

from subfleet.elastic.building import network_of
from subfleet.elastic.cost import Costs
from subfleet.elastic.network import Family, Network
from subfleet.elastic.replication import size_in
from subfleet.methods.roles import Roles
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture
from subfleet.rounds.context import Declared, RunContext
from subfleet.search.candidates import order_candidates
from subfleet.search.estimates import Estimates, estimate_by_shapes
from subfleet.settings.run import Run


def create_context(config: Run, run_id: str) -> RunContext:
    """Create the context of a run.

    Args:
        config: settings of the run.
        run_id: unique id.

    Raises:
        ConfigError: the settings of the model are invalid, the search space is empty, or inputs that are not images are
            to be augmented.
    """
    problem = config.training.augmentation.problem_with(config.model.input_shape)
    if problem is not None:
        raise ConfigError(problem)
    roles, network = config.roles, network_of(config.model)
    return RunContext(
        config=config,
        run_id=run_id,
        roles=roles,
        first=_declare(config, roles, network, roles.assigner.space(network, config.rates)),
        declare=cache(partial(_declare_grown, config, roles)),
    )


def _declare_grown(config: Run, roles: Roles, network_id: str, family: Family, members: tuple[Family, ...]) -> Declared:
    """A network that was added during the run; the names of its submodels begin with its id."""
    network = replace(network_of(family), id=network_id)
    sizes = {member: size_in(network, network_of(member)) for member in members}
    own = {size.architecture_id: _name_by_size(network, size, member.TYPE) for member, size in sizes.items()}
    space = tuple(own.values()) or roles.assigner.space(network, config.rates)
    named = [replace(size, name=f"{network_id} {size.name}") for size in space]
    declared = _declare(config, roles, network, named)
    by_id = {size.architecture_id: size for size in declared.space}
    return replace(
        declared, members=MappingProxyType({family: by_id[size.architecture_id] for family, size in sizes.items()})
    )


def _name_by_size(network: Network, size: Architecture, family: str) -> Architecture:
    """The network of a client, named by its family, depth and number of parameters."""
    depth = len(network.cells) - len(network.blocks) + len(size.blocks)
    return replace(size, name=f"{family} d{depth} {network.parameter_count(size) / 1e6:.2f}M")


def _declare(config: Run, roles: Roles, network: Network, space: Sequence[Architecture]) -> Declared:
    overhead_bytes = {target: config.memory_overhead_bytes.get(target, 0) for target in config.targets}
    training = config.training
    memory = estimate_by_shapes(
        network, overhead_bytes, batch_size=training.program_batch_size, recompute=training.recompute
    )
    estimate = Estimates(network=network, costs=Costs(network), codec=roles.techniques.codec, memory=memory)
    candidates = [estimate(architecture) for architecture in space]
    if not candidates:
        raise ConfigError("the method's space of submodels is empty; name one or more width rates")
    return Declared(network=network, candidates=order_candidates(candidates), estimate=estimate)
