"""A mistake as the command line says it: its arguments are options, and by its kind there is one that puts it right.

>>> with_advice(WrongArgument("memory_gb=0: it takes a number > 0", "memory_gb"))
'--memory-gb=0: it takes a number > 0'
>>> with_advice(NoPlace("the disk is full; choose another place"))
'the disk is full; choose another place with --out'
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ntkexp.mistake import HydraSetting, Mistake, NoPlace, UnknownKey, Untrusted, Useless, WrongArgument

ADVICE: Mapping[type[Mistake], str] = {
    NoPlace: " with --out",
    Useless: " with --force",
    Untrusted: "; add `--trust {source}`",
    HydraSetting: "; --out says where runs go, --config-dir adds YAML",
    UnknownKey: "; `ntkexp config --tree` shows every key",
}
"""What follows the message of each kind of mistake."""

AGAIN = "; --force computes it again"
"""What follows where a finished result is found."""


def with_advice(mistake: Mistake) -> str:
    """Give the message of a mistake, with advice in words of the command line."""
    said = str(mistake)
    for argument in mistake.arguments if isinstance(mistake, WrongArgument) else ():
        said = re.sub(rf"\b{argument}=", f"--{argument.replace('_', '-')}=", said)
    advice = next((words for kind, words in ADVICE.items() if isinstance(mistake, kind)), "")
    return said + advice.format_map(vars(mistake))
