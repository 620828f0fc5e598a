"""Runs one ONNX program: python old_runtime.py <program> <inputs.npz> <outputs.npz>; prints the runtime's version."""

import sys

import numpy as np
import onnxruntime

program, inputs, outputs = sys.argv[1:]
session = onnxruntime.InferenceSession(program, providers=["CPUExecutionProvider"])
names = [value.name for value in session.get_outputs()]
with np.load(inputs) as arrays:
    results = session.run(names, dict(arrays))
np.savez(outputs, **dict(zip(names, results, strict=True)))
sys.stdout.write(onnxruntime.__version__)
