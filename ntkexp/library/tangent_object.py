"""The tangent kernel as an object that is called: on tensors, NumPy arrays and DataLoaders, by other libraries too."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, overload

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ntkexp.kernel import Casts
from ntkexp.kernel.read.reader import kernel_bytes
from ntkexp.kernel.record.products import full_precision
from ntkexp.kernel.record.tape import as_inputs, examples, part, tensors
from ntkexp.library.module import named, of_module, reader_of, refuse_unfit
from ntkexp.library.tangent import MODES, refuse_large, tangent_kernel
from ntkexp.mistake import Mistake, checked_number, first_line, in_short, nearest
from ntkexp.shapes import Inputs

Examples: TypeAlias = "Inputs | np.ndarray[Any, Any] | DataLoader[Any]"
"""What a kernel is called on."""

Blocks = Literal["all", "trace", "diagonal"]
RANDOM: tuple[type[Sampler[Any]], ...] = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
MOST = 2**20  # examples of a block


@dataclass(frozen=True, eq=False)
class TangentKernel:
    """K(θ; x, x′) = J(θ; x) J(θ; x′)ᵀ of a module, as a function of (x1, x2), where x2 is x1 if it is not given.

    By `outputs` it gives::

        "all"         K[x, c, x′, c′]                    [n1, C, n2, C]
        "trace"       Σ_c K[x, c, x′, c], one matrix     [n1, n2]
        "diagonal"    K[x, c, x′, c] for each output c   [n1, n2, C]

    Examples are what `tangent_kernel` takes, or a NumPy array, whose floating numbers become those of the module's
    weights; or a DataLoader, whose rows are taken in order. Of a batch (inputs, targets, …) the inputs are taken, or
    what `inputs`, a function of the batch, gives. Given arrays for all its arguments, it gives an array.
    `weights`, `output` and `casts` are those of `tangent_kernel`; without `weights` the kernel is that of the module as
    it is when the kernel is called. A kernel is computed in blocks of rows and columns that take about `memory_gb`.

    >>> kernel = TangentKernel(nn.Linear(2, 1).double(), outputs="trace")
    >>> kernel(np.array([[1.0, 2.0], [0.0, 3.0]]))
    array([[ 6.,  7.],
           [ 7., 10.]])

    With outputs="trace" it is a kernel of scikit-learn's support vector machines, and gives the matrices of its
    `kernel="precomputed"`:

    >>> from sklearn.svm import SVC
    >>> x, labels = np.array([[-2.0, 0.0], [2.0, 0.0], [2.0, 1.0]]), [0, 1, 1]
    >>> SVC(kernel=kernel).fit(x, labels).predict(x[:2]).tolist()
    [0, 1]
    >>> SVC(kernel="precomputed").fit(kernel(x), labels).predict(kernel(x[:2], x)).tolist()
    [0, 1]
    """

    module: nn.Module
    outputs: Blocks = "all"
    weights: Mapping[str, Tensor] | None = None
    output: str | int | None = None
    inputs: Callable[[Any], Inputs] | None = None
    memory_gb: float = 4.0
    casts: Casts = "keep"

    def __post_init__(self) -> None:
        if not isinstance(self.outputs, str) or self.outputs not in MODES:
            hint = nearest(in_short(self.outputs).strip("'"), MODES)
            raise Mistake(f"outputs={in_short(self.outputs)} is none of {', '.join(MODES)}{hint}")
        checked_number("memory_gb", self.memory_gb, above=True)

    @overload
    def __call__(  # type: ignore[overload-overlap]  # arrays are among examples, and come first
        self, x1: np.ndarray[Any, Any], x2: np.ndarray[Any, Any] | None = None
    ) -> np.ndarray[Any, Any]: ...

    @overload
    def __call__(self, x1: Examples, x2: Examples | None = None) -> Tensor: ...

    def __call__(self, x1: Examples, x2: Examples | None = None) -> Tensor | np.ndarray[Any, Any]:
        left, right = self.rows(x1, "x1"), None if x2 is None else self.rows(x2, "x2")
        found = self.matrix(left, right)
        arrays = isinstance(x1, np.ndarray) and (x2 is None or isinstance(x2, np.ndarray))
        return found.cpu().numpy() if arrays else found

    @full_precision()
    def matrix(self, left: Inputs, right: Inputs | None) -> Float[Tensor, "probe *kernel"]:
        """The kernel, block by block; of examples with themselves, blocks are mirrored at the diagonal."""
        other = left if right is None else right
        counts = examples(left), examples(other)
        side = block_side(
            self.module,
            left,
            self.weights,
            self.output,
            self.casts,
            all_pairs=self.outputs == "all",
            memory_gb=self.memory_gb,
        )
        if side >= max(counts):
            return self.block(left, right)
        whole: Tensor | None = None
        for rows in blocks(counts[0], side):
            for columns in blocks(counts[1], side):
                if right is None and columns.start < rows.start:
                    continue
                same = right is None and rows == columns
                found = self.block(part(left, rows), None if same else part(other, columns))
                if whole is None:  # now its outputs are known
                    shape, outputs = list(found.shape), found.shape[-1] if found.dim() > 2 else 1
                    shape[0], shape[-2 if self.outputs == "all" else 1] = counts
                    needed = found.element_size() * float(np.prod(shape))
                    refuse_large(
                        "kernel", *counts, outputs=outputs, needed=needed, choice="outputs='trace'"
                    )
                    whole = found.new_empty(shape)
                whole[self.place(rows, columns)] = found
                if right is None and not same:
                    whole[self.place(columns, rows)] = self.mirrored(found)
        assert whole is not None  # there is an example on either side
        return whole

    def block(self, left: Inputs, right: Inputs | None) -> Float[Tensor, "probe *kernel"]:
        found = tangent_kernel(
            self.module,
            left,
            right,
            weights=self.weights,
            output=self.output,
            outputs=self.outputs,
            casts=self.casts,
        )
        return found[:, 0, :, 0] if self.outputs == "trace" else found

    def place(self, rows: slice, columns: slice) -> tuple[slice, ...]:
        return (rows, slice(None), columns) if self.outputs == "all" else (rows, columns)

    def mirrored(self, found: Float[Tensor, "probe *kernel"]) -> Float[Tensor, "train *kernel"]:
        """K(x′, x), of K(x, x′)."""
        return found.permute(2, 3, 0, 1) if self.outputs == "all" else found.transpose(0, 1)

    # --- Examples, as tensors.

    def rows(self, given: Examples, name: str) -> Inputs:
        """Examples as `tangent_kernel` takes them."""
        if isinstance(given, DataLoader):
            found = self.loaded(given, name)
        elif isinstance(given, np.ndarray):
            found = self.converted(given, name)
        else:
            found = given
        refuse_unfit(found, name)
        return as_inputs(found)

    def converted(self, array: np.ndarray[Any, Any], name: str) -> Tensor:
        """An array as a tensor, where the weights are, and in their numbers if it holds floating ones."""
        if array.dtype.kind not in "biuf":
            raise Mistake(f"{name} is an array of {array.dtype}; give one of numbers")
        if array.ndim < 2:
            raise Mistake(
                f"{name} is an array of shape {list(array.shape)}; give one [example, …]. (scikit-learn calls the "
                "kernels of KernelRidge for two examples at a time: there, give kernel='precomputed', and this "
                "kernel's matrix)"
            )
        weight = next(iter(self.module.parameters()), torch.empty(0))
        found = torch.as_tensor(array, device=weight.device)
        return (
            found.to(weight.dtype)
            if found.is_floating_point() and weight.is_floating_point()
            else found
        )

    def loaded(self, loader: DataLoader[Any], name: str) -> Inputs:
        """The inputs of all batches, one after the other."""
        samplers = loader.sampler, getattr(loader.batch_sampler, "sampler", None)
        if any(isinstance(each, RANDOM) for each in samplers):
            raise Mistake(
                f"{name}: the DataLoader shuffles, and rows of a kernel would be in an unknown order; give "
                "shuffle=False"
            )
        batches, held = list[Inputs](), 0
        for batch in loader:
            batches.append(as_inputs(self.taken(batch)))
            held += sum(tensor.nbytes for tensor in tensors(batches[-1]))
            if held > self.memory_gb * 1e9:
                raise Mistake(
                    f"{name}: the examples alone take more than memory_gb={self.memory_gb:g}; raise it"
                )
        if not batches:
            raise Mistake(f"{name}: the DataLoader gives no batch; give at least one example")
        try:
            return joined(batches)
        except (RuntimeError, ValueError) as error:
            raise Mistake(f"{name}: the batches do not go together: {first_line(error)}") from error

    def taken(self, batch: Any) -> Any:
        """The inputs of a batch: all of a tensor or a mapping, the first of (inputs, targets, …)."""
        if self.inputs is not None:
            return self.inputs(batch)
        return batch[0] if isinstance(batch, tuple | list) else batch


@of_module
def block_side(
    module: nn.Module,
    x1: Inputs,
    weights: Mapping[str, Tensor] | None = None,
    output: str | int | None = None,
    casts: Casts = "keep",
    *,
    all_pairs: bool,
    memory_gb: float,
) -> int:
    """The most examples on either side of a block that takes `memory_gb`, judged by two examples; of all pairs of
    outputs, or of a few outputs at a time."""
    if examples(x1) <= 1:
        return MOST
    reader, own = reader_of(module, output, casts)
    place = own | named(module, {} if weights is None else weights, "weights")
    tape = reader.record(place, part(as_inputs(x1), slice(0, 2)))
    some = reader.tangent(tape, None if all_pairs else [0])
    recorded = tape.bytes_per_example * (1 + some.outputs)

    def needed(side: int) -> float:
        result = side**2 * some.outputs**2 * tape.outputs.element_size()
        return kernel_bytes(some, side, side) + 2 * side * recorded + result

    return max(1, bisect_left(range(1, MOST), memory_gb * 1e9, key=needed))


def joined(batches: list[Inputs]) -> Inputs:
    """Batches of one form as one.

    >>> joined([{"x": torch.ones(2, 3)}, {"x": torch.ones(1, 3)}])["x"].shape
    torch.Size([3, 3])
    """
    flat = [tree_flatten(batch) for batch in batches]
    form, leaves = flat[0][1], []
    for column in zip(*(found for found, _ in flat), strict=True):
        constant = not isinstance(column[0], Tensor)
        if constant and any(each != column[0] for each in column):
            raise ValueError(f"{in_short(column[0])} is another in a later batch")
        leaves.append(column[0] if constant else torch.cat(column))
    if any(other != form for _, other in flat):
        raise ValueError("they hold other things")
    whole: Inputs = tree_unflatten(leaves, form)
    return whole


def blocks(count: int, side: int) -> list[slice]:
    return [slice(at, min(at + side, count)) for at in range(0, count, side)]
