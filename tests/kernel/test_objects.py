"""Kernel objects and kernel machines, compared with dense Jacobians, training, and scikit-learn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF
from sklearn.kernel_ridge import KernelRidge
from sklearn.svm import SVC
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ntkexp import KernelMachine, TangentKernel, tangent_kernel
from ntkexp.capacity import MemoryBudget
from ntkexp.library.tangent_object import Blocks, block_side
from tests.kernel import oracle
from tests.kernel.oracle import EPS, agree, normal as draw, refused
from tests.kernel.problems import problem

MODES: tuple[Blocks, ...] = ("all", "trace", "diagonal")


def network() -> nn.Sequential:
    """Return a network of three inputs and two outputs."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def reduced(kernel: Tensor, mode: Blocks) -> Tensor:
    """Return the entries of a whole kernel that a mode gives."""
    return torch.einsum({"all": "qcnd->qcnd", "trace": "qcnc->qn", "diagonal": "qcnc->qnc"}[mode], kernel)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["tanh", "convolution"])
def test_every_mode_is_that_of_the_dense_jacobians_in_blocks_of_any_size(name: str, mode: Blocks) -> None:
    given = problem(name)
    x1, x2 = given.x[:3], given.x[1:].flip(0)[:2]
    for small in (4.0, 1e-9):  # in one block, and in blocks of one example each
        kernel = TangentKernel(given.module, mode, memory_gb=small)
        agree(kernel(x1, x2), reduced(oracle.tangent(given.module, x1, x2), mode), 100 * EPS)
        agree(kernel(x1), reduced(oracle.tangent(given.module, x1, x1), mode), 100 * EPS)


def test_less_memory_is_smaller_blocks() -> None:
    net, x = network(), draw(50, 3)
    sides = [block_side(net, x, all_pairs=True, budget=MemoryBudget.of_gb(gb)) for gb in (1e-9, 4e-5, 4e-4, 4.0)]
    assert sides == sorted(sides)
    assert sides[0] == 1 < sides[1] < sides[2] < 1_000 < sides[3]
    bytes_of_result = 8 * 4 * sides[2] ** 2
    assert bytes_of_result < 4e5


