"""Tasks with paths drawn on the device: the jobs of the worker, and its answers."""

from dataclasses import replace
from pathlib import Path

from agent.agent_cases import (
    EVALUATION,
    RESULT,
    announce,
    connected_agent,
    evaluate_task,
    train_task,
    with_submodel,
    with_work,
)
from edge_client.fleet_rig import Rig

from subfleet.agent.actions import Keep
from subfleet.agent.outcomes import EvaluationEnded, TrainingEnded
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.evaluating import EvaluationSettings
from subfleet.protocol.messages import Evaluated, Update
from subfleet.protocol.paths import PathScore, PathSettings
from subfleet.protocol.submodel import Architecture

CHOICES = (("section0.block0", ("conv3", "identity")),)
EXAMPLES = (("section0.block0", (("conv3", 20), ("identity", 0))),)
POPULATION = (("conv3",), ("identity",))
SCORES = (PathScore(loss=0.25, accuracy=1.0), PathScore(loss=0.75, accuracy=0.5))


def test_a_job_has_the_subspace_and_the_path_settings(tmp_path: Path) -> None:
    architecture, paths = Architecture(choices=CHOICES), PathSettings(sampler="exact", forward_macs=10**6)
    rig = Rig(tmp_path)
    rig.server.announce(announce(1, "train"))
    evaluation = EvaluationSettings(batch_size=8, population=POPULATION)
    rig.server.assign(
        with_submodel(with_work(rig.server.evaluate_task(), settings=evaluation), architecture=architecture)
    )
    rig.until(lambda: bool(rig.trainer.evaluations))
    rig.server.assign(with_submodel(with_work(rig.server.train_task(), paths=paths), architecture=architecture))
    rig.until(lambda: bool(rig.trainer.jobs))
    ((training,), (evaluated,)) = rig.trainer.jobs, rig.trainer.evaluations
    assert (training.choices, training.work.paths) == (CHOICES, paths)
    assert (evaluated.choices, evaluated.work.settings.population) == (CHOICES, POPULATION)


def test_an_update_has_the_examples_of_each_operator_and_an_evaluation_the_scores_of_each_path() -> None:
    agent, task = connected_agent(), train_task()
    agent.train(task)
    result = replace(RESULT, operator_examples=EXAMPLES)
    keeps = [
        action
        for action in agent.step(TrainingEnded(task_id=task.task_id, result=result, blob=BlobRef.of(b"update")))
        if isinstance(action, Keep)
    ]
    (update,) = [action.message for action in keeps if isinstance(action.message, Update)]
    assert update.operator_examples == EXAMPLES
    evaluation = evaluate_task(number=2)
    agent.train(evaluation)
    actions = agent.step(EvaluationEnded(task_id=evaluation.task_id, result=replace(EVALUATION, scores=SCORES)))
    (evaluated,) = [
        action.message for action in actions if isinstance(action, Keep) and isinstance(action.message, Evaluated)
    ]
    assert evaluated.scores == SCORES
