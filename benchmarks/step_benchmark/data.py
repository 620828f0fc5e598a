"""Training batches: real data if SUBFLEET_DATA names their folder, else learnable data from a seed.

Real data are Fashion-MNIST (1x28x28), CIFAR-10 (3x32x32), Tiny Shakespeare (tokens) and Speech Commands (1x49x10 MFCC).
"""

import gzip
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from step_benchmark.zoo import ZooModel

FloatArray = npt.NDArray[np.float32]
IndexArray = npt.NDArray[np.int64]

SAMPLE_RATE_HZ = 16_000
FRAME_SAMPLES = 640
"""Frames of 40 ms, one every 20 ms: 49 in a second (Zhang et al. 2017, section 3.1)."""
STRIDE_SAMPLES = 320
MEL_BANDS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Inputs and labels in a model's shapes, and their source."""

    inputs: FloatArray | IndexArray
    labels: IndexArray
    source: str


def load_samples(model: ZooModel, count: int, seed: int = 0) -> Samples:
    """Load the first `count` samples of a seeded order.

    Args:
        model: the model that reads them.
        count: number of samples.
        seed: seed of the order, and of generated data.
    """
    random = np.random.default_rng(seed)
    folder = os.environ.get("SUBFLEET_DATA", "")
    reader = READERS.get("tokens" if model.sample_dtype == "I64" else str(model.sample_shape))
    if folder and reader is not None:
        return reader(Path(folder), model, count, random)
    if model.sample_dtype == "I64":
        return _make_text(model, count, random)
    return _make_classes(model, count, random)


def _make_classes(model: ZooModel, count: int, random: np.random.Generator) -> Samples:
    """Make one smooth pattern per class, with noise of the same strength."""
    labels = random.integers(0, model.class_count, count)
    coarse = random.standard_normal((model.class_count, *(math.ceil(size / 4) for size in model.sample_shape)))
    patterns = coarse
    for axis, size in enumerate(model.sample_shape, start=1):
        patterns = np.repeat(patterns, 4, axis=axis).take(range(size), axis=axis)
    inputs = patterns[labels] + random.standard_normal((count, *model.sample_shape))
    return Samples(inputs=inputs.astype(np.float32), labels=labels.astype(np.int64), source="made")


def _make_text(model: ZooModel, count: int, random: np.random.Generator) -> Samples:
    """Make walks on a random graph: each symbol has four followers, and some symbols are far more frequent."""
    followers = (model.sample_limit * random.random((model.sample_limit, 4)) ** 4).astype(np.int64)
    tokens = np.empty((count, model.sample_shape[0] + 1), np.int64)
    tokens[:, 0] = random.integers(0, model.sample_limit, count)
    for position in range(1, tokens.shape[1]):
        tokens[:, position] = followers[tokens[:, position - 1], random.integers(0, 4, count)]
    return Samples(inputs=tokens[:, :-1].copy(), labels=tokens[:, 1:].copy(), source="made")


def _read_text(folder: Path, model: ZooModel, count: int, random: np.random.Generator) -> Samples:
    text = np.frombuffer((folder / "tinyshakespeare" / "input.txt").read_bytes(), np.uint8)
    _, tokens = np.unique(text, return_inverse=True)
    if tokens.max() >= model.sample_limit:
        raise SystemExit(f"the text has {tokens.max() + 1} symbols, but {model.name} knows {model.sample_limit}")
    length = model.sample_shape[0]
    starts = random.integers(0, len(tokens) - length - 1, count)
    windows = np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64)
    return Samples(inputs=windows[:, :-1].copy(), labels=windows[:, 1:].copy(), source="tinyshakespeare")


def _read_cifar(folder: Path, model: ZooModel, count: int, random: np.random.Generator) -> Samples:
    with np.load(folder / "cifar10" / "cifar10_lossless_12k.npz", allow_pickle=False) as file:
        indices = random.permutation(len(file["y_train"]))[:count]
        images, labels = file["x_train"][indices], file["y_train"][indices]
    return _scale_images(images.transpose(0, 3, 1, 2), labels, "cifar10")


