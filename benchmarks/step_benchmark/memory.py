"""The peak memory of a program, measured as in `benchmarks/plan_memory.py`: a fresh process trains with it."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from plan_memory import TRAIN
from safetensors.numpy import save_file

from step_benchmark.data import Samples
from step_benchmark.stepping import Start
from subfleet.protocol.programs import Program, encode_program


def measure_peak_bytes(program: Program, start: Start, samples: Samples, *, threads: int = 1) -> int:
    """The growth of a fresh process that trains with a program; 0 if it failed."""
    manifest = program.manifest
    names = {value.tensor for value in manifest.inputs if value.role in ("parameter", "buffer")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "program").write_bytes(encode_program(program))
        save_file({key: tensor.numpy() for key, tensor in start.state.items() if key in names}, folder / "weights")
        np.savez(folder / "data.npz", x=samples.inputs, y=samples.labels)
        job = {
            "folder": name,
            "target": manifest.target,
            "batch_size": manifest.batch_size,
            "parts": 1,
            "accumulate": False,
            "threads": threads,
        }
        # NumPy's threads would add stacks and buffers that no device's trainer has.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.run(
            [sys.executable, "-c", TRAIN, json.dumps(job)], capture_output=True, text=True, env=environment, check=False
        )
    if process.returncode:
        print("\n".join(process.stderr.strip().splitlines()[-1:]), file=sys.stderr)
        return 0
    return int(json.loads(process.stdout.splitlines()[-1])["peak_bytes"])
