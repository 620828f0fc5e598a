"""From a configuration to what a run works with: the network, its search space, its prices."""

from dataclasses import replace
from functools import cache, partial

from subfleet.elastic.building import network_of
from subfleet.elastic.cost import Costs
from subfleet.elastic.network import Family, Network
from subfleet.methods.policies import Policies
from subfleet.protocol.errors import ConfigError
from subfleet.rounds.terms import Declared, Terms
from subfleet.search.candidates import ordered
from subfleet.search.prices import Prices, estimated_memory
from subfleet.settings.run import Run

__all__ = ["terms_of"]


def terms_of(config: Run, run_id: str) -> Terms:
    """Everything about a run that does not change.

    Args:
        config: of the run.
        run_id: its name and a part that no other run has.

    Raises:
        ConfigError: the model's description is wrong, there is nothing to choose from, or the model's inputs are no
            images, which alone can be augmented.
    """
    problem = config.training.augmentation.problem_with(config.model.input_shape)
    if problem is not None:
        raise ConfigError(problem)
    policies = config.policies
    return Terms(
        config=config,
        run_id=run_id,
        policies=policies,
        first=_declared(config, policies, network_of(config.model)),
        declare=cache(partial(_grown, config, policies)),
    )


def _grown(config: Run, policies: Policies, network_id: str, family: Family) -> Declared:
    """A network that appeared during the run; its sizes have its id in their names."""
    found = _declared(config, policies, replace(network_of(family), id=network_id))
    named = (replace(one, spec=replace(one.spec, name=f"{network_id} {one.spec.name}")) for one in found.candidates)
    return replace(found, candidates=tuple(named))


def _declared(config: Run, policies: Policies, network: Network) -> Declared:
    overhead_bytes = {target: config.memory_overhead_bytes.get(target, 0) for target in config.targets}
    training = config.training
    memory = estimated_memory(
        network, overhead_bytes, batch_size=training.program_batch_size, recompute=training.recompute
    )
    price = Prices(network=network, costs=Costs(network), codec=policies.update_codec, memory=memory)
    candidates = [price(spec) for spec in policies.space(network, config.rates)]
    if not candidates:
        raise ConfigError("the method's space of subnets is empty; name one or more width rates")
    return Declared(network=network, candidates=ordered(candidates), price=price)
