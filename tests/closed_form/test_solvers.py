"""Ways to solve, against a plain solve; what was left out, against leaving it out; probabilities, against sampling."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ntkexp.closed_form import (
    calibration_error,
    conjugate_gradients,
    factorise,
    folds,
    held_out,
    log_loss,
    modes_of,
    probabilities,
)
from ntkexp.mistake import Mistake

EXAMPLES = 12


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kernel(rank: int = 20) -> Tensor:
    features = random(EXAMPLES, rank, seed=1)
    return features @ features.mH / rank


def plain(ridge: float, right: Tensor) -> Tensor:
    found: Tensor = torch.linalg.solve(kernel() + ridge * torch.eye(EXAMPLES, dtype=torch.float64), right)
    return found


@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_cholesky_solves(ridge: float) -> None:
    targets, found = random(EXAMPLES, 3, seed=2), factorise(kernel(), ridge)
    assert found.jitter == 0
    torch.testing.assert_close(found.solve(targets), plain(ridge, targets), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_conjugate_gradients_end_after_as_many_products_as_there_are_examples(ridge: float) -> None:
    matrix, targets = kernel(), random(EXAMPLES, 3, seed=2)
    targets[:, 1] = 0.0  # has arrived before it starts
    found = conjugate_gradients(lambda a: matrix @ a + ridge * a, matrix.diagonal() + ridge, targets)
    assert found.products <= EXAMPLES + 2  # two for rounding
    assert found.residual <= 1e-10
    # an error is at most the residual times the condition number, below a thousand
    torch.testing.assert_close(found.solution, plain(ridge, targets), rtol=1e-7, atol=1e-7)


def test_conjugate_gradients_say_how_far_they_came() -> None:
    matrix, heard = kernel(), []
    targets = random(EXAMPLES, 1, seed=2)
    found = conjugate_gradients(
        lambda a: matrix @ a, matrix.diagonal(), targets, most=3, tell=lambda *told: heard.append(told)
    )
    assert [count for count, _ in heard] == [1, 2, 3]
    true = float((targets - matrix @ found.solution).norm() / targets.norm())
    assert found.residual == pytest.approx(true, rel=1e-6)
    assert found.residual > 1e-10


def test_a_ridge_that_rounding_eats_is_helped_by_a_jitter() -> None:
    singular = kernel(rank=3)
    singular[0] *= 1 + 1e-15  # indefinite by rounding
    found = factorise((singular + singular.mH) / 2 - 1e-15 * torch.eye(EXAMPLES), 1e-16)
    assert 0 < found.jitter < 1e-8
    assert found.solve(random(EXAMPLES, 1, seed=2)).isfinite().all()


def test_cholesky_refuses_what_is_singular() -> None:
    with pytest.raises(Mistake, match=r"the kernel is singular.*a ridge > 0"):
        factorise(kernel(rank=3), 0.0)


@pytest.mark.parametrize("count", [EXAMPLES, 5], ids=["one by one", "five folds"])
@pytest.mark.parametrize("entries", [1, 2])
def test_what_is_left_out_is_as_if_it_had_not_been_there(count: int, entries: int) -> None:
    ridge, targets = 0.2, random(EXAMPLES, 2, seed=3)
    parts = folds(EXAMPLES // entries, count, entries)
    found = held_out(modes_of(kernel()), ridge, targets, parts)
    assert sorted(torch.cat(parts).tolist()) == list(range(EXAMPLES))
    for part in parts:
        kept = torch.ones(EXAMPLES, dtype=torch.bool)
        kept[part] = False
        R = kernel()[kept][:, kept] + ridge * torch.eye(int(kept.sum()), dtype=torch.float64)
        expected = kernel()[part][:, kept] @ torch.linalg.solve(R, targets[kept])
        torch.testing.assert_close(found[part], expected, rtol=1e-11, atol=1e-12)


def test_probabilities_are_frequencies() -> None:
    mean, deviation, draws = random(4, 3, seed=4), random(4, seed=5).abs() + 0.1, 100_000
    drawn = mean + deviation[:, None] * random(draws, 4, 3, seed=6)
    frequencies = torch.nn.functional.one_hot(drawn.argmax(2), 3).double().mean(0)
    error = 5 * 0.5 / draws**0.5  # five standard errors
    torch.testing.assert_close(probabilities(mean, deviation), frequencies, rtol=0, atol=error)


def test_two_classes_at_one_output() -> None:
    found = probabilities(torch.tensor([[0.0], [1.0]]).double(), torch.tensor([1.0, 0.0]).double())
    assert found.tolist() == [[0.5, 0.5], [0.0, 1.0]]


def test_the_log_of_probabilities_is_a_loss() -> None:
    found = torch.tensor([[0.25, 0.75], [0.5, 0.5]], dtype=torch.float64)
    expected = -(torch.tensor([0.75, 0.5]).double().log().mean())
    assert log_loss(found, torch.tensor([1, 0])) == pytest.approx(float(expected), rel=1e-15)


def test_honest_confidence_is_calibrated() -> None:
    found = torch.tensor([[0.25, 0.75]] * 4, dtype=torch.float64)
    assert calibration_error(found, torch.tensor([1, 1, 1, 0])) == pytest.approx(0, abs=1e-15)
    assert calibration_error(found, torch.tensor([1, 1, 0, 0])) == pytest.approx(0.25, abs=1e-15)
