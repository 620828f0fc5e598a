"""Which operators of a supernet a client is sent: as many as a budget of bytes has room for (FedorAS, equation 1)."""

from collections.abc import Mapping
from random import Random

__all__ = ["draw_subspace"]


def draw_subspace(
    choices: Mapping[str, Mapping[str, int]], budget_bytes: float, rng: Random
) -> dict[str, tuple[str, ...]] | None:
    """Draw a subspace: operators without parameters, one of each choice that has none of these, then what fits.

    All operators are equally likely to come next, but the last room goes to small ones, so that these are kept more
    often than large ones, as in the public code.

    Args:
        choices: of each choice its operators that the device can run, with their bytes, in network order; one or more.
        budget_bytes: for all of them together, taken whole at most.
        rng: where the draw comes from.

    Returns:
        The operators that are kept of each choice, in network order; None where not one of each fits.
    """
    kept = {name: {one for one, size in own.items() if not size} for name, own in choices.items()}
    lacking = [name for name, own in kept.items() if not own]
    left = budget_bytes
    to_come = sum(min(choices[name].values(), default=0) for name in lacking)
    if any(not own for own in choices.values()) or to_come > left:
        return None
    rng.shuffle(lacking)
    for name in lacking:
        own = choices[name]
        to_come -= min(own.values())
        one = rng.choice([one for one, size in own.items() if size <= left - to_come])
        kept[name].add(one)
        left -= own[one]
    others = [(name, one) for name, own in choices.items() for one in own if one not in kept[name]]
    rng.shuffle(others)
    for name, one in others:
        if choices[name][one] <= left:
            kept[name].add(one)
            left -= choices[name][one]
    return {name: tuple(one for one in own if one in kept[name]) for name, own in choices.items()}
