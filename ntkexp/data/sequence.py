"""Sequences: sentences of tokens with a class to predict,
and tasks that are trained one after another."""

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

# --- Sentences of tokens, which are integers below a `vocabulary`
#
#     tokens     [example, position]
#     one_hot    [example, position, token], 1 at the token and 0 elsewhere, for networks that need numbers
#
# Tokens are stored as float64, which represents them exactly.


class AbstractTokens(AbstractSource):
    """A source of tokens. Tokens are never standardised."""

    standardise: Literal["none"] = "none"
    encoding: Literal["tokens", "one_hot"] = "tokens"

    def sentences(
        self,
        tokens: Int[Tensor, "example position"],
        labels: Int[Tensor, " example"],
        classes: tuple[str, ...],
        vocabulary: int,
    ) -> Examples:
        """Return sentences and labels as examples in the chosen encoding."""
        if self.encoding == "one_hot":
            return Examples(tokens.double(), labels, classes, one_hot=vocabulary)
        return Examples(tokens.double(), labels, classes, vocabulary=vocabulary)


class ModularAddition(AbstractTokens):
    """Modular addition: two numbers as tokens, and their sum modulo p as the class.

    There are p = `modulus` classes. The token k < p is the number k. The token p is the
    sign '=', which ends the inputs if `equals` is true.

        x = (a, b)  or  (a, b, =),    y = (a + b) mod p,    all p² pairs of a, b in 0 … p − 1

    A. Power et al., "Grokking: generalization beyond overfitting on small algorithmic
    datasets" (2022), arXiv:2201.02177.

    >>> source = ModularAddition(modulus=5, train=20, query=5)
    >>> data = source.split()
    >>> torch.equal(data.train.inputs.sum(1).long() % 5, data.train.target)
    True
    """

    train: Count = 64
    query: CountOrNone = 24
    modulus: int = Field(11, ge=2, le=4096)
    equals: bool = False

    def examples(self, generator: torch.Generator) -> Examples:
        count = self.train + self.query + (self.test or 0)
        pairs = self.modulus**2
        if count > pairs:
            raise Mistake(
                f"data.modulus={self.modulus} makes {pairs} sums, and data.train, data.query and "
                f"data.test ask for {count}; lower one of them, or raise data.modulus"
            )
        numbers = torch.arange(self.modulus)
        tokens = torch.cartesian_prod(numbers, numbers)
        labels = tokens.sum(1) % self.modulus
        if self.equals:
            tokens = torch.cat([tokens, torch.full((len(tokens), 1), self.modulus)], 1)
        names = tuple(str(number) for number in range(self.modulus))
        return self.sentences(tokens, labels, names, self.modulus + self.equals)


class Text(AbstractTokens):
    """Text from a file, byte by byte: predict the next byte from `context` bytes.

        ntkexp train model=transformer model.causal=true data=text data.path=book.txt
        data.context=16

    Tokens and classes are the bytes that occur in the file, in ascending order. Other
    bytes would only enlarge kernels, whose size grows with the square of the number of
    classes. An example is a window of `context` bytes and the next byte. Windows do not
    overlap, so that no split contains the answers of another split. Equal windows are
    used only once. The default splits are small, because there are many classes."""

    train: Count = 32
    query: CountOrNone = 16
    test: CountOrNone | None = 16
    path: UserPath
    context: Count = 16

    def files(self) -> tuple[Path, ...]:
        return (require_file(self.path),)

    def examples(self, generator: torch.Generator) -> Examples:
        raw = read_contents(self.path)
        characters = sorted(set(raw))
        position = torch.zeros(256, dtype=torch.int64)
        position[characters] = torch.arange(len(characters))
        tokens = position[np.frombuffer(raw, np.uint8).astype(np.int64)]

        # Distinct windows of `context` bytes and the next byte
        size = self.context + 1
        window_count = len(tokens) // size
        windows = torch.unique(
            tokens[: window_count * size].view(window_count, size), dim=0
        )
        count = self.train + self.query + (self.test or 0)
        if count > len(windows):
            raise Mistake(
                f"{quoted(self.path)} holds {len(tokens)} bytes, and in them {len(windows)} "
                f"different windows of data.context={self.context} and one more; data.train, "
                f"data.query and data.test ask for {count}; lower one of them, or take a longer text"
            )
        names = tuple(byte_name(byte) for byte in characters)
        return self.sentences(windows[:, :-1], windows[:, -1], names, len(names))


