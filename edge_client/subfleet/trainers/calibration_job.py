"""Measures the inputs of norms with running statistics on a device's own data, with the training program.

A training step at learning rate 0 changes no weight, and updates the running statistics by the momentum times the
batch's mean and unbiased variance, without padding. Statistics that start at zero thus give mean and variance of the
batch; with the number of its values they give its sum and sum of squares, which are added over batches in float64.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from subfleet.arrays import numpy_dtype
from subfleet.protocol.calibration import NormLayer, name_sums
from subfleet.protocol.errors import ProtocolError
from subfleet.protocol.jobs import Job, TrainResult
from subfleet.protocol.task import Calibrate
from subfleet.trainers.feeding import ProgramCall, Tally, check_settings, compute_constants, make_calls
from subfleet.trainers.job_context import JobContext, open_context
from subfleet.trainers.job_files import read_weights, write_arrays
from subfleet.trainers.kept import Host
from subfleet.trainers.layouts import StepLayout
from subfleet.trainers.program_layout import list_stages
from subfleet.trainers.program_session import ProgramSession
from subfleet.trainers.runtime import Array, Runtime

_MEAN, _VARIANCE = "running_mean", "running_var"
_Doubles = npt.NDArray[np.float64]


def calibrate_job(
    job: Job[Calibrate], stopped: Callable[[], bool], *, target: str, runtime: Runtime, host: Host
) -> TrainResult:
    """Write the sums of one pass over the data; see `train_job` for the arguments and errors."""
    with open_context(job, stopped, target=target, runtime=runtime, host=host) as context:
        tally = _calibrate(job, context)
    return tally.result(sample_count=len(context.dataset), measured_peak_bytes=context.watch.growth_bytes())


def _calibrate(job: Job[Calibrate], context: JobContext) -> Tally:
    work = job.work
    loaded, dataset, host = context.loaded, context.dataset, context.host
    layout, links = loaded.layout.for_training, loaded.layout.chain.links
    loaded.layout.check_paths(named=False)
    loaded.load_within(links, job, drops=False)
    check_settings(work.settings, layout)
    _check_norms(work, layout)
    weights = dict(read_weights(job.tensor_paths, layout.weights))
    constants = compute_constants(work.settings, layout, dataset, weights)
    path, sums = tuple(list_stages(links)), {norm.name: _Sums(norm) for norm in work.calibration.norms}
    host.release()
    tally, started_s = Tally(), host.now_s()
    for call in make_calls(job, layout, dataset):
        context.check_stopped(f"calibration was stopped after {tally.step_count} steps")
        session = ProgramSession(loaded, links, weights | _make_zero_statistics(layout, sums), constants)
        weights.clear()
        tally.take(call, session.step(path, call.fed, last=call.last), layout)
        # The weights do not change, so they need not be held twice.
        weights |= session.finish()
        _add(sums, call, weights, layout)
        context.watch.check()
    tally.end(host.now_s() - started_s)
    write_arrays(job.output_path, {name: array for norm in sums.values() for name, array in norm.arrays().items()})
    return tally


class _Sums:
    """The sums of one norm's inputs."""

    def __init__(self, norm: NormLayer) -> None:
        self._norm = norm
        self._count = 0
        self._total: _Doubles = np.zeros((), np.float64)
        self._squares: _Doubles = np.zeros((), np.float64)

    def add(self, samples: int, mean: Array, variance: Array) -> None:
        """Add a batch's fraction of the running statistics."""
        norm, count = self._norm, samples * self._norm.positions
        share = float(np.float32(norm.momentum))
        of_batch = mean.astype(np.float64) * (norm.scale / share)
        # A single value has no variance: the program leaves it at 0, which is right for the sums.
        spread = variance.astype(np.float64) * (norm.scale**2 / share) * (count - 1)
        self._count += count
        self._total = self._total + count * of_batch
        self._squares = self._squares + spread + count * np.square(of_batch)

    def arrays(self) -> dict[str, Array]:
        """Return the sums by the names that the server expects."""
        values: tuple[Array, ...] = (np.array(self._count, np.int64), self._total, self._squares)
        return dict(zip(name_sums(self._norm.name), values, strict=True))


def _check_norms(work: Calibrate, layout: StepLayout) -> None:
    settings = work.settings
    if settings.learning_rate or settings.epochs != 1 or settings.local_steps or layout.accumulates:
        raise ProtocolError(
            f"the task asks for learning rate {settings.learning_rate:g}, {settings.epochs} epochs, "
            f"{settings.local_steps} local steps and {'parts of batches' if layout.accumulates else 'whole batches'}, "
            "but norms are measured in one pass over whole batches at learning rate 0"
        )
    lacking = {f"{norm.name}.{kind}" for norm in work.calibration.norms for kind in (_MEAN, _VARIANCE)} - layout.buffers
    if lacking:
        raise ProtocolError(f"the task names the norm tensor {min(lacking)!r:.120}, but its program has no such tensor")


def _make_zero_statistics(layout: StepLayout, norms: Mapping[str, object]) -> dict[str, Array]:
    return {
        value.tensor: np.zeros(value.shape, numpy_dtype(value.dtype))
        for value in layout.stored
        if value.tensor.rpartition(".")[0] in norms and value.role == "buffer"
    }


def _add(sums: Mapping[str, _Sums], call: ProgramCall, weights: Mapping[str, Array], layout: StepLayout) -> None:
    samples = int(np.count_nonzero(call.fed[layout.sample_mask.name]))
    for name, norm in sums.items():
        norm.add(samples, weights[f"{name}.{_MEAN}"], weights[f"{name}.{_VARIANCE}"])
