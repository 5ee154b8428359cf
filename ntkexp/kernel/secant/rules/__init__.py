"""How a difference passes each operation: a rule is one short function, found by the operation's ATen name."""

from ntkexp.kernel.secant.rules.base import Rule
from ntkexp.kernel.secant.rules.bilinear import BILINEAR, CONVOLUTION, MATRIX_PRODUCT
from ntkexp.kernel.secant.rules.binary import BINARY
from ntkexp.kernel.secant.rules.choice import CHOICE, MASK, POOL
from ntkexp.kernel.secant.rules.complex_numbers import COMPLEX as COMPLEX
from ntkexp.kernel.secant.rules.elementwise import ELEMENTWISE, POWER
from ntkexp.kernel.secant.rules.linear import LINEAR, LOOKUP
from ntkexp.kernel.secant.rules.linear_algebra import LINEAR_ALGEBRA
from ntkexp.kernel.secant.rules.norm import NORM, VECTOR_NORM
from ntkexp.kernel.secant.rules.smooth import SMOOTH, SOFTMAX

CHAPTERS = (
    *(LINEAR, LOOKUP, BILINEAR, MATRIX_PRODUCT, CONVOLUTION, ELEMENTWISE, POWER, SMOOTH),
    *(SOFTMAX, CHOICE, MASK, POOL, BINARY, NORM, VECTOR_NORM, LINEAR_ALGEBRA),
)
RULES: dict[str, Rule] = {name: rule for chapter in CHAPTERS for name, rule in chapter.items()}
