"""Any `nn.Module`, built by a function of the user's:

    ntkexp train model=module model.path=my_net.py:build      (and my_net.py has to be trusted)

`build` is a function, or the class of the module itself. It is given those of these arguments that its signature names,
and whatever else it takes needs a default:

    shape     of an example, such as (1, 8, 8)       outputs   how many the data and the loss ask for
    width     model.width                            vocabulary   how many tokens there are; 0: the data has numbers
    seed      a number below 2³², another for every `seed`: the start of the stream of the weights

It runs with torch's own generator seeded, so that every `nn.init` inside is drawn from `seed`, and in double precision.
The module then takes [example, *shape] (tokens as int64) and returns [example, outputs], or [example] if that is 1. It
is run in evaluation: dropout does nothing, and batch norm keeps its statistics. Of `init`, only how the output is read
(alpha, antisymmetric, centred) applies. The file, with the files beside it that it imports, belongs to the identity of
a run; other files that it reads do not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import field_validator
from torch import nn

from ntkexp.init.base import AbstractInit
from ntkexp.mistake import Mistake, nearest, nearest_file
from ntkexp.model.base import AbstractArchitecture
from ntkexp.model.foreign.adapted import adapted, refuse_chance
from ntkexp.model.foreign.user_file import files_of, load
from ntkexp.model.learning_task import LearningTask


class Module(AbstractArchitecture):
    """`path` is FILE.py:FUNCTION, or FILE.py, of which the function is called build."""

    remedy: ClassVar[str] = "look at how the module draws its weights, and what it does with the data"

    path: str

    @field_validator("path")
    @classmethod
    def names_a_file(cls, path: str) -> str:
        file, _, function = file_and_function(path)
        if not file.endswith(".py") or not function.isidentifier():
            raise Mistake("it takes FILE.py:FUNCTION, such as my_net.py:build")
        return path

    @property
    def given(self) -> str:
        """The key with its value."""
        return f"model.path={self.path}"

    @property
    def file(self) -> Path:
        """The file, which has to be there."""
        file = Path(file_and_function(self.path)[0]).expanduser()
        if file.is_file():
            return file
        files = [str(other.relative_to(file.parent)) for other in file.parent.glob("*.py")]
        raise Mistake(f"{self.given}: there is no file {file} (seen from {Path.cwd()}){nearest_file(file.name, files)}")

    def code(self) -> tuple[Path, ...]:
        return (self.file,)

    def files(self) -> tuple[Path, ...]:
        return files_of(self.file)

    def network(self, init: AbstractInit, task: LearningTask, generator: torch.Generator) -> nn.Module:
        build = function(load(self.file, self.given), file_and_function(self.path)[2], self.given)
        seed = generator.initial_seed()
        known = {
            "shape": task.shape,
            "outputs": task.outputs,
            "width": self.width,
            "seed": seed,
            "vocabulary": task.vocabulary,
        }
        arguments = self.arguments(build, known)
        make = partial(self.call, build, arguments)
        module, again = (adapted(make, task, seed, self.given, self.file) for _ in range(2))
        refuse_chance(self.given, module, again)
        return module

    def arguments(self, build: Callable[..., object], known: Mapping[str, object]) -> dict[str, object]:
        """The arguments that the function wants, of what there is."""
        parameters = inspect.signature(build).parameters.values()
        several = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
        for parameter in parameters:
            if parameter.name not in known and parameter.default is parameter.empty and parameter.kind not in several:
                raise Mistake(
                    f"{self.given} wants '{parameter.name}', and can be given {', '.join(known)}; give it a default"
                )
        return {parameter.name: known[parameter.name] for parameter in parameters if parameter.name in known}

    def call(self, build: Callable[..., object], arguments: Mapping[str, object]) -> nn.Module:
        """The module that the function returns, if it is one."""
        module = build(**arguments)
        if not isinstance(module, nn.Module):
            raise Mistake(f"{self.given} returns a {type(module).__name__}; let it return an nn.Module")
        return module


def file_and_function(path: str) -> tuple[str, str, str]:
    """Split a path into the file and the function.

    >>> file_and_function("a/my_net.py:Net"), file_and_function("my_net.py")
    (('a/my_net.py', ':', 'Net'), ('my_net.py', ':', 'build'))
    """
    return (path, ":", "build") if path.endswith(".py") else path.rpartition(":")


def function(module: object, name: str, given: str) -> Callable[..., object]:
    """Find a function or class of a module by its name."""
    own = getattr(module, "__name__", "")
    known = [key for key, value in vars(module).items() if callable(value) and getattr(value, "__module__", "") == own]
    found: object = getattr(module, name, None)
    if found is None:
        there = f"it has {', '.join(known)}" if known else "it has no function"
        raise Mistake(f"{given}: there is no function {name} in the file; {there}{nearest(name, known)}")
    if isinstance(found, nn.Module):
        raise Mistake(f"{given}: {name} is a module that no seed can draw anew; name a function that builds it")
    if not callable(found):
        raise Mistake(f"{given}: {name} is a {type(found).__name__}, and a function is expected")
    return found
