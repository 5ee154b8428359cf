"""Machines that solve for coefficients, and the controls that have nothing to do with the network."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ntkexp.machine.base import DoesNotApply, Evidence
from ntkexp.machine.machines import Gauss, KernelRegression, Left, RBFIdentity, RBFRegression, Secant
from tests.machine.evidence import POINTS, TRAIN, along, evidence, kernel_of, random


def regular(outputs: int = 1) -> Evidence:
    """A path kernel of full rank, of other directions than the training examples' own: it is not symmetric."""
    kernel = kernel_of(random(POINTS, 9, seed=7), outputs)
    return evidence(kernel + 0.1 * random(*kernel.shape, seed=8))


def singular() -> Evidence:
    """A path kernel of rank two."""
    return evidence(kernel_of(random(POINTS, 2, seed=7)))


@pytest.mark.parametrize("outputs", [1, 3])
def test_regression_with_a_regular_kernel_reproduces_what_was_learned(outputs: int) -> None:
    found = regular(outputs)
    prediction = KernelRegression().predict(found)
    # the kernel's condition number is below a thousand
    torch.testing.assert_close(prediction.outputs[:TRAIN], found.end[:TRAIN], rtol=1e-11, atol=1e-11)
    assert prediction.detail.startswith(f"𝒦 by secant, rank {TRAIN * outputs}/{TRAIN * outputs}, cut-off ")


def test_regression_with_a_singular_kernel_projects_and_says_so() -> None:
    found = singular()
    prediction = KernelRegression().predict(found)
    features = random(POINTS, 2, seed=7)
    fitted = torch.linalg.lstsq(features[:TRAIN], found.learned).solution
    expected = found.start + features @ fitted
    torch.testing.assert_close(prediction.outputs, expected, rtol=1e-11, atol=1e-11)
    cutoff = TRAIN * torch.finfo(torch.float64).eps
    assert prediction.detail == f"𝒦 by secant, rank 2/{TRAIN}, cut-off {cutoff:.0e}"


def test_regression_refuses_a_kernel_that_was_not_read() -> None:
    found = regular()
    unread = along(found, {"secant": replace(found.path, kernel=torch.full_like(found.path.kernel, torch.nan))})
    with pytest.raises(DoesNotApply, match=r"path\.probes"):
        KernelRegression().predict(unread)


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_identity_holds_for_any_contributions(outputs: int) -> None:
    found = regular(outputs)
    rounding = 1e-14 * float(found.path.contributions.abs().sum(2).max())  # a product, a quotient and a sum of five
    summed = found.start + found.path.contributions.sum(2)
    torch.testing.assert_close(RBFIdentity().predict(found).outputs, summed, rtol=0, atol=rounding)


def test_the_identity_does_not_apply_where_the_kernel_vanishes() -> None:
    far = regular()
    inputs = far.inputs.clone()
    inputs[-1] += 1e6
    with pytest.raises(DoesNotApply, match="vanishes"):
        RBFIdentity().predict(replace(far, inputs=inputs))


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_control_regression_is_gaussian_with_the_median_width(outputs: int) -> None:
    found = regular(outputs)
    distances = torch.cdist(found.inputs, found.inputs[:TRAIN])
    off_diagonal = distances[:TRAIN][~torch.eye(TRAIN, dtype=torch.bool)]
    width = float(off_diagonal.median())
    kernel = torch.exp(-distances.square() / (2 * width**2))
    expected = found.start + kernel @ torch.linalg.solve(kernel[:TRAIN], found.learned)
    prediction = RBFRegression().predict(found)
    torch.testing.assert_close(prediction.outputs, expected, rtol=1e-10, atol=1e-10)  # condition number below 1e4
    assert prediction.detail.startswith(f"h={width:.3g}, rank {TRAIN * outputs}/")


def test_examples_that_coincide_still_have_a_width() -> None:
    found = regular()
    same = replace(found, inputs=torch.ones_like(found.inputs))
    assert RBFIdentity().predict(same).detail == "h=1, 𝒮 by secant"


def test_the_path_sum_adds_the_contributions_of_its_rule() -> None:
    found = regular(3)
    other = replace(found.path, contributions=2 * found.path.contributions, detail="nodes=2")
    both = along(found, {**found.paths, "gauss": other})
    for machine, times, detail in ((Secant(), 1, "pieces=1"), (Gauss(), 2, "nodes=2")):
        prediction = machine.predict(both)
        assert prediction.detail == detail
        torch.testing.assert_close(
            prediction.outputs, found.start + times * found.path.contributions.sum(2), rtol=1e-14, atol=1e-14
        )


def test_a_rule_that_was_not_accumulated_does_not_apply() -> None:
    with pytest.raises(DoesNotApply, match=r"add left to path\.rule"):
        Left().predict(regular())
