"""Sets of subnets to choose from."""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

from subfleet.elastic.axes import Axis
from subfleet.elastic.network import Network
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.subnet import Prefix, SubnetSpec

__all__ = ["uniform_space"]


def uniform_space(network: Network, rates: Sequence[float]) -> tuple[SubnetSpec, ...]:
    """Every width rate with every depth: nested prefixes of all channel axes, and the first blocks of each section.

    A channel axis keeps `ceil(rate * size)` indices, rounded up to whole groups. Rates that round to the same widths
    make one subnet, named after the largest of them. A name such as "w1/2 d2-1" tells the rate and the blocks of each
    section, counting the one that is always there.

    Args:
        network: the declaration.
        rates: widths relative to the full network, from 0.001 to 1.

    Returns:
        Different subnets from the fewest to the most parameters.

    Raises:
        ConfigError: there is no rate, or one is out of range.
    """
    if not rates or not all(0.001 <= rate <= 1 for rate in rates):
        raise ConfigError(f"width rates are {list(rates)}, but must be one or more numbers from 0.001 to 1")
    # 0.1 means one tenth: exact fractions keep ceil() from seeing 0.1 * 30 as a little more than 3.
    fractions = sorted({Fraction(rate).limit_denominator(1000) for rate in rates}, reverse=True)
    depths = list(itertools.product(*(range(1, depth + 1) for depth in network.config.depths)))
    found: dict[str, SubnetSpec] = {}
    for rate, depth in itertools.product(fractions, depths):
        spec = _uniform_spec(network, rate, depth)
        found.setdefault(spec.spec_id, spec)
    return tuple(sorted(found.values(), key=lambda spec: (network.parameter_count(spec), spec.name)))


def _uniform_spec(network: Network, rate: Fraction, depth: Sequence[int]) -> SubnetSpec:
    sizes = {name: _kept_size(axis, rate) for name, axis in network.axes.items() if axis.kind == "channel"}
    blocks = []
    for section, kept in enumerate(depth):
        # The first block of a section is always there, and no skippable block.
        blocks += [block.name for block in network.blocks if block.section == section][: kept - 1]
    return SubnetSpec(
        # An axis that is kept whole is not named, so that equal subnets are equal specs.
        axes=tuple((name, Prefix(size=size)) for name, size in sorted(sizes.items()) if size < network.axes[name].size),
        blocks=tuple(blocks),
        name=f"w{rate} d{'-'.join(map(str, depth))}",
    )


def _kept_size(axis: Axis, rate: Fraction) -> int:
    return min(axis.size, math.ceil(rate * axis.size / axis.granularity) * axis.granularity)
