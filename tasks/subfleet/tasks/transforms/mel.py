"""Log-mel spectrograms: sound as an image of time and pitch (Davis and Mermelstein 1980)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

_BLOCK_CLIPS = 64
"""Clips that are transformed at once, to bound memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MelSettings:
    """Frames and bands of a spectrogram.

    The defaults give 49 frames per second of 40 bands, from 40 ms every 20 ms (Zhang et al. 2017, section 3.1).

    Attributes:
        rate_hz: samples per second.
        frame_samples: length of one frame.
        stride_samples: distance between the starts of successive frames.
        spectrum_samples: length of the Fourier transform, at least `frame_samples`; frames are padded with zeros.
        bands: number of mel bands.
        low_hz: lower edge of the first band.
        high_hz: upper edge of the last band, at most half of the rate.
        floor: added to powers before the logarithm, so that silence is finite.
    """

    rate_hz: int = 16_000
    frame_samples: int = 640
    stride_samples: int = 320
    spectrum_samples: int = 1024
    bands: int = 40
    low_hz: float = 20.0
    high_hz: float = 8_000.0
    floor: float = 1e-6

    def frames(self, samples: int) -> int:
        """Number of frames of a clip of at least `frame_samples` samples."""
        return 1 + (samples - self.frame_samples) // self.stride_samples


def log_mel(clips: npt.NDArray[np.floating], settings: MelSettings) -> Floats:
    """Compute the natural logarithm of the power in each mel band.

    Args:
        clips: (clips, samples), from -1 to 1.
        settings: frames and bands.

    Returns:
        (clips, frames, bands).
    """
    window = np.hanning(settings.frame_samples + 1)[:-1]
    filters = make_mel_filters(settings)
    bands = np.empty((len(clips), settings.frames(clips.shape[1]), settings.bands), np.float32)
    for start in range(0, len(clips), _BLOCK_CLIPS):
        block = clips[start : start + _BLOCK_CLIPS]
        frames = np.lib.stride_tricks.sliding_window_view(block, settings.frame_samples, axis=1)
        spectrum = np.fft.rfft(frames[:, :: settings.stride_samples] * window, n=settings.spectrum_samples)
        power = spectrum.real**2 + spectrum.imag**2
        bands[start : start + _BLOCK_CLIPS] = np.log(power @ filters + settings.floor)
    return bands


def make_mel_filters(settings: MelSettings) -> npt.NDArray[np.float64]:
    """Weights of each frequency in each band, (frequencies, bands): triangles, evenly spaced on the mel scale.

    Between the centres of the first and the last band the weights of each frequency sum to 1.
    """
    edges_hz = _edges_hz(settings)
    bins_hz = np.fft.rfftfreq(settings.spectrum_samples, 1 / settings.rate_hz)[:, None]
    widths_hz = np.diff(edges_hz)
    rising = (bins_hz - edges_hz[:-2]) / widths_hz[:-1]
    falling = (edges_hz[2:] - bins_hz) / widths_hz[1:]
    filters: npt.NDArray[np.float64] = np.clip(np.minimum(rising, falling), 0, None)
    return filters


def _edges_hz(settings: MelSettings) -> npt.NDArray[np.float64]:
    # mel = 1127 ln(1 + f / 700 Hz)
    low, high = (1127 * np.log1p(edge / 700) for edge in (settings.low_hz, settings.high_hz))
    edges: npt.NDArray[np.float64] = 700 * np.expm1(np.linspace(low, high, settings.bands + 2) / 1127)
    return edges
