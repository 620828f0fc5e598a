"""Data readers, the order of batches, and metrics. Needs NumPy, and Pillow for folders of images.

Named data sets are in `subfleet.tasks.named_dataset`, so a device with its own data does not load their readers.
"""

from subfleet.tasks.arrays_file import write_npz
from subfleet.tasks.batches import (
    StepOrigin,
    batch_order,
    draw_round_part,
    iter_batches,
    path_random,
    sample_random,
    split_batch,
    step_random,
)
from subfleet.tasks.bundled import load_digits
from subfleet.tasks.data_form import DataForm, reshape_samples, shape_problem
from subfleet.tasks.dataset import Dataset
from subfleet.tasks.hold_out import hold_out
from subfleet.tasks.sources import describe_source, read_dataset

__all__ = [
    "DataForm",
    "Dataset",
    "StepOrigin",
    "batch_order",
    "describe_source",
    "draw_round_part",
    "hold_out",
    "iter_batches",
    "load_digits",
    "path_random",
    "read_dataset",
    "reshape_samples",
    "sample_random",
    "shape_problem",
    "split_batch",
    "step_random",
    "write_npz",
]
