"""A small network with a grouped convolution (Xie et al. 2017, "ResNeXt", figure 3c), outside our families."""

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from subfleet.elastic.axes import Axis
from subfleet.elastic.families.blueprint import Blueprint, Sizes
from subfleet.elastic.families.layers import SpatialMean
from subfleet.elastic.families.records.residual import Mlp


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    config: Mlp
    blueprint: Blueprint


def _build(sizes: Sizes) -> nn.Module:
    stem, groups, inside = sizes["stem"], sizes["groups"], sizes["groups"] * 2
    return nn.Sequential(
        OrderedDict(
            start=nn.Conv2d(2, stem, 3, padding=1),
            relu=nn.ReLU(),
            reduce=nn.Conv2d(stem, inside, 1),
            norm=nn.GroupNorm(groups, inside),
            grouped=nn.Conv2d(inside, inside, 3, padding=1, groups=groups),
            relu2=nn.ReLU(),
            expand=nn.Conv2d(inside, stem, 1),
            pool=SpatialMean(),
            head=nn.Linear(stem, sizes["class"]),
        )
    )


GROUPED = Case(
    config=Mlp(input_shape=(2, 4, 4), class_count=3, widths=(5,), depths=(1,), norm="none"),
    blueprint=Blueprint(
        axes=(
            Axis(name="stem", size=5, kind="channel"),
            Axis(name="groups", size=3, kind="channel"),
            Axis(name="class", size=3, kind="class", granularity=3),
        ),
        blocks=(),
        build=_build,
    ),
)