class Batches(Dataset[Any]):
    """A data set whose items are whole batches."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> Any:
        return self.items[place]


@pytest.mark.parametrize("batch_size", [2, 7, None])
def test_the_rows_of_a_loader_are_its_examples_in_order(batch_size: int | None) -> None:
    net, x, y = network(), draw(7, 3), draw(7, 2)
    loader: DataLoader[Any]
    if batch_size is None:  # batches that the data set makes
        loader = DataLoader(Batches({"input": x[:3]}, {"input": x[3:6]}, {"input": x[6:]}), batch_size=None)
    else:
        loader = DataLoader(TensorDataset(x, y), batch_size)
    found = TangentKernel(net)(loader, x[:2])
    agree(found, tangent_kernel(net, x, x[:2]), 100 * EPS)
    targets = TangentKernel(net, inputs=lambda batch: batch["input"] if isinstance(batch, dict) else 2 * batch[0])
    agree(targets(loader), tangent_kernel(net, x if batch_size is None else 2 * x), 100 * EPS)


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (DataLoader(TensorDataset(draw(4, 3)), 2, shuffle=True), "x1: .*shuffles.*shuffle=False"),
        (DataLoader(Batches(draw(2, 3), draw(2, 4)), batch_size=None), "x1: .*do not go together"),
        (DataLoader(Batches(), batch_size=None), "x1: .*no batch"),
        (DataLoader(TensorDataset(draw(300, 3)), 2), "GB of the first examples of x1; raise it"),
    ],
)
def test_loaders_that_are_refused(loader: DataLoader[Any], words: str) -> None:
    with refused(words):
        TangentKernel(network(), memory_gb=5e-6)(loader)


def test_an_array_is_taken_and_given_in_the_numbers_of_the_weights() -> None:
    net, x = network().float(), draw(4, 3)
    found = TangentKernel(net, "trace")(x.numpy())
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.float32
    agree(torch.as_tensor(found), TangentKernel(net, "trace")(x.float()), 0.0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (np.ones(3), r"shape \[3\].*precomputed"),
        (np.array([["a"]]), "of <U1"),
        (np.ones((0, 3)), "no example"),
        (np.ones((2, 4)), "does not take them"),
        ([1, 2], "x1"),
    ],
)
def test_other_arrays_are_refused(given: Any, words: str) -> None:
    with refused(words):
        TangentKernel(network())(given)
    with refused(r"outputs='traec' is none of .* did you mean 'trace'"):
        TangentKernel(network(), "traec")  # type: ignore[arg-type]


# Compared with scikit-learn.


def digits() -> tuple[Any, Any, Any]:
    x = draw(40, 3).numpy()
    return x, np.where(x[:, 0] * x[:, 1] > 0, "same", "other"), draw(9, 3, seed=1).numpy()


def test_a_support_vector_machine_takes_it_as_a_function_and_as_a_matrix() -> None:
    x, labels, new = digits()
    kernel = TangentKernel(network(), "trace")
    by_function = SVC(kernel=kernel, C=10).fit(x, labels)
    by_matrix = SVC(kernel="precomputed", C=10).fit(kernel(x), labels)
    assert by_function.score(x, labels) > 0.8
    np.testing.assert_allclose(
        by_function.decision_function(new), by_matrix.decision_function(kernel(new, x)), rtol=0, atol=1e-9
    )


def test_ridge_regression_is_that_of_scikit_learn() -> None:
    (x, _, new), y, ridge = digits(), draw(40, 2, seed=2).numpy(), 0.1
    kernel = TangentKernel(network(), "trace")

    def share(one: Any, two: Any = None) -> Any:
        return kernel(one, two) / 2  # of two columns

    expected = KernelRidge(alpha=ridge, kernel="precomputed").fit(share(x), y).predict(share(new, x))
    condition = np.linalg.norm(share(x), 2) / ridge
    for machine, seen, asked in (
        (KernelMachine(kernel, ridge=ridge), x, new),
        (KernelMachine("precomputed", ridge=ridge), share(x), share(new, x)),
        (KernelMachine(share, ridge=ridge), x, new),
    ):
        found = machine.fit(seen, y).predict(asked)
        np.testing.assert_allclose(found, expected, rtol=0, atol=10 * EPS * condition * abs(expected).max())


@pytest.mark.parametrize("mode", MODES)
def test_the_best_ridge_has_the_smallest_leave_one_out_error(mode: Blocks) -> None:
    """All outputs share the ridge. Without an example, the machine is fitted to the other examples."""
    x, y, kernel = draw(7, 3), draw(7, 2, seed=2), TangentKernel(network(), mode)
    machine = KernelMachine(kernel, ridge="best").fit(x, y)
    assert machine.fitted is not None

    def error(ridge: float) -> float:
        total = 0.0
        for k in range(7):
            others = torch.arange(7) != k
            predicted = KernelMachine(kernel, ridge=ridge).fit(x[others], y[others]).predict(x[[k]])
            total += float((predicted - y[[k]]).square().sum())
        return total

    best = machine.fitted.ridge
    diagonal = torch.einsum("ncnc->nc", tangent_kernel(network(), x)).mean()
    assert any(best == pytest.approx(float(diagonal) * 10 ** (k / 2)) for k in range(-16, 3))
    assert error(best) == min(error(best * factor) for factor in (0.1, 10**-0.5, 1, 10**0.5, 10))
    agree(machine.predict(x), KernelMachine(kernel, ridge=best).fit(x, y).predict(x), 0)
    assert (machine.deviation(x) > 0).all() if mode == "trace" else machine.fitted.form != "matrix"


def test_steps_that_diverge_are_reported() -> None:
    """At more than 2n/λ_max, which has λ_max = 6.5 here with the ridge."""
    x, y = draw(6, 3), draw(6)
    for size, words in ((2 * 6 / 6.5 - 1e-9, None), (2.0, r"diverges with steps of 2; take steps below 1\.8")):
        machine = KernelMachine(fixed(6, 6), ridge=0.5, steps=3, step_size=size)
        with nullcontext() if words is None else pytest.warns(UserWarning, match=words):
            machine.fit(x, y)


def test_the_deviation_is_that_of_a_gaussian_process() -> None:
    (x, _, new), y = digits(), draw(40, seed=2).numpy()
    mean, deviation = GaussianProcessRegressor(RBF(), alpha=0.1, optimizer=None).fit(x, y).predict(new, return_std=True)
    machine = KernelMachine(RBF(), ridge=0.1).fit(x, y)
    np.testing.assert_allclose(machine.predict(new), mean, rtol=0, atol=1e-11)
    np.testing.assert_allclose(machine.deviation(new), deviation, rtol=0, atol=1e-11)


# Training with a fixed kernel.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_it_is_gradient_descent_of_the_linearised_network(mode: Blocks, ridge: float) -> None:
    """f ← f − η/n (K + ridge) (f − y), from f_0 on; with a ridge, of f_0 + K a with the penalty of a."""
    net, x, new, y = network(), draw(6, 3), draw(4, 3, seed=1), draw(6, 2, seed=2)
    steps, size = 50, 0.2
    kernel = TangentKernel(net, mode)
    whole, cross = tangent_kernel(net, x), tangent_kernel(net, new, x)
    if mode != "all":  # outputs learn separately: each by its own kernel, or by the mean
        diagonals = [torch.einsum("qcnc->qcn", each) for each in (whole, cross)]
        if mode == "trace":
            diagonals = [each.mean(1, keepdim=True).expand_as(each) for each in diagonals]
        whole, cross = (torch.einsum("qcn,cd->qcnd", each, torch.eye(2).double()) for each in diagonals)
    coefficients = torch.zeros_like(y)
    with torch.no_grad():
        start, started = net(x), net(new)
    for _ in range(steps):  # a ← a + η/n (y − f_0 − K a − ridge a)
        missing = y - start - torch.einsum("qcnd,nd->qc", whole, coefficients) - ridge * coefficients
        coefficients = coefficients + size / len(x) * missing
    expected = started + torch.einsum("qcnd,nd->qc", cross, coefficients)
    machine = KernelMachine(kernel, ridge=ridge, steps=steps, step_size=size, start=net).fit(x, y)
    agree(machine.predict(new), expected, 100 * EPS * steps)
    fine = KernelMachine(kernel, ridge=ridge, steps=10**6, step_size=steps * size / 10**6, start=net).fit(x, y)
    flow = KernelMachine(kernel, ridge=ridge, time=steps * size, start=net).fit(x, y)
    agree(fine.predict(new), flow.predict(new), 1e-4)  # η → 0, with an error of O(η λ) in a mode


def test_the_deviation_of_networks_that_start_at_random() -> None:
    """Linear networks, f_0 = Φ w with w ~ N(0, 1): the part of Φ that A = K(x, X) g(R) misses keeps its variance."""
    features, new = draw(5, 8), draw(3, 8, seed=1)
    machine = KernelMachine(lambda one, two: 3 * one @ two.T, ridge=0.1, time=2.0).fit(features, torch.eye(5).double())
    left = new - machine.predict(new) @ features
    agree(machine.deviation(new, nngp=lambda one, two: one @ two.T), left.norm(dim=1), 1e-12)


def linear(one: Tensor, two: Tensor) -> Tensor:
    return one @ two.T


@pytest.mark.parametrize(
    ("nngp", "words"),
    [
        (lambda one, two: torch.stack(2 * [linear(one, two)], 2), r"of the form diagonal and the shape \[1, 1\]"),
        (lambda one, two: torch.einsum("nm,cd->ncmd", linear(one, two), torch.eye(2).double()), "of the form blocks"),
        (lambda one, two: linear(one, two)[:, :3], r"the shape \[5, 3\].* here of shape \[5, 5\]"),
        (lambda one, two: one @ torch.arange(64).double().view(8, 8) @ two.T, "not symmetric"),
    ],
)
def test_covariances_that_are_no_matrix_of_the_examples_are_refused(
    nngp: Callable[[Tensor, Tensor], Tensor], words: str
) -> None:
    machine = KernelMachine(linear, ridge=0.1).fit(draw(5, 8), draw(5, 2))
    with refused(words):
        machine.deviation(draw(1, 8, seed=1), nngp=nngp)


def test_labels_become_targets_of_the_squared_loss_and_come_back() -> None:
    x, labels, new = digits()
    for names, places in ((labels, None), (np.arange(40) % 3 + 5, 3)):
        machine = KernelMachine(TangentKernel(network(), "trace"), ridge=1e-3, classes=True).fit(x, names)
        outputs = machine.decision_function(new)
        kinds = np.unique(names)
        expected = kinds[(outputs > 0).astype(int)] if places is None else kinds[outputs.argmax(1)]
        assert machine.predict(new).tolist() == expected.tolist()
        assert outputs.shape == ((9,) if places is None else (9, places))
    assert (KernelMachine(RBF(), classes=True).fit(x, labels).predict(x) == labels).all()  # t = ∞ learns all


def fixed(*shape: int) -> Callable[..., Tensor]:
    return lambda *given: torch.ones(shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("kernel", "y", "words"),
    [
        (fixed(6, 1), draw(6), r"shape \[6, 1\], and y has 6 rows"),  # nothing is broadcast
        (fixed(1, 6), draw(6), r"shape \[1, 6\]"),
        (fixed(6, 6, 3), draw(6, 2), r"shape \[6, 6, 3\], and y has 2 columns"),
        (fixed(6, 3, 6, 3), draw(6, 2), r"and y has 2 columns"),
        (fixed(6, 6), draw(5), r"y has 5 rows"),
        (fixed(6, 6), draw(6, 1, 1), r"y has the shape \[6, 1, 1\]"),
        (fixed(6, 6), torch.arange(6), "int64.*classes=True"),
        (fixed(6, 6), torch.tensor([1.0] * 5 + [float("nan")]), "not finite"),
        (fixed(6, 6), torch.eye(6).to_sparse(), "y is nested, sparse, quantized"),
        (fixed(6, 6), draw(6), "singular.*ridge"),
        (lambda *given: draw(6, 6), draw(6), "not symmetric"),
        (lambda *given: torch.tensor([3.0, 1, 1, 1, 1, -2]).diag(), draw(6), "semidefinite.* from -2 to 3"),
        (lambda *given: -torch.eye(6), draw(6), "semidefinite.* from -1 to 0"),
    ],
)
def test_kernels_and_targets_that_do_not_fit_are_refused(kernel: Callable[..., Tensor], y: Tensor, words: str) -> None:
    with refused(words):
        KernelMachine(kernel).fit(draw(6, 3), y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_a_kernel_is_singular_to_its_own_rounding(dtype: torch.dtype) -> None:
    """Eigenvalues up to n · eps · λ_max are rounding, with the eps of the kernel's dtype."""
    for factor, is_singular in ((0.9, True), (1.1, False)):
        matrix = torch.tensor([1.0] * 5 + [factor * 6 * torch.finfo(dtype).eps]).diag().to(dtype)
        for kernel in (matrix, matrix.numpy()):
            machine = KernelMachine("precomputed")
            if is_singular:
                with refused("the kernel is singular"):
                    machine.fit(kernel, draw(6))
            else:
                machine.fit(kernel, draw(6))


