"""A kernel file of sketches: another file than the exact one, whose maker says how far it may be off."""

from __future__ import annotations

from ntkexp.config.compose import compose
from ntkexp.kernel_file.kernel import EmpiricalKernel

SMALL = ("data.train=9", "data.probe=4", "data.test=3", "model.width=16")


def mean_of_two(*overrides: str) -> EmpiricalKernel:
    """The mean over two networks."""
    experiment = compose([*SMALL, *overrides])
    return EmpiricalKernel(experiment, experiment.draw(), seeds=(0, 1))


def test_it_lies_within_its_bar_and_has_an_identity_of_its_own() -> None:
    exact, sketched = mean_of_two(), mean_of_two("kernel.sketch=500")
    points = exact.experiment.draw().train.inputs
    kernel, found = exact.among(points)["ntk"], sketched.among(points)["ntk"]
    bar, size = (sum(each) / 2 for each in zip(*sketched.errors, strict=True))
    assert 0 < float((found - kernel).norm()) <= bar < 0.5 * size
    assert "kernel.sketch=500" in sketched.remark
    assert exact.remark == ""
    elsewhere = mean_of_two("kernel.sketch=500").remark
    assert elsewhere.startswith("the kernel is a sketch (kernel.sketch=500): it tells")
    assert sketched.spec == exact.spec | {"sketch": 500, "sketch_seed": 0}
