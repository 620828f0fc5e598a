"""XNNPACK's graph as bytes: ExecuTorch's flat buffer behind a header.

ExecuTorch's own writer asks every object for its fields' types again and again, which takes ten times as long as all
the rest. The flat buffer is still made by its compiler from its schema.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["serialise_graph"]

_ALIGNMENT = 16
_UNIONS = ("xnode_union", "xvalue_union")


def _fields(part: Any) -> dict[str, Any]:
    """A part of the graph as the flat buffer's compiler reads it: a union says which of its types it is."""
    fields = vars(part)
    # The compiler wants to know the type before it comes to the value.
    types = {f"{name}_type": type(fields[name]).__name__ for name in _UNIONS if name in fields}
    return {**types, **fields}


def _flat_buffer(graph: Any) -> bytes:
    from executorch.backends.xnnpack.serialization import xnnpack_graph_serialize
    from executorch.exir._serialize._flatbuffer import _flatc_compile

    schema = Path(xnnpack_graph_serialize.__file__).parent / "schema.fbs"
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "graph.json"
        text.write_text(json.dumps(graph, default=_fields), encoding="ascii")
        _flatc_compile(folder, str(schema), str(text))
        return text.with_suffix(".bin").read_bytes()


def _align(content: bytes) -> bytes:
    return content + b"\0" * (-len(content) % _ALIGNMENT)


def serialise_graph(graph: Any) -> bytes:
    """A graph without constants of its own, as the delegate reads it."""
    from executorch.backends.xnnpack.serialization.xnnpack_graph_serialize import XNNHeader

    body = _flat_buffer(graph)
    start = len(_align(b"\0" * XNNHeader.EXPECTED_LENGTH))
    end = start + len(_align(body))
    header = XNNHeader(
        flatbuffer_offset=start, flatbuffer_size=len(body), constant_data_offset=end, constant_data_size=0
    )
    return _align(header.to_bytes()) + _align(body)
