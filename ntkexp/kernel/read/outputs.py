"""Outputs that a kernel is between, how many are read at once, and what was found out for the latest questions.

Outputs: which of them a kernel is between, and how many are read at once.

`all` gives blocks [out, out_], a list of places the blocks of those outputs, and `trace` their sum Σ_c K[x, c, x′, c],
which needs no memory for blocks: outputs are read a few at a time.

>>> wanted("all", 3), wanted([2, 0], 3)
(range(0, 3), [2, 0])
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.arrange import each_output
from ntkexp.kernel.features.blocks import Block, Factored, Features, Key, arrays
from ntkexp.kernel.record.tape import Slot, Tape
from ntkexp.mistake import Mistake

# --- Answers: what was found out, for the latest questions.
#
# Where values route rows, by masks, orders or experts, every batch may be a question of its own, and answers are
# as large as what they are about: the oldest are forgotten.


LATEST = 64  # what is remembered: something for every block of a run, where values route rows

T = TypeVar("T")


@dataclass
class Answers(Generic[T]):
    """The latest `room` answers.

    >>> squares = Answers[int](room=2)
    >>> [squares.to(n, lambda n=n: n * n) for n in (1, 2, 1, 3)], list(squares.kept)
    ([1, 4, 1, 9], [1, 3])
    """

    room: int = field(default_factory=lambda: LATEST)
    kept: OrderedDict[Hashable, T] = field(default_factory=OrderedDict, repr=False)

    def to(self, question: Hashable, find: Callable[[], T]) -> T:
        """The answer to a question; found again if it is not known any more."""
        return self.keep(question, self.kept[question] if question in self.kept else find())

    def keep(self, question: Hashable, answer: T) -> T:
        """Remember an answer as the latest."""
        self.kept[question] = answer
        self.kept.move_to_end(question)
        while len(self.kept) > self.room:
            self.kept.popitem(last=False)
        return answer


AT_ONCE = 0.5e9  # bytes of gradients of a few outputs; more at once would not be faster

Outputs: TypeAlias = Literal["all", "trace"] | Sequence[int]


@dataclass(frozen=True)
class Mixtures:
    """What is differentiated: some outputs, each by itself, or one mixture of them all, another for each example.

    >>> import torch
    >>> Mixtures(torch.tensor([[0.5, -0.5]]), None).columns.shape  # a mixture of two outputs, of one example
    torch.Size([1, 1, 2])
    """

    numbers: Float[Tensor, "example out"]  # the outputs, or the mixture
    chosen: tuple[int, ...] | None  # none where it is a mixture

    @classmethod
    def of(cls, tape: Tape, chosen: Sequence[int] | None) -> Mixtures:
        """The chosen outputs, or all."""
        outputs = tape.outputs
        return cls(outputs, tuple(range(outputs.shape[1]) if chosen is None else chosen))

    @property
    def count(self) -> int:
        """How many there are."""
        return 1 if self.chosen is None else len(self.chosen)

    @cached_property
    def columns(self) -> Float[Tensor, "mixture example out"]:
        """The weight of every output, for which a program does not ask.

        A mixture that examples have in common is copied for each: a program is for those that they have not, too.
        """
        return self.numbers[None].contiguous() if self.chosen is None else each_output(self.numbers, self.chosen)


def wanted(outputs: Outputs | str, count: int) -> Sequence[int]:
    """The places of the outputs that are read."""
    if isinstance(outputs, str):
        if outputs not in ("all", "trace"):
            raise Mistake(f"outputs={outputs!r}: give 'all', 'trace' or a list of outputs, such as [0, 3]")
        return range(count)
    try:
        chosen = [index(place) for place in outputs]
    except TypeError:
        raise Mistake(f"outputs={outputs!r}: give 'all', 'trace' or a list of outputs, such as [0, 3]") from None
    if not chosen or any(place not in range(count) for place in chosen):
        raise Mistake(f"outputs={chosen}: the module has {count}, numbered from 0 to {count - 1}")
    return chosen


def chunks(tape: Tape, examples: int, count: int, read: Callable[[Sequence[int]], Features]) -> Iterator[range]:
    """All outputs, as many at a time as keep gradients small: those of values, and those of weights where they are
    multiplied out, which is seen from one output if it matters.
    """
    values, weights = tape.bytes_per_example, sum(tape[slot].nbytes for slot in tape.weights)
    size = int(AT_ONCE / ((values + weights) * examples))
    if size < count:
        size = int(AT_ONCE / ((values + bytes_made(read([0]))) * examples))
    size = max(1, min(count, size))
    yield from (range(first, min(first + size, count)) for first in range(0, count, size))


def bytes_made(features: Features) -> int:
    """Bytes of an example's gradients of one output, whose factors are multiplied out where there are many uses."""
    return sum(numbers_made(block) * block.numbers.element_size() for block in features.blocks.values())


def numbers_made(block: Block) -> int:
    """How many numbers an example's gradients of one output have as they are used."""
    if isinstance(block, Factored) and block.inputs.shape[1] == 1:
        return block.outputs[0].numel()
    return block.size


# --- Parts: tapes and features taken apart into tensors, and put together again from others.
#
# A program takes tensors and gives tensors. What it is fed are the values that weights and inputs decide; what it
# gives are the values on a tape, or the factors of features. All the rest is the same whenever it runs, and is
# kept as a mould.


def fed_slots(tape: Tape) -> list[Slot]:
    """The slots of weights and inputs."""
    return [*tape.weights, *tape.inputs]


def varying(tape: Tape) -> list[Tensor]:
    """The values that weights or inputs decide; all others are the same on every tape of a program."""
    return [tape[slot] for slot in (*fed_slots(tape), *tape.made)]


def parts(made: Tape | Features) -> list[Tensor]:
    """What is compared: all tensors of features; the outputs of a tape, to which all else on it leads.

    On the way to them there may be memory that nobody has written to yet.
    """
    if isinstance(made, Tape):
        return [made.outputs]
    return [value for block in made.blocks.values() for value in arrays(block).values()]


def tape_mould(tape: Tape) -> Tape:
    """A tape without the values that vary."""
    gone, nothing = {*fed_slots(tape), *tape.made}, tape.outputs.new_empty(0)
    return tape.refilled(tuple(nothing if Slot(k) in gone else value for k, value in enumerate(tape.values)))


def fill_tape(mould: Tape, fed: Sequence[Tensor], found: Sequence[Tensor]) -> Tape:
    """Another tape of the same program."""
    values = list(mould.values)
    for slot, value in zip((*fed_slots(mould), *mould.made), (*fed, *found), strict=True):
        values[slot] = value
    return mould.refilled(tuple(values))


def features_mould(features: Features) -> Features:
    """Features without their numbers."""
    return fill_features(features, (), [value.new_empty([0] * value.dim()) for value in parts(features)])


def fill_features(mould: Features, fed: Sequence[Tensor], found: Sequence[Tensor]) -> Features:
    """Other features of the same function."""
    left = iter(found)
    blocks: dict[Key, Block] = {}
    for key, block in mould.blocks.items():
        kept: dict[str, Any] = vars(block) | {name: next(left) for name in arrays(block)}
        blocks[key] = type(block)(**kept)
    return Features(blocks, mould.examples, mould.outputs)
