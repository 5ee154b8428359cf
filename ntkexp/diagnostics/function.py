"""A diagnostic that calls a function in a user's file."""

from __future__ import annotations

from pathlib import Path

from pydantic import field_validator

from ntkexp.diagnostics.base import AbstractDiagnostic, Measured, TrainingState
from ntkexp.mistake import Mistake
from ntkexp.model.foreign import files_imported, load_module, one_line
from ntkexp.model.libraries import file_and_function, find_function, source_file


class UserFunction(AbstractDiagnostic):
    """A function of the user: FILE.py:FUNCTION.

        ntkexp train diagnostics=[my_file.py:rotation]

    The user must have trusted the file. The function takes a `ntkexp.diagnostics.base.TrainingState`.
    It returns a number, an array, or a dict of them. It must not change the tensors that it
    receives.
    """

    path: str

    @field_validator("path")
    @classmethod
    def refuse_other_paths(cls, path: str) -> str:
        file, _, function = path.rpartition(":")
        if not file.endswith(".py") or not function.isidentifier():
            raise Mistake("it takes FILE.py:FUNCTION, such as my_file.py:rotation")
        return path

    @property
    def option(self) -> str:
        """The name of the function."""
        return file_and_function(self.path)[2]

    @property
    def setting(self) -> str:
        return f"diagnostics=[{self.path}]"

    @property
    def file(self) -> Path:
        return source_file(self.path, self.setting)

    def code(self) -> tuple[Path, ...]:
        return (self.file,)

    def files(self) -> tuple[Path, ...]:
        return files_imported(self.file)

    def measure(self, state: TrainingState) -> Measured:
        function = find_function(load_module(self.file, self.setting), self.option, self.setting)
        with one_line(self.setting, self.file):
            measured: Measured = function(state)  # type: ignore[assignment]  # checked by its caller
        return measured
