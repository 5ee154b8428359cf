"""How a difference passes each operation: a rule is one short function, found by the operation's ATen name."""

from ntkexp.kernel.rules import bilinear, elementwise, linear
from ntkexp.kernel.rules.base import Rule

RULES: dict[str, Rule] = {**linear.RULES, **bilinear.RULES, **elementwise.RULES}
