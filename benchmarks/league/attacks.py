"""The games under attack: what a fifth of malicious clients costs, as in FedFA's paper.

Park and Joe-Wong, "Federated Learning with Flexible Architectures", section 5.1: samples are split evenly, every client
has one architecture for good, half of the fleet the smallest, malicious clients the largest, and a part of the fleet
is drawn for each round. The paper compares FedFA with each of the others on the architectures that the other is made
for: with FlexiFed where depths alone differ, with HeteroFL where widths alone do, with NeFL where both do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from league.entrants import Entrant
from league.experiment import MODEL, Setting, play
from league.fleet import COMMUNICATION_S, LeagueDevice
from subfleet.device_profiles import DeviceProfile, LogRow, ResourceLog
from subfleet.elastic.building import network_of
from subfleet.elastic.spaces import uniform_space
from subfleet.emulation.attacks import Attack, Backdoor, LabelShuffling
from subfleet.emulation.gathered import GatheredRun
from subfleet.methods.fedfa import FedFA
from subfleet.methods.flexifed import FlexiFed
from subfleet.methods.heterofl import HeteroFL
from subfleet.methods.nefl import NeFL
from subfleet.methods.sizes import whole_depth
from subfleet.protocol.readings import Reading
from subfleet.settings.suspicion import SuspicionSettings

__all__ = ["ATTACKED", "ATTACKERS", "ATTACKS", "CLIENTS", "RIVALS", "attack_game"]

CLIENTS = 50
CLIENTS_PER_ROUND = 10
ATTACKERS = "attackers"
"""Their tier, in games without an attack too."""
_ATTACKERS = 10
_SMALLEST = 25
_PLENTY = 10**12

ATTACKS: Mapping[str, Attack | None] = MappingProxyType(
    {
        "honest": None,
        "shuffled": LabelShuffling(strength=20.0),
        "shuffled-5": LabelShuffling(strength=5.0),
        "shuffled-1": LabelShuffling(strength=1.0),
        # Samples are split evenly, so that an attacker weighs what each other client does.
        "backdoor": Backdoor(target=0, fraction=0.5, weight=1.0, total_weight=CLIENTS_PER_ROUND * 0.5),
    }
)
"""By name. In the mean two attackers are drawn for a round: each sends half of what replaces the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attacked:
    """An entrant under attack.

    Attributes:
        entrant: as it plays.
        varies: what its clients' architectures differ in: "depth", "width" or "both".
    """

    entrant: Entrant
    varies: str


_FEDFA = FedFA(norm="l2", scaled="changes")
"""As the paper's text says: updates are brought to the mean of their L2 norms."""
_WEIGHTS = FedFA(norm="l2")
"""As its formula says: weights are."""
_DEPTHS = (1.0,)
"""The whole width alone, with any number of blocks."""

ATTACKED: Mapping[str, Attacked] = MappingProxyType(
    {
        "fedfa-depth": Attacked(entrant=Entrant(method=_FEDFA, rates=_DEPTHS), varies="depth"),
        "flexifed-depth": Attacked(entrant=Entrant(method=FlexiFed(sharing="max"), rates=_DEPTHS), varies="depth"),
        "fedfa-width": Attacked(entrant=Entrant(method=replace(_FEDFA, depth=False)), varies="width"),
        "heterofl-width": Attacked(
            entrant=Entrant(method=HeteroFL(weighting="samples", class_mask=False)), varies="width"
        ),
        "fedfa-both": Attacked(entrant=Entrant(method=_FEDFA), varies="both"),
        "nefl-both": Attacked(
            entrant=Entrant(method=NeFL(neighbours=0), model={"learnable_steps": True}), varies="both"
        ),
        "fedfa-depth-weights": Attacked(entrant=Entrant(method=_WEIGHTS, rates=_DEPTHS), varies="depth"),
        "fedfa-width-weights": Attacked(entrant=Entrant(method=replace(_WEIGHTS, depth=False)), varies="width"),
        "fedfa-both-weights": Attacked(entrant=Entrant(method=_WEIGHTS), varies="both"),
        "fedfa-grafting": Attacked(entrant=Entrant(method=replace(_FEDFA, scaling=False)), varies="both"),
        "fedfa-scaling": Attacked(entrant=Entrant(method=replace(_FEDFA, grafting=False)), varies="both"),
        "fedfa-neither": Attacked(
            entrant=Entrant(method=replace(_FEDFA, grafting=False, scaling=False)), varies="both"
        ),
    }
)
"""Who plays under attack."""

