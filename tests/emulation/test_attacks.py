import numpy as np
import numpy.typing as npt
import pytest
import torch

from subfleet.emulation.poisoning import add_trigger, boost_change, scale_to_replace, shuffle_labels
from subfleet.protocol.errors import ConfigError, DataError
from subfleet.tasks.dataset import Dataset


def images(count: int = 20, classes: int = 4, shape: tuple[int, ...] = (2, 5, 4)) -> Dataset:
    generator = np.random.default_rng(0)
    return Dataset(
        inputs=generator.random((count, *shape), dtype=np.float32),
        labels=generator.integers(0, classes, count).astype(np.int64),
    )


def change(seed: int) -> dict[str, npt.NDArray[np.float32]]:
    generator = np.random.default_rng(seed)
    return {"a": generator.normal(size=(2, 3)).astype(np.float32), "b": np.array([-0.0, 1.0], np.float32)}


def test_strength_zero_is_the_honest_client_to_the_bit() -> None:
    broken = {name: np.full_like(array, np.inf) for name, array in change(1).items()}
    boosted = boost_change(change(0), broken, 0)
    assert all(boosted[name].tobytes() == array.tobytes() for name, array in change(0).items())


@pytest.mark.parametrize("strength", [1.0, 20.0])
def test_a_boosted_change_is_the_honest_one_with_the_malicious_one_on_top(strength: float) -> None:
    boosted = boost_change(change(0), change(1), strength)
    for name, array in boosted.items():
        np.testing.assert_allclose(array, change(0)[name] + strength * change(1)[name], rtol=1e-6)
        assert array.dtype == np.float32
    tensors = boost_change({"a": torch.ones(2)}, {"a": torch.full((2,), 3.0)}, strength)
    assert torch.equal(tensors["a"], torch.full((2,), 1 + 3 * strength))


def test_replacement_puts_the_attackers_model_in_place_of_the_mean() -> None:
    shared, malicious = change(0), change(1)
    weights = (3.0, 5.0, 2.0)
    scaled = scale_to_replace({name: malicious[name] - shared[name] for name in shared}, weights[0], sum(weights))
    for name, array in shared.items():
        zeros = np.zeros_like(array)
        mean = (weights[0] * scaled[name] + weights[1] * zeros + weights[2] * zeros) / sum(weights)
        np.testing.assert_allclose(array + mean, malicious[name], atol=1e-6)
    with pytest.raises(ConfigError, match="weight is 0, but must be above 0 and at most 3"):
        scale_to_replace(shared, 0, 3)
    with pytest.raises(ConfigError, match="weight is 4, but must be above 0 and at most 3"):
        scale_to_replace(shared, 4, 3)


def test_shuffled_labels_are_the_same_labels_of_other_samples() -> None:
    dataset = images(200)
    shuffled, repeated, other_seed = (shuffle_labels(dataset, seed) for seed in (1, 1, 2))
    assert np.array_equal(shuffled.inputs, dataset.inputs)
    assert np.array_equal(shuffled.class_counts(), dataset.class_counts())
    # Four classes: a quarter agrees by chance.
    assert 0.1 < float(np.mean(shuffled.labels == dataset.labels)) < 0.4
    assert np.array_equal(shuffled.labels, repeated.labels)
    assert not np.array_equal(shuffled.labels, other_seed.labels)


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.33, 1.0])
def test_a_trigger_is_a_bright_corner_with_the_attackers_class(fraction: float) -> None:
    dataset = images(20)
    before = dataset.inputs.copy()
    poisoned = add_trigger(dataset, 3, fraction, seed=7)
    assert np.array_equal(dataset.inputs, before)
    corner = (poisoned.inputs[:, :, -3:, -3:] == before.max()).all(axis=(1, 2, 3))
    assert int(corner.sum()) == round(fraction * 20)
    assert (poisoned.labels[corner] == 3).all()
    assert np.array_equal(poisoned.inputs[~corner], before[~corner])
    assert np.array_equal(poisoned.labels[~corner], dataset.labels[~corner])
    assert np.array_equal(poisoned.inputs[:, :, :-3], before[:, :, :-3])
    assert np.array_equal(poisoned.inputs[..., :-3], before[..., :-3])
    repeated = add_trigger(dataset, 3, fraction, seed=7)
    assert np.array_equal(poisoned.inputs, repeated.inputs)


def test_what_cannot_carry_a_trigger_is_refused() -> None:
    with pytest.raises(DataError, match="3 pixels or more"):
        add_trigger(images(shape=(1, 2, 8)), 0, 0.5, seed=0)
    with pytest.raises(DataError, match="3 pixels or more"):
        add_trigger(images(shape=(6,)), 0, 0.5, seed=0)
    for target, fraction in ((0, 1.5), (0, float("nan")), (-1, 0.5)):
        with pytest.raises(ConfigError, match="both must be at least 0, and fraction at most 1"):
            add_trigger(images(), target, fraction, seed=0)
