"""Tries one network of the corpus in a separate process; prints one JSON object.

python -m corpus_benchmark.job '{"network": "timm dla46x_c"}'
python -m corpus_benchmark.job '{"network": "timm dla46x_c", "target": "onnx", "folder": "..."}'
"""

import json
import logging
import math
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from corpus_benchmark.networks import SMOKE, CorpusNetwork, draw_inputs, list_networks, make_seeded
from corpus_benchmark.trial import record
from subfleet.arrays import encode_arrays
from subfleet.device_profiles import detect_packing_width
from subfleet.elastic.building import build_module, init_state, network_of
from subfleet.elastic.maps import extract
from subfleet.elastic.recording.loading import record_network
from subfleet.elastic.spaces import uniform_space
from subfleet.elastic.update_form import list_frozen
from subfleet.export.programs import export_program
from subfleet.export.request_steps import training_step_of
from subfleet.export.requests import TrainRequest
from subfleet.export.targets import find_target
from subfleet.export.verification.distances import Distance, Run, Trial
from subfleet.export.verification.verifying import second_step
from subfleet.protocol.errors import SubfleetError
from subfleet.protocol.memory_plan import compute_peak_bytes
from subfleet.protocol.programs import Program, encode_program
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings
from subfleet.tasks.arrays_file import make_dataset, write_npz

BATCH_SIZE = 4
_STEPS = 6
_LARGE_DISTANCE, _MORE_BATCHES = 2.0, 4
_OBJECTIVES = {"sample": "cross_entropy", "token": "next_token", "pixel": "dense_cross_entropy"}


def export(described: CorpusNetwork, target: str, folder: Path) -> dict[str, Any]:
    """Export the training program of half of each width, and write the files of a training."""
    module = make_seeded(described)
    try:
        family = record_network(module, described.input_shape, symbols=described.symbols)
    except SubfleetError as error:
        return {"refused": f"not recorded: {error}"}
    network = network_of(family)
    half = next(own for own in reversed(uniform_space(network, (0.5, 1.0))) if own.name.startswith("w1/2"))
    request = TrainRequest(
        model=family,
        architecture=half,
        target=target,
        batch_size=BATCH_SIZE,
        objective=ObjectiveSettings(name=_OBJECTIVES[family.PREDICTS]),  # type: ignore[arg-type]
        optimiser=OptimiserSettings(),
    )
    started_s = time.monotonic()
    try:
        with _watch_distances() as trials:
            program = export_program(request)
    except SubfleetError as error:
        return {"refused": str(error)}
    seconds = time.monotonic() - started_s
    state = extract(network, half, init_state(network, 0))
    (folder / "program").write_bytes(encode_program(program))
    frozen = list_frozen(network) & state.keys()  # a task has them in a blob of their own
    for file, names in (("weights", state.keys() - frozen), ("frozen", frozen)):
        if names:
            own = {name: tensor.numpy() for name, tensor in state.items() if name in names}
            (folder / file).write_bytes(encode_arrays(own))
    _write_data(described, program, family.class_count, folder)
    submodel = build_module(network, half)
    submodel.load_state_dict(state)
    memory = program.manifest.memory
    return {
        "export_s": seconds,
        "max_abs_diff": program.manifest.max_abs_diff,
        "distance_over_eager": _find_distance(program, request, min(map(_compare_with_eager, trials))),
        "planned_bytes": compute_peak_bytes(memory.peak_bytes, memory.packings, detect_packing_width()),
        "eager_step_s": _measure_eager_step(submodel, draw_inputs(described, BATCH_SIZE, 0)),
    }


@contextmanager
def _watch_distances() -> Iterator[list[Sequence[Distance]]]:
    """Keep what the exporter measures in each trial of a program."""
    measure, trials = Trial.measure, list[Sequence[Distance]]()

    def keep(trial: Trial, run: Run) -> list[Distance]:
        distances = measure(trial, run)
        trials.append(distances)
        return distances

    with patch.object(Trial, "measure", keep):
        yield trials


def _find_distance(program: Program, request: TrainRequest, distance: float) -> float:
    """The distance that the exporter saw; if it is large, the median of that and those of other batches.

    A gradient jumps where an activation's input rounds to the other side of 0, in some batches.
    """
    if distance <= _LARGE_DISTANCE:
        return distance
    step, target = training_step_of(request), find_target(request.target)

    def run(example: Sequence[Tensor]) -> Sequence[Tensor]:
        named = {value.name: tensor for value, tensor in zip(step.inputs, example, strict=True)}
        return target.run(bytes(program.body), named)

    generators = [torch.Generator().manual_seed(seed) for seed in range(_MORE_BATCHES)]
    others = [Trial(step, second_step(step, generator)).measure(run) for generator in generators]
    return median([distance, *map(_compare_with_eager, others)])


def _compare_with_eager(distances: Sequence[Distance]) -> float:
    """The program's distance from double precision over that of PyTorch's own step.

    Both are root mean squares over the results, each relative to its size.
    """
    seen = [distance for distance in distances if distance.is_seen and distance.size]
    own, eager = (math.hypot(*(getattr(one, kind) / one.size for one in seen)) for kind in ("own", "eager"))
    return own / eager


def _write_data(described: CorpusNetwork, program: Program, class_count: int, folder: Path) -> None:
    label = next(value for value in program.manifest.inputs if value.role == "label")
    count = _STEPS * BATCH_SIZE
    labels = np.random.default_rng(0).integers(0, class_count, (count, *label.shape[1:]))
    write_npz(folder / "data.npz", make_dataset(draw_inputs(described, count, 0).numpy(), labels, "random", exact=True))


def _measure_eager_step(module: nn.Module, inputs: Tensor) -> float:
    """Median seconds of PyTorch's own step with the same submodel: gradients of a sum, and momentum."""
    module.train()
    optimiser = torch.optim.SGD([own for own in module.parameters() if own.requires_grad], 1e-4, momentum=0.9)
    seconds = []
    for _ in range(_STEPS):
        started_s = time.perf_counter()
        optimiser.zero_grad()
        module(inputs).logsumexp(1).mean().backward()
        optimiser.step()
        seconds.append(time.perf_counter() - started_s)
    return median(seconds[1:])


def main(job: Mapping[str, str]) -> dict[str, Any]:
    """Do one job; see the module."""
    torch.set_num_threads(1)
    described = {**list_networks(), SMOKE.name: SMOKE}[job["network"]]
    if "target" in job:
        return export(described, job["target"], Path(job["folder"]))
    return asdict(record(described))


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of the packages' own code
    logging.disable(logging.CRITICAL)
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))) + "\n")
