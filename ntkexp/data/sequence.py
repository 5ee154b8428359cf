"""One task after another: phases, in each of which only its own examples are learned.

    ntkexp train data=sequence data.phases=[[0,1],[2,3],[4,5]]

A phase is a list of classes of `source`, or a source of its own, of which the examples alone are asked for: their
number, their noise and their scale are those of the sequence. All phases share one network. With `outputs=shared` the
k-th class of every phase is the same output ("domain-incremental" learning), with `outputs=own` every class has one
("class-incremental"; G. van de Ven, T. Tuytelaars & A. Tolias, "Three types of incremental learning", 2022).

>>> data = Sequence(train=40, probe=20, test=0).split()
>>> data.phases, data.classes, data.train.phase.bincount().tolist()
(('0 1', '2 3'), ('0/2', '1/3'), [20, 20])
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ntkexp.component import CountOrNone, Steps
from ntkexp.data.base import AbstractSource, Examples, Standardise, examples_stream, share
from ntkexp.data.images import Digits
from ntkexp.mistake import Mistake

OWN = ("train", "probe", "test", "label_noise", "standardise")
"""Fields of a source that are the sequence's to say."""


class Sequence(AbstractSource):
    """Sources that are learned in turn; `train`, `probe` and `test` are shared out among them equally."""

    standardise: Standardise = "all"
    source: AbstractSource = Digits()
    phases: tuple[AbstractSource | tuple[CountOrNone, ...], ...] = Field(((0, 1), (2, 3)), min_length=1)
    steps: tuple[Steps, ...] | None = None
    outputs: Literal["shared", "own"] = "shared"

    @model_validator(mode="after")
    def refuse_contradictions(self) -> Self:
        """What a phase cannot say, and steps without a phase."""
        for source in self.sources:
            if isinstance(source, Sequence):
                raise Mistake(
                    "data.phases: a phase that is a sequence itself would be learned at once; list its phases"
                )
            for name in OWN:
                if getattr(source, name) != type(source).model_fields[name].default:
                    raise Mistake(
                        f"data.{name} is shared by all phases, and one of them has its own ({getattr(source, name)}); "
                        f"give data.{name} instead"
                    )
        if self.steps is not None and len(self.steps) != len(self.phases):
            raise Mistake(
                f"data.steps={list(self.steps)}: there are {len(self.phases)} phases; give the steps of each, or null "
                "for equal shares"
            )
        if self.label_noise and self.outputs == "own":
            raise Mistake(
                f"data.label_noise={self.label_noise:g}: with data.outputs=own a label would become one of another "
                "phase; use data.outputs=shared, or leave the noise out"
            )
        return self

    @property
    def sources(self) -> tuple[AbstractSource, ...]:
        """What is learned in each phase."""
        return tuple(each if isinstance(each, AbstractSource) else self.of_classes(each) for each in self.phases)

    def of_classes(self, classes: tuple[int, ...]) -> AbstractSource:
        """Some classes of the source."""
        if "classes" not in type(self.source).model_fields:
            raise Mistake(
                f"data.phases has {list(classes)}, and classes of data.source={self.source.option} cannot be chosen; "
                "give a source in its place, such as {_target_: ntkexp.data.Teacher, seed: 1}"
            )
        return self.source.model_copy(update={"classes": classes})

    def phase_steps(self, steps: int) -> tuple[int, ...]:
        """Equal shares, the first ones larger by one if need be, or what is given.

        >>> Sequence().phase_steps(301), Sequence(steps=(1, 9)).phase_steps(10)
        ((151, 150), (1, 9))
        """
        count = len(self.phases)
        if self.steps is None:
            if steps < count:
                raise Mistake(f"steps={steps}: there are {count} phases, each of which takes a step or more")
            return tuple(share(steps, number, count) for number in range(count))
        if sum(self.steps) != steps:
            raise Mistake(
                f"data.steps={list(self.steps)} are {sum(self.steps)} steps in all, and steps={steps}; "
                f"give steps={sum(self.steps)}"
            )
        return self.steps

    def examples(self, generator: torch.Generator) -> Examples:
        sources = self.sources
        parts = [drawn(source, generator, number) for number, source in enumerate(sources, start=1)]
        called = [" ".join(part.classes) or source.option for source, part in zip(sources, parts, strict=True)]
        refuse_unlike(parts, self.outputs)
        names, targets = labelled(parts, self.outputs)
        bytes_ = all(part.inputs.dtype == torch.uint8 and part.white == parts[0].white for part in parts)
        inputs = [part.inputs if bytes_ or part.one_hot else part.inputs.double() / part.white for part in parts]
        first = parts[0]
        return Examples(
            torch.cat(inputs),
            torch.cat(targets),
            names,
            white=first.white if bytes_ else 1.0,
            gaps=any(part.gaps for part in parts),
            vocabulary=first.vocabulary,
            one_hot=first.one_hot,
            phases=told_apart(called),
            phase=torch.cat([torch.full((len(part.inputs),), number) for number, part in enumerate(parts)]),
            phase_classes=tuple(part.classes for part in parts) if names and self.outputs == "shared" else (),
        )