@pytest.mark.parametrize("order", ["reversed", "big-endian"])
def test_arrays_of_any_layout_are_read(order: str) -> None:
    matrix = draw(8, 6).numpy()
    kernel = matrix[:6].T @ matrix[:6]
    given = [kernel[::-1, ::-1], draw(6, 2).numpy()[::-1]]
    if order == "big-endian":
        given = [array.astype(">f8") for array in given]
    x, y = given
    found = KernelMachine("precomputed", ridge=0.1).fit(x, y).predict(x[:2])
    net = network()
    points = draw(4, 3).numpy()
    odd_points = points[::-1] if order == "reversed" else points.astype(">f8")
    expected_kernel = TangentKernel(net)(np.array(odd_points, dtype=float, order="C"))
    np.testing.assert_array_equal(TangentKernel(net)(odd_points), expected_kernel)
    native_x, native_y = (np.array(array, dtype=float, order="C") for array in given)
    expected = native_x[:2] @ np.linalg.solve(native_x + 0.1 * np.eye(6), native_y)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_queries_and_settings_that_do_not_fit_are_refused() -> None:
    with refused("call fit"):
        KernelMachine("precomputed").predict(draw(2, 6))
    machine = KernelMachine("precomputed", ridge=1.0).fit(torch.eye(6).double(), draw(6, 2))
    for cross in (draw(2, 5), draw(2, 1), draw(2, 6, 2)):
        with refused(r"a column for each training example"):
            machine.predict(cross)
    with refused(r"start= returns outputs of shape \[6, 1\]"):
        KernelMachine(fixed(6, 6), ridge=1.0, start=lambda x: x[:, :1]).fit(draw(6, 3), draw(6, 2))
    with refused("diverges"):
        KernelMachine(fixed(6, 6), steps=10**4, step_size=1e9).fit(draw(6, 3), draw(6))
    with refused("y holds one class; give two at least"):
        KernelMachine(fixed(6, 6), classes=True).fit(draw(6, 3), torch.zeros(6, dtype=torch.long))
    two_trainings = "give either time= .*, or steps= with step_size="
    for wrong, words in (
        ({"steps": 3}, two_trainings),
        ({"step_size": 0.1}, two_trainings),
        ({"time": 1.0, "steps": 3, "step_size": 0.1}, two_trainings),
        ({"ridge": -1.0}, "ridge=-1.0"),
        ({"ridge": "bets"}, "ridge='bets': give a number ≥ 0, or 'best'"),
        ({"time": -1.0}, "time=-1.0"),
    ):
        with refused(words):
            KernelMachine("precomputed", **wrong)
