"""Games under attack: a fifth of a small fleet sends boosted malicious changes, or teaches a trigger.

Samples are split evenly (IID). Twenty clients of four kinds of device replay the league's logs. The attackers are of
the largest kind, so that they hold the largest architecture that any client holds; honest clients hold it too, or
nothing could outvote the attackers in what only the largest has.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from league.entrants import ENTRANTS, Entrant
from league.experiment import Setting, play
from league.fleet import KINDS, LeagueDevice, devices
from subfleet.emulation.attacks import Attack, Backdoor, LabelShuffling
from subfleet.emulation.virtual.description import VirtualExperiment
from subfleet.server.methods.fedfa import FedFA

__all__ = ["ATTACKED", "ATTACKS", "CLIENTS", "attack_game"]

_FLEET = ((KINDS[0], 5), (KINDS[2], 4), (KINDS[4], 4), (KINDS[5], 7))
"""How many clients there are of which kinds."""
CLIENTS = sum(count for _, count in _FLEET)
_ATTACKERS = 4
"""So many of the last kind; the honest ones come first."""
ATTACKERS = "attackers"
"""Their tier, in games without an attack too."""

ATTACKS: Mapping[str, Attack | None] = MappingProxyType(
    {
        "honest": None,
        "shuffled": LabelShuffling(strength=20.0),
        "shuffled-5": LabelShuffling(strength=5.0),
        "shuffled-1": LabelShuffling(strength=1.0),
        # Samples are split evenly, so that an attacker weighs what each other client does.
        "backdoor": Backdoor(target=0, fraction=0.5, weight=1.0, total_weight=CLIENTS / _ATTACKERS),
    }
)
"""By name. Four attackers that send the same share the replacement among them."""

ATTACKED: Mapping[str, Entrant] = MappingProxyType(
    {
        "fedfa": ENTRANTS["fedfa"],
        "heterofl": ENTRANTS["heterofl"],
        "flexifed-max": ENTRANTS["flexifed-max"],
        "nefl": ENTRANTS["nefl"],
        "fedfa-grafting": Entrant(method=FedFA(scaling=False), note="grafting alone"),
        "fedfa-scaling": Entrant(method=FedFA(grafting=False), note="scaling alone"),
        "fedfa-neither": Entrant(method=FedFA(grafting=False, scaling=False), note="neither grafting nor scaling"),
        "fedfa-paper": ENTRANTS["fedfa-paper"],
    }
)
"""Who plays under attack."""


def attack_game(entrant: str, attack: str, seed: int, rounds: int, samples: Path, data: Path) -> VirtualExperiment:
    """Describe a game.

    Args:
        entrant: a name of `ATTACKED`.
        attack: a name of `ATTACKS`.
        seed: as for `league.experiment.game`.
        rounds: of the run.
        samples: the file that `league.samples.cut` wrote for this seed and `CLIENTS` clients, split evenly.
        data: the folder of logs.
    """
    setting = Setting(name=f"{entrant}-{attack}-{seed}", seed=seed, rounds=rounds)
    found = play(ATTACKED[entrant], setting, _fleet(data), samples)
    honest, attackers = found.clients[:-_ATTACKERS], found.clients[-_ATTACKERS:]
    turned = (replace(one, attack=ATTACKS[attack], tier=ATTACKERS) for one in attackers)
    return replace(found, clients=(*honest, *turned))


def _fleet(data: Path) -> tuple[LeagueDevice, ...]:
    every = devices(data)
    return tuple(device for kind, count in _FLEET for device in [one for one in every if one.kind == kind][:count])
