"""Settings of a network that was recorded from a PyTorch module."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from subfleet.elastic.families.records import fields
from subfleet.elastic.network import Norm, Places
from subfleet.elastic.recording.record import NetworkRecord, unpack_record
from subfleet.protocol.bounds import Length, checked
from subfleet.protocol.limits import Positive

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Recorded:
    """A network that was recorded from a PyTorch module; nothing of the module's code is needed to train it.

    Attributes:
        input_shape: shape of one sample.
        class_count: as in `Family`.
        recording: the record in lines of text, see `subfleet.elastic.recording.record.pack_record`.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "recorded"
    input_shape: fields.Counts
    class_count: Positive
    recording: Annotated[tuple[str, ...], Length(least=1)]

    @property
    def PREDICTS(self) -> Places:  # noqa: N802 - a constant of other families
        """See `get_predicted_places`."""
        return self.record().predicts

    @property
    def norm(self) -> Norm:
        """As in `Family`."""
        record = self.record()
        called = {call[0] for call in record.training.calls}
        if any(tensor.role == "mean" for tensor in record.tensors):
            return "batch"
        if "torch.nn.functional.group_norm" in called:
            return "group"
        return "layer" if any(tensor.role == "gain" for tensor in record.tensors) else "none"

    @property
    def learnable_steps(self) -> bool:
        """As in `Family`."""
        return any(tensor.role == "step" for tensor in self.record().tensors)

    @property
    def scaler(self) -> bool:
        """As in `Family`."""
        return any(call[0] == "divide_by_kept" for call in self.record().training.calls)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the tensors that training does not change."""
        return tuple(tensor.name for tensor in self.record().tensors if not tensor.trained)

    @property
    def awaited(self) -> tuple[str, ...]:
        """Names of the frozen tensors whose values must be given, because they are not in the record."""
        tensors = self.record().tensors
        return tuple(tensor.name for tensor in tensors if not tensor.trained and not tensor.values)

    @property
    def hindrance(self) -> str:
        """Why the network cannot grow block by block, such as "has no residual blocks"; empty if it can."""
        record = self.record()
        if not record.blocks:
            return "has no residual blocks"
        if any(
            not tensor.trained and any(not isinstance(size, int) for size in tensor.shape) for tensor in record.tensors
        ):
            return "keeps some of its tensors as they are, which cannot grow"
        return "reads several outputs one after another, which cannot grow by copies" if record.sums else ""

    def record(self) -> NetworkRecord:
        """The record of the network."""
        return unpack_record(self.recording)

    def module(self) -> "nn.Module":
        """See `Family`."""
        from subfleet.elastic.recording.replaying import replay_whole

        return replay_whole(self.record())
