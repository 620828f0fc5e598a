import pytest
from hypothesis import given
from hypothesis import strategies as st

from subfleet.protocol.errors import ConfigError, ProtocolError
from subfleet.protocol.topics import Address, Topics

_IDS = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", fullmatch=True)
_KINDS = st.from_regex(r"[a-z]{1,12}", fullmatch=True)


@pytest.mark.slow
@given(fleet=_IDS, client_id=_IDS, kind=_KINDS)
def test_topics_round_trip(fleet: str, client_id: str, kind: str) -> None:
    topics = Topics(fleet)
    assert topics.parse(topics.all(kind)) == Address(direction="all", client_id="", kind=kind)
    assert topics.parse(topics.downlink(client_id, kind)) == Address(direction="down", client_id=client_id, kind=kind)
    assert topics.parse(topics.uplink(client_id, kind)) == Address(direction="up", client_id=client_id, kind=kind)


@pytest.mark.slow
@given(topic=st.one_of(st.text(), st.text().map(lambda rest: f"subfleet/1/main/{rest}")))
def test_reading_raises_nothing_but_protocol_errors(topic: str) -> None:
    topics = Topics()
    try:
        address = topics.parse(topic)
    except ProtocolError:
        return
    built = {
        "all": topics.all(address.kind),
        "down": topics.downlink(address.client_id, address.kind),
        "up": topics.uplink(address.client_id, address.kind),
    }
    assert built[address.direction] == topic


@pytest.mark.parametrize(
    "topic",
    ["", "subfleet/1/other/all/round", "subfleet/1/main", "subfleet/1/main/up/a", "subfleet/1/main/up/+/x", "x/all/y"],
)
def test_other_topics_are_refused(topic: str) -> None:
    with pytest.raises(ProtocolError):
        Topics().parse(topic)


@pytest.mark.parametrize("fleet", ["", "a/b", "+", "#", "x" * 65])
def test_a_fleet_name_that_would_break_topics_is_refused(fleet: str) -> None:
    with pytest.raises(ConfigError, match="fleet name"):
        Topics(fleet)
