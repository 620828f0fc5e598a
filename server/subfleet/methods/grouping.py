"""Groups of clients by how their updates point: cosines between changes, and agglomerative clustering into two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from subfleet.elastic.network import Network
from subfleet.methods.aggregator import ClientUpdate

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Matrix = npt.NDArray[np.float64]

__all__ = ["Linkage", "cosines", "two_groups"]

Linkage = Literal["complete", "single"]
"""How far two groups are from each other: as their farthest members, or as their nearest."""


def cosines(network: Network, clients: Sequence[ClientUpdate]) -> Matrix:
    """The cosine between the changes of each two clients, over the elements that both have.

    Args:
        network: of all of them.
        clients: in any order, which is that of rows and columns.

    Returns:
        A symmetric matrix of numbers from -1 to 1; 0 where one of both has not moved.
    """
    import numpy as np
    import torch

    from subfleet.elastic.maps import tensor_maps

    count = len(clients)
    products, squares = torch.zeros(count, count, dtype=torch.float64), torch.zeros(count, count, dtype=torch.float64)
    maps = [tensor_maps(network, one.client.architecture) for one in clients]
    for name, decl in network.tensors.items():
        changes = torch.zeros(count, *decl.shape, dtype=torch.float64)
        held = torch.zeros_like(changes)
        for place, (one, own) in enumerate(zip(clients, maps, strict=True)):
            if name in own:
                change = one.change[name].double().cpu()
                own[name].scatter(change, changes[place])
                own[name].scatter(torch.ones_like(change), held[place])
        flat, mask = changes.reshape(count, -1), held.reshape(count, -1)
        products += flat @ flat.T
        squares += flat.square() @ mask.T  # of the row's client, where the column's has the element, too
    norms = (squares * squares.T).sqrt()
    found = torch.where(norms > 0, products / norms.clamp_min(1e-300), torch.zeros_like(products))
    return np.asarray(found.clamp(-1.0, 1.0).numpy())


def two_groups(similarity: Matrix, linkage: Linkage) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Agglomerative clustering: the two nearest groups become one, until two are left. Of equals the first are taken.

    Args:
        similarity: of each two of two or more, symmetric.
        linkage: see `Linkage`.

    Returns:
        The places of the members of both groups, in order; the group of the first place first.
    """
    import numpy as np

    count = len(similarity)
    distance = -np.asarray(similarity, np.float64)
    np.fill_diagonal(distance, np.inf)
    merged = np.maximum if linkage == "complete" else np.minimum
    groups = {place: [place] for place in range(count)}
    while len(groups) > 2:
        left, right = divmod(int(distance.argmin()), count)
        row = merged(distance[left], distance[right])
        distance[left], distance[:, left] = row, row
        distance[right], distance[:, right] = np.inf, np.inf
        distance[left, left] = np.inf
        groups[left] += groups.pop(right)
    first, second = sorted(tuple(sorted(group)) for group in groups.values())
    return first, second
