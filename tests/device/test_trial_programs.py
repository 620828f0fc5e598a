"""The trial programs of devices agree with the exporter and with PyTorch."""

import importlib.util
import json
from importlib import resources
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from subfleet.arrays import decode_arrays
from subfleet.device.runtime_trial import DATA, EXPECTED, SETTINGS, TARGETS, WEIGHTS, name_program_file
from subfleet.export.request_steps import training_step_of
from subfleet.protocol.programs import decode_program
from subfleet.tasks import read_dataset

ROOT = Path(__file__).parents[2]
SHIPPED = Path(str(resources.files("subfleet.device"))) / "trial_files"
FILES = {DATA, EXPECTED, WEIGHTS, *map(name_program_file, TARGETS)}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_trial_programs", ROOT / "scripts" / "make_trial_programs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_a_program_has_the_values_of_todays_exporter(script: ModuleType, target: str) -> None:
    manifest = decode_program((SHIPPED / name_program_file(target)).read_bytes()).manifest
    step = training_step_of(script.create_request(target))
    assert (manifest.target, manifest.purpose, manifest.batch_size) == (target, "train", SETTINGS.batch_size)
    assert (manifest.inputs, manifest.outputs) == (step.inputs, step.outputs), "run scripts/make_trial_programs.py"


@pytest.mark.slow
def test_the_loss_is_pytorchs(script: ModuleType) -> None:
    expected = json.loads((SHIPPED / EXPECTED).read_text())["loss"]
    assert script.measure_pytorch_loss(SHIPPED) == pytest.approx(expected, rel=1e-5)
    assert expected != pytest.approx(np.log(3), rel=1e-2), "an untrained model would have that loss, too"


def test_nothing_else_is_shipped_and_all_of_it_is_small() -> None:
    assert {path.name for path in SHIPPED.iterdir()} == FILES
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 200_000
    assert len(read_dataset(str(SHIPPED / DATA))) == 2 * SETTINGS.batch_size


@pytest.mark.long
@pytest.mark.export
def test_the_script_writes_what_is_shipped(script: ModuleType, tmp_path: Path) -> None:
    script.write_trial_files(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES
    assert (tmp_path / DATA).read_bytes() == (SHIPPED / DATA).read_bytes()
    new, old = (decode_arrays((folder / WEIGHTS).read_bytes()) for folder in (tmp_path, SHIPPED))
    assert all(np.array_equal(new[name], old[name]) for name in old)
    for target in TARGETS:
        written, shipped = (
            decode_program((folder / name_program_file(target)).read_bytes()) for folder in (tmp_path, SHIPPED)
        )
        if written.manifest.versions == shipped.manifest.versions:
            assert bytes(written.body) == bytes(shipped.body)
