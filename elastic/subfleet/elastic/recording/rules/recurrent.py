"""Recurrent layers that run as one operator."""

from collections.abc import Mapping
from types import MappingProxyType

from subfleet.elastic.recording.dimensions import Leaf, make_whole_dim, tie
from subfleet.elastic.recording.following import Operation, Rule

_GATES = 4


def _run_lstm(operation: Operation) -> None:
    """A layer over (tokens, batch, width) with weights (gates * states, inputs) and states (batch, states)."""
    source, *weights = operation.args[:5]
    tokens, batch, width = operation.dims(0)
    inputs, recurrent, *biases = (operation.follower.dims_of(weight) for weight in weights)
    state = Leaf(weights[1].shape[1])
    rows = (Leaf(_GATES, reason="equal chunks are read one by one"), state)
    for own, dim in (
        (inputs[1], width),
        (recurrent[1], (state,)),
        *((dims[0], rows) for dims in (inputs, recurrent, *biases)),
    ):
        tie(own, dim)
    for given in operation.args[5:7]:
        tie(operation.follower.dims_of(given)[0], batch)
        tie(operation.follower.dims_of(given)[1], (state,))
    operation.follower.add_product(source, weights[0], result=[tokens, batch, inputs[0]], summed=[inputs[1]])
    operation.follower.add_product(source, weights[1], result=[tokens, batch, recurrent[0]], summed=[recurrent[1]])
    result, *states = operation.outputs
    operation.assign([tokens, batch, (state,)], result)
    for tensor in states:
        known = tensor.shape == operation.args[5].shape
        operation.assign([batch, (state,)] if known else [make_whole_dim(size, "") for size in tensor.shape], tensor)


RECURRENT: Mapping[str, Rule] = MappingProxyType({"mkldnn_rnn_layer": _run_lstm})
