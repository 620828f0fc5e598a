"""What a virtual client tells the server of itself."""

from subfleet.device.describing import packing_width_of
from subfleet.emulation.gathered import EmulatedDevice
from subfleet.protocol.messages import Profile
from subfleet.tasks.measuring import statistics_of

__all__ = ["announcement"]


def announcement(client: EmulatedDevice) -> Profile:
    """The profile that a virtual client announces: it follows from its description alone."""
    summary = client.data.summary()
    return Profile(
        client_id=client.client_id,
        session_id=f"{client.client_id}-1",
        device=client.profile.name,
        runtimes=(client.runtime,),
        sample_count=summary.sample_count,
        class_counts=summary.class_counts,
        input_shape=summary.input_shape,
        memory_total_bytes=client.profile.memory_total_bytes or 0,
        memory_share=client.profile.memory_share,
        memory_limit_bytes=client.profile.memory_limit_bytes,
        message_id=f"profile.{client.client_id}-1",
        operators=client.profile.operators,
        macs_per_s=client.profile.macs_per_s,
        architecture=client.profile.architecture,
        network=client.profile.network,
        class_names=summary.class_names,
        other_input_shapes=summary.other_input_shapes,
        packing_width=packing_width_of(client.profile),
        held_out_count=0 if client.test is None else len(client.test),
        inputs=statistics_of(client.data),
    )
