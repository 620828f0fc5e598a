"""What a virtual client tells the server of itself."""

from dataclasses import replace

from subfleet.device.describing import make_profile
from subfleet.emulation.gathering import EmulatedDevice
from subfleet.protocol.messages import Profile
from subfleet.tasks.measuring import measure_inputs


def build_profile(client: EmulatedDevice) -> Profile:
    """The profile that a virtual client announces: it follows from its description alone."""
    summary = replace(client.data.summary(), inputs=measure_inputs(client.data))
    held_out = None if client.test is None else client.test.summary()
    session_id = f"{client.client_id}-1"
    return make_profile(client.client_id, session_id, client.profile, client.runtime, summary, held_out)
