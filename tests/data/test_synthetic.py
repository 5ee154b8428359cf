"""Sources that are made: against their formulas, written here a second time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

from ntkexp.data.base import AbstractSource
from ntkexp.data.synthetic import Circle, Cued, Moons, Parity, Sphere, Teacher, corners, hermite

EPS = torch.finfo(torch.float64).eps


def draw(source: AbstractSource) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets before the split."""
    examples = source.examples(torch.Generator().manual_seed(0))
    return examples.inputs, examples.target


def test_the_circle_carries_its_waves() -> None:
    inputs, target = draw(Circle(frequencies=(2, 5)))
    angle = torch.atan2(inputs[:, 1], inputs[:, 0])
    waves = sum((k * angle).cos() + (k * angle).sin() for k in (2, 5))
    assert torch.allclose(target[:, 0], torch.as_tensor(waves), rtol=0, atol=100 * EPS)


def test_angles_are_uniform() -> None:
    inputs, _ = draw(Circle(train=4000))
    assert inputs.mean(0).abs().max() < 4 * (2 * len(inputs)) ** -0.5  # four deviations of the mean of cos a


def test_the_sphere_has_radius_one_and_no_preferred_direction() -> None:
    inputs, _ = draw(Sphere(train=4000, dimension=5))
    assert (inputs.norm(dim=1) - 1).abs().max() < 10 * EPS
    covariance = inputs.t() @ inputs / len(inputs)
    # an entry of x xᵀ has a deviation of at most √(2/d²) = 0.28; four of these over √n
    assert (covariance - torch.eye(5) / 5).abs().max() < 4 * 0.28 * len(inputs) ** -0.5


def test_hermite_polynomials_are_orthonormal() -> None:
    z, weight = torch.linspace(-10, 10, 4001, dtype=torch.float64), 20 / 4000
    density = weight * (-(z**2) / 2).exp() / (2 * torch.pi) ** 0.5
    values = torch.stack(hermite(z, 4))
    # the trapezium rule converges faster than any power here; the tail beyond 10 is below 1e-14
    assert torch.allclose((values * density) @ values.t(), torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-12)


def test_degree_one_is_linear() -> None:
    inputs, target = draw(Sphere(degree=1))
    solution = torch.linalg.lstsq(inputs, target).solution
    assert torch.allclose(inputs @ solution, target, rtol=0, atol=1e4 * EPS)  # the condition number is far below 100
    assert solution.norm().item() == pytest.approx(10**0.5, rel=1e-12)


@pytest.mark.parametrize("source", [Teacher, Sphere])
def test_more_examples_are_of_the_same_function(source: type[Teacher | Sphere]) -> None:
    few, many = draw(source(train=50, probe=0, test=0)), draw(source(train=60, probe=0, test=0))
    shared = [k for k in range(50) if torch.equal(few[0][k], many[0][k])]
    # blocks of sixteen normal numbers are drawn alike, but for the last
    assert len(shared) > 10
    assert torch.allclose(few[1][shared], many[1][shared], rtol=0, atol=100 * EPS)


def test_the_teacher_is_a_sum_over_its_units() -> None:
    inputs, target = draw(Teacher(dimension=3, hidden=4, train=5, probe=0, test=0))
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    second = torch.randn(4, 1, generator=generator, dtype=torch.float64)
    for x, y in zip(inputs, target, strict=True):
        units = [second[j, 0] * torch.tanh(sum(x[i] * first[i, j] for i in range(3)) / 3**0.5) for j in range(4)]
        assert abs(sum(units) / 2 - y[0]) < 10 * EPS


def test_moons_without_noise_lie_on_two_half_circles() -> None:
    inputs, labels = draw(Moons(noise=0))
    centre = torch.tensor([[0.0, 0.0], [1.0, 0.5]], dtype=torch.float64)[labels]
    assert ((inputs - centre).norm(dim=1) - 1).abs().max() < 10 * EPS
    side = torch.tensor([1.0, -1.0], dtype=torch.float64)[labels]
    assert (side * (inputs - centre)[:, 1] > -10 * EPS).all()
    assert labels.bincount().tolist() == [256, 256]


@pytest.mark.parametrize("inputs", ["signs", "gaussian"])
def test_parity_is_the_sign_of_the_product(inputs: str) -> None:
    points, labels = draw(Parity(order=3, inputs=inputs))
    assert torch.equal(points[:, 0] * points[:, 1] * points[:, 2] > 0, labels == 1)


def test_all_corners_of_a_cube_can_be_asked_for() -> None:
    found = corners(16, 4, torch.Generator().manual_seed(0))
    assert {tuple(corner) for corner in found.tolist()} == set(product((-1.0, 1.0), repeat=4))


def test_corners_are_drawn_evenly() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = sum(corners(3, 2, generator).sum(0) for _ in range(600))
    # leaving out one of four corners moves each sum by ±1: four deviations of 600 of them
    assert torch.as_tensor(counts).abs().max() < 4 * 600**0.5


def test_more_examples_than_corners_are_refused(refusal: Callable[[AbstractSource], str]) -> None:
    assert "data.dimension=3" in refusal(Parity(dimension=3))


def test_more_factors_than_coordinates_are_refused(refusal: Callable[[AbstractSource], str]) -> None:
    assert "data.order=11" in refusal(Parity(order=11))


def test_cued_tasks_are_two_orthogonal_directions_at_the_same_points() -> None:
    parts = [draw(Cued(task=task, dimension=4, cue=3.0)) for task in (1, 2)]
    points = parts[0][0][:, :4]
    found = [torch.linalg.lstsq(points, target).solution[:, 0] for _, target in parts]
    assert torch.allclose(
        torch.stack(found) @ torch.stack(found).t(), torch.eye(2).double(), atol=1e-12
    )  # 512 equations
    for number, (inputs, target) in enumerate(parts):
        assert torch.equal(inputs[:, :4], points)
        assert torch.allclose(points @ found[number], target[:, 0], rtol=0, atol=1e-12)
        assert torch.equal(inputs[:, 4:], 3.0 * torch.eye(2)[number].double().expand(len(inputs), 2))
