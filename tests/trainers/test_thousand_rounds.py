"""No memory leaks in a thousand rounds of one process, with one program or two alternating ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow

LARGEST_GROWTH_BYTES_PER_ROUND = 1024
"""Less than a page: a leaked buffer, session or file would grow the process by more."""

# In a separate process: after other tests, releasing free memory would take most of the time.
ROUNDS = """
import gc, json, sys
from dataclasses import replace
from pathlib import Path
from subfleet.protocol.programs import encode_program
from subfleet.protocol.training import TrainingSettings
from subfleet.device_profiles.process_memory import release_free_memory
from subfleet.trainers.memory_watch import MemoryWatch
from subfleet.trainers.onnx import OnnxTrainer
from trainers.softmax_program import BATCH, program, samples, write_job

folder, rounds, alternate = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True"
settings = TrainingSettings(epochs=1, batch_size=BATCH, learning_rate=0.1, seed=5)
job = write_job(folder, samples(2 * BATCH), settings=settings)
whole = program()
(folder / "other").write_bytes(encode_program(replace(whole, manifest=replace(whole.manifest, program_id="other"))))
jobs = [job, replace(job, program_path=folder / "other")] if alternate else [job]
trainer, watch, sizes = OnnxTrainer(), MemoryWatch(2**40), []
for number in range(rounds):
    trainer.train(replace(jobs[number % len(jobs)], round=number), lambda: False)
    if number >= rounds // 5 and number % 10 == 0:
        gc.collect()
        release_free_memory()
        sizes.append(watch.measure_held_bytes())
print(json.dumps(sizes))
"""


@pytest.mark.parametrize(("rounds", "alternate"), [pytest.param(1000, False, marks=pytest.mark.long), (200, True)])
def test_rounds_do_not_grow_the_process(tmp_path: Path, rounds: int, *, alternate: bool) -> None:
    arguments = [sys.executable, "-c", ROUNDS, str(tmp_path), str(rounds), str(alternate)]
    # One heap for all threads: on a busy machine they would sometimes get more heaps, which is not a leak.
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "MALLOC_ARENA_MAX": "1"}
    process = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)
    assert process.returncode == 0, process.stderr
    sizes = json.loads(process.stdout)
    assert len(sizes) == (rounds - rounds // 5) // 10
    growths = np.sort(np.diff(sizes))
    # The heap may grow once by a block for many rounds, so the largest growth is left out. A leak continues.
    assert growths[:-1].sum() / (10 * (len(growths) - 1)) < LARGEST_GROWTH_BYTES_PER_ROUND
