"""How messages encode class names; without names, the bytes are those of earlier releases."""

import json

import pytest

from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.messages import Profile, decode, encode
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.readings import Budget
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task import Task, TaskSubmodel, Train
from subfleet.protocol.training import TrainingSettings

_BLOB = BlobRef(sha256="0" * 64, size_bytes=1)


def _profile(**changes: object) -> bytes:
    profile = Profile(
        client_id="pi",
        session_id="s",
        device="raspberry_pi_4",
        runtimes=("onnx",),
        sample_count=1,
        class_counts=(1,),
        input_shape=(4,),
        memory_total_bytes=1,
        memory_fraction=1.0,
    )
    return json.dumps({**json.loads(encode(profile)), **changes}).encode()


def _task(classes: tuple[str, ...] = ()) -> Task:
    return Task(
        task_id="t",
        run_id="r",
        round=1,
        client_id="pi",
        submodels=(
            TaskSubmodel(
                architecture=Architecture(),
                program=ProgramRef(program_id="p", target="onnx", blob=_BLOB),
                weights=_BLOB,
            ),
        ),
        work=Train(settings=TrainingSettings()),
        planned_peak_bytes=1,
        budget=Budget(memory_bytes=1),
        deadline_s=1.0,
        message_id="m",
        classes=classes,
    )


def test_the_bytes_of_class_names_are_fixed() -> None:
    """A profile without class names is encoded as in earlier releases."""
    plain = json.loads(_profile(message_id="m"))
    assert not {"class_names", "other_input_shapes"} & set(plain)
    assert json.loads(encode(_task()))["classes"] == []
    named = {"class_counts": [4, 6], "class_names": ["7", "\u00e9"], "other_input_shapes": [[3, 8, 8]]}
    profile = decode(_profile(message_id="m", **named))
    assert isinstance(profile, Profile)
    assert (profile.class_names, profile.other_input_shapes) == (("7", "\u00e9"), ((3, 8, 8),))
    assert encode(profile) == json.dumps({**plain, **named}, sort_keys=True, separators=(",", ":")).encode()
    task = _task(classes=("b", "a"))
    assert json.loads(encode(task))["classes"] == ["b", "a"]
    assert decode(encode(task)) == task


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"class_counts": [1, -1]}, r"class_counts\[1\] is -1, but must be 0 or more"),
        ({"class_counts": [1, 2], "class_names": ["a"]}, "there are 1 class names for 2 class counts"),
        ({"class_counts": [1, 2], "class_names": ["a", "a"]}, "has 'a' twice"),
        ({"class_counts": [1], "class_names": ["\u001b[2J"]}, "printable"),
        ({"class_counts": [1], "class_names": ["a" * 65]}, "1 to 64"),
        ({"other_input_shapes": [[1]] * 9}, "other_input_shapes has 9 items, but must have at most 8"),
        ({"other_input_shapes": [[1] * 17]}, r"other_input_shapes\[0\] has 17 items, but must have at most 16"),
    ],
)
def test_wrong_classes_of_a_profile_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        decode(_profile(**changes))


def test_a_task_with_invalid_classes_is_refused() -> None:
    plain = json.loads(encode(_task(classes=("a", "b"))))
    with pytest.raises(ProtocolError, match="has 'a' twice"):
        decode(json.dumps({**plain, "classes": ["a", "a"]}).encode())
