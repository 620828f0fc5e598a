"""Transforms are pure; random numbers are a function of (seed, round, client, epoch)."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matrices import examples

from subfleet.protocol.training import AugmentationSettings
from subfleet.tasks import iter_batches, sample_random
from subfleet.tasks.transforms.augmentation import (
    augment,
    crop_randomly,
    draw_augmentation,
    flip_horizontally,
)
from subfleet.tasks.transforms.mel import MelSettings, log_mel, make_mel_filters
from subfleet.tasks.transforms.tokens import (
    CHARACTERS,
    END_OF_LINE,
    UNKNOWN,
    build_vocabulary,
    character_tokens,
    split_words,
    token_windows,
    word_tokens,
)

EPOCH: dict[str, Any] = {"seed": 3, "round_number": 4, "client_id": "c", "epoch": 1}
BOTH = AugmentationSettings(name="crop_and_flip", padding=2)


def pictures(count: int = 9) -> npt.NDArray[np.float32]:
    return np.random.default_rng(0).random((count, 3, 5, 6), np.float32)


def draws(**changes: Any) -> npt.NDArray[np.float32]:
    return draw_augmentation(9, **{**EPOCH, **changes})


@given(padding=st.integers(1, 9), seed=st.integers(0, 99))
def test_a_crop_is_a_window_of_the_bordered_image(padding: int, seed: int) -> None:
    images = pictures(4)
    drawn = np.random.default_rng(seed).random((4, 2), np.float32)
    cut = crop_randomly(images, drawn, padding=padding)
    for image, result, (down, across) in zip(images, cut, drawn, strict=True):
        row, column = int(down * (2 * padding + 1)), int(across * (2 * padding + 1))
        bordered = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
        assert np.array_equal(result, bordered[:, row : row + 5, column : column + 6])


def test_every_offset_occurs_and_the_middle_one_changes_nothing() -> None:
    images = np.tile(np.arange(1, 31, dtype=np.float32).reshape(1, 1, 5, 6), (500, 1, 1, 1))
    drawn = np.random.default_rng(0).random((500, 2), np.float32)
    assert len({image.tobytes() for image in crop_randomly(images, drawn, padding=2)}) == 25
    assert np.array_equal(crop_randomly(images, np.full((500, 2), 0.5, np.float32), padding=2), images)


def test_a_flip_mirrors_left_and_right_below_a_half() -> None:
    images = pictures(2)
    result = flip_horizontally(images, np.array([0.49, 0.5], np.float32))
    assert np.array_equal(result[0], images[0, :, :, ::-1])
    assert np.array_equal(result[1], images[1])


def test_augmentation_follows_from_seed_round_client_and_epoch_alone() -> None:
    images = pictures()
    first = augment(images, draws(), BOTH)
    assert first.tobytes() == augment(images, draws(), BOTH).tobytes()
    changes: list[dict[str, Any]] = [{"seed": 4}, {"round_number": 5}, {"client_id": "d"}, {"epoch": 2}]
    for change in changes:
        assert first.tobytes() != augment(images, draws(**change), BOTH).tobytes()
    assert draws().tobytes() != sample_random(9, 3, seed=3, round_number=4, client_id="1/c", epoch=0).tobytes()


def test_a_sample_is_changed_alike_in_whatever_batch_it_comes() -> None:
    images, drawn = pictures(), draws()
    whole = augment(images, drawn, BOTH)
    for size in (2, 4, 9):
        for indices, _ in iter_batches(9, size, **EPOCH):
            assert np.array_equal(augment(images[indices], drawn[indices], BOTH), whole[indices])


def test_crops_go_down_and_across_independently_of_each_other_and_of_flips() -> None:
    images = np.tile(np.arange(1, 31, dtype=np.float32).reshape(1, 1, 5, 6), (500, 1, 1, 1))
    drawn = sample_random(500, 3, **EPOCH)
    assert len({image.tobytes() for image in augment(images, drawn, BOTH)}) == 25 * 2


def test_no_augmentation_changes_nothing() -> None:
    assert augment(pictures(), draws(), AugmentationSettings()).tobytes() == pictures().tobytes()


def test_draws_are_even() -> None:
    drawn = sample_random(20_000, 2, seed=0, round_number=0, client_id="", epoch=0)
    assert 0 <= drawn.min() < drawn.max() < 1
    assert np.abs(np.histogram(drawn, 10, (0, 1))[0] / 4000 - 1).max() < 0.06


def sine(hertz: float, amplitude: float = 0.5) -> npt.NDArray[np.float64]:
    return amplitude * np.sin(2 * np.pi * hertz * np.arange(16_000) / 16_000)


def centres_hz(mel: MelSettings) -> npt.NDArray[np.float64]:
    """The centre of each band, where its weight is 1: even steps of mel = 1127 ln(1 + f / 700 Hz)."""
    low, high = 1127 * np.log(1 + mel.low_hz / 700), 1127 * np.log(1 + mel.high_hz / 700)
    edges = 700 * (np.exp(np.linspace(low, high, mel.bands + 2) / 1127) - 1)
    return np.asarray(edges[1:-1])


def test_a_tones_loudest_band_is_the_one_around_it() -> None:
    mel = MelSettings()
    centres = centres_hz(mel)
    tones = list(centres[3:-1:4])
    bands = log_mel(np.stack([sine(hertz) for hertz in tones]), mel)
    assert bands.shape == (len(tones), 49, 40)
    assert bands.argmax(2).tolist() == [[3 + 4 * number] * 49 for number in range(len(tones))]


def test_the_bands_of_a_tone_hold_its_power() -> None:
    # A tone of amplitude a with whole periods in the frame has the power (a / 2 * sum of the window)^2 at its line.
    mel = MelSettings(spectrum_samples=640, floor=0.0)
    filters = make_mel_filters(mel)
    hertz = 1000.0
    line = round(hertz * 640 / 16_000)
    near = np.zeros(321)
    near[line - 1 : line + 2] = (0.5 / 2 * 320) ** 2 * np.array([0.25, 1, 0.25])
    np.testing.assert_allclose(np.exp(log_mel(sine(hertz)[None], mel)[0, 5]), near @ filters, rtol=1e-4, atol=1e-3)


def test_twice_the_amplitude_is_four_times_the_power() -> None:
    mel = MelSettings(floor=0.0)
    noise = np.random.default_rng(0).standard_normal((1, 4000))
    np.testing.assert_allclose(log_mel(2 * noise, mel) - log_mel(noise, mel), np.log(4), rtol=1e-4)


def test_the_filters_share_each_frequency_between_the_outer_centres() -> None:
    mel = MelSettings()
    filters, centres = make_mel_filters(mel), centres_hz(mel)
    bins_hz = np.fft.rfftfreq(mel.spectrum_samples, 1 / mel.rate_hz)
    inside = (bins_hz >= centres[0]) & (bins_hz <= centres[-1])
    np.testing.assert_allclose(filters[inside].sum(1), 1, rtol=1e-9)
    assert filters.min() >= 0
    assert filters[bins_hz < mel.low_hz].sum() == 0


def test_blocks_of_clips_change_nothing_and_silence_has_a_logarithm() -> None:
    mel = MelSettings(bands=4)
    clips = np.random.default_rng(0).standard_normal((130, 960)).astype(np.float32)
    together = log_mel(clips, mel)
    assert np.array_equal(together[129:], log_mel(clips[129:], mel))
    np.testing.assert_allclose(log_mel(np.zeros((1, 640)), mel), np.log(mel.floor), rtol=1e-6)


def test_characters_have_a_fixed_table() -> None:
    assert character_tokens("\n ~é\t😀A").tolist() == [1, 2, CHARACTERS - 1, 0, 0, 0, 2 + ord("A") - 32]
    assert len(character_tokens("")) == 0
    assert character_tokens("\ud800").tolist() == [2 + ord("?") - 32], "a lone surrogate is no character"
    printable = "".join(map(chr, range(32, 127)))
    assert character_tokens("\n" + printable).tolist() == list(range(1, CHARACTERS))


def test_words_are_numbered_by_frequency_then_name_up_to_the_limit() -> None:
    words = split_words("b a b\nc <unk> a b d\n")
    assert words == ["b", "a", "b", END_OF_LINE, "c", "<unk>", "a", "b", "d", END_OF_LINE, END_OF_LINE]
    vocabulary = build_vocabulary(words, limit=5)
    assert dict(vocabulary) == {UNKNOWN: 0, END_OF_LINE: 1, "b": 2, "a": 3, "c": 4}
    assert word_tokens(words, vocabulary).tolist() == [2, 3, 2, 1, 4, 0, 3, 2, 0, 1, 1]


@examples(20)
@given(count=st.integers(0, 60), context=st.integers(1, 9))
def test_windows_are_the_text_and_what_follows_it(count: int, context: int) -> None:
    inputs, labels = token_windows(np.arange(count), context)
    used = max(count - 1, 0) // context * context
    assert inputs.shape == labels.shape == (used // context, context)
    assert inputs.flatten().tolist() == list(range(used))
    assert labels.flatten().tolist() == list(range(1, used + 1))


@pytest.mark.parametrize("samples", [640, 959, 960, 16_000])
def test_the_count_of_frames_is_that_of_whole_frames(samples: int) -> None:
    mel = MelSettings(bands=2)
    assert log_mel(np.zeros((1, samples)), mel).shape == (1, mel.frames(samples), 2)
