"""The runs that come with the package, by name."""

from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType

__all__ = ["RUNS", "shipped_text"]

_METHODS = (
    *(
        "anycostfl",
        "clustered",
        "dynamic_selection",
        "fedadam",
        "fedadp",
        "fedavg",
        "federated_dropout",
        "fedfa",
        "fedoras",
        "fedprox",
    ),
    *("fedrolex", "fedyogi", "fjord", "flexifed", "fluid", "heterofl", "nefl", "oort", "power_of_choice", "pyramidfl"),
    *("fedtrans", "sattler", "standalone"),
)
_LEAGUE = ("league", "league-both", "league-depth", "league-width")
_FEDTRANS = (
    *("fedtrans-ablation", "fedtrans-game", "fedtrans-heterogeneity", "fedtrans-models", "fedtrans-sensitivity"),
    "fedtrans-vit",
)
_FEDADP = ("fedadp-game", "fedadp-vgg", "fedadp-vgg-small")
_KINDS = ("classification", "multi-label", "regression", "regression-several", "segmentation", "sequence")
RUNS: Mapping[str, str] = MappingProxyType(
    {name: f"{name}.toml" for name in ("quickstart", "fleet", *_METHODS, *_LEAGUE, *_FEDTRANS, *_FEDADP, *_KINDS)}
)
"""Name to file in the package's `runs` folder."""


def shipped_text(name: str) -> str:
    """The text of a shipped run.

    Raises:
        KeyError: there is none of that name.
    """
    return (resources.files("subfleet.settings") / "runs" / RUNS[name]).read_text(encoding="utf-8")
