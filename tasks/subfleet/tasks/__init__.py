"""What is learned: data readers, the order of batches, and metrics. Needs NumPy; Pillow only for folders of images."""

from subfleet.tasks.batches import batch_order, iter_batches
from subfleet.tasks.dataset import Dataset
from subfleet.tasks.samples import digits
from subfleet.tasks.sources import read_dataset, write_npz

__all__ = ["Dataset", "batch_order", "digits", "iter_batches", "read_dataset", "write_npz"]