def drawn(source: AbstractSource, generator: torch.Generator, number: int) -> Examples:
    """The examples of a phase, the same ones wherever its source stands; a mistake in it is said with its number."""
    same = torch.Generator()
    same.set_state(generator.get_state())
    try:
        return source.examples(same if source.seed is None else examples_stream(source.seed))
    except Mistake as mistake:
        if type(mistake) is not Mistake:  # which the command line knows how to put right
            raise
        raise Mistake(f"data.phases, phase {number}: {mistake}") from mistake


def told_apart(names: Several[str]) -> tuple[str, ...]:
    """A phase is called by its classes, or by what its values come from; of namesakes each has a number.

    >>> told_apart(["3 8", "1 7", "3 8"])
    ('3 8 (1)', '1 7', '3 8 (3)')
    """
    return tuple(f"{name} ({number})" if names.count(name) > 1 else name for number, name in enumerate(names, start=1))


def refuse_unlike(parts: Several[Examples], outputs: str) -> None:
    """One network takes the inputs of all phases, and gives the outputs of all."""
    first = layout(parts[0])
    for number, part in enumerate(parts[1:], start=2):
        if part.as_given or parts[0].as_given:
            raise Mistake("data.phases: examples that are given in their own order cannot be put in a sequence")
        if layout(part) != first:
            raise Mistake(
                f"data.phases: phase {number} has {said(part)}, and phase 1 {said(parts[0])}; one network takes "
                "inputs of one shape, and gives classes or values in all phases"
            )
        if outputs == "shared" and len(part.classes) != len(parts[0].classes):
            raise Mistake(
                f"data.phases: phase {number} has {len(part.classes)} classes and phase 1 {len(parts[0].classes)}, "
                "which cannot share outputs; choose as many, or data.outputs=own"
            )
    if outputs == "own" and not parts[0].classes:
        raise Mistake("data.outputs=own: there are values and no classes; use data.outputs=shared")


def layout(part: Examples) -> tuple[object, ...]:
    """What one network needs to know of its inputs and outputs."""
    values = () if part.classes else tuple(part.target.shape[1:])
    return (tuple(part.inputs.shape[1:]), part.vocabulary, part.one_hot, bool(part.classes), values)


def said(part: Examples) -> str:
    """The layout in words."""
    kind = "classes" if part.classes else f"{part.target.shape[1]} values"
    tokens = part.vocabulary or part.one_hot
    return f"inputs {list(part.inputs.shape[1:])}{f' of {tokens} tokens' if tokens else ''} and {kind}"


def labelled(parts: Several[Examples], outputs: str) -> tuple[tuple[str, ...], list[Tensor]]:
    """The names of all classes, and the targets among them."""
    if outputs == "shared":
        together = zip(*(part.classes for part in parts), strict=True)
        return tuple("/".join(dict.fromkeys(names)) for names in together), [part.target for part in parts]
    names = tuple(dict.fromkeys(name for part in parts for name in part.classes))
    places = [torch.tensor([names.index(name) for name in part.classes]) for part in parts]
    return names, [place[part.target.long()] for place, part in zip(places, parts, strict=True)]
