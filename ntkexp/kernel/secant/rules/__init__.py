"""Difference rules, in tables by the operation's name in ATen (torch's C++ library). A
rule returns the exact change of the operation's result in a step, as a linear map of the
changes of its arguments. Each rule is one short function."""

from ntkexp.kernel.secant.call import Rule
from ntkexp.kernel.secant.rules.bilinear import BILINEAR
from ntkexp.kernel.secant.rules.binary import BINARY
from ntkexp.kernel.secant.rules.choice import CHOICE
from ntkexp.kernel.secant.rules.complex_numbers import COMPLEX as COMPLEX
from ntkexp.kernel.secant.rules.elementwise import ELEMENTWISE
from ntkexp.kernel.secant.rules.linear import LINEAR, LOOKUP
from ntkexp.kernel.secant.rules.linear_algebra import LINEAR_ALGEBRA
from ntkexp.kernel.secant.rules.norm import NORM_RULES, SOFTMAX
from ntkexp.kernel.secant.rules.sampling import SAMPLING

RULES: dict[str, Rule] = (
    LINEAR
    | LOOKUP
    | BILINEAR
    | ELEMENTWISE
    | SOFTMAX
    | CHOICE
    | BINARY
    | NORM_RULES
    | LINEAR_ALGEBRA
    | SAMPLING
)
