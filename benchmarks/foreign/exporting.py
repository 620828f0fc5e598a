"""Exports one network in a separate process, and writes the files of its training.

python -m foreign.exporting '{"network": "BERT", "target": "onnx", "folder": "...", "plant": ""}'
"""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import nn

from foreign.network import ForeignNetwork, build_seeded, create_step
from foreign.planting import drop_activations, invert_gradient
from foreign.registry import NETWORKS
from subfleet.device_profiles import detect_packing_width
from subfleet.export.preflight import explain_failure
from subfleet.export.programs import write_program
from subfleet.protocol.errors import ExportError
from subfleet.protocol.memory_plan import compute_peak_bytes
from subfleet.protocol.programs import Program, encode_program
from subfleet.tasks.arrays_file import make_dataset, write_npz

_STEPS = 3.5
"""Samples of a training; its last batch is half empty."""


def export_network(job: Mapping[str, str]) -> dict[str, Any]:
    """Export a network, write its program, weights and data, and return the outcome."""
    torch.set_num_threads(1)
    network, folder = NETWORKS[job["network"]], Path(job["folder"])
    module = build_seeded(network, 0)
    started_s = time.perf_counter()
    try:
        with invert_gradient(planted=job["plant"] == "gradient"):
            program = write_program(create_step(network, module), target=job["target"], program_id=network.name)
    except ExportError as error:
        refusal = explain_failure(error, module, network.sample, target=job["target"], batch_size=network.batch_size)
        return {"refused": str(refusal)}
    export_s = time.perf_counter() - started_s
    if job["plant"] == "plan":
        program = drop_activations(program)
    (folder / "program").write_bytes(encode_program(program))
    _write_weights(module, program, folder)
    _write_data(network, program, folder)
    memory = program.manifest.memory
    return {
        "export_s": export_s,
        "max_abs_diff": program.manifest.max_abs_diff,
        "planned_bytes": compute_peak_bytes(memory.peak_bytes, memory.packings, detect_packing_width()),
    }


def _write_weights(module: nn.Module, program: Program, folder: Path) -> None:
    names = {value.tensor for value in program.manifest.inputs if value.role in {"parameter", "frozen", "buffer"}}
    state = module.state_dict()
    save_file({name: state[name].detach().contiguous().numpy() for name in names}, folder / "weights")


def _write_data(network: ForeignNetwork, program: Program, folder: Path) -> None:
    random = np.random.default_rng(0)
    count = int(_STEPS * network.batch_size)
    label = next(value for value in program.manifest.inputs if value.role == "label")
    arrays = []
    for shape, limit in ((network.sample.shape, network.sample.limit), (label.shape[1:], label.limit)):
        sizes = (count, *shape)
        arrays.append(random.integers(0, limit, sizes) if limit else random.standard_normal(sizes, dtype=np.float32))
    write_npz(folder / "data.npz", make_dataset(*arrays, "random numbers", exact=True))


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(export_network(json.loads(sys.argv[1]))))
