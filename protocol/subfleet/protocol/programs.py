"""Programs: their manifests, and the packed form in which they travel."""

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.chains import Chain
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.memory_plan import MemoryPlan
from subfleet.protocol.schema import ADDED_LATER, canonical_json, from_plain, parse_json
from subfleet.protocol.tensors import Tensor, decode_container, encode_container

Role = Literal[
    # Fed with every step.
    "input",  # samples, (batch, *sample shape); F32, or I64 indices such as tokens
    "label",  # I64 class indices or F32 targets, (batch, ...); an index below 0 is not counted
    "sample_mask",  # 1 for a real sample, 0 for padding, (batch,)
    "learning_rate",  # scalar
    "random",  # uniform in [0, 1), fresh in every step: dropout's randomness
    "class_mask",  # 1 for a class that the client holds, 0 for one that it lacks, (classes,)
    "coefficient",  # scalar field of `TrainingSettings`, by the value's name: proximal_mu or distillation_weight
    "frozen",  # an untrained weight, which is not part of an update
    "anchor",  # a parameter as it was before the first step, for the proximal term
    "batch_weight",  # scalar: the count of the whole batch, of which the input is a micro-batch
    "apply",  # scalar: 1 in the last micro-batch of a batch, after which the optimiser steps; else 0
    # Between the pieces of a chain.
    "features",  # input or output of a link, (batch, ...)
    "features_gradient",  # the loss's gradient with respect to them
    "gradient_scale",  # scalar: by which clipping multiplies all gradients of a path
    # Carried from step to step: an input, and as an output the same thing after the step.
    "parameter",  # a weight
    "buffer",  # state of a layer besides its weights, such as a running mean
    "optimiser_state",  # zero before the first step; `tensor` is empty if it belongs to none
    "gradient",  # summed over the micro-batches so far; zero before the first, and again after the last
    # Read after every step.
    "loss",  # scalar, mean over `count`; of a micro-batch, its fraction of the whole batch's mean
    "correct",  # scalar, how many of `count` were predicted correctly before the step; 0 if that has no meaning
    "count",  # scalar, how many labels count: real samples, or the real tokens of real samples
    "squares",  # scalar, sum of the squares of the losses of `count` labels, if the objective asks for it
    "logits",  # (batch, ...)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueInfo:
    """One input or output of a program.

    Attributes:
        name: in the program.
        dtype: as in the tensor container, such as "F32".
        shape: sizes, including a fixed batch size.
        role: its purpose.
        tensor: the submodel's tensor to which a parameter, buffer, anchor, gradient or optimiser state belongs.
        limit: exclusive upper bound of the indices in an I64 input or label, so that unsuitable data are refused before
            a program reads beyond a table; 0 if there is none.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: Role
    tensor: str = ""
    limit: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceProgram:
    """One program of a chain's piece.

    Attributes:
        name: in the chain's body; see `subfleet.protocol.chains.name_program`.
        inputs: in order; `tensor` is the name after the operator's prefix.
        outputs: in order.
    """

    name: str
    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramManifest:
    """Everything that a trainer must know about a program.

    Attributes:
        program_id: content id of the request that made it: shape, objective, optimiser, batch, target, versions.
        target: "onnx" or "executorch".
        purpose: "train", "infer" or "evaluate".
        batch_size: samples of one step; a smaller last batch is padded and masked.
        inputs: in order.
        outputs: in order.
        memory: the planned memory on a device.
        max_abs_diff: largest difference from PyTorch in the export's comparison; relative to the largest number of the
            tensor if that is above 1.
        versions: of the tools that wrote it.
        operators: operators that its runtime must have, sorted, such as "Conv" or "aten::add.out"; empty if unknown.
            For a chain, only those of links without a choice.
        chain: the links of a supernet's program; `inputs` and `outputs` are then those of all its pieces. None for a
            program in one piece.
        pieces: the programs in a chain's body.
    """

    program_id: str
    target: str
    purpose: Literal["train", "infer", "evaluate"]
    batch_size: int
    inputs: tuple[ValueInfo, ...]
    outputs: tuple[ValueInfo, ...]
    memory: MemoryPlan
    max_abs_diff: float
    versions: dict[str, str] = field(default_factory=dict)
    operators: tuple[str, ...] = field(default=(), metadata=ADDED_LATER)
    chain: Chain | None = field(default=None, metadata=ADDED_LATER)
    pieces: tuple[PieceProgram, ...] = field(default=(), metadata=ADDED_LATER)

    @property
    def planned_peak_bytes(self) -> int:
        """The largest growth of a trainer's process: all parts of the memory plan."""
        return self.memory.peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program and its manifest; they travel as one blob. A chain's body is a tensor container of its programs."""

    manifest: ProgramManifest
    body: bytes | memoryview


_BODY = "program"
_DIGEST = "sha256"
_MANIFEST = "manifest"
_MAX_MANIFEST_BYTES = 4 * 2**20


def encode_program(program: Program) -> bytes:
    """Pack a program as a tensor container: manifest and digest as metadata, the bytes as one U8 tensor."""
    body = Tensor(name=_BODY, dtype="U8", shape=(len(program.body),), data=program.body)
    metadata = {_MANIFEST: canonical_json(program.manifest).decode(), _DIGEST: hashlib.sha256(program.body).hexdigest()}
    return encode_container([body], metadata)


def decode_program(buffer: bytes | memoryview) -> Program:
    """Unpack a program and check its digest, as a damaged program may crash a runtime.

    Raises:
        ProtocolError: the bytes are not a packed program, or are damaged.
    """
    body, plain = _unpack(buffer)
    return Program(manifest=from_plain(ProgramManifest, plain), body=body)


def program_id_of(buffer: bytes | memoryview) -> str:
    """Read the id of a packed program, without the rest of its manifest.

    Raises:
        ProtocolError: the bytes are not a packed program, or are damaged.
    """
    _, plain = _unpack(buffer)
    program_id = plain.get("program_id") if isinstance(plain, dict) else None
    if not isinstance(program_id, str):
        raise ProtocolError(f"a program's manifest must have a program_id, but has {program_id!r:.80}")
    return program_id


def _unpack(buffer: bytes | memoryview) -> tuple[memoryview | bytes, Any]:
    """Return the program's bytes and the JSON of its manifest."""
    container = decode_container(buffer)
    if set(container.tensors) != {_BODY} or set(container.metadata) != {_MANIFEST, _DIGEST}:
        raise ProtocolError("a packed program must hold one tensor 'program' and the metadata 'manifest' and 'sha256'")
    body = container.tensors[_BODY].data
    if hashlib.sha256(body).hexdigest() != container.metadata[_DIGEST]:
        raise ProtocolError("the program's bytes do not match their digest; fetch it again")
    return body, parse_json(container.metadata[_MANIFEST].encode(), max_bytes=_MAX_MANIFEST_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRef:
    """Names a program and the blob that holds it."""

    program_id: str
    target: str
    blob: BlobRef
