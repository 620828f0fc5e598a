"""Runs ONNX programs: python old_runtime.py <folder> <name>...; prints the runtime's version.

Each program is <name>.onnx in the folder, its inputs <name>.inputs.npz; its outputs become <name>.outputs.npz.
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime

folder = Path(sys.argv[1])
for name in sys.argv[2:]:
    session = onnxruntime.InferenceSession(str(folder / f"{name}.onnx"), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    with np.load(folder / f"{name}.inputs.npz") as arrays:
        results = session.run(names, dict(arrays))
    np.savez(folder / f"{name}.outputs.npz", **dict(zip(names, results, strict=True)))
sys.stdout.write(onnxruntime.__version__)
