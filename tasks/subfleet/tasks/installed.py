"""The data sets that need no download: digits, for each kind of task, and scikit-learn's diabetes."""

from subfleet.tasks import known_classes
from subfleet.tasks.named_dataset import NamedDataset
from subfleet.tasks.readers.included import (
    ATTRIBUTES,
    BRIGHTNESSES,
    PIXEL_CLASSES,
    TOKENS,
    read_diabetes,
    read_digits,
    read_digits_attributes,
    read_digits_moments,
    read_digits_pixels,
    read_digits_tokens,
)

_IMAGE = (1, 8, 8)
_LICENCE = "CC BY 4.0"
_SOURCE = "UCI's optical recognition of handwritten digits, its test part, as scikit-learn has it."

DIGITS = NamedDataset(
    name="digits",
    summary="handwritten digits in 10 classes, tiny",
    files=(),
    read=read_digits,
    input_shape=_IMAGE,
    class_count=10,
    class_names=known_classes.DIGITS,
    objective="cross_entropy",
    licence=_LICENCE,
    source=_SOURCE,
)
DIGITS_ATTRIBUTES = NamedDataset(
    name="digits_attributes",
    summary="handwritten digits: whether each is even, prime, five or more, and has a loop",
    files=(),
    read=read_digits_attributes,
    input_shape=_IMAGE,
    class_count=len(ATTRIBUTES),
    objective="binary_cross_entropy",
    licence=_LICENCE,
    source=_SOURCE,
)
DIGITS_MOMENTS = NamedDataset(
    name="digits_moments",
    summary="handwritten digits: row and column of the ink's centre, and its spread, in pixels",
    files=(),
    read=read_digits_moments,
    input_shape=_IMAGE,
    class_count=3,
    objective="mean_squared_error",
    licence=_LICENCE,
    source=_SOURCE,
)
DIGITS_PIXELS = NamedDataset(
    name="digits_pixels",
    summary="handwritten digits: whether each pixel is outside, of a stroke, or in a hole",
    files=(),
    read=read_digits_pixels,
    input_shape=_IMAGE,
    class_count=len(PIXEL_CLASSES),
    class_names=PIXEL_CLASSES,
    objective="dense_cross_entropy",
    licence=_LICENCE,
    source=_SOURCE,
)
DIGITS_TOKENS = NamedDataset(
    name="digits_tokens",
    summary="handwritten digits of 4 x 4 pixels: the next pixel's brightness, of 8",
    files=(),
    read=read_digits_tokens,
    input_shape=(TOKENS,),
    class_count=BRIGHTNESSES,
    objective="next_token",
    licence=_LICENCE,
    source=_SOURCE,
)
DIABETES = NamedDataset(
    name="diabetes",
    summary="ten measurements of patients, and how far diabetes has gone a year later",
    files=(),
    read=read_diabetes,
    input_shape=(10,),
    class_count=1,
    objective="mean_squared_error",
    licence="none stated; cite Efron et al. 2004",
    source="Efron et al. 2004, Least Angle Regression, as scikit-learn has it.",
)