def byte_name(byte: int) -> str:
    """Return a printable byte as a character, other bytes as hexadecimal codes.

    >>> byte_name(97), byte_name(10), byte_name(32), byte_name(200)
    ('a', '0x0a', '0x20', '0xc8')
    """
    return chr(byte) if 32 < byte < 127 else f"0x{byte:02x}"


SHARED_FIELDS = ("train", "query", "test", "label_noise", "standardise")
"""Fields that a sequence sets for all phases."""


class Sequence(AbstractSource):
    """One task after another: each phase of training uses only its own examples.

    `train`, `query` and `test` are divided equally among the phases.

        ntkexp train data=sequence data.phases=[[0,1],[2,3],[4,5]]

    A phase is a list of classes of `source`, or another source. The sequence sets the
    number, noise and scale of the examples in all phases. All phases share one network.
    With `outputs=shared`, the k-th classes of all phases share one output
    ("domain-incremental" learning); with `outputs=own`, every class has its own output
    ("class-incremental"; G. van de Ven, T. Tuytelaars & A. Tolias, "Three types of
    incremental learning", 2022).

    >>> data = Sequence(train=40, query=20, test=0).split()
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
        for source in self.sources:
            if isinstance(source, Sequence):
                raise Mistake(
                    "data.phases: a phase cannot be a sequence, whose phases would be learned at "
                    "once; list its phases instead"
                )
            for name in SHARED_FIELDS:
                value = getattr(source, name)
                if value != type(source).model_fields[name].default:
                    raise Mistake(
                        f"data.{name} is shared by all phases, and one of them has its own "
                        f"({value}); give data.{name} instead"
                    )
        if self.steps is not None and len(self.steps) != len(self.phases):
            raise Mistake(
                f"data.steps={list(self.steps)}: there are {len(self.phases)} phases; give the "
                "steps of each, or null for equal shares"
            )
        if self.label_noise and self.outputs == "own":
            raise Mistake(
                f"data.label_noise={self.label_noise:g}: with data.outputs=own, noise would give "
                "labels of other phases; use data.outputs=shared, or leave the noise out"
            )
        return self

    @property
    def sources(self) -> tuple[AbstractSource, ...]:
        """The source of each phase: the phase itself if it is a source, otherwise
        `source` with the classes of the phase."""
        sources: list[AbstractSource] = []
        for phase in self.phases:
            if isinstance(phase, AbstractSource):
                sources.append(phase)
                continue
            if "classes" not in type(self.source).model_fields:
                raise Mistake(
                    f"data.phases has {list(phase)}, and classes of "
                    f"data.source={self.source.option} cannot be chosen; give a source in its "
                    "place, such as {_target_: ntkexp.data.Teacher, seed: 1}"
                )
            sources.append(self.source.model_copy(update={"classes": phase}))
        return tuple(sources)

    def phase_steps(self, steps: int) -> tuple[int, ...]:
        """Return the number of steps of each phase: `self.steps`, or equal parts of
        `steps`. If the parts are unequal, the first phases get one step more.

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
                f"data.steps={list(self.steps)} are {sum(self.steps)} steps in all, and "
                f"steps={steps}; give steps={sum(self.steps)}"
            )
        return self.steps

    def examples(self, generator: torch.Generator) -> Examples:
        sources = self.sources
        parts = [
            examples_of_phase(source, generator, number)
            for number, source in enumerate(sources, start=1)
        ]
        refuse_unlike(parts, self.outputs)
        phase_names = [
            " ".join(part.classes) or source.option
            for source, part in zip(sources, parts, strict=True)
        ]
        phase_numbers = [
            torch.full((len(part.inputs),), k) for k, part in enumerate(parts)
        ]
        names, targets = (
            shared_targets(parts) if self.outputs == "shared" else own_targets(parts)
        )
        phase_classes: tuple[tuple[str, ...], ...] = ()
        if names and self.outputs == "shared":
            phase_classes = tuple(part.classes for part in parts)
        inputs, white = joined_inputs(parts)
        return Examples(
            inputs,
            torch.cat(targets),
            names,
            white=white,
            gaps=any(part.gaps for part in parts),
            vocabulary=parts[0].vocabulary,
            one_hot=parts[0].one_hot,
            phases=distinct_names(phase_names),
            phase=torch.cat(phase_numbers),
            phase_classes=phase_classes,
        )


