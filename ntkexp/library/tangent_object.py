"""The tangent kernel as a callable object for tensors, NumPy arrays and DataLoaders, as
other libraries expect."""

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

from ntkexp.capacity import MemoryBudget, split_range
from ntkexp.kernel import Casts
from ntkexp.kernel.read.reader import kernel_bytes
from ntkexp.kernel.record.products import full_precision
from ntkexp.kernel.record.tape import as_inputs, examples, part, tensors
from ntkexp.library.module import named, of_module, reader_of, refuse_unfit
from ntkexp.library.tangent import MODES, refuse_large, tangent_kernel
from ntkexp.mistake import Mistake, first_line, in_short, nearest
from ntkexp.shapes import Inputs

Examples: TypeAlias = "Inputs | np.ndarray[Any, Any] | DataLoader[Any]"
"""The examples that a kernel accepts."""

Blocks = Literal["all", "trace", "diagonal"]
RANDOM_SAMPLERS: tuple[type[Sampler[Any]], ...] = (
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
MAX_BLOCK_SIDE = 2**20  # largest number of examples on one side of a block


@dataclass(frozen=True, eq=False)
class TangentKernel:
    """The tangent kernel K(θ; x, x′) = J(θ; x) J(θ; x′)ᵀ of a module,
    as a function of (x1, x2).

    `outputs` chooses the form::

        "all"         K[x, c, x′, c′]                    [n1, C, n2, C]
        "trace"       Σ_c K[x, c, x′, c], one matrix     [n1, n2]
        "diagonal"    K[x, c, x′, c] for each output c   [n1, n2, C]

    Args:
        module: any module, as in `tangent_kernel`.
        outputs: the form of the kernel: "all", "trace" or "diagonal".
        weights: replaces parameters of the module, by name. By default, the kernel uses
            the weights of the module at the time of the call.
        output: the name or index of a tensor, if the module returns several.
        inputs: a function that returns the inputs from a batch of a DataLoader. By
            default, the first entry of a batch (inputs, targets, …) is used.
        memory_gb: the memory for blocks of rows and columns.
        casts: "ignore" skips casts to dtypes of lower precision than the weights.

    Raises:
        Mistake: if `outputs` is none of the three.

    >>> kernel = TangentKernel(nn.Linear(2, 1).double(), outputs="trace")
    >>> kernel(np.array([[1.0, 2.0], [0.0, 3.0]]))
    array([[ 6.,  7.],
           [ 7., 10.]])

    With outputs="trace", it is a valid `kernel` for scikit-learn's support vector
    machines, and returns matrices for `kernel="precomputed"`:

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
            raise Mistake(
                f"outputs={in_short(self.outputs)} is none of {', '.join(MODES)}{hint}"
            )
        _ = self.budget

    @property
    def budget(self) -> MemoryBudget:
        return MemoryBudget.of_gb(self.memory_gb)

    @overload
    def __call__(  # type: ignore[overload-overlap]  # arrays are `Examples`, so this comes first
        self, x1: np.ndarray[Any, Any], x2: np.ndarray[Any, Any] | None = None
    ) -> np.ndarray[Any, Any]: ...

    @overload
    def __call__(self, x1: Examples, x2: Examples | None = None) -> Tensor: ...

    def __call__(
        self, x1: Examples, x2: Examples | None = None
    ) -> Tensor | np.ndarray[Any, Any]:
        """Compute the kernel between two sets of examples.

        Args:
            x1: the examples: as for `tangent_kernel`, a NumPy array, or a DataLoader
                that does not shuffle. Floating-point arrays are converted to the dtype
                of the weights.
            x2: other examples, by default those of x1.

        Returns:
            The kernel in the form of `outputs`. If all arguments are arrays,
            it is an array.

        Raises:
            Mistake: if the module is random or couples examples,
                or if a loader shuffles.
        """
        left = self.rows(x1, "x1")
        right = None if x2 is None else self.rows(x2, "x2")
        kernel = self.matrix(left, right)
        if isinstance(x1, np.ndarray) and isinstance(x2, np.ndarray | None):
            return kernel.cpu().numpy()
        return kernel

    @full_precision()
    def matrix(
        self, left: Inputs, right: Inputs | None
    ) -> Float[Tensor, "query *kernel"]:
        """Return the kernel, block by block. If `right` is None,
        mirror the blocks above the diagonal."""
        columns_inputs = left if right is None else right
        counts = (examples(left), examples(columns_inputs))
        side = block_side(
            self.module,
            left,
            self.weights,
            self.output,
            self.casts,
            all_pairs=self.outputs == "all",
            budget=self.budget,
        )
        if side >= max(counts):
            return self.block(left, right)
        kernel: Tensor | None = None
        for rows in split_range(0, counts[0], side):
            for columns in split_range(0, counts[1], side):
                if right is None and columns.start < rows.start:
                    continue
                is_diagonal = right is None and rows == columns
                columns_part = None if is_diagonal else part(columns_inputs, columns)
                block = self.block(part(left, rows), columns_part)
                if kernel is None:  # the first block gives the number of outputs
                    kernel = self.empty(block, counts)
                kernel[self.block_index(rows, columns)] = block
                if right is None and not is_diagonal:
                    kernel[self.block_index(columns, rows)] = self.transposed(block)
        assert kernel is not None  # `left` and `right` have at least one example
        return kernel

    def empty(
        self, block: Tensor, counts: tuple[int, int]
    ) -> Float[Tensor, "query *kernel"]:
        """Allocate the kernel, or raise if it exceeds the memory."""
        shape = list(block.shape)
        shape[0] = counts[0]
        shape[-2 if self.outputs == "all" else 1] = counts[1]
        outputs = block.shape[-1] if block.dim() > 2 else 1
        needed = block.element_size() * float(np.prod(shape))
        refuse_large(
            "kernel", *counts, outputs=outputs, needed=needed, choice="outputs='trace'"
        )
        return block.new_empty(shape)

    def block(
        self, left: Inputs, right: Inputs | None
    ) -> Float[Tensor, "query *kernel"]:
        kernel = tangent_kernel(
            self.module,
            left,
            right,
            weights=self.weights,
            output=self.output,
            outputs=self.outputs,
            casts=self.casts,
        )
        return kernel[:, 0, :, 0] if self.outputs == "trace" else kernel

    def block_index(self, rows: slice, columns: slice) -> tuple[slice, ...]:
        """Return the index of a block in the kernel."""
        return (
            (rows, slice(None), columns) if self.outputs == "all" else (rows, columns)
        )

    def transposed(
        self, block: Float[Tensor, "query *kernel"]
    ) -> Float[Tensor, "train *kernel"]:
        """Return the block K(x′, x), given K(x, x′)."""
        return (
            block.permute(2, 3, 0, 1)
            if self.outputs == "all"
            else block.transpose(0, 1)
        )

    # --- Conversion of examples to tensors

    def rows(self, examples_given: Examples, name: str) -> Inputs:
        """Convert examples to inputs of `tangent_kernel`."""
        if isinstance(examples_given, DataLoader):
            inputs = self.loaded(examples_given, name)
        elif isinstance(examples_given, np.ndarray):
            inputs = self.converted(examples_given, name)
        else:
            inputs = examples_given
        refuse_unfit(inputs, name)
        return as_inputs(inputs)

    def converted(self, array: np.ndarray[Any, Any], name: str) -> Tensor:
        """Convert an array to a tensor on the weights' device. Convert floating-point
        arrays to the dtype of the weights."""
        if array.dtype.kind not in "biuf":
            raise Mistake(f"{name} is an array of {array.dtype}; give one of numbers")
        if array.ndim < 2:
            raise Mistake(
                f"{name} is an array of shape {list(array.shape)}; give one [example, …]. "
                "(scikit-learn calls the kernels of KernelRidge for two examples at a time: "
                "there, give kernel='precomputed', and this kernel's matrix)"
            )
        weight = next(iter(self.module.parameters()), torch.empty(0))
        # torch takes neither negative strides nor a foreign byte order
        native = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
        tensor = torch.as_tensor(native, device=weight.device)
        if tensor.is_floating_point() and weight.is_floating_point():
            return tensor.to(weight.dtype)
        return tensor

    def loaded(self, loader: DataLoader[Any], name: str) -> Inputs:
        """Return the inputs of all batches of a DataLoader. Raise if it shuffles."""
        samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
        if any(isinstance(sampler, RANDOM_SAMPLERS) for sampler in samplers):
            raise Mistake(
                f"{name}: the DataLoader shuffles, and rows of a kernel would be in an unknown "
                "order; give shuffle=False"
            )
        batches = list[Inputs]()
        loaded_bytes = 0
        for batch in loader:
            inputs = as_inputs(self.inputs_of(batch))
            batches.append(inputs)
            loaded_bytes += sum(tensor.nbytes for tensor in tensors(inputs))
            self.budget.require(loaded_bytes, f"the first examples of {name}")
        if not batches:
            raise Mistake(
                f"{name}: the DataLoader gives no batch; give at least one example"
            )
        try:
            return concatenated(batches)
        except (RuntimeError, ValueError) as error:
            raise Mistake(
                f"{name}: the batches do not go together: {first_line(error)}"
            ) from error

    def inputs_of(self, batch: Any) -> Any:
        """Return the inputs of a batch: the result of the function `inputs` if there is
        one, else the first entry of (inputs, targets, …), or the batch itself."""
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
    budget: MemoryBudget,
) -> int:
    """Return the largest number of examples on each side of a block
    that fits into the budget.

    Estimate the memory from two examples. With `all_pairs`, a block contains all pairs
    of outputs. Otherwise, it is computed one output at a time."""
    if examples(x1) <= 1:
        return MAX_BLOCK_SIDE
    reader, module_weights = reader_of(module, output, casts)
    all_weights = module_weights | named(module, weights, "weights")
    tape = reader.record(all_weights, part(as_inputs(x1), slice(0, 2)))
    jacobian = reader.tangent(tape, None if all_pairs else [0])
    recorded = tape.bytes_per_example * (1 + jacobian.outputs)

    def needed(side: int) -> float:
        result = side**2 * jacobian.outputs**2 * tape.outputs.element_size()
        return kernel_bytes(jacobian, side, side) + 2 * side * recorded + result

    return max(1, bisect_left(range(1, MAX_BLOCK_SIDE), budget.bytes, key=needed))


def concatenated(batches: list[Inputs]) -> Inputs:
    """Concatenate batches of equal structure.

    >>> concatenated([{"x": torch.ones(2, 3)}, {"x": torch.ones(1, 3)}])["x"].shape
    torch.Size([3, 3])
    """
    flat = [tree_flatten(batch) for batch in batches]
    form = flat[0][1]
    leaves = list[Any]()
    for column in zip(*(leaves_of_batch for leaves_of_batch, _ in flat), strict=True):
        first = column[0]
        if isinstance(first, Tensor):
            leaves.append(torch.cat(column))
            continue
        if any(value != first for value in column):
            raise ValueError(f"{in_short(first)} is another in a later batch")
        leaves.append(first)
    if any(other_form != form for _, other_form in flat):
        raise ValueError("they hold other things")
    inputs: Inputs = tree_unflatten(leaves, form)
    return inputs
