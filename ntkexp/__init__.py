"""Is a network trained by gradient descent a kernel machine, and which one?

The command `ntkexp` runs experiments. The library has these functions and classes:

    tangent_kernel(module, x1, x2)                    K(θ; x, x′) = J(θ; x) J(θ; x′)ᵀ
    TangentKernel(module)(x1, x2)                     the kernel as an object for scikit-learn
    KernelMachine(kernel).fit(x, y).predict(x)        training with a fixed kernel, in closed form
    secant_kernel(module, start, end, queries, train)  K̄(x, x′) = J̄(start → end; x) J(start; x′)ᵀ
    infinite_kernel(spec, x1, x2)                     NNGP and tangent kernel at infinite width
    load_run(folder)                                  a finished run as tables and a data set
    load_sweep(name)                                  a sweep as a table, its runs and pictures
    follow(model, optimizer, queries=x)               attribution of a training loop to examples
    AbstractOptimizerRule, LinearStep                 update rules of custom optimizers for `follow`
    validate(run, scores)                             scores compared with retraining: LDS, QLD
    lightning.Follow, huggingface.Follow              `follow` as a callback
    bridges.QuandaExplainer, .DattriAttributor        scores of a followed loop for other libraries

J is the Jacobian of the outputs with respect to the weights θ. The secant Jacobian J̄
maps the change of the weights from start to end to the change of the outputs. Functions
raise a `Mistake` with a one-line message if an argument is invalid.

For annotations, there are the classes of results: `Trace` (of `follow`), `Attribution` (of
`trace.attribute`), `Run`, `Sweep` and `Validation`."""

from __future__ import annotations

import sys

# `python -m ntkexp` puts the working folder first on sys.path. A file `typing.py` there
# would hide the module of the standard library. So remove the folder, unless it
# contains the package.
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
    from ntkexp.foreign_loop.trace import Trace
    from ntkexp.library import (
        KernelMachine,
        TangentKernel,
        infinite_kernel,
        secant_kernel,
        tangent_kernel,
    )
    from ntkexp.mistake import Mistake
    from ntkexp.optimizer.base import LinearStep
    from ntkexp.report.loaded_run import LoadedRun as Run, load_run
    from ntkexp.report.loaded_sweep import LoadedSweep as Sweep, load_sweep
    from ntkexp.report.scores import Attribution
    from ntkexp.report.validation import Validation
    from ntkexp.validation import validate

__all__ = [
    "AbstractOptimizerRule",
    "Attribution",
    "KernelMachine",
    "LinearStep",
    "Mistake",
    "Run",
    "Sweep",
    "TangentKernel",
    "Trace",
    "Validation",
    "follow",
    "infinite_kernel",
    "load_run",
    "load_sweep",
    "secant_kernel",
    "tangent_kernel",
    "validate",
]

HOMES = {
    "AbstractOptimizerRule": "ntkexp.foreign_loop.rule",
    "Attribution": "ntkexp.report.scores",
    "KernelMachine": "ntkexp.library",
    "LinearStep": "ntkexp.optimizer.base",
    "Mistake": "ntkexp.mistake",
    "Run": "ntkexp.report.loaded_run",
    "Sweep": "ntkexp.report.loaded_sweep",
    "TangentKernel": "ntkexp.library",
    "Trace": "ntkexp.foreign_loop.trace",
    "Validation": "ntkexp.report.validation",
    "follow": "ntkexp.foreign_loop.follow",
    "infinite_kernel": "ntkexp.library",
    "load_run": "ntkexp.report.loaded_run",
    "load_sweep": "ntkexp.report.loaded_sweep",
    "secant_kernel": "ntkexp.library",
    "tangent_kernel": "ntkexp.library",
    "validate": "ntkexp.validation",
}
CLASSES = {"Run": "LoadedRun", "Sweep": "LoadedSweep"}
"""The names of classes in their modules, where they differ from the public names."""
CALLBACKS = frozenset({"huggingface", "lightning"})
"""Submodules that need an optional library."""


def __dir__() -> list[str]:
    """Return the public names and the module's own double-underscore names."""
    return sorted(
        {
            *__all__,
            *CALLBACKS,
            "__version__",
            *(name for name in globals() if name.startswith("__")),
        }
    )


def __getattr__(name: str) -> object:
    """Import a public name at its first use,
    so that `import ntkexp` does not load torch."""
    from importlib import import_module  # noqa: PLC0415  loaded at the first use only

    if name == "__version__":
        return import_module("ntkexp.records.folder").package_version()
    if name in CALLBACKS:
        return import_module(f"ntkexp.{name}")
    if name not in HOMES:
        raise AttributeError(f"module 'ntkexp' has no attribute '{name}'")
    return getattr(import_module(HOMES[name]), CLASSES.get(name, name))
