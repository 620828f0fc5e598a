"""The longest control messages fit the limits of hosted brokers; docs/reference/brokers.md lists their lengths."""

import random
from collections.abc import Callable

import pytest
from agent.agent_cases import evaluate_task, score_task, train_task

from subfleet.protocol.blobs import MESSAGE_BYTES, BlobRef
from subfleet.protocol.candidate_scores import MAX_CANDIDATES
from subfleet.protocol.evaluating import EvaluationSettings
from subfleet.protocol.limits import MAX_COUNTED_CLASSES
from subfleet.protocol.messages import Evaluated, Message, Profile, Task, encode
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.submodel import Architecture, Explicit, Prefix
from subfleet.protocol.task import TaskSubmodel

RESNET50 = (64, 256, 512, 1024, 2048, *(64,) * 6, *(128,) * 8, *(256,) * 12, *(512,) * 6)
VGG16 = (64, 64, 128, 128, 256, 256, 256, *(512,) * 6, 4096, 4096)
FRAME_BYTES = 256


def _drop_half(widths: tuple[int, ...]) -> Architecture:
    """A random half of the channels of each layer, as in Federated Dropout."""
    rng = random.Random(1)
    index_sets = [Explicit(indices=tuple(sorted(rng.sample(range(width), width // 2)))) for width in widths]
    return Architecture(
        axes=tuple((f"stages.{number:02}.width", index_set) for number, index_set in enumerate(index_sets))
    )


def _task(architecture: Architecture, names: int = 0, tensors: int = 0) -> Task:
    rng = random.Random(2)
    letters = "abcdefghijklmnopqrstuvwxyz"
    classes = tuple(f"{number}{''.join(rng.choices(letters, k=16))}" for number in range(names))
    sends = tuple(f"stages.{number // 8}.blocks.{number % 8}.convolution.weight" for number in range(tensors))
    return train_task(architecture=architecture, classes=classes, sends=sends)


def _score_task() -> Task:
    rng = random.Random(3)
    digests = [f"{rng.getrandbits(256):064x}" for _ in range(3 * MAX_CANDIDATES)]
    architectures = tuple(
        Architecture(
            axes=tuple((f"stages.{axis:02}.width", Prefix(size=rng.randint(1, width))) for axis, width in pairs),
            blocks=tuple(f"stages.{block // 8}.blocks.{block % 8}" for block in range(32)),
        )
        for pairs in [list(enumerate(RESNET50))] * MAX_CANDIDATES
    )
    programs = tuple(
        ProgramRef(
            program_id=digests[3 * index], target="onnx", blob=BlobRef(sha256=digests[3 * index + 1], size_bytes=10**7)
        )
        for index in range(MAX_CANDIDATES)
    )
    weights = tuple(BlobRef(sha256=digests[3 * index + 2], size_bytes=10**7) for index in range(MAX_CANDIDATES))
    parts = zip(architectures, programs, weights, strict=True)
    candidates = tuple(
        TaskSubmodel(architecture=architecture, program=program, weights=blob) for architecture, program, blob in parts
    )
    return score_task(submodels=candidates)


def _population_task() -> Task:
    rng = random.Random(4)
    operators = ("mbconv_k3_e3", "mbconv_k5_e3", "mbconv_k3_e6", "mbconv_k5_e6", "identity", "zero")
    paths = tuple(tuple(rng.choice(operators) for _ in range(24)) for _ in range(64))
    return evaluate_task(settings=EvaluationSettings(batch_size=32, population=paths))


def _profile(classes: int, *, named: bool = False) -> Profile:
    rng = random.Random(5)
    return Profile(
        client_id="a" * 64,
        session_id="b" * 32,
        device="board",
        runtimes=("onnx",),
        sample_count=10**6,
        class_counts=tuple(rng.randint(0, 2000) for _ in range(classes)),
        input_shape=(3, 224, 224),
        memory_total_bytes=8 * 10**9,
        memory_fraction=0.5,
        class_names=_task(Architecture(), names=classes).classes if named else (),
    )


def _evaluated() -> Evaluated:
    rng = random.Random(6)
    counts = tuple(rng.randint(0, 50) for _ in range(MAX_COUNTED_CLASSES))
    return Evaluated(
        task_id="t",
        run_id="r",
        round=1,
        client_id="a",
        loss=1.0,
        accuracy=sum(count // 2 for count in counts) / sum(counts),
        sample_count=sum(counts),
        label_count=sum(counts),
        class_counts=counts,
        class_correct=tuple(count // 2 for count in counts),
        measured_peak_bytes=1,
        scores=(),
        seconds=1.0,
        message_id="m",
    )


LONGEST: dict[str, Callable[[], Message]] = {
    "Federated Dropout, ResNet-50": lambda: _task(_drop_half(RESNET50)),
    "Federated Dropout, VGG16": lambda: _task(_drop_half(VGG16)),
    "1,000 names of classes, 300 of tensors": lambda: _task(_drop_half(RESNET50), names=1000, tensors=300),
    "16 candidates, ResNet-50": _score_task,
    "64 paths of 24 choices": _population_task,
    "profile of 1,000 named classes": lambda: _profile(1000, named=True),
    "profile of 8,192 classes": lambda: _profile(8192),
    "evaluation of 8,192 classes": _evaluated,
}


@pytest.mark.parametrize("name", LONGEST)
def test_the_longest_messages_come_through_hosted_brokers(name: str) -> None:
    assert len(encode(LONGEST[name]())) + FRAME_BYTES <= MESSAGE_BYTES
