from collections.abc import Iterator

import pytest
from transport.mosquitto import open_mosquitto
from transport.rigs import FAULTS, Rig, memory_rig, mqtt_rig, paced_rig

from subfleet.link.broker import EmbeddedBroker

_BROKER_MARKS = (pytest.mark.broker, pytest.mark.slow)


@pytest.fixture(scope="session")
def embedded_url() -> Iterator[str]:
    with EmbeddedBroker() as broker:
        yield broker.url


@pytest.fixture(scope="session")
def mosquitto_url() -> Iterator[str]:
    with open_mosquitto() as url:
        yield url


@pytest.fixture(
    params=[
        "memory",
        "faulty",
        "paced",
        pytest.param("embedded", marks=_BROKER_MARKS),
        pytest.param("mosquitto", marks=_BROKER_MARKS),
    ]
)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Each transport, and the memory transport also with faults."""
    if request.param in ("embedded", "mosquitto"):
        opened_rig = mqtt_rig(request.getfixturevalue(f"{request.param}_url"))
    else:
        opened_rig = {"memory": memory_rig, "faulty": lambda: memory_rig(FAULTS), "paced": paced_rig}[request.param]()
    yield opened_rig
    opened_rig.close()
