"""How a difference passes each operation: a rule is one short function, found by the operation's ATen name."""

from ntkexp.kernel.secant.rules import (
    bilinear,
    binary,
    choice,
    convolution,
    cross_entropy,
    elementwise,
    linear,
    linear_algebra,
    lookup,
    mask,
    matrix_product,
    norm,
    pool,
    power,
    smooth,
    softmax,
    vector_norm,
)
from ntkexp.kernel.secant.rules.base import Rule
from ntkexp.kernel.secant.rules.complex_numbers import COMPLEX as COMPLEX

CHAPTERS = (
    *(linear, lookup, bilinear, matrix_product, convolution, elementwise, power, smooth),
    *(softmax, choice, mask, pool, binary, norm, vector_norm, cross_entropy, linear_algebra),
)
RULES: dict[str, Rule] = {name: rule for chapter in CHAPTERS for name, rule in chapter.RULES.items()}
