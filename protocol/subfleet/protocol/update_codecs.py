"""Settings of update codecs, in configurations and tasks.

`subfleet.arrays.codecs` implements them. A codec encodes only changes of weights: running statistics of norms, and
tensors that would not become smaller, are sent as they are.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from subfleet.protocol.bounds import Range, checked

MAX_LEVELS = 127
"""Levels of magnitude; with both signs and zero they fit 8 bits."""
MAX_BUCKET_SIZE = 2**20
LEAST_FRACTION = 1e-6

Levels = Annotated[int, Range(least=1, most=MAX_LEVELS)]
BucketSize = Annotated[int, Range(least=1, most=MAX_BUCKET_SIZE)]
SentFraction = Annotated[float, Range(least=LEAST_FRACTION, most=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncompressed:
    """Every change as float32."""

    TYPE: ClassVar[str] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Qsgd:
    """Every change rounded to a few levels, up or down at random, without bias.

    Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", NeurIPS 2017, section
    3.1, with whole bits per value instead of an entropy code, so that the size of an update does not depend on its
    values.

    Attributes:
        levels: levels of magnitude above 0, 1 to 127. 1 takes 2 bits per value, 3 takes 3, 7 takes 4, and 127 takes 8.
        bucket_size: number of values that share a scale, 1 or more; smaller buckets are more precise and larger.
    """

    TYPE: ClassVar[str] = "qsgd"
    levels: Levels = MAX_LEVELS
    bucket_size: BucketSize = 512


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class TopK:
    """The changes of largest magnitude of each tensor, as float32; the others count as 0.

    Attributes:
        fraction: fraction of a tensor's values that is sent, above 0 and at most 1; at least one value.
    """

    TYPE: ClassVar[str] = "top_k"
    fraction: SentFraction = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class TopKQsgd:
    """The changes of largest magnitude of each tensor, rounded to a few levels.

    Attributes:
        fraction: see `TopK`.
        levels: see `Qsgd`.
        bucket_size: see `Qsgd`; only sent values count.
    """

    TYPE: ClassVar[str] = "top_k_qsgd"
    fraction: SentFraction = 0.1
    levels: Levels = MAX_LEVELS
    bucket_size: BucketSize = 512


AnyUpdateCodec = Uncompressed | Qsgd | TopK | TopKQsgd
"""Every codec of updates."""
