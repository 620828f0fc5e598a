"""Label masking: a client neither trains nor moves the outputs of classes that it lacks (HeteroFL, section 3.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from subfleet.elastic.network import Network, TensorDecl
from subfleet.methods.policies import Participant
from subfleet.protocol.training import TrainingSettings

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["held_classes", "with_class_mask"]


def with_class_mask(settings: TrainingSettings, round_number: int) -> TrainingSettings:
    """The local training with logits of absent classes counted as 0, where labels are classes."""
    if not settings.objective.over_classes:
        return settings
    return replace(settings, objective=replace(settings.objective, class_mask=True))


def held_classes(network: Network, client: Participant) -> Mapping[str, float | Tensor]:
    """Factors of 1 on the rows of classes that the client holds, and of 0 on the others.

    None where its labels are no classes.
    """
    if not client.class_counts:
        return {}
    tensors = [decl for decl in network.tensors.values() if _class_dimension(network, decl) is not None]
    return {decl.name: _rows(network, decl, client) for decl in tensors}


def _class_dimension(network: Network, decl: TensorDecl) -> int | None:
    kinds = [network.axes[dim].kind if isinstance(dim, str) else None for dim in decl.axes]
    return kinds.index("class") if "class" in kinds else None


def _rows(network: Network, decl: TensorDecl, client: Participant) -> Tensor:
    import torch  # by those who fold, not by those who read settings

    dimension = _class_dimension(network, decl) or 0
    counts = (*client.class_counts, *([0] * (decl.shape[dimension] - len(client.class_counts))))
    held = torch.tensor([float(count > 0) for count in counts])
    return held.reshape([-1 if place == dimension else 1 for place in range(len(decl.shape))])
