"""Messages of servers are bounded like those of devices: none can end an agent."""

import json
from collections.abc import Mapping
from types import MappingProxyType

import pytest

from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.messages import Ack, Message, Refusal, RoundInfo, decode, encode
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.readings import Budget
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task import Deploy, Task, TaskSubmodel

SERVER_MESSAGES: Mapping[str, Message] = MappingProxyType(
    {
        "round": RoundInfo(run_id="r", round=1, round_count=1, phase="train", log_time_s=None, deadline_s=1.0),
        "task": Task(
            task_id="t",
            run_id="r",
            round=1,
            client_id="pi",
            submodels=(
                TaskSubmodel(
                    architecture=Architecture(),
                    program=ProgramRef(program_id="p", target="onnx", blob=BlobRef.of(b"p")),
                ),
            ),
            work=Deploy(),
            planned_peak_bytes=1,
            budget=Budget(memory_bytes=1),
            deadline_s=1.0,
        ),
        "ack": Ack(of="m", status="accepted"),
    }
)


@pytest.mark.parametrize("kind", ["round", "task", "ack"])
@pytest.mark.parametrize("text", ["x" * 4097, "\x1b[2J", "", "\n"])
def test_no_id_of_a_server_is_too_long_or_empty_or_has_control_characters(kind: str, text: str) -> None:
    """Devices compose their own ids, which are bounded too, from these ids, and log them."""
    plain = json.loads(encode(SERVER_MESSAGES[kind]))
    names = {"round": ("run_id", "message_id"), "task": ("run_id", "task_id", "message_id"), "ack": ("of",)}[kind]
    for name in names:
        if kind == "ack" and len(text) < 4097:
            continue  # an ack's `of` is compared with the ids of sent messages
        with pytest.raises(ProtocolError, match=name):
            decode(json.dumps({**plain, name: text}).encode())


@pytest.mark.parametrize("seconds", [-1.0, 1e300])
def test_a_server_gives_no_impossible_time(seconds: float) -> None:
    for kind in ("round", "task"):
        with pytest.raises(ProtocolError, match="deadline_s"):
            decode(json.dumps({**json.loads(encode(SERVER_MESSAGES[kind])), "deadline_s": seconds}).encode())


@pytest.mark.parametrize("name", ["message_id", "task_id", "run_id"])
def test_no_answer_has_an_id_that_its_ack_could_not_carry(name: str) -> None:
    answer = Refusal(task_id="t", run_id="r", round=1, client_id="pi", reason="data", detail="none")
    with pytest.raises(ProtocolError, match=name):
        decode(json.dumps({**json.loads(encode(answer)), name: "x" * 600}).encode())
