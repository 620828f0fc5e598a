"""A client's labels in a run: its classes in the run's order, or why they are none of the run's. Pure."""

from subfleet.protocol.class_names import class_places
from subfleet.protocol.messages import Profile
from subfleet.settings.run import Run

__all__ = ["class_counts_of"]


def class_counts_of(config: Run, profile: Profile) -> tuple[tuple[int, ...], str]:
    """How many labels of each of the run's classes a client tells that it has; and why it cannot take part.

    The reason is empty where it can. Then it maps its data by the same names and the same rule.
    """
    class_count, counts = config.model.class_count, profile.class_counts
    if not config.training.objective.over_classes:
        return (), ""  # whole numbers are targets, too
    if not counts:
        return (), "its labels are floating point numbers, but the run's are classes"
    if not profile.class_names:
        problem = f"its data have {len(counts)} classes, but the model has {class_count}"
        return counts, problem if len(counts) > class_count else ""
    try:
        places = class_places(profile.class_names, config.data.classes, class_count)
    except ValueError as error:
        return (), str(error)
    ordered = [0] * class_count
    for place, count in zip(places, counts, strict=True):
        ordered[place] = count
    return tuple(ordered), ""
