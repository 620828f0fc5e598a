"""Networks that appear and retire after a fold: what a method answers is checked, and becomes the next model."""

from dataclasses import replace
from types import MappingProxyType

from subfleet.elastic.inheriting import inherited
from subfleet.elastic.lineage import Lineage
from subfleet.elastic.model_state import ModelState
from subfleet.methods.run_networks import Evolution, EvolutionContext
from subfleet.rounds.terms import Terms

__all__ = ["evolved"]


def evolved(terms: Terms, context: EvolutionContext, answer: Evolution) -> tuple[ModelState, tuple[Lineage, ...]]:
    """The next model, and the lineages of all networks that the run has had.

    Args:
        terms: of the run.
        context: what the method was asked.
        answer: what it answered.

    Raises:
        ValueError: the answer is none that `Evolved` allows: a mistake of the method's, which says what it is.
        ConfigError: the map of a network that appears does not fit it.
    """
    _check(terms, context, answer)
    if not answer.born and not answer.retired:
        return answer.after, () if len(context.lineages) == 1 else context.lineages
    state, retired = answer.after, frozenset(answer.retired)
    for lineage in answer.born:
        state = state.with_network(lineage.id, _first_state(terms, context, answer, lineage))
    lineages = (
        *(replace(one, retired_round=context.round) if one.id in retired else one for one in context.lineages),
        *answer.born,
    )
    for lineage in lineages:
        if lineage.id in retired:
            state = state.without_network(lineage.id, lineage)
    return state, lineages


def _first_state(terms: Terms, context: EvolutionContext, answer: Evolution, lineage: Lineage) -> ModelState:
    network, state = terms.declared(lineage).network, answer.states.get(lineage.id)
    if state is None:
        # What is drawn lies where the others do.
        parent = context.networks[next(iter(context.networks)) if lineage.parent is None else lineage.parent]
        shared = answer.after.of(parent.id).shared
        state = ModelState.first(inherited(lineage.map, network, parent, shared, seed=context.seed), lineage)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.shared.items()}
    if shapes != {name: decl.shape for name, decl in network.tensors.items()}:
        raise ValueError(f"the first weights of network {lineage.id!r} are not those of its settings")
    shared = {name: state.shared[name] for name in network.tensors}
    return replace(state, shared=shared, lineage=lineage, others=MappingProxyType({}))


def _check(terms: Terms, context: EvolutionContext, answer: Evolution) -> None:
    used = {one.id for one in context.lineages}
    in_use = set(context.networks)
    born = [one.id for one in answer.born]
    if len({*born, *used}) < len(born) + len(used) or "" in born:
        raise ValueError(f"networks {born} appear, but each needs an id that none of {sorted(used)} ever had")
    for one in answer.born:
        first = terms.config.model
        asked = (one.config.input_shape, one.config.class_count)
        if asked != (first.input_shape, first.class_count):
            raise ValueError(
                f"network {one.id!r} takes {asked[0]} and tells {asked[1]} classes apart, but the run's take "
                f"{first.input_shape} and tell {first.class_count}"
            )
        if one.parent is not None and one.parent not in in_use:
            raise ValueError(f"network {one.id!r} grows from {one.parent!r}, which is not in use")
        if (one.born_round, one.retired_round) != (context.round, None):
            raise ValueError(f"network {one.id!r} appears after round {context.round}, but says otherwise")
    if not set(answer.retired) <= in_use:
        raise ValueError(f"networks {sorted(answer.retired)} retire, but in use are {sorted(in_use)}")
    if in_use == set(answer.retired) and not born:
        raise ValueError("all networks retire, but one must be in use")
    if set(answer.after.network_ids) != in_use:
        raise ValueError("the model after a round has other networks than the round; name them in `born` or `retired`")
