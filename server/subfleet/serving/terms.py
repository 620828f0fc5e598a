"""From a configuration to what a run works with: the network, its search space, its prices."""

from subfleet.elastic.building import network_of
from subfleet.elastic.cost import Costs
from subfleet.protocol.errors import ConfigError
from subfleet.rounds.state import Terms
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
    network = network_of(config.model)
    problem = config.training.augmentation.problem_with(config.model.input_shape)
    if problem is not None:
        raise ConfigError(problem)
    policies = config.policies
    overhead_bytes = {target: config.memory_overhead_bytes.get(target, 0) for target in config.targets}
    training = config.training
    memory = estimated_memory(
        network, overhead_bytes, batch_size=training.program_batch_size, recompute=training.recompute
    )
    price = Prices(network=network, costs=Costs(network), codec=policies.update_codec, memory=memory)
    candidates = [price(spec) for spec in policies.space(network, config.rates)]
    if not candidates:
        raise ConfigError("the method's space of subnets is empty; name one or more width rates")
    return Terms(
        config=config,
        run_id=run_id,
        network=network,
        policies=policies,
        candidates=ordered(candidates),
        price=price,
    )
