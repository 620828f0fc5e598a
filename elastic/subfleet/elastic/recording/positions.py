"""Counts the places of a sample at which tensors of a module are applied."""

import math
from collections import Counter

from subfleet.elastic.recording.dimensions import measure
from subfleet.elastic.recording.following import list_tensors
from subfleet.elastic.recording.run import ModuleRuns


def count_positions(runs: ModuleRuns) -> dict[str, int]:
    """The number of places at which each tensor is applied; of a batch, where these depend on it.

    Of a weight, at which it is multiplied, over all layers that share it; of all other tensors of a layer, those of its
    weight, or the places of the result of the call that reads it.
    """
    multiplications = Counter[str]()
    for product in runs.training.products:
        multiplications[product.weight] += math.prod(measure(dim) for dim in (*product.result, *product.summed))
    counts = {name: count // runs.state[name].numel() for name, count in multiplications.items() if name in runs.state}
    layers = {name.rpartition(".")[0]: count for name, count in counts.items()}
    names = {id(tensor): name for name, tensor in runs.state.items()}
    for call in runs.training.calls:
        results = list_tensors(call.out)
        for tensor in list_tensors((call.args, call.kwargs)):
            name = names.get(id(tensor), "")
            if name and name not in counts and tensor.dim() == 1 < len(tensor) and results:
                layer = name.rpartition(".")[0]
                counts[name] = layers.get(layer) or results[0].numel() // tensor.numel()
    return {name: max(1, count) for name, count in counts.items()}