RIVALS: Mapping[str, str] = MappingProxyType(
    {
        "flexifed-depth": "fedfa-depth",
        "heterofl-width": "fedfa-width",
        "nefl-both": "fedfa-both",
        "fedfa-depth-weights": "fedfa-depth",
        "fedfa-width-weights": "fedfa-width",
        "fedfa-both-weights": "fedfa-both",
        "fedfa-grafting": "fedfa-both",
        "fedfa-scaling": "fedfa-both",
        "fedfa-neither": "fedfa-both",
    }
)
"""Whose loss is compared with which form of FedFA's, on the same architectures."""


def attack_game(name: str, attack: str, seed: int, rounds: int, samples: Path) -> GatheredRun:
    """Describe a game.

    Args:
        name: of `ATTACKED`.
        attack: a name of `ATTACKS`.
        seed: as for `league.experiment.game`.
        rounds: of the run.
        samples: the file that `league.samples.cut` wrote for this seed and `CLIENTS` clients, split evenly.
    """
    one = ATTACKED[name]
    setting = Setting(name=f"{name}-{attack}-{seed}", seed=seed, rounds=rounds, clients_per_round=CLIENTS_PER_ROUND)
    found = play(one.entrant, setting, _fleet(_sizes_bytes(one)), samples)
    turned = (replace(client, attack=ATTACKS[attack]) for client in found.devices[-_ATTACKERS:])
    # What the methods withstand by themselves is compared; the server leaves out nobody.
    config = replace(found.run, suspicion=SuspicionSettings(change_factor=0, loss_factor=0))
    return replace(found, run=config, devices=(*found.devices[:-_ATTACKERS], *turned))


def _sizes_bytes(one: Attacked) -> list[int]:
    """Bytes of the weights of every architecture, the smallest first."""
    network = network_of(MODEL)
    space = whole_depth if one.varies == "width" else uniform_space
    return sorted(4 * network.parameter_count(spec) for spec in space(network, one.entrant.rates))


def _fleet(sizes_bytes: Sequence[int]) -> tuple[LeagueDevice, ...]:
    """Half of it can carry the smallest alone, the others one of all each; attackers come last, and carry anything."""
    middle = CLIENTS - _SMALLEST - _ATTACKERS
    # A link that moves one architecture's weights and the steps of its blocks, and not the next one's.
    carried = [sizes_bytes[0]] * _SMALLEST + [
        sizes_bytes[place * len(sizes_bytes) // middle] for place in range(middle)
    ]
    tiers = ["smallest"] * _SMALLEST + ["others"] * middle + [ATTACKERS] * _ATTACKERS
    links_bytes = [*(size + 64 for size in carried), *[_PLENTY] * _ATTACKERS]
    return tuple(
        _device(f"client-{place:02d}", tier, link_bytes)
        for place, (tier, link_bytes) in enumerate(zip(tiers, links_bytes, strict=True))
    )


def _device(name: str, tier: str, link_bytes: int) -> LeagueDevice:
    rate_bps = 8 * link_bytes / COMMUNICATION_S
    reading = Reading(memory_free_bytes=_PLENTY, downlink_bps=rate_bps, uplink_bps=rate_bps)
    log = ResourceLog(device=tier, source="none", licence="none", rows=(LogRow(t_s=0.0, reading=reading),))
    profile = DeviceProfile(name=tier, title=tier, memory_share=1.0, runtimes=("onnx",))
    return LeagueDevice(client_id=name, tier=tier, profile=profile, log=log)
