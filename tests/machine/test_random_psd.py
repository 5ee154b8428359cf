"""A random kernel: exact where it is divided by and multiplied with again, and a kernel all the same."""

from __future__ import annotations

import torch

from ntkexp.machine.machines import RandomIdentity, RandomRegression, random_kernel
from tests.machine.evidence import POINTS, TRAIN, evidence, kernel_of, random

EVIDENCE = evidence(kernel_of(random(POINTS, 3)))
EPS = torch.finfo(torch.float64).eps


def test_any_kernel_divides_out() -> None:
    path = EVIDENCE.paths["secant"]
    expected = EVIDENCE.start + path.contributions.sum(2) + path.decay
    torch.testing.assert_close(RandomIdentity().predict(EVIDENCE).outputs, expected, rtol=0, atol=100 * EPS)


def test_its_regression_reproduces_what_was_learned() -> None:
    """The kernel is at least the identity, and at most a few times it, so that nothing is lost in the solve."""
    outputs = RandomRegression().predict(EVIDENCE).outputs
    torch.testing.assert_close(outputs[:TRAIN], EVIDENCE.end[:TRAIN], rtol=0, atol=1000 * EPS)
    assert (outputs[TRAIN:] - EVIDENCE.end[TRAIN:]).norm() > 0.1


def test_it_is_symmetric_and_at_least_the_identity() -> None:
    kernel = random_kernel(EVIDENCE)[:TRAIN]
    torch.testing.assert_close(kernel, kernel.t(), rtol=0, atol=10 * EPS)
    assert torch.linalg.eigvalsh(kernel).min() >= 1 - 100 * EPS
