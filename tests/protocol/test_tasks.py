"""Tasks on the wire: each kind of work has its own fields, and no others."""

import json

import pytest
from agent.agent_cases import (
    PROGRAM,
    blob,
    calibrate_task,
    deploy_task,
    evaluate_task,
    score_task,
    train_task,
)

from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.messages import decode, encode
from subfleet.protocol.schema import canonical_json, to_plain
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task import Task, TaskSubmodel
from subfleet.protocol.training import TrainingSettings
from subfleet.protocol.update_codecs import TopKQsgd

_TRAINING = {"settings": to_plain(TrainingSettings())}
"""The fields that train and calibrate tasks share."""
CANDIDATE = TaskSubmodel(architecture=Architecture(), program=PROGRAM, weights=blob("w"))


@pytest.mark.parametrize(
    ("task", "work"),
    [
        (
            train_task(),
            {
                **_TRAINING,
                "type": "train",
                "paths": None,
                "sends": [],
                "update_codec": {"type": "none"},
            },
        ),
        (
            calibrate_task(),
            {
                **_TRAINING,
                "type": "calibrate",
                "calibration": {"norms": [{"momentum": 0.1, "name": "norm", "positions": 4, "scale": 1.0}]},
            },
        ),
        (
            evaluate_task(),
            {
                "type": "evaluate",
                "settings": {"batch_size": 8, "per_class": True},
            },
        ),
        (deploy_task(), {"type": "deploy"}),
    ],
    ids=["train", "calibrate", "evaluate", "deploy"],
)
def test_each_kind_of_work_is_written_with_its_name(task: Task, work: dict[str, object]) -> None:
    assert json.loads(encode(task))["work"] == work
    assert decode(encode(task)) == task


def test_the_bytes_of_a_task_are_fixed() -> None:
    program = b'{"blob":%s,"program_id":"p","target":"fake"}' % canonical_json(PROGRAM.blob)
    first, second = (canonical_json(blob(f"weights s1 {part}")) for part in "ab")
    architecture = b'"architecture":{"axes":[],"blocks":[],"choices":[],"name":"%s"}'
    candidates = b'[{%s,"program":%s,"weights":%s},{%s,"program":%s,"weights":%s}]' % (
        *(architecture % b"w1/2 d1", program, first),
        *(architecture % b"w1 d1", program, second),
    )
    settings = canonical_json(TrainingSettings())
    assert encode(score_task(attempt=2, classes=("b", "a"))) == (
        b'{"attempt":2,"budget":{"downlink_bytes":null,"memory_bytes":1000,"uplink_bytes":null},'
        b'"classes":["b","a"],"client_id":"pi","deadline_s":60.0,"kind":"task","message_id":"m-s1",'
        b'"planned_peak_bytes":500,"round":1,"run_id":"run","schema":3,"submodels":%s,"task_id":"s1","transform":null,'
        b'"work":{"batches":2,"settings":%s,"type":"score"}}' % (candidates, settings)
    )


def test_a_task_names_the_codec_of_its_update() -> None:
    task = train_task(update_codec=TopKQsgd(fraction=0.25, levels=3, bucket_size=64))
    plain = json.loads(encode(task))
    assert plain["work"]["update_codec"] == {"type": "top_k_qsgd", "fraction": 0.25, "levels": 3, "bucket_size": 64}
    assert decode(encode(task)) == task
    plain["work"]["update_codec"]["levels"] = 128
    with pytest.raises(ProtocolError, match=r"Task\.work\.update_codec\.levels is 128, but must be from 1 to 127"):
        decode(json.dumps(plain).encode())


@pytest.mark.parametrize("task", [train_task(), calibrate_task(), score_task(), evaluate_task(), deploy_task()])
def test_a_task_has_the_fields_of_its_work_and_no_others(task: Task) -> None:
    optional = {"paths", "sends", "update_codec", "batches"}
    plain = json.loads(encode(task))
    for name in plain["work"].keys() - optional - {"type"}:
        remaining = {key: value for key, value in plain["work"].items() if key != name}
        with pytest.raises(ProtocolError, match=rf"Task\.work\.{name} is missing"):
            decode(json.dumps({**plain, "work": remaining}).encode())
    with pytest.raises(ProtocolError, match=r"Task\.work\.other is an unknown key"):
        decode(json.dumps({**plain, "work": {**plain["work"], "other": 1}}).encode())
    with pytest.raises(ProtocolError, match=r"Task.work has the type 'rest', but must be one of \['train'"):
        decode(json.dumps({**plain, "work": {**plain["work"], "type": "rest"}}).encode())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"submodels": []}, "submodels is empty, but must have 1 or more"),
        ({"submodels": [to_plain(CANDIDATE)] * 17}, "submodels has 17 items, but must have at most 16"),
        ({"work": {"type": "score", "settings": {}, "batches": 1}}, "batches is 1, but must be 2 or more"),
    ],
)
def test_wrong_candidates_are_refused(changes: dict[str, object], words: str) -> None:
    plain = json.loads(encode(score_task())) | changes
    with pytest.raises(ProtocolError, match=words):
        decode(json.dumps(plain).encode())


@pytest.mark.parametrize("task", [train_task(), calibrate_task(), evaluate_task()])
def test_a_task_that_is_not_scored_has_one_submodel(task: Task) -> None:
    plain = json.loads(encode(task))
    plain["submodels"] *= 2
    with pytest.raises(ProtocolError, match="has 2 submodels, but must have 1"):
        decode(json.dumps(plain).encode())


@pytest.mark.parametrize("task", [train_task(), score_task(), deploy_task()])
def test_weights_are_sent_with_a_submodel_unless_it_is_deployed(task: Task) -> None:
    plain = json.loads(encode(task))
    weights = to_plain(blob("w")) if plain["submodels"][0]["weights"] is None else None
    plain["submodels"][0]["weights"] = weights
    with pytest.raises(ProtocolError, match="each submodel must have weights, unless the task is to deploy models"):
        decode(json.dumps(plain).encode())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"positions": 0}, "positions is 0, but must be from 1 to"),
        ({"positions": 2**40}, "but must be from 1 to 2147483648"),
        ({"momentum": 0}, "momentum is 0.0, but must be above 0 and at most 1"),
        ({"momentum": 1.5}, "momentum is 1.5, but must be above 0 and at most 1"),
        ({"scale": 0}, "scale is 0.0, but must be above 0"),
        (None, "norms names 'norm' more than once"),
    ],
)
def test_wrong_norms_are_refused(changes: dict[str, object] | None, words: str) -> None:
    plain = json.loads(encode(calibrate_task()))
    (norm,) = plain["work"]["calibration"]["norms"]
    plain["work"]["calibration"]["norms"] = [norm, norm] if changes is None else [norm | changes]
    with pytest.raises(ProtocolError, match=words):
        decode(json.dumps(plain).encode())
