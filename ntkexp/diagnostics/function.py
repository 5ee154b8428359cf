"""A diagnostic that calls a function in a user's file."""

from __future__ import annotations

from pathlib import Path

from pydantic import field_validator

from ntkexp.diagnostics.base import AbstractDiagnostic, Measured, TrainingState
from ntkexp.mistake import Mistake
from ntkexp.model.foreign import as_mistake, files_imported
from ntkexp.model.user_function import FunctionInFile


class UserFunction(AbstractDiagnostic):
    """A function of the user: FILE.py:FUNCTION.

        ntkexp train diagnostics=[my_file.py:rotation]

    The user must have trusted the file. The function takes a
    `ntkexp.diagnostics.base.TrainingState`. It returns a number, an array, or a dict of
    numbers and arrays. It must not change the tensors that it receives."""

    path: str

    @field_validator("path")
    @classmethod
    def refuse_other_paths(cls, path: str) -> str:
        if path.endswith(".py") or not FunctionInFile(path, "").is_well_formed:
            raise Mistake("it takes FILE.py:FUNCTION, such as my_file.py:rotation")
        return path

    @property
    def option(self) -> str:
        """The name of the function."""
        return self.function.name

    @property
    def function(self) -> FunctionInFile:
        return FunctionInFile(self.path, f"diagnostics=[{self.path}]")

    def code(self) -> tuple[Path, ...]:
        return (self.function.file,)

    def files(self) -> tuple[Path, ...]:
        return files_imported(self.function.file)

    def measure(self, state: TrainingState) -> Measured:
        measure = self.function.load()
        with as_mistake(self.function.setting, self.function.file):
            measured: Measured = measure(state)  # type: ignore[assignment]  # checked by its caller
        return measured