def joined_inputs(parts: Several[Examples]) -> tuple[Tensor, float]:
    """Return the inputs of all phases, and the value of intensity 1.

    Keep images as bytes if all phases have bytes with the same `white`.
    """
    white = parts[0].white
    if all(part.inputs.dtype == torch.uint8 and part.white == white for part in parts):
        return torch.cat([part.inputs for part in parts]), white
    inputs = [
        part.inputs if part.one_hot else part.inputs.double() / part.white
        for part in parts
    ]
    return torch.cat(inputs), 1.0


def shared_targets(parts: Several[Examples]) -> tuple[tuple[str, ...], list[Tensor]]:
    """Return the names of shared outputs, and the unchanged targets. The name of output
    k joins the names of the k-th classes of all phases."""
    by_output = zip(*(part.classes for part in parts), strict=True)
    names = tuple("/".join(dict.fromkeys(classes)) for classes in by_output)
    return names, [part.target for part in parts]


def own_targets(parts: Several[Examples]) -> tuple[tuple[str, ...], list[Tensor]]:
    """Return the names of all classes, and targets
    that are indices into these names."""
    names = tuple(dict.fromkeys(name for part in parts for name in part.classes))
    targets = []
    for part in parts:
        numbers = torch.tensor([names.index(name) for name in part.classes])
        targets.append(numbers[part.target.long()])
    return names, targets


def examples_of_phase(
    source: AbstractSource, generator: torch.Generator, number: int
) -> Examples:
    """Return the examples of a phase. They do not depend on the position of the phase
    in the sequence."""
    if source.seed is None:
        stream = torch.Generator()
        stream.set_state(generator.get_state())
    else:
        stream = examples_stream(source.seed)
    try:
        return source.examples(stream)
    except Mistake as mistake:
        # The command line appends advice to subclasses of `Mistake`, so raise them
        # unchanged.
        if type(mistake) is not Mistake:
            raise
        raise Mistake(f"data.phases, phase {number}: {mistake}") from mistake


def distinct_names(names: Several[str]) -> tuple[str, ...]:
    """Append its number to each name that occurs more than once.

    >>> distinct_names(["3 8", "1 7", "3 8"])
    ('3 8 (1)', '1 7', '3 8 (3)')
    """
    return tuple(
        f"{name} ({number})" if names.count(name) > 1 else name
        for number, name in enumerate(names, start=1)
    )


def refuse_unlike(parts: Several[Examples], outputs: str) -> None:
    """Raise if one network cannot take the inputs and targets of all phases."""

    def layout(part: Examples) -> tuple[object, ...]:
        values = () if part.classes else tuple(part.target.shape[1:])
        shape = tuple(part.inputs.shape[1:])
        return shape, part.vocabulary, part.one_hot, bool(part.classes), values

    def in_words(part: Examples) -> str:
        kind = "classes" if part.classes else f"{part.target.shape[1]} values"
        tokens = part.vocabulary or part.one_hot
        of_tokens = f" of {tokens} tokens" if tokens else ""
        return f"inputs {list(part.inputs.shape[1:])}{of_tokens} and {kind}"

    first = parts[0]
    for number, part in enumerate(parts[1:], start=2):
        if part.as_given or first.as_given:
            raise Mistake(
                "data.phases: a source with a fixed order of examples cannot be a phase"
            )
        if layout(part) != layout(first):
            raise Mistake(
                f"data.phases: phase {number} has {in_words(part)}, and phase 1 "
                f"{in_words(first)}; one network takes inputs of one shape, and gives classes or "
                "values in all phases"
            )
        if outputs == "shared" and len(part.classes) != len(first.classes):
            raise Mistake(
                f"data.phases: phase {number} has {len(part.classes)} classes and phase 1 "
                f"{len(first.classes)}, which cannot share outputs; choose equal numbers "
                "of classes, or data.outputs=own"
            )
    if outputs == "own" and not first.classes:
        raise Mistake(
            "data.outputs=own: there are values and no classes; use data.outputs=shared"
        )
