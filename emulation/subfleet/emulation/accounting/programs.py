"""Estimates of programs and of what travels, without an export and without a model."""

from collections.abc import Mapping
from types import MappingProxyType

from subfleet.elastic.network import Network
from subfleet.elastic.update_form import UpdateForm
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task import Train
from subfleet.protocol.tensors import measure_container
from subfleet.protocol.update_codecs import Uncompressed

PROGRAM_BYTES: Mapping[str, int] = MappingProxyType({"onnx": 2_120, "executorch": 4_700, "torch": 830})
"""By target, bytes of a training program for each tensor of its submodel; it has no weights. The programs of the
methods' checks, convolutional networks of 11 to 23 tensors, have 0.97 to 1.17 of it, and 1.6 with self-distillation."""


def estimate_program_bytes(network: Network, size: Architecture, target: str) -> int:
    """The bytes of the training program of a submodel, see `PROGRAM_BYTES`."""
    return PROGRAM_BYTES[target] * len(network.shapes(size))


def count_weight_bytes(network: Network, architecture: Architecture, *, frozen: bool) -> int:
    """The bytes of a submodel's frozen weights, or of the others, as they are sent."""
    shapes = network.shapes(architecture)
    return measure_container({name: shape for name, shape in shapes.items() if network.tensors[name].frozen == frozen})


def count_update_bytes(network: Network, architecture: Architecture, work: Train) -> int:
    """The bytes of an update as it is sent. With a codec the container's header is that of an update without one."""
    form = UpdateForm.of(network, architecture, work.update_codec, work.sends)
    plain = UpdateForm.of(network, architecture, Uncompressed(), work.sends)
    return measure_container(form.shapes) - plain.size_bytes + form.size_bytes
