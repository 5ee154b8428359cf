"""The table of planted bugs in docs/follow-proofs.md.

`python -m tests.docs.follow` writes it, and a test compares it.
"""

from __future__ import annotations

import re
import textwrap

from tests.docs.readme import ROOT
from tests.foreign_loop.bugs import GRADIENT, RECORDED, REFUSED, loss_of_a_stale_graph
from tests.foreign_loop.loops import Body

PAGE = ROOT / "docs" / "follow-proofs.md"
SECTION = re.compile(r"(?<=<!-- bugs -->\n\n).*?(?=\n<!-- end -->)", re.DOTALL)


def page() -> str:
    """Return the page with a new table."""
    return SECTION.sub(lambda _: table(), PAGE.read_text(encoding="utf-8"))


def table() -> str:
    """Return the number of recorded bugs, and the messages for the others."""
    rows = [(sentence(body), refusal(step, name, said)) for body, step, name, said in REFUSED]
    rows += [(sentence(loss_of_a_stale_graph), "PyTorch itself refuses it; the steps before are recorded")]
    text = (
        f"Our tests plant {len(RECORDED) + len(rows)} bugs in loops. Of these, {len(RECORDED)} are recorded, such as a "
        "forgotten `zero_grad` or shifted labels: the parts add up to the actual change. The others are refused:"
    )
    head = ["| bug | message |", "|---|---|"]
    return "\n".join([*textwrap.wrap(text, 118), "", *head, *(f"| {a} | {b} |" for a, b in rows)]) + "\n"


def sentence(body: Body) -> str:
    """Return the description of a bug."""
    return (body.__doc__ or "").strip()


def refusal(step: int, name: str, said: str) -> str:
    of = " of the recorded examples" if said == GRADIENT else ""
    return f"step {step}, `{name}` {said}" if name else f"step {step}: {said}{of}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
