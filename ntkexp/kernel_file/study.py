"""A study: several kernels of infinite width, each by its overrides, that are to stand in one table.

>>> Study(kernels={"A": ["model=mlp"]}, base=["data=wine"]).overrides(["data.train=50"])
{'A': ['data=wine', 'model=mlp', 'data.train=50']}
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, PositiveFloat, ValidationError

from ntkexp.component import Component
from ntkexp.config.choices import Choices, read
from ntkexp.config.validation import refusal
from ntkexp.mistake import Mistake, nearest


class Study(Component):
    """`base` is common to all kernels; `published` is an accuracy in per cent that stands beside the NTK's, found with
    the data that `published_with` names.
    """

    kernels: dict[str, tuple[str, ...]] = Field(min_length=1)
    base: tuple[str, ...] = ()
    published: dict[str, PositiveFloat] = Field(default_factory=dict)
    published_with: str = ""

    def overrides(self, words: Sequence[str]) -> dict[str, list[str]]:
        """The overrides that make each kernel; the last word counts."""
        return {name: [*self.base, *own, *words] for name, own in self.kernels.items()}


def study(name: str, choices: Choices) -> Study:
    """Read the study of a file."""
    known = choices.options("study")
    if name not in known:
        raise Mistake(f"'{name}' is no study; choose from {', '.join(known)}{nearest(name, known)}")
    fields = read(choices.file("study", name))
    try:
        return Study.model_validate(fields)
    except ValidationError as error:
        raise Mistake(f"{choices.file('study', name)}: {refusal(error, Study, '', fields)}") from None
