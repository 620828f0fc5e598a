"""Settings of a network that was recorded from a PyTorch module."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from subfleet.elastic.families.records.checks import Counts
from subfleet.elastic.network import Norm, Places
from subfleet.elastic.recording.record import pack_record, unpack_record
from subfleet.protocol.bounds import Length, checked
from subfleet.protocol.limits import Count, Positive

if TYPE_CHECKING:
    from subfleet.elastic.families.blueprint import Blueprint


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Recorded:
    """A network that was recorded from a PyTorch module; nothing of the module's code is needed to train it.

    Attributes:
        input_shape: shape of one sample.
        class_count: as in `Family`.
        recording: the record in lines of text, see `subfleet.elastic.recording.record.pack_record`.
        symbols: size of the vocabulary if inputs are tokens; 0 if they are numbers.
    """

    TAG: ClassVar[str] = "family"
    TYPE: ClassVar[str] = "recorded"
    learnable_steps: ClassVar[bool] = False
    scaler: ClassVar[bool] = False
    input_shape: Counts
    class_count: Positive
    recording: Annotated[tuple[str, ...], Length(least=1)]
    symbols: Count = 0

    @property
    def PREDICTS(self) -> Places:  # noqa: N802 - a constant of other families
        """See `get_predicted_places`."""
        return unpack_record(self.recording).predicts

    @property
    def depths(self) -> tuple[int, ...]:
        """As in `Family`; each section has one block more than a submodel can leave out."""
        return tuple(len(names) + 1 for names in unpack_record(self.recording).sections) or (1,)

    @property
    def norm(self) -> Norm:
        """As in `Family`."""
        roles = {tensor.role for tensor in unpack_record(self.recording).tensors}
        return "batch" if "mean" in roles else "layer" if "gain" in roles else "none"

    @property
    def frozen(self) -> tuple[str, ...]:
        """See `subfleet.elastic.explicit.ExplicitFamily`."""
        return tuple(tensor.name for tensor in unpack_record(self.recording).tensors if not tensor.trained)

    @property
    def awaited(self) -> tuple[str, ...]:
        """See `subfleet.elastic.explicit.ExplicitFamily`."""
        tensors = unpack_record(self.recording).tensors
        return tuple(tensor.name for tensor in tensors if not tensor.trained and not tensor.values)

    @property
    def hindrance(self) -> str:
        """See `subfleet.elastic.explicit.ExplicitFamily`."""
        record = unpack_record(self.recording)
        if not record.training.blocks:
            return "has no residual blocks"
        if any(
            not tensor.trained and any(not isinstance(size, int) for size in tensor.shape) for tensor in record.tensors
        ):
            return "keeps some of its tensors as they are, which cannot grow"
        return "reads several outputs one after another, which cannot grow by copies" if record.sums else ""

    def with_sizes(self, sizes: Mapping[str, int]) -> "Recorded":
        """See `subfleet.elastic.explicit.ExplicitFamily`."""
        from subfleet.elastic.recording.growing import resize_record

        return replace(self, recording=pack_record(resize_record(unpack_record(self.recording), sizes)))

    def with_copy(self, block: str) -> tuple["Recorded", str]:
        """See `subfleet.elastic.explicit.ExplicitFamily`."""
        from subfleet.elastic.recording.growing import copy_block

        record, name = copy_block(unpack_record(self.recording), block)
        return replace(self, recording=pack_record(record)), name

    def united_with(self, others: Sequence["Recorded"]) -> "Recorded":
        """See `subfleet.elastic.explicit.ExplicitFamily`."""
        from subfleet.elastic.recording.uniting import unite_records

        record = unite_records([unpack_record(own.recording) for own in (self, *others)])
        return replace(self, recording=pack_record(record))

    def blueprint(self) -> "Blueprint":
        """See `Family`."""
        from subfleet.elastic.recording.blueprint import recorded_blueprint

        return recorded_blueprint(unpack_record(self.recording), symbols=self.symbols)
