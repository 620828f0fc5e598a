"""Finds the axes whose indices growth cannot copy.

Growth copies the rows of weights that compute an index, and divides the columns of weights that read it. It takes the
first dimension of a weight for rows and all others for columns, so an axis must not be used in any other way.
"""

from collections.abc import Iterator

from torch import Tensor

from subfleet.elastic.recording.dimensions import Leaf, expand_parts, resolve
from subfleet.elastic.recording.run import ModuleRuns

_EMBEDDING = "torch.nn.functional.embedding"


def find_uncopied(runs: ModuleRuns) -> Iterator[Leaf]:
    """Yield the leaves that products of computed values sum over, and those of weights that read others than usual."""
    read = dict[str, set[Leaf]]()
    for product in runs.training.products:
        summed = {leaf for dim in product.summed for leaf in _list_leaves(dim)}
        read.setdefault(product.weight, set()).update(summed)
    yield from read.pop("", ())
    embeddings = {id(call.args[1]) for call in runs.training.calls if call.name == _EMBEDDING}
    for name, leaves in read.items():
        tensor = runs.state.get(name)
        if tensor is not None:
            yield from _find_unusual(runs, tensor, leaves, embeds=id(tensor) in embeddings)


def _find_unusual(runs: ModuleRuns, weight: Tensor, read: set[Leaf], *, embeds: bool) -> Iterator[Leaf]:
    for place, dim in enumerate(runs.follower.dims_of(weight)):
        for leaf in _list_leaves(dim):
            if embeds or (leaf in read) != (place > 0):
                yield leaf


def _list_leaves(dim: tuple[Leaf, ...]) -> list[Leaf]:
    return [leaf for product in expand_parts(resolve(dim)) for leaf in product]
