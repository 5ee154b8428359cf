"""Whether a sketch is worth its while: what it and its error bar take, against what the exact kernel takes.

Of n rows of P numbers, each a sum of u outer products, and v vectors for the bar, counted in multiplications:

    exact    n u P + n² P/2
    bar      2 n u P + 2 n v P        beside the sketch itself

so the exact kernel of a few dozen rows takes less than the bar alone. What both read is not in it.
"""

from __future__ import annotations

from ntkexp.kernel.features.blocks import Factored, Rows
from ntkexp.kernel.features.strips import Chunks, factors_kept, names
from ntkexp.kernel.features.use_by_use import Copies, Part, UseByUse
from ntkexp.kernel.read.in_turns import KEPT
from ntkexp.kernel.read.sketched import has_few_uses
from ntkexp.kernel.sketch.error_bar import VECTORS
from ntkexp.kernel.sketch.sketch import SLOWER, operations

LONG = 1e11  # multiplications of a sketch that are worth a word: a second or two


def remark(some: UseByUse, probe: int, train: int, size: int) -> str | None:
    """What to say of a sketch of so many examples, with as many as `train` or with themselves, which are like some."""
    sketched = of_sketch(some, probe, train, size)
    held = (probe + train) * some.nbytes / some.examples <= KEPT
    if sketched < LONG or not held or (exact := of_kernel(some, probe, train)) > sketched:
        return None
    return (
        f"the exact kernel of these {probe + train} examples takes less than this sketch of it, some {exact:.1g} "
        f"multiplications for {sketched:.1g}, and has no error: leave sketch out"
    )


def of_kernel(some: UseByUse, probe: int, train: int) -> float:
    """Multiplications of the exact kernel; with themselves, where `train` is none, of half of it."""
    one, other = Chunks([some]), train or probe
    factors = factors_kept(one, one, probe, other)
    kept = names(factors)
    rows = sum(size for name, size in one.sizes.items() if name not in kept) * some.outputs**2 * probe * other
    made = sum(multiplied_out(part) for part in some.parts if isinstance(part, Factored) and not is_kept(part, kept))
    total = sum(size.operations for size in factors.values()) + rows + made * (probe + other)
    return total if train else total / 2


def of_sketch(some: UseByUse, probe: int, train: int, size: int) -> float:
    """Multiplications of a sketch to so many dimensions, and of its error bar."""
    weights = sum(Chunks([some]).sizes.values())
    each = sum(of_part(part, size) for part in some.parts)
    made = sum(multiplied_out(part) for part in some.parts if isinstance(part, Factored))
    bar = VECTORS * made if has_few_uses(some) else made + VECTORS * some.outputs * weights
    return (probe + train) * each + (probe + (train or probe)) * bar


def of_part(part: Part, size: int) -> float:
    """Multiplications of the sketch of one use, for an example."""
    match part:
        case Factored():
            return min(operations(part.inputs, part.outputs, size))
        case Copies():
            return SLOWER * part.gradients[0].numel()
        case Rows():
            return SLOWER * part.rows[0].numel()


def multiplied_out(part: Factored) -> int:
    """Multiplications of an example's gradients."""
    return part.outputs[0].numel() * part.rows


def is_kept(part: Factored, kept: frozenset[str]) -> bool:
    """Whether the factors of these parameters are never multiplied out."""
    return any(view is not None and view.name in kept for view in (part.weight, part.bias))
