"""Nothing leaks: a thousand rounds in one process, of one program and of two in turn."""

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from trainers.softmax_program import BATCH, program, samples, write_job

from subfleet.protocol.programs import encode_program
from subfleet.protocol.training import TrainingSettings
from subfleet.trainers.memory import MemoryWatch, release_free_memory
from subfleet.trainers.onnx import OnnxTrainer

pytestmark = pytest.mark.slow

SETTINGS = TrainingSettings(epochs=1, batch_size=BATCH, learning_rate=0.1, seed=5)
LARGEST_GROWTH_BYTES_PER_ROUND = 1024
"""Below one page: a round that forgot to free its smallest buffer, session or file would grow by more."""


@pytest.mark.parametrize(("rounds", "alternate"), [(1000, False), (200, True)])
def test_rounds_do_not_grow_the_process(tmp_path: Path, rounds: int, *, alternate: bool) -> None:
    job = write_job(tmp_path, samples(2 * BATCH), settings=SETTINGS)
    made = program()
    (tmp_path / "other").write_bytes(encode_program(replace(made, manifest=replace(made.manifest, program_id="other"))))
    jobs = [job, replace(job, program_path=tmp_path / "other")] if alternate else [job]
    trainer = OnnxTrainer()
    watch = MemoryWatch(2**40)
    sizes = []
    for number in range(rounds):
        trainer.train(replace(jobs[number % len(jobs)], round=number), lambda: False)
        if number >= rounds // 5 and number % 10 == 0:
            gc.collect()
            release_free_memory()
            sizes.append(watch.held_bytes())
    slope = np.polyfit(np.arange(len(sizes)) * 10, np.array(sizes, np.float64), 1)[0]
    assert slope < LARGEST_GROWTH_BYTES_PER_ROUND
