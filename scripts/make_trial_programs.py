"""Writes the files for trials of runtimes on devices: small training programs, weights, data and the right loss.

    python scripts/make_trial_programs.py [FOLDER]

The default folder is the one in the package. The loss is PyTorch's. The same tools write the same bytes.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from subfleet.arrays import encode_arrays
from subfleet.device.runtime_trial import DATA, EXPECTED, SETTINGS, TARGETS, WEIGHTS, make_trial_job, name_program_file
from subfleet.elastic.building import init_state, network_of
from subfleet.elastic.families.records.residual import PreactResNet
from subfleet.export.programs import export_program
from subfleet.export.requests import TrainRequest
from subfleet.export.targets.torch import TARGET, write_torch_program
from subfleet.protocol.programs import encode_program
from subfleet.protocol.submodel import Architecture
from subfleet.tasks import Dataset, write_npz
from subfleet.trainers.torch import TorchTrainer

FOLDER = Path(__file__).parents[1] / "edge_client" / "subfleet" / "device" / "trial_files"
MODEL = PreactResNet(input_shape=(1, 6, 6), class_count=3, widths=(4,), depths=(1,))
"""Convolutions, norms and a linear layer: the kernels that training on a device uses."""
SEED = 1


def create_request(target: str) -> TrainRequest:
    """Create the request for the training program of a target."""
    return TrainRequest(
        model=MODEL,
        architecture=Architecture(),
        target=target,
        batch_size=SETTINGS.batch_size,
        objective=SETTINGS.objective,
        optimiser=SETTINGS.optimiser,
    )


def write_trial_files(folder: Path) -> None:
    """Write all files of a trial."""
    folder.mkdir(parents=True, exist_ok=True)
    for target in TARGETS:
        (folder / name_program_file(target)).write_bytes(encode_program(export_program(create_request(target))))
    # The last layer and a residual branch begin at zero: a little noise makes every weight matter.
    generator = np.random.default_rng(SEED)
    weights = {
        name: (tensor.numpy() + generator.normal(0, 0.1, tuple(tensor.shape))).astype(np.float32)
        for name, tensor in init_state(network_of(MODEL), SEED).items()
    }
    (folder / WEIGHTS).write_bytes(encode_arrays(weights))
    count = 2 * SETTINGS.batch_size
    inputs = generator.standard_normal((count, *MODEL.input_shape)).astype(np.float32)
    write_npz(folder / DATA, Dataset(inputs=inputs, labels=np.arange(count, dtype=np.int64) % MODEL.class_count))
    (folder / EXPECTED).write_text(json.dumps({"loss": measure_pytorch_loss(folder)}) + "\n", encoding="utf-8")


def measure_pytorch_loss(folder: Path) -> float:
    """The mean loss of the trial's steps in PyTorch."""
    with tempfile.TemporaryDirectory() as work:
        program = Path(work) / name_program_file(TARGET)
        program.write_bytes(encode_program(write_torch_program(create_request(TARGET))))
        job = replace(make_trial_job(folder, TARGET, Path(work) / "update"), program_path=program)
        return TorchTrainer().train(job, lambda: False).loss


if __name__ == "__main__":
    write_trial_files(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
