"""Sequences: sentences of tokens, images read row by row, and one class or number to predict for each."""

from __future__ import annotations

from collections.abc import Sequence as Several
from pathlib import Path
from typing import Literal, Self

import numpy as np
import torch
from jaxtyping import Int
from pydantic import Field, model_validator
from torch import Tensor

from ntkexp.component import Count, CountOrNone, Steps
from ntkexp.data.base import (
    AbstractSource,
    Examples,
    Standardise,
    UserPath,
    examples_stream,
    quoted,
    read_contents,
    require_file,
    share,
)
from ntkexp.data.images import Digits
from ntkexp.mistake import Mistake

# --- Sentences of tokens, which are whole numbers below a `vocabulary`, and one token or class to predict.
#
# They reach the network as they are, or encoded as one-hot vectors for networks that know numbers only:
#
#     tokens   [example, position]        one_hot   [example, position, token], 1 at the token and 0 elsewhere
#
# Doubles hold them exactly up to 2^53.


class AbstractTokens(AbstractSource):
    """A source gives tokens; a scale would make them something else, so there is none."""

    standardise: Literal["none"] = "none"
    encoding: Literal["tokens", "one_hot"] = "tokens"

    def sentences(
        self,
        tokens: Int[Tensor, "example position"],
        labels: Int[Tensor, " example"],
        classes: tuple[str, ...],
        vocabulary: int,
    ) -> Examples:
        """Examples in the encoding that is asked for."""
        if self.encoding == "one_hot":
            return Examples(tokens.double(), labels, classes, one_hot=vocabulary)
        return Examples(tokens.double(), labels, classes, vocabulary=vocabulary)


class ModularAddition(AbstractTokens):
    """Modular addition: two numbers as tokens, their sum modulo p as the class.

    `modulus` classes, of which token k is class k; the sign '=' is the token `modulus`.

        x = (a, b)  or  (a, b, =),    y = (a + b) mod p,    all p² pairs of a, b in 0 … p − 1

    A. Power et al., "Grokking: generalization beyond overfitting on small algorithmic datasets" (2022),
    arXiv:2201.02177.

    >>> source = ModularAddition(modulus=5, train=20, probe=5)
    >>> data = source.split()
    >>> torch.equal(data.train.inputs.sum(1).long() % 5, data.train.target)
    True
    """

    train: Count = 64
    probe: CountOrNone = 24
    modulus: int = Field(11, ge=2, le=4096)
    equals: bool = False

    def examples(self, generator: torch.Generator) -> Examples:
        count, pairs = self.train + self.probe + (self.test or 0), self.modulus**2
        if count > pairs:
            raise Mistake(
                f"data.modulus={self.modulus} makes {pairs} sums, and data.train, data.probe and data.test ask for "
                f"{count}; lower one of them, or raise data.modulus"
            )
        numbers = torch.arange(self.modulus)
        tokens = torch.cartesian_prod(numbers, numbers)
        labels = tokens.sum(1) % self.modulus
        if self.equals:
            tokens = torch.cat([tokens, torch.full((len(tokens), 1), self.modulus)], 1)
        names = tuple(str(number) for number in range(self.modulus))
        return self.sentences(tokens, labels, names, self.modulus + self.equals)


