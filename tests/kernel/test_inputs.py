"""Modules with several inputs, by position or by name, and with several outputs."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ntkexp.library import secant_kernel, tangent_kernel
from ntkexp.mistake import Mistake
from ntkexp.shapes import Inputs
from tests.kernel import oracle
from tests.kernel.compare import agree

EPS = torch.finfo(torch.float64).eps


class Pair(NamedTuple):
    """A tuple with names."""

    logits: Tensor
    hidden: Tensor


@dataclass
class Answer:
    """What a network may give beside its outputs."""

    logits: Tensor
    cache: list[Tensor]
    loss: Tensor | None = None


class Several(nn.Module):
    """Tokens and a mask, with a switch; the answer comes as it is asked for."""

    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.form = form

    def forward(self, tokens: Tensor, mask: Tensor, double: bool = False) -> object:
        hidden = torch.tanh(self.mix(self.table(tokens))) * mask[..., None]
        logits: Tensor = self.head(hidden.sum(1)) * (2.0 if double else 1.0)
        forms: dict[str, object] = {
            "dict": {"logits": logits, "cache": [hidden]},
            "dataclass": Answer(logits, [hidden]),
            "tuple": (logits, hidden),
            "named tuple": Pair(logits, hidden),
            "tensor": logits,
            "nothing": None,
        }
        return forms[self.form]


def several(form: str = "tensor") -> nn.Module:
    """With the same random weights in every form."""
    made = Several(form).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return made


TOKENS = torch.tensor([[0, 3, 6], [1, 1, 2], [5, 4, 0], [2, 6, 6]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 1, 1], [0, 1, 1]]).double()


class Joined(nn.Module):
    """The same network with one input, for the oracle."""

    def __init__(self, double: bool) -> None:
        super().__init__()
        self.inner, self.twice = several(), double

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.inner(x[:, :3].long(), x[:, 3:].double(), self.twice)
        return outputs


def expected(double: bool = False) -> Tensor:
    """By plain Jacobians."""
    x = torch.cat([TOKENS.double(), MASK], 1)
    return oracle.tangent(Joined(double), x, x)


@pytest.mark.parametrize(
    ("inputs", "double"),
    [
        ((TOKENS, MASK), False),
        ((TOKENS, MASK, True), True),
        ({"tokens": TOKENS, "mask": MASK}, False),
        ({"tokens": TOKENS, "mask": MASK, "double": True}, True),
        (UserDict(tokens=TOKENS, mask=MASK), False),
    ],
    ids=["by position", "a constant by position", "by name", "a constant by name", "another mapping"],
)
def test_several_inputs(inputs: Inputs, double: bool) -> None:
    agree(tangent_kernel(several(), inputs), expected(double), 100 * EPS)


@pytest.mark.parametrize(
    ("form", "output"),
    [("dict", "logits"), ("dataclass", "logits"), ("tuple", 0), ("named tuple", "logits"), ("named tuple", 0)],
)
def test_one_of_several_outputs(form: str, output: str | int) -> None:
    agree(tangent_kernel(several(form), (TOKENS, MASK), output=output), expected(), 100 * EPS)


def test_the_second_of_several_outputs_is_another() -> None:
    """Hidden states have an axis of positions and one of units; the outputs are both."""
    assert tangent_kernel(several("tuple"), (TOKENS, MASK), output=1).shape == (4, 12, 4, 12)


def test_a_step_through_several_inputs_and_outputs_is_exact() -> None:
    made = several("dict")
    start = {name: weight.detach() for name, weight in made.named_parameters()}
    residual = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs = {"tokens": TOKENS, "mask": MASK}
    gradient = torch.autograd.grad(made(**inputs)["logits"], list(made.parameters()), residual)
    end = {name: weight - 0.3 * g for (name, weight), g in zip(start.items(), gradient, strict=True)}
    probes = {"tokens": TOKENS.flip(1), "mask": MASK}
    kernel = secant_kernel(made, start, end, probes, inputs, output="logits")
    before = made(**probes)["logits"].detach()
    after = torch.func.functional_call(made, end, (), probes)["logits"].detach()
    scale = before.abs().max() + after.abs().max() + 0.3 * kernel.abs().max()
    agree(-0.3 * torch.einsum("qcnd,nd->qc", kernel, residual), after - before, 300 * EPS, scale)


@pytest.mark.parametrize(
    ("form", "output", "words"),
    [
        ("dict", None, ("gives a dict", "'logits'", "output=")),
        ("dict", "logit", ("output='logit'", "did you mean 'logits'?")),
        ("dict", "cache", ("output='cache'", "no tensor", "'logits'")),
        ("dataclass", None, ("gives a Answer", "'logits'")),
        ("tuple", None, ("gives a tuple", "0, 1")),
        ("tuple", 2, ("output=2", "0, 1")),
        ("tensor", "logits", ("output='logits'", "leave output out")),
        ("nothing", None, ("NoneType", "no tensor")),
    ],
)
def test_outputs_that_cannot_be_read_are_refused_in_one_line(
    form: str, output: str | int | None, words: tuple[str, ...]
) -> None:
    with pytest.raises(Mistake) as caught:
        tangent_kernel(several(form), (TOKENS, MASK), output=output)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ((TOKENS, MASK[:3]), ("[4, 3], [3, 3]", "same examples")),
        ({"tokens": TOKENS, "mask": torch.tensor(1.0)}, ("[4, 3], []",)),
        ((1, 2), ("no tensor at all",)),
        ("text", ("the inputs are a str", "dict of keyword arguments")),
    ],
)
def test_inputs_that_are_no_examples_are_refused_in_one_line(inputs: Inputs, words: tuple[str, ...]) -> None:
    with pytest.raises(Mistake) as caught:
        tangent_kernel(several(), inputs)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)
