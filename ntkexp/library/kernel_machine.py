"""A kernel machine with `fit` and `predict`: training with a fixed kernel under squared
loss, in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias
from warnings import warn

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.capacity import MemoryBudget
from ntkexp.closed_form import (
    AbstractGain,
    DescentGain,
    Ensemble,
    FlowGain,
    Kernels,
    Modes,
    Posterior,
    best_ridge,
    divergence,
    folds,
    modes_of,
)
from ntkexp.component import MAX_STEPS
from ntkexp.library.module import is_plain
from ntkexp.library.tangent_object import Examples, TangentKernel
from ntkexp.loss import Squared
from ntkexp.mistake import Mistake, checked_count, checked_number, in_short

Kernel: TypeAlias = Callable[..., "Tensor | np.ndarray[Any, Any]"]
"""A function (x1, x2) ↦ K. K is [n1, n2], one matrix for all outputs; [n1, n2, C], one
matrix per output; or [n1, C, n2, C], a block per pair of examples."""

PRECOMPUTED = "precomputed"
COPIES_FOR_MODES = 6  # copies of a matrix that its eigendecomposition needs
# size of |K − Kᵀ| relative to the largest |K|; allows float32 rounding
MAX_ASYMMETRY = 1e-4
# size of a negative eigenvalue relative to the largest one; allows float32 rounding
MAX_NEGATIVE_SHARE = 1e-4

Form = Literal["matrix", "diagonal", "blocks"]


@dataclass(frozen=True)
class LearnedMachine:
    """The result of `KernelMachine.fit`. For each matrix K of the kernel, it holds the
    eigendecomposition (modes) of K, and the coefficients a = g(K + ridge) (y − f_0)."""

    x: Any
    ridge: float
    form: Form
    modes: Sequence[Modes]
    coefficients: Sequence[Float[Tensor, "entry column"]]
    targets: Float[Tensor, "train out"]
    labels: Any  # class labels, or None for targets that are numbers
    is_vector: bool  # True if the targets had one axis
    is_tensor: bool


class KernelMachine:
    """The predictor of training with the fixed kernel K under squared loss:

        f̂(x) = f_0(x) + Σᵢ K(x, xᵢ) aᵢ
        a = g(K(X, X) + ridge) (y − f_0(X))
        g(λ) = 1/λ                    after endless training
        g(λ) = (1 − e^{−tλ/n})/λ      after a time t of gradient flow
        g(λ) = (1 − (1 − ηλ/n)ᵏ)/λ    after k steps of size η

    The loss is Σᵢ‖f(xᵢ) − yᵢ‖²/2n, the mean over the n examples,
    as in `ntkexp kernel predict`.

    All equations are solved in double precision.
    Results are tensors if y is a tensor, otherwise arrays.

    Args:
        kernel: a `TangentKernel`, or any function of (x1, x2) that returns [n1, n2],
            [n1, n2, C] or [n1, C, n2, C]. With "precomputed", `fit` and `predict` take
            matrices of these shapes instead of examples. The trace of a
            `TangentKernel` is divided by the number C of columns of y.
        ridge (number or "best"): the ridge, which is added to the eigenvalues. With
            "best", `fit` chooses it from a grid by leave-one-out cross-validation of
            kernel ridge regression, as `ntkexp kernel predict` can. Then
            `machine.fitted.ridge` is the ridge.
        time: t, the time of gradient flow.
        steps: k, the number of steps of gradient descent.
        step_size: η, the step size (learning rate) of gradient descent.
        start: the function f_0, such as a network. By default, f_0 is zero.
        classes: True if y holds labels. The labels are encoded as targets, as for
            `loss=squared`. `predict` then returns labels, and `decision_function`
            returns the outputs.
        memory_gb: the memory for blocks of the kernel.

    Raises:
        Mistake: if arguments exclude each other, such as `time` and `steps`.

    >>> plain = KernelMachine(lambda x1, x2: x1 @ x2.T, ridge=1.0)
    >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([6.0, 12.0])
    >>> [round(float(value), 9) for value in plain.fit(x, y).predict(torch.tensor([[3.0]]))]
    [15.0]
    """

    def __init__(
        self,
        kernel: Kernel | Literal["precomputed"],
        *,
        ridge: float | Literal["best"] = 0.0,
        time: float = math.inf,
        steps: int | None = None,
        step_size: float | None = None,
        start: Callable[[Any], Any] | None = None,
        classes: bool = False,
        memory_gb: float = 4.0,
    ) -> None:
        if not callable(kernel) and not (
            isinstance(kernel, str) and kernel == PRECOMPUTED
        ):
            raise Mistake(
                f"kernel={in_short(kernel)}: give a function of (x1, x2), or 'precomputed'"
            )
        if not (start is None or callable(start)):
            raise Mistake(
                f"start={in_short(start)}: give a function of inputs, or leave it out for f_0 = 0"
            )
        if not callable(kernel) and start is not None:
            raise Mistake(
                "start= needs inputs, and kernel='precomputed' has none; subtract f_0 from y"
            )
        self.kernel = kernel
        self.start = start
        self.classes = bool(checked_count("classes", classes, 0, 1))
        self.ridge: float | Literal["best"] = "best"
        if not isinstance(ridge, str):
            self.ridge = checked_number("ridge", ridge)
        elif ridge != "best":
            raise Mistake(f"ridge={in_short(ridge)}: give a number ≥ 0, or 'best'")
        self.time = checked_number("time", time, most=math.inf)
        if (steps is None) != (step_size is None) or (
            steps is not None and self.time != math.inf
        ):
            raise Mistake(
                "give either time= for gradient flow, or steps= with step_size= for gradient descent"
            )
        self.steps: int | None = None
        self.step_size: float | None = None
        if steps is not None and step_size is not None:
            self.steps = checked_count("steps", steps, 0, MAX_STEPS)
            self.step_size = checked_number("step_size", step_size, above=True)
        self.budget = MemoryBudget.of_gb(memory_gb)
        self.fitted: LearnedMachine | None = None

    def fit(self, x: Examples, y: Any) -> KernelMachine:
        """Train on examples. Warn if gradient descent with these steps diverges.

        Args:
            x: the examples, or with "precomputed" the kernel matrix of all pairs.
            y (tensor or array [n] or [n, C]): the targets,
                or with `classes` the labels [n].

        Returns:
            The machine itself.

        Raises:
            Mistake: if x and y have different lengths, or if a value is not finite.
        """
        labels, targets = self.encoded(y)
        count, width = targets.shape
        kernel = self.matrices(x, None, width)
        form = kernel.form
        entries = count * width if form == "blocks" else count
        if any(matrix.shape != (entries, entries) for matrix in kernel.matrices):
            shape = list(kernel.matrices[0].shape)
            raise Mistake(
                f"the kernel among the examples has shape {shape}, and y has {count} rows; give "
                "one for each"
            )
        numbers = sum(matrix.numel() for matrix in kernel.matrices)
        needed = COPIES_FOR_MODES * 8.0 * numbers
        self.budget.require(needed, f"the modes of {entries} equations")
        residual = targets - self.outputs_at_start(x, count, width)
        gain = self.gain(count)
        modes = [
            positive(modes_of(symmetric(matrix), kernel.eps))
            for matrix in kernel.matrices
        ]
        rights = split(residual, form)
        ridge = self.ridge
        if ridge == "best":
            left_out = folds(count, count, entries // count)
            ridge = best_ridge(kernel.matrices, modes, rights, left_out)
        coefficients = [
            modes_of_matrix.at(gain, ridge)(right)
            for modes_of_matrix, right in zip(modes, rights, strict=True)
        ]
        if not all(column.isfinite().all() for column in coefficients):
            raise Mistake(
                "training with this kernel diverges: its coefficients are not finite; take "
                "smaller steps"
            )
        largest = max(float(modes_of_matrix.values[-1]) for modes_of_matrix in modes)
        remark = divergence(self.step_size, largest + ridge, count)
        if remark is not None:
            warn(remark, stacklevel=2)
        is_vector = self.classes or np.ndim(y) == 1
        self.fitted = LearnedMachine(
            x,
            ridge,
            form,
            modes,
            coefficients,
            targets,
            labels,
            is_vector,
            isinstance(y, Tensor),
        )
        return self

    def predict(self, x: Examples) -> Any:
        """Return the predictions f̂(x).

        Args:
            x: the examples, or with "precomputed" the matrix [n1, n] of the kernel with
                the training examples.

        Returns:
            The predictions in the shape of the targets, or, with `classes`, the label of the
            largest output.
        """
        if not self.classes:
            return self.decision_function(x)
        machine, outputs = self.outputs(x)
        class_index = (
            (outputs[:, 0] > 0).long() if outputs.shape[1] == 1 else outputs.argmax(1)
        )
        labels = machine.labels[class_index.numpy()]
        return torch.as_tensor(labels) if machine.is_tensor else labels

    def decision_function(self, x: Examples) -> Any:
        """Return the outputs f̂(x). With `classes`, too, return outputs, not labels.

        Args:
            x: the examples, as in `predict`.

        Returns:
            The outputs [n, C], or [n] for targets with one axis or for two classes.
        """
        machine, outputs = self.outputs(x)
        outputs = (
            outputs[:, 0] if machine.is_vector and outputs.shape[1] == 1 else outputs
        )
        return outputs if machine.is_tensor else outputs.numpy()

    def deviation(self, x: Examples, nngp: Kernel | None = None) -> Any:
        """Return the standard deviation of the outputs at x,
        for a kernel of one matrix for all outputs.

        Args:
            x: the examples.
            nngp: the covariance 𝒢 of the outputs before training,
                a function of (x1, x2).

        Returns:
            The deviation [n]. Without `nngp`, it is the posterior deviation of the Gaussian process
            with this kernel, given targets with noise of variance `ridge`. With `nngp`, it is the
            deviation over random initial weights of networks that train all layers::

                σ² = 𝒢(x, x) + A 𝒢(X, X) Aᵀ − 2 A 𝒢(X, x),    A = K(x, X) g(K(X, X) + ridge)

        Raises:
            Mistake: if the kernel is "precomputed", or has a matrix for each output.
        """
        machine = self.fitted_machine()
        if machine.form != "matrix" or self.kernel == PRECOMPUTED:
            raise Mistake(
                "a deviation needs a kernel function that returns one matrix for all outputs, "
                "such as NNGP"
            )
        if not (nngp is None or callable(nngp)):
            raise Mistake(
                f"nngp={in_short(nngp)}: give the kernel of the outputs before training, a "
                "function of (x1, x2)"
            )
        (modes,) = machine.modes
        gain = self.gain(len(machine.targets))
        gain_map = modes.at(gain, machine.ridge)
        width = machine.targets.shape[1]
        (cross,) = self.matrices(x, machine.x, width).matrices
        points, examples = cross.shape
        prior = self.kernel if nngp is None else nngp
        prior_kernel = self.covariance(prior, x, None, (points, points))
        prior_variance = prior_kernel.diagonal()
        if nngp is None:
            variance = Posterior(
                cross, gain_map, modes.at(gain.doubled, machine.ridge)
            ).variance(prior_variance)
        else:
            start = Kernels(
                symmetric(self.covariance(nngp, machine.x, None, (examples, examples))),
                self.covariance(nngp, x, machine.x, (points, examples)),
            )
            variance = Ensemble(cross, start, gain_map).variance(prior_variance)
        deviation = variance.clamp(min=0).sqrt()
        return deviation if machine.is_tensor else deviation.numpy()

    def covariance(
        self, kernel: Any, x: Any, x2: Any, shape: tuple[int, int]
    ) -> Float[Tensor, "row column"]:
        """Return the values of a covariance function. Raise unless they are one matrix
        of the given shape."""
        width = self.fitted_machine().targets.shape[1]
        values = self.read(kernel, x, x2, width)
        matrix = values.matrices[0]
        if values.form != "matrix" or matrix.shape != shape:
            raise Mistake(
                f"nngp= returns a kernel of the form {values.form} and the shape {list(matrix.shape)}; "
                f"let it return one matrix for all outputs, here of shape {list(shape)}"
            )
        return matrix

    # --- Values of the kernel, and of f_0

    def gain(self, examples: int) -> AbstractGain:
        """Return the gain g of the chosen training, for a loss that is the mean over
        `examples` examples."""
        if self.steps is not None and self.step_size is not None:
            return DescentGain(self.step_size / examples, self.steps)
        return FlowGain(self.time / examples)

    def fitted_machine(self) -> LearnedMachine:
        if self.fitted is None:
            raise Mistake(
                "the kernel machine has learned nothing yet; call fit(x, y) first"
            )
        return self.fitted

    def outputs(self, x: Examples) -> tuple[LearnedMachine, Float[Tensor, "point out"]]:
        """Return the result of `fit`, and the outputs f̂(x) = f_0(x) + K(x, X) a."""
        machine = self.fitted_machine()
        width = machine.targets.shape[1]
        kernel = self.matrices(x, machine.x, width)
        matrices = kernel.matrices
        entries = len(machine.coefficients[0])
        if kernel.form != machine.form or any(
            matrix.shape[1] != entries for matrix in matrices
        ):
            raise Mistake(
                f"K(x, X) has {matrices[0].shape[1]} columns and the form {kernel.form}, and K(X, X) had "
                f"{entries} and the form {machine.form}; give K(x, X) with a column for each "
                "training example"
            )
        parts = [
            matrix @ a for matrix, a in zip(matrices, machine.coefficients, strict=True)
        ]
        change = torch.cat(parts, 1).reshape(-1, width)
        return machine, self.outputs_at_start(x, len(change), width) + change

    def matrices(self, x: Any, x2: Any, width: int) -> KernelMatrices:
        """Return the kernel between `x` and `x2`. If `x2` is None, return the kernel
        among the examples of `x`."""
        if self.kernel == PRECOMPUTED:
            return as_matrices(x, width)
        assert callable(self.kernel)
        return self.read(self.kernel, x, x2, width)

    def read(self, kernel: Any, x: Any, x2: Any, width: int) -> KernelMatrices:
        is_tangent_kernel = isinstance(kernel, TangentKernel)
        if x2 is None and not is_tangent_kernel:  # a TangentKernel takes None
            x2 = x
        values = as_matrices(kernel(x, x2), width)
        if is_tangent_kernel and kernel.outputs == "trace":
            # for a trace, divide by the number of target columns
            means = [matrix / width for matrix in values.matrices]
            return replace(values, matrices=means)
        return values

    def outputs_at_start(
        self, x: Any, count: int, width: int
    ) -> Float[Tensor, "example out"]:
        """Return the outputs f_0(x) before training."""
        if self.start is None:
            return torch.zeros(count, width, dtype=torch.float64)
        with torch.no_grad():
            values = self.start(x)
        if not isinstance(values, Tensor | np.ndarray):
            raise Mistake(
                f"start= returns a {type(values).__name__}; let it return a tensor "
                "or an array"
            )
        outputs = as_doubles(values, "start=")
        is_vector = width == 1 and outputs.shape == (count,)
        if not is_vector and outputs.shape != (count, width):
            raise Mistake(
                f"start= returns outputs of shape {list(outputs.shape)} for {count} "
                f"examples, and targets have {width} columns; return [{count}, {width}]"
            )
        return outputs.reshape(count, width)

    def encoded(self, y: Any) -> tuple[Any, Float[Tensor, "train out"]]:
        """Return the class labels (None without `classes`), and the targets."""
        if isinstance(y, Tensor) and not is_plain(y):
            raise Mistake(
                "y is nested, sparse, quantized or without numbers; give a plain tensor"
            )
        values = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
        if self.classes:
            if values.ndim != 1 or values.dtype.kind not in "biuSUO":
                raise Mistake(
                    f"classes=True: y is {values.dtype} of shape {list(values.shape)}; give one "
                    "label for each example"
                )
            labels, class_indices = np.unique(values, return_inverse=True)
            if len(labels) < 2:
                raise Mistake("classes=True: y holds one class; give two at least")
            return labels, Squared().encode(torch.as_tensor(class_indices), len(labels))
        if values.dtype.kind != "f":
            raise Mistake(
                f"y holds {values.dtype}: give floating numbers, or classes=True if they are labels"
            )
        if values.ndim not in (1, 2) or not values.size:
            raise Mistake(
                f"y has the shape {list(values.shape)}; give [example] or [example, output]"
            )
        if not np.isfinite(values).all():
            raise Mistake("y has entries that are not finite")
        return None, as_doubles(values, "y").reshape(len(values), -1)


# --- A kernel as one matrix or several matrices, with a linear system for each. Its
# form is "matrix" (one matrix for all outputs), "diagonal" (one matrix for each
# output), or "blocks" (one matrix, with a row for each pair of an example and an
# output).


@dataclass(frozen=True)
class KernelMatrices:
    """The values of a kernel as matrices in double precision. `eps` is the precision
    with which the kernel was computed."""

    form: Form
    matrices: list[Float[Tensor, "row column"]]
    eps: float


def as_matrices(kernel: Any, width: int) -> KernelMatrices:
    """Return the values of a kernel as one matrix or several matrices.

    >>> values = as_matrices(torch.ones(4, 2, 3, 2), width=2)
    >>> values.form, [list(matrix.shape) for matrix in values.matrices], values.eps < 1e-6
    ('blocks', [[8, 6]], True)
    """
    if not isinstance(kernel, Tensor | np.ndarray):
        raise Mistake(
            f"the kernel is a {type(kernel).__name__}; it takes a tensor or an array [n1, n2, …]"
        )
    values = as_doubles(kernel, "the kernel")
    if not values.isfinite().all():
        raise Mistake("the kernel has entries that are not finite")
    eps = precision(kernel)
    match list(values.shape):
        case [_, _]:
            return KernelMatrices("matrix", [values], eps)
        case [_, _, 1]:
            return KernelMatrices("matrix", [values[:, :, 0]], eps)
        case [_, 1, _, 1]:
            return KernelMatrices("matrix", [values[:, 0, :, 0]], eps)
        case [_, _, out] if out == width:
            return KernelMatrices("diagonal", list(values.unbind(2)), eps)
        case [_, out, _, out_] if out == out_ == width:
            return KernelMatrices("blocks", [values.flatten(2).flatten(0, 1)], eps)
    raise Mistake(
        f"the kernel has the shape {list(values.shape)}, and y has {width} columns; give [n1, n2], "
        f"[n1, n2, {width}] or [n1, {width}, n2, {width}]"
    )


def as_doubles(values: Tensor | np.ndarray[Any, Any], name: str) -> Tensor:
    """Convert a plain tensor or array of numbers to double precision.
    Raise for other objects."""
    if isinstance(values, Tensor):
        holds_numbers = is_plain(values) and not values.is_complex()
    else:
        holds_numbers = values.dtype.kind in "biuf"
    if not holds_numbers:
        raise Mistake(
            f"{name}: it holds {values.dtype}, or is nested or sparse; give a plain tensor or array "
            "of numbers"
        )
    if isinstance(values, np.ndarray):
        # copy, because torch takes no negative strides
        values = np.array(values, dtype=np.float64, order="C")
    return torch.as_tensor(values).detach().cpu().double()


def precision(values: Tensor | np.ndarray[Any, Any]) -> float:
    """Return the relative rounding error of numbers of this dtype,
    or of double precision if it is larger."""
    double = torch.finfo(torch.float64).eps
    if isinstance(values, Tensor):
        is_floating = values.is_floating_point()
        return torch.finfo(values.dtype).eps if is_floating else double
    return (
        max(double, float(np.finfo(values.dtype).eps))
        if values.dtype.kind == "f"
        else double
    )


def split(
    values: Float[Tensor, "train out"], form: Form
) -> list[Float[Tensor, "entry column"]]:
    """Split values into one right-hand side for each linear system."""
    match form:
        case "matrix":
            return [values]
        case "diagonal":
            return [column[:, None] for column in values.T]
        case "blocks":
            return [values.reshape(-1, 1)]


def positive(modes: Modes) -> Modes:
    """Return the modes of a kernel. Raise if it has a negative eigenvalue."""
    largest = float(modes.values[-1])
    if -modes.lowest > MAX_NEGATIVE_SHARE * largest:
        raise Mistake(
            f"the kernel is not positive semidefinite: its eigenvalues reach from {modes.lowest:.3g} "
            f"to {largest:.3g}; give a kernel K(x, x') = ⟨φ(x), φ(x')⟩"
        )
    return modes


def symmetric(matrix: Float[Tensor, "entry entry"]) -> Float[Tensor, "entry entry"]:
    """Return the matrix. Raise unless it is symmetric."""
    largest = float(matrix.abs().max()) or 1.0
    asymmetry = float((matrix - matrix.T).abs().max()) / largest
    if asymmetry > MAX_ASYMMETRY:
        raise Mistake(
            f"the kernel is not symmetric: |K − Kᵀ| reaches {asymmetry:.1g} of its largest entry; give "
            "a symmetric kernel"
        )
    return matrix
