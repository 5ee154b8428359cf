"""Drawing: the random numbers of a module whose generators begin in a known state, as numbers from outside.

Such a module is a function again, of a batch as a whole: who is left out moves what the others draw. A number that was
drawn counts as an input, which differs from batch to batch and leads back to no weight.

    dropout(x, p) = x · m / (1 − p)        m was drawn
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional

from ntkexp.kernel.record.arguments import leaves
from ntkexp.mistake import Mistake

FREE = frozenset(
    (
        *("bernoulli", "binomial", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal"),
        *("normal_functional", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like"),
        *("random", "randperm", "uniform"),
    )
)
"""Operations whose result has no derivative in what they are given."""


@cache
def is_random(op: OpOverload) -> bool:
    """Whether the operation draws numbers."""
    return torch.Tag.nondeterministic_seeded in op.tags


def refuse_unknown(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], *, known: bool) -> None:
    """Refuse to draw where nobody knows from which state."""
    if any(isinstance(leaf, torch.Generator) for leaf in leaves((args, *kwargs.values()))):
        raise Mistake(
            f"the module draws random numbers ({op}) from a generator of its own, whose state nobody keeps; let it "
            "draw from torch's, or call module.eval() first"
        )
    if not known:
        raise Mistake(f"the module draws random numbers ({op}); kernels need a function: call module.eval() first")


def refuse_passing(op: OpOverload) -> None:
    """Refuse numbers through which gradients pass."""
    if base_name(op) not in FREE:
        raise Mistake(f"the module draws random numbers through which gradients pass ({op}); put another layer there")


def dropped(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A call of torch, but dropout by one operation, which writes nothing in place. It draws in the order of memory,
    which `functionalize` does not keep.

    >>> x, state = torch.ones(4, 2).t(), torch.get_rng_state()
    >>> one = functional.dropout(x)
    >>> torch.set_rng_state(state)
    >>> torch.equal(one, dropped(functional.dropout, (x,), {}))
    True
    """
    if func is not functional.dropout and func is not torch.dropout:
        return func(*args, **kwargs)
    value, rate, training, in_place = of_dropout(*args, **kwargs)
    if not training or not rate:
        return func(*args, **kwargs)
    found = torch.native_dropout(value, rate, True)[0]
    return value.copy_(found) if in_place else found


def of_dropout(
    input: Tensor,  # noqa: A002  as torch calls it
    p: float = 0.5,
    training: bool | None = None,
    inplace: bool = False,
    *,
    train: bool = True,
) -> tuple[Tensor, float, bool, bool]:
    """The arguments of dropout, as they are given to the layer's function, or to that of torch."""
    return input, p, train if training is None else training, inplace


def base_name(op: OpOverload) -> str:
    """The name of an operation, whether it writes in place or not.

    >>> base_name(torch.ops.aten.bernoulli_.float), base_name(torch.ops.aten.bernoulli.p)
    ('bernoulli', 'bernoulli')
    """
    return str(op._schema.name.removeprefix("aten::").removesuffix("_"))
