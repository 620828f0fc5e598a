"""MQTT's rule for matching topics with subscriptions."""


def matches(topic_filter: str, topic: str) -> bool:
    """Whether a subscription covers a topic; `+` stands for one level, a final `#` for all that follow.

    As MQTT 3.1.1 section 4.7 says: `a/#` covers `a` too, and no wildcard in the first level covers a topic that starts
    with `$`, where brokers publish their own state.
    """
    filter_levels, levels = topic_filter.split("/"), topic.split("/")
    if topic.startswith("$") and filter_levels[0] in ("+", "#"):
        return False
    if filter_levels[-1] == "#":
        filter_levels.pop()
        levels = levels[: len(filter_levels)]
    return len(filter_levels) == len(levels) and all(
        expected in ("+", level) for expected, level in zip(filter_levels, levels, strict=True)
    )
