"""Finds the axes whose indices growth cannot copy.

Growth copies the rows of weights that compute an index, and divides the columns of weights that read it. It takes the
first dimension of a weight for rows and all others for columns, so an axis must not be used in any other way.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from subfleet.elastic.recording.dimensions import Dim, Leaf, expand_parts, resolve
from subfleet.elastic.recording.run import ModuleRuns

_EMBEDDING = "torch.nn.functional.embedding"


def find_uncopied(runs: ModuleRuns) -> Iterator[Leaf]:
    """Yield the leaves that products of computed values sum over, and those of weights that read others than usual."""
    summed = defaultdict[str, list[Dim]](list)
    for product in runs.training.products:
        summed[product.weight] += product.summed
    for dim in summed.pop("", ()):
        yield from _list_leaves(dim)
    embeddings = {id(call.args[1]) for call in runs.training.calls if call.name == _EMBEDDING}
    for name, dims in summed.items():
        tensor = runs.state.get(name)
        if tensor is not None:
            yield from _find_unusual(runs.follower.dims_of(tensor), dims, embeds=id(tensor) in embeddings)


def _find_unusual(dims: Sequence[Dim], summed: Sequence[Dim], *, embeds: bool) -> Iterator[Leaf]:
    read = {leaf for dim in summed for leaf in _list_leaves(dim)}
    places = Counter(leaf for dim in dims for leaf in _list_leaves(dim))
    for place, dim in enumerate(dims):
        itself = any(dim is own for own in summed)
        for leaf in _list_leaves(dim):
            is_read = leaf in read if places[leaf] == 1 else itself
            if embeds or is_read != (place > 0):
                yield leaf


def _list_leaves(dim: tuple[Leaf, ...]) -> list[Leaf]:
    return [leaf for product in expand_parts(resolve(dim)) for leaf in product]
