"""How a difference passes each operation: a rule is one short function, found by the operation's ATen name."""

from ntkexp.kernel.rules import bilinear, choice, convolution, elementwise, linear, norm, smooth, softmax
from ntkexp.kernel.rules.base import Rule

CHAPTERS = (linear, bilinear, convolution, elementwise, smooth, softmax, norm, choice)
RULES: dict[str, Rule] = {name: rule for chapter in CHAPTERS for name, rule in chapter.RULES.items()}
