"""Whether a run does what its method's paper says: the method's own departures, and those of what the run replaces."""

from collections.abc import Sequence
from operator import attrgetter

from subfleet.methods.describing import Setting, status_of, those_true
from subfleet.methods.policies import Method
from subfleet.protocol.update_codecs import Uncompressed

__all__ = ["departures_of", "method_status"]


def departures_of(method: Method, setting: Setting) -> tuple[str, ...]:
    """In what a method differs from its paper: by itself, and by each parameter that has not the paper's value."""
    told = (
        one.departure(name, attrgetter(name)(method))
        for name, one in method.INFO.published.items()
        if one is not None and one.matters(method)
    )
    return (*method.departures(setting), *filter(None, told))


def method_status(method: Method, setting: Setting, altered: Sequence[str] = ()) -> str:
    """Of a method in a run: "exact" where it does what its paper says, else in what it differs from it.

    Args:
        method: with its parameters.
        setting: what of the run decides, too.
        altered: what the run did with updates that its method would have taken as they are.
    """
    return status_of((*departures_of(method, setting), *_replaced(method, setting), *altered))


def _replaced(method: Method, setting: Setting) -> tuple[str, ...]:
    """What the run does in place of the method, where the method has no word on it itself."""
    own, judged = method.policies(), method.INFO.judges
    merge, optimiser, codec, taught = (
        setting.merge,
        setting.server_optimiser,
        setting.update_codec,
        setting.distillation,
    )
    other_optimiser = optimiser is not None and type(optimiser) is not type(own.server_optimiser)
    other_codec = codec not in (None, Uncompressed()) and "update_codec" not in judged
    teaches = taught is not None and taught.iterations > 0 and "distillation" not in judged
    return those_true(
        {
            f"updates are merged by {merge.TYPE if merge else ''} in place of the mean (merge)": merge is not None,
            f"the server's optimiser is {optimiser.TYPE if optimiser else ''} (server_optimiser)": other_optimiser,
            f"updates are compressed by {codec.TYPE if codec else ''} (update_codec)": other_codec,
            "norms are kept per size (norms)": setting.norms == "bank"
            and setting.norm != "none"
            and "norms" not in judged,
            "the whole model teaches its subnets (distillation)": teaches,
        }
    )
