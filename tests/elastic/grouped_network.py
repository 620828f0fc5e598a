"""A small network with a grouped convolution (Xie et al. 2017, "ResNeXt", figure 3c), outside our families."""

from collections import OrderedDict
from functools import cache

from torch import nn

from subfleet.elastic.building import network_of
from subfleet.elastic.families.layers import SpatialMean
from subfleet.elastic.network import Network
from subfleet.elastic.recording.loading import record_network


@cache
def record_grouped_network() -> Network:
    """Its axes are "start", the groups "reduce", and "class"."""
    module = nn.Sequential(
        OrderedDict(
            start=nn.Conv2d(2, 5, 3, padding=1),
            relu=nn.ReLU(),
            reduce=nn.Conv2d(5, 6, 1),
            norm=nn.GroupNorm(3, 6),
            grouped=nn.Conv2d(6, 6, 3, padding=1, groups=3),
            relu2=nn.ReLU(),
            expand=nn.Conv2d(6, 5, 1),
            pool=SpatialMean(),
            head=nn.Linear(5, 3),
        )
    )
    return network_of(record_network(module, (2, 4, 4)))