def _read_fashion(folder: Path, model: ZooModel, count: int, random: np.random.Generator) -> Samples:
    data_folder = folder / "fashion_mnist"
    images = np.frombuffer(
        gzip.decompress((data_folder / "t10k-images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16
    )
    labels = np.frombuffer(
        gzip.decompress((data_folder / "t10k-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8
    )
    indices = random.permutation(len(labels))[:count]
    return _scale_images(images.reshape(-1, 1, 28, 28)[indices], labels[indices], "fashion_mnist")


def _scale_images(images: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8], source: str) -> Samples:
    scaled = (images / 255).astype(np.float32)
    axes = (0, 2, 3)
    inputs = (scaled - scaled.mean(axes, keepdims=True)) / scaled.std(axes, keepdims=True)
    return Samples(inputs=np.ascontiguousarray(inputs, np.float32), labels=labels.astype(np.int64), source=source)


def _read_speech(folder: Path, model: ZooModel, count: int, random: np.random.Generator) -> Samples:
    with np.load(folder / "speech_commands" / "sc_v002_test_subset.npz", allow_pickle=False) as file:
        audio, offsets, names = file["audio"], file["offsets"], file["label"]
    indices = random.permutation(len(names))[:count]
    clips = np.zeros((count, SAMPLE_RATE_HZ), np.float32)
    for row, clip in enumerate(indices):
        wave = audio[offsets[clip] : offsets[clip + 1]][:SAMPLE_RATE_HZ]
        clips[row, : len(wave)] = wave / 2**15
    classes = {name: number for number, name in enumerate(np.unique(names))}
    features = compute_mfcc(clips, coefficients=model.sample_shape[2])
    inputs = (features - features.mean((0, 1))) / (features.std((0, 1)) + 1e-6)
    labels = np.array([classes[names[clip]] for clip in indices], np.int64)
    return Samples(inputs=inputs[:, None].astype(np.float32), labels=labels, source="speech_commands")


def compute_mfcc(clips: FloatArray, *, coefficients: int) -> FloatArray:
    """Mel-frequency cepstral coefficients, (clips, samples) to (clips, frames, coefficients).

    Power spectrum of Hann-windowed frames, triangular filters even on the mel scale from 20 Hz to 4 kHz, logarithm,
    and the orthonormal cosine transform (Davis and Mermelstein 1980).
    """
    frames = np.lib.stride_tricks.sliding_window_view(clips, FRAME_SAMPLES, axis=1)[:, ::STRIDE_SAMPLES]
    power = np.abs(np.fft.rfft(frames * np.hanning(FRAME_SAMPLES), n=1024)) ** 2
    edges_mel = np.linspace(1127 * math.log1p(20 / 700), 1127 * math.log1p(4000 / 700), MEL_BANDS + 2)
    edges_hz = 700 * np.expm1(edges_mel / 1127)
    bins_hz = np.linspace(0, SAMPLE_RATE_HZ / 2, power.shape[2])
    rising = (bins_hz - edges_hz[:-2, None]) / np.diff(edges_hz)[:-1, None]
    falling = (edges_hz[2:, None] - bins_hz) / np.diff(edges_hz)[1:, None]
    bands = np.log(power @ np.clip(np.minimum(rising, falling), 0, None).T + 1e-6)
    places = (np.arange(MEL_BANDS) + 0.5) * math.pi / MEL_BANDS
    cosines = np.cos(places[:, None] * np.arange(coefficients)) * math.sqrt(2 / MEL_BANDS)
    cosines[:, 0] /= math.sqrt(2)
    features: FloatArray = (bands @ cosines).astype(np.float32)
    return features


READERS: Mapping[str, Callable[[Path, ZooModel, int, np.random.Generator], Samples]] = MappingProxyType(
    {"tokens": _read_text, "(3, 32, 32)": _read_cifar, "(1, 28, 28)": _read_fashion, "(1, 49, 10)": _read_speech}
)
