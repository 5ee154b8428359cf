"""What holds for every source that needs no path: the YAMLs are globbed, a new one is tested without being named."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ntkexp.data.base import AbstractSource, Data
from ntkexp.data.images import Digits

EPS = torch.finfo(torch.float64).eps


def same(one: Data, other: Data) -> bool:
    """Whether two draws agree in every bit."""
    parts = ("shown", "inputs", "target", "index")
    return all(
        torch.equal(getattr(getattr(one, split), part), getattr(getattr(other, split), part))
        for split in ("train", "probe", "test")
        for part in parts
    )


def test_the_yaml_states_every_default(name: str, configured: Callable[..., AbstractSource]) -> None:
    source = configured(name)
    assert source == type(source)()
    assert source.fields().keys() == {"_target_", *type(source).model_fields}


def test_the_number_of_threads_changes_no_bit() -> None:
    """With so many pixels that torch would share out their sum."""
    source, before, drawn, after = Digits(classes="all", train=1297, probe=0, test=500), torch.get_num_threads(), [], []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            drawn.append(source.split())
            after.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    assert after == [1, 2]
    assert same(*drawn)


def test_splits_have_the_sizes_and_types_asked_for(source: AbstractSource) -> None:
    data = source.split()
    for split, size in ((data.train, 40), (data.probe, 20), (data.test, 30)):
        assert len(split.shown) == len(split.inputs) == len(split.target) == len(split.index) == size
        assert split.shown.shape == split.inputs.shape
        assert split.inputs.dtype == split.shown.dtype == torch.float64
        assert split.target.dtype == (torch.int64 if data.classes else torch.float64)
        assert split.target.ndim == (1 if data.classes else 2)
        assert all(tensor.isfinite().all() for tensor in (split.shown, split.inputs, split.target))


def test_splits_share_no_example(source: AbstractSource) -> None:
    data = source.split()
    index = torch.cat([data.train.index, data.probe.index, data.test.index])
    assert len(set(index.tolist())) == len(index)
    shown = torch.cat([data.train.shown, data.probe.shown, data.test.shown]).flatten(1)
    assert len(torch.unique(shown, dim=0)) == len(shown)


def test_a_seed_gives_the_same_bits_whatever_the_global_generators_do(source: AbstractSource) -> None:
    torch.manual_seed(1)
    first = source.split()
    torch.manual_seed(2)
    np.random.seed(3)  # noqa: NPY002  the global state is what this test is about
    assert same(first, source.split())


def test_global_generators_are_left_alone(source: AbstractSource) -> None:
    before, before_numpy = torch.get_rng_state(), np.random.get_state(legacy=False)  # noqa: NPY002  as above
    source.split()
    assert torch.equal(before, torch.get_rng_state())
    after_numpy = np.random.get_state(legacy=False)  # noqa: NPY002  as above
    np.testing.assert_equal(after_numpy, before_numpy)


def test_another_seed_is_another_draw(source: AbstractSource) -> None:
    assert not same(source.split(), source.model_copy(update={"seed": 1}).split())


def test_every_training_class_is_a_class(source: AbstractSource) -> None:
    data = source.split()
    if data.classes:
        assert set(data.train.target.tolist()) <= set(range(len(data.classes)))
        assert len(data.classes) >= 2
    else:
        # rounding of a mean over 40 numbers of size about 1
        assert data.train.target.mean(0).abs().max() < 100 * EPS
        assert (data.train.target.std(0, correction=0) - 1).abs().max() < 100 * EPS


def test_each_and_all_standardise_the_training_split(source: AbstractSource) -> None:
    each = source.model_copy(update={"standardise": "each"}).split().train
    varying = (each.shown != each.shown[:1]).any(0)
    # centring loses digits where a feature's mean is large against its deviation: up to 1e4 times in these sets
    assert each.inputs.mean(0).abs().max() < 1e5 * EPS
    assert (each.inputs.std(0, correction=0)[varying] - 1).abs().max() < 1e5 * EPS
    assert (each.inputs[:, ~varying] == 0).all()
    together = source.model_copy(update={"standardise": "all"}).split().train.inputs
    assert together.mean().abs() < 1e3 * EPS
    assert abs(together.std(correction=0) - 1) < 1e3 * EPS


def test_none_leaves_the_inputs_as_they_are_shown(source: AbstractSource) -> None:
    test = source.model_copy(update={"standardise": "none"}).split().test
    assert torch.equal(test.inputs, test.shown)


def test_label_noise_touches_training_targets_only(source: AbstractSource) -> None:
    clean, noisy = source.split(), source.model_copy(update={"label_noise": 0.25}).split()
    assert torch.equal(clean.train.inputs, noisy.train.inputs)
    if clean.classes:
        assert (clean.train.target != noisy.train.target).sum() == 10
        assert torch.equal(clean.test.target, noisy.test.target)
        assert torch.equal(clean.probe.target, noisy.probe.target)
    else:
        # an affine change of scale is all that the noise does to targets elsewhere
        both = torch.cat([clean.test.target, noisy.test.target], 1)
        assert torch.corrcoef(both.t())[0, 1] > 1 - 1e3 * EPS
        assert not torch.allclose(clean.train.target, noisy.train.target)
