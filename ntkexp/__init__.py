"""Is a network trained by gradient descent a kernel machine, and which one?

The command `ntkexp` runs experiments; these functions are its library:

    tangent_kernel(module, x1, x2)                    K(θ; x, x′) = J(θ; x) J(θ; x′)ᵀ
    TangentKernel(module)(x1, x2)                     the same as an object, which scikit-learn and DataLoaders know
    KernelMachine(kernel).fit(x, y).predict(x)        training with a fixed kernel, in closed form
    secant_kernel(module, start, end, probes, train)  K̄(x, x′) = J̄(start → end; x) J(start; x′)ᵀ
    infinite_kernel(spec, x1, x2)                     the kernels of an infinitely wide network: NNGP and tangent
    load_run(folder)                                  a finished run, as data frames and a data set
    follow(model, optimizer, queries=x)               a training loop of one's own, proved and attributed to examples
    AbstractOptimizerRule, LinearStep                 how an optimizer of one's own takes gradients in, for `follow`
    validate(run, scores)                             scores compared with trainings without some examples: LDS, QLD
    lightning.Follow, huggingface.Follow              the same as callbacks of Lightning and of Hugging Face's Trainer
    bridges.QuandaExplainer, .DattriAttributor        scores of a followed loop, in the shapes of other libraries

What is refused raises a `Mistake`, whose message is one line.
"""

from __future__ import annotations

import sys

# `python -m ntkexp` puts the working folder first on the path, where a file `typing.py` would replace Python's.
# The folder stays if the package itself lies there.
if (
    sys.argv[:1] == ["-m"]
    and "ntkexp" in sys.orig_argv
    and not sys.flags.safe_path
    and not __file__.startswith(f"{sys.path[0]}/ntkexp/")
):
    del sys.path[0]

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ntkexp.foreign_loop.follow import follow
    from ntkexp.foreign_loop.rule import AbstractOptimizerRule
    from ntkexp.library import (
        KernelMachine,
        TangentKernel,
        infinite_kernel,
        secant_kernel,
        tangent_kernel,
    )
    from ntkexp.mistake import Mistake
    from ntkexp.optimizer.base import LinearStep
    from ntkexp.report.loaded_run import load_run
    from ntkexp.validation import validate

__all__ = [
    "AbstractOptimizerRule",
    "KernelMachine",
    "LinearStep",
    "Mistake",
    "TangentKernel",
    "follow",
    "infinite_kernel",
    "load_run",
    "secant_kernel",
    "tangent_kernel",
    "validate",
]

HOMES = {
    "AbstractOptimizerRule": "ntkexp.foreign_loop.rule",
    "KernelMachine": "ntkexp.library",
    "LinearStep": "ntkexp.optimizer.base",
    "Mistake": "ntkexp.mistake",
    "TangentKernel": "ntkexp.library",
    "follow": "ntkexp.foreign_loop.follow",
    "infinite_kernel": "ntkexp.library",
    "load_run": "ntkexp.report.loaded_run",
    "secant_kernel": "ntkexp.library",
    "tangent_kernel": "ntkexp.library",
    "validate": "ntkexp.validation",
}
CALLBACKS = frozenset({"huggingface", "lightning"})
"""Modules that need a library which not everybody has."""


def __dir__() -> list[str]:
    """What users call, and what this module has as any module does."""
    return sorted(
        {
            *__all__,
            *CALLBACKS,
            "__version__",
            *(name for name in globals() if name.startswith("__")),
        }
    )


def __getattr__(name: str) -> object:
    """Import a function when it is first asked for: `import ntkexp` loads neither torch nor pandas."""
    from importlib import import_module  # noqa: PLC0415  nothing is loaded before it is asked for

    if name == "__version__":
        return import_module("ntkexp.records.folder").package_version()
    if name in CALLBACKS:
        return import_module(f"ntkexp.{name}")
    if name not in HOMES:
        raise AttributeError(f"module 'ntkexp' has no attribute '{name}'")
    return getattr(import_module(HOMES[name]), name)
