"""While tests run, the shapes in signatures are checked, in every module that states any.

Other modules are left alone: their types are checked by mypy, and beartype refuses some of what mypy understands.
"""

from __future__ import annotations

from pathlib import Path

from jaxtyping import install_import_hook

PACKAGE = Path(__file__).parents[1] / "ntkexp"
CHECKER = (
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"  # a whole number is a float, as for mypy
)


def stating_shapes() -> list[str]:
    """The modules that import jaxtyping, by name."""
    files = (path for path in sorted(PACKAGE.rglob("*.py")) if "from jaxtyping import" in path.read_text("utf-8"))
    return [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in files]


install_import_hook(stating_shapes(), CHECKER)
