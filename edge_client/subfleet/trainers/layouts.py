"""Which layout the program of a job must have."""

from subfleet.protocol.programs import EvaluateJob, ProgramManifest, ScoreJob, TrainJob
from subfleet.trainers.evaluation_layout import EvaluationLayout, evaluation_layout
from subfleet.trainers.step_layout import StepLayout, step_layout

__all__ = ["AnyJob", "AnyLayout", "layout_for"]

AnyJob = TrainJob | ScoreJob | EvaluateJob
AnyLayout = StepLayout | EvaluationLayout


def layout_for(job: AnyJob, manifest: ProgramManifest) -> AnyLayout:
    """Read the layout of a job's program from its manifest.

    Raises:
        ProtocolError: the program is for something else, or its values do not fit together.
    """
    return evaluation_layout(manifest) if isinstance(job, EvaluateJob) else step_layout(manifest)
