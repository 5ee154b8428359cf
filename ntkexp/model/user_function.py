"""Functions in files of the user, FILE.py:FUNCTION."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from ntkexp.mistake import Mistake, nearest, nearest_file
from ntkexp.model.foreign import load_module


@dataclass(frozen=True)
class FunctionInFile:
    """A function in a user's file, FILE.py:FUNCTION.
    FILE.py alone means the function `build`.

    >>> [FunctionInFile(path, "").name for path in ("a/my_net.py:Net", "my_net.py")]
    ['Net', 'build']
    """

    path: str
    setting: str  # the argument in messages, such as "model.path=my_net.py:Net"

    @property
    def parts(self) -> tuple[str, str]:
        """The path of the file, and the name of the function."""
        if self.path.endswith(".py"):
            return self.path, "build"
        file, _, name = self.path.rpartition(":")
        return file, name

    @property
    def is_well_formed(self) -> bool:
        file, name = self.parts
        return file.endswith(".py") and name.isidentifier()

    @property
    def name(self) -> str:
        return self.parts[1]

    @property
    def file(self) -> Path:
        """The file. Raise if there is none."""
        file = Path(self.parts[0]).expanduser()
        if file.is_file():
            return file
        files = [
            str(other.relative_to(file.parent)) for other in file.parent.glob("*.py")
        ]
        hint = nearest_file(file.name, files)
        raise Mistake(
            f"{self.setting}: there is no file {file} (seen from {Path.cwd()}){hint}"
        )

    def load(self) -> Callable[..., object]:
        """Run the file, which the user must have trusted, and return the function."""
        return find_function(
            load_module(self.file, self.setting), self.name, self.setting
        )


def find_function(module: object, name: str, key: str) -> Callable[..., object]:
    """Return a function of the user's file. Error messages begin with `key`."""
    module_name = getattr(module, "__name__", "")
    functions = [
        function_name
        for function_name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module_name
    ]
    value: object = getattr(module, name, None)
    if value is None:
        known = f"it has {', '.join(functions)}" if functions else "it has no function"
        raise Mistake(
            f"{key}: there is no function {name} in the file; {known}{nearest(name, functions)}"
        )
    if isinstance(value, nn.Module):
        raise Mistake(
            f"{key}: {name} is a module, whose weights the seed cannot draw; name a function that "
            "builds it"
        )
    if not callable(value):
        raise Mistake(
            f"{key}: {name} is a {type(value).__name__}, and a function is expected"
        )
    if inspect.iscoroutinefunction(value):
        raise Mistake(f"{key}: {name} is async; write `def` in place of `async def`")
    return value