class Text(AbstractTokens):
    """Text from a file, byte by byte: `context` bytes are shown, the next one is to be predicted.

    A source of few examples by default, since there are many classes.

        ntkexp train model=transformer model.causal=true data=text data.path=book.txt data.context=16

    The tokens are the bytes that the file holds, in order of their codes, and these are the classes as well: a
    class that never occurs would add nothing but size to kernels, which grow with the square of the classes.
    Windows do not overlap, so that no split shows what another asks, and of equal ones a single one is kept.
    """

    train: Count = 32
    probe: CountOrNone = 16
    test: CountOrNone | None = 16
    path: UserPath
    context: Count = 16

    def files(self) -> tuple[Path, ...]:
        return (require_file(self.path),)

    def examples(self, generator: torch.Generator) -> Examples:
        raw = read_contents(self.path)
        present = sorted(set(raw))
        position = torch.zeros(256, dtype=torch.int64)
        position[present] = torch.arange(len(present))
        tokens = position[np.frombuffer(raw, np.uint8).astype(np.int64)]

        # pieces of the text, of which there have to be enough
        size = self.context + 1
        whole = len(tokens) // size
        windows: Tensor = (
            torch.unique(tokens[: whole * size].view(whole, size), dim=0) if whole else tokens[:0]
        )
        count = self.train + self.probe + (self.test or 0)
        if count > len(windows):
            raise Mistake(
                f"{quoted(self.path)} holds {len(tokens)} bytes, and in them {len(windows)} different windows of "
                f"data.context={self.context} and one more; data.train, data.probe and data.test ask for {count}; "
                "lower one of them, or take a longer text"
            )
        names = tuple(byte_name(byte) for byte in present)
        return self.sentences(windows[:, :-1], windows[:, -1], names, len(names))


def byte_name(byte: int) -> str:
    """A byte as a person would write it.

    >>> byte_name(97), byte_name(10), byte_name(32), byte_name(200)
    ('a', '0x0a', '0x20', '0xc8')
    """
    return chr(byte) if 32 < byte < 127 else f"0x{byte:02x}"


OWN = ("train", "probe", "test", "label_noise", "standardise")
"""Fields of a source that are the sequence's to say."""


class Sequence(AbstractSource):
    """One task after another: phases, in each of which only its own examples are learned.

    Sources that are learned in turn; `train`, `probe` and `test` are shared out among them equally.

        ntkexp train data=sequence data.phases=[[0,1],[2,3],[4,5]]

    A phase is a list of classes of `source`, or a source of its own, of which the examples alone are asked for:
    their number, their noise and their scale are those of the sequence. All phases share one network. With
    `outputs=shared` the k-th class of every phase is the same output ("domain-incremental" learning), with
    `outputs=own` every class has one ("class-incremental"; G. van de Ven, T. Tuytelaars & A. Tolias, "Three types
    of incremental learning", 2022).

    >>> data = Sequence(train=40, probe=20, test=0).split()
    >>> data.phases, data.classes, data.train.phase.bincount().tolist()
    (('0 1', '2 3'), ('0/2', '1/3'), [20, 20])
    """

    standardise: Standardise = "all"
    source: AbstractSource = Digits()
    phases: tuple[AbstractSource | tuple[CountOrNone, ...], ...] = Field(
        ((0, 1), (2, 3)), min_length=1
    )
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
        """What is learned in each phase: a source of its own, or some classes of the source of all."""
        sources = []
        for phase in self.phases:
            if (
                not isinstance(phase, AbstractSource)
                and "classes" not in type(self.source).model_fields
            ):
                raise Mistake(
                    f"data.phases has {list(phase)}, and classes of data.source={self.source.option} cannot be chosen; "
                    "give a source in its place, such as {_target_: ntkexp.data.Teacher, seed: 1}"
                )
            own = (
                phase
                if isinstance(phase, AbstractSource)
                else self.source.model_copy(update={"classes": phase})
            )
            sources.append(own)
        return tuple(sources)

    def phase_steps(self, steps: int) -> tuple[int, ...]:
        """Equal shares, the first ones larger by one if need be, or what is given.

        >>> Sequence().phase_steps(301), Sequence(steps=(1, 9)).phase_steps(10)
        ((151, 150), (1, 9))
        """
        count = len(self.phases)
        if self.steps is None:
            if steps < count:
                raise Mistake(
                    f"steps={steps}: there are {count} phases, each of which takes a step or more"
                )
            return tuple(share(steps, number, count) for number in range(count))
        if sum(self.steps) != steps:
            raise Mistake(
                f"data.steps={list(self.steps)} are {sum(self.steps)} steps in all, and steps={steps}; "
                f"give steps={sum(self.steps)}"
            )
        return self.steps

    def examples(self, generator: torch.Generator) -> Examples:
        sources = self.sources
        parts = [
            examples_of_phase(source, generator, number)
            for number, source in enumerate(sources, start=1)
        ]
        called = [
            " ".join(part.classes) or source.option
            for source, part in zip(sources, parts, strict=True)
        ]
        refuse_unlike(parts, self.outputs)
        if self.outputs == "shared":
            together = zip(*(part.classes for part in parts), strict=True)
            names = tuple("/".join(dict.fromkeys(classes)) for classes in together)
            targets = [part.target for part in parts]
        else:  # every class has an output: its place among the names of all
            names = tuple(dict.fromkeys(name for part in parts for name in part.classes))
            class_numbers = [
                torch.tensor([names.index(name) for name in part.classes]) for part in parts
            ]
            targets = [
                numbers[part.target.long()]
                for numbers, part in zip(class_numbers, parts, strict=True)
            ]
        bytes_ = all(
            part.inputs.dtype == torch.uint8 and part.white == parts[0].white for part in parts
        )
        inputs = [
            part.inputs if bytes_ or part.one_hot else part.inputs.double() / part.white
            for part in parts
        ]
        first = parts[0]
        return Examples(
            torch.cat(inputs),
            torch.cat(targets),
            names,
            white=first.white if bytes_ else 1.0,
            gaps=any(part.gaps for part in parts),
            vocabulary=first.vocabulary,
            one_hot=first.one_hot,
            phases=distinct_names(called),
            phase=torch.cat(
                [torch.full((len(part.inputs),), number) for number, part in enumerate(parts)]
            ),
            phase_classes=tuple(part.classes for part in parts)
            if names and self.outputs == "shared"
            else (),
        )


