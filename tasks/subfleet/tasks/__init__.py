"""What is learned: data readers, the order of batches, and metrics. Needs NumPy; Pillow only for folders of images."""

from subfleet.tasks.batches import StepOrigin, batch_order, iter_batches, split_batch, step_random
from subfleet.tasks.dataset import Dataset
from subfleet.tasks.samples import digits
from subfleet.tasks.sources import read_dataset, write_npz

__all__ = [
    "Dataset",
    "StepOrigin",
    "batch_order",
    "digits",
    "iter_batches",
    "read_dataset",
    "split_batch",
    "step_random",
    "write_npz",
]