def examples_of_phase(source: AbstractSource, generator: torch.Generator, number: int) -> Examples:
    """The examples of a phase, the same ones wherever its source stands; a mistake in it is said with its number."""
    same = torch.Generator()
    same.set_state(generator.get_state())
    try:
        return source.examples(same if source.seed is None else examples_stream(source.seed))
    except Mistake as mistake:
        if type(mistake) is not Mistake:  # which the command line knows how to put right
            raise
        raise Mistake(f"data.phases, phase {number}: {mistake}") from mistake


def distinct_names(names: Several[str]) -> tuple[str, ...]:
    """A phase is called by its classes, or by what its values come from; of namesakes each has a number.

    >>> distinct_names(["3 8", "1 7", "3 8"])
    ('3 8 (1)', '1 7', '3 8 (3)')
    """
    return tuple(
        f"{name} ({number})" if names.count(name) > 1 else name
        for number, name in enumerate(names, start=1)
    )


def refuse_unlike(parts: Several[Examples], outputs: str) -> None:
    """One network takes the inputs of all phases, and gives the outputs of all."""

    def layout(part: Examples) -> tuple[object, ...]:
        values = () if part.classes else tuple(part.target.shape[1:])
        return (
            tuple(part.inputs.shape[1:]),
            part.vocabulary,
            part.one_hot,
            bool(part.classes),
            values,
        )

    def in_words(part: Examples) -> str:
        kind = "classes" if part.classes else f"{part.target.shape[1]} values"
        tokens = part.vocabulary or part.one_hot
        return f"inputs {list(part.inputs.shape[1:])}{f' of {tokens} tokens' if tokens else ''} and {kind}"

    first = parts[0]
    for number, part in enumerate(parts[1:], start=2):
        if part.as_given or first.as_given:
            raise Mistake(
                "data.phases: examples that are given in their own order cannot be put in a sequence"
            )
        if layout(part) != layout(first):
            raise Mistake(
                f"data.phases: phase {number} has {in_words(part)}, and phase 1 {in_words(first)}; one network takes "
                "inputs of one shape, and gives classes or values in all phases"
            )
        if outputs == "shared" and len(part.classes) != len(first.classes):
            raise Mistake(
                f"data.phases: phase {number} has {len(part.classes)} classes and phase 1 {len(first.classes)}, "
                "which cannot share outputs; choose as many, or data.outputs=own"
            )
    if outputs == "own" and not first.classes:
        raise Mistake("data.outputs=own: there are values and no classes; use data.outputs=shared")
