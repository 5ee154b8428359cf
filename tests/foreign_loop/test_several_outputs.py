"""Models that return several tensors, and models whose gradients are not the derivatives of their values.

A loss of several outputs is the loss of their concatenation, so the oracle is the same model with one output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import xarray as xr
from torch import Tensor, nn
from torch.nn import functional

import ntkexp
from ntkexp.foreign_loop.example_names import SeenCall
from ntkexp.foreign_loop.trace import Trace
from ntkexp.mistake import Mistake
from ntkexp.model.functional import choose_output
from tests.foreign_loop.loops import parts_of

EXAMPLES, INPUTS, STEPS = 12, 4, 4
ROUNDING = 1e-11  # of sums over 4 steps of 12 examples, relative to the largest contribution

with torch.random.fork_rng(devices=()):
    torch.manual_seed(0)
    X = torch.randn(EXAMPLES, INPUTS, dtype=torch.float64)


@dataclass(frozen=True)
class Named:
    """A dataclass of outputs."""

    policy: Tensor
    value: Tensor


class Several(nn.Module):
    """A trunk and two heads. `form` makes the answer from the trunk and the heads."""

    def __init__(self, form: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(1)
            self.trunk = nn.Linear(INPUTS, 6).double()
            self.policy = nn.Linear(6, 3).double()
            self.value = nn.Linear(6, 1).double()
        self.form = form

    def forward(self, x: Tensor) -> Any:
        hidden = functional.gelu(self.trunk(x))
        return self.form(hidden, self.policy(hidden), self.value(hidden))


def likelihood(logits: Tensor, x: Tensor) -> Tensor:
    return functional.cross_entropy(logits, (x[:, 0] > 0).long())


def error(value: Tensor, x: Tensor) -> Tensor:
    return (value.flatten(1).mean(1) - x.sum(1)).square().mean()


def of_pair(answer: Any, x: Tensor) -> Tensor:
    policy, value = (answer.policy, answer.value) if hasattr(answer, "policy") else answer[:2]
    return likelihood(policy, x) + 0.5 * error(value, x)


def of_nested(answer: Any, x: Tensor) -> Tensor:
    return likelihood(answer["heads"][0], x) + error(answer["heads"][1]["value"], x)


def of_probabilities(answer: Any, x: Tensor) -> Tensor:
    """The probabilities are computed from the logits, and the loss uses both."""
    penalty: Tensor = answer["probabilities"].square().sum(1).mean()
    return likelihood(answer["logits"], x) + penalty


def of_tokens(answer: Any, x: Tensor) -> Tensor:
    """Outputs of other numbers of axes."""
    penalty: Tensor = answer[0].square().mean()
    return penalty + error(answer[1], x)


Form: TypeAlias = Callable[[Tensor, Tensor, Tensor], Any]
Loss: TypeAlias = Callable[[Any, Tensor], Tensor]

CASES: Mapping[str, tuple[Form, Loss, tuple[str, ...]]] = {
    "a list": (lambda h, p, v: [p, v], of_pair, ("0", "1")),
    "a dataclass": (lambda h, p, v: Named(p, v), of_pair, ("policy", "value")),
    "nested": (lambda h, p, v: {"heads": (p, {"value": v}), "n": 1}, of_nested, ("heads.0", "heads.1.value")),
    "one computed from another": (
        lambda h, p, v: {"logits": p, "probabilities": p.softmax(1)},
        of_probabilities,
        ("logits", "probabilities"),
    ),
    "other axes": (lambda h, p, v: (h.view(-1, 2, 3), v), of_tokens, ("0", "1")),
    "one of them unused": (lambda h, p, v: (p, v, h), of_pair, ("0", "1")),
}  # fmt: skip


class Joined(nn.Module):
    """The oracle: the outputs that the loss uses, as one tensor."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, x: Tensor) -> Tensor:
        return choose_output(self.model(x), self.names)


def trained(
    model: nn.Module, loss: Callable[[Any, Tensor], Tensor], output: Any = None, to: Path | None = None
) -> Trace:
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    with ntkexp.follow(model, optimizer, queries=X[:3], output=output, to=to) as trace:
        for step in range(STEPS):
            optimizer.zero_grad()
            for batch in torch.split(X.roll(step, 0), EXAMPLES // 2):  # accumulated
                loss(model(batch), batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return trace


def part_of(answer: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    rows = torch.split(answer, [shape[1:].numel() for shape in shapes], 1)
    return [row.view(-1, *shape[1:]) for row, shape in zip(rows, shapes, strict=True)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(3)
def test_a_loss_of_several_outputs_is_one_of_their_concatenation(case: str, tmp_path: Path) -> None:
    form, loss, names = CASES[case]
    model = Several(form)
    answer = model(X)
    shapes = [choose_output(answer, name).shape for name in names]

    def of_joined(joined: Tensor, x: Tensor) -> Tensor:
        parts = dict(zip(names, part_of(joined, shapes), strict=True))
        if case == "nested":
            return of_nested({"heads": (parts["heads.0"], {"value": parts["heads.1.value"]})}, x)
        return loss(parts if case == "one computed from another" else tuple(parts.values()), x)

    alike = trained(Joined(deepcopy(model), names), of_joined).attribute(quiet=True)
    found = parts_of(trained(deepcopy(model), loss, names[0], tmp_path / "trace"))
    both = trained(deepcopy(model), loss, list(names)).attribute(quiet=True)

    width = shapes[0][1:].numel()
    oracle = alike["contribution"].transpose("query", "out", "example")
    size = float(abs(oracle).max())
    for ours, outputs in ((found, slice(width)), (both, slice(None))):
        values = ours["contribution"].sel(example=oracle["example"]).transpose("query", "out", "example").values
        assert float(abs(values - oracle.values[:, outputs]).max()) <= ROUNDING * size


def test_a_list_of_one_output_is_that_output() -> None:
    model = Several(lambda h, p, v: {"logits": p})
    one, other = (
        trained(deepcopy(model), lambda answer, x: likelihood(answer["logits"], x), output).attribute(quiet=True)
        for output in ("logits", ["logits"])
    )
    xr.testing.assert_allclose(one["contribution"], other["contribution"], rtol=0, atol=ROUNDING)


def test_a_loss_inside_the_model_counts_once() -> None:
    """The model computes its loss from the logits that it returns."""

    class WithLoss(Several):
        def forward(self, x: Tensor) -> Any:
            _, policy, value = super().forward(x)
            return {"loss": likelihood(policy, x), "logits": policy, "value": value}

    model = WithLoss(lambda h, p, v: (h, p, v))
    alike = Several(lambda h, p, v: p)
    one = trained(model, lambda answer, x: answer["loss"], "logits").attribute(quiet=True)
    other = trained(alike, likelihood).attribute(quiet=True)
    xr.testing.assert_allclose(one["contribution"], other["contribution"], rtol=0, atol=ROUNDING)


def test_a_loss_that_no_output_explains_is_refused() -> None:
    class Balanced(Several):
        def forward(self, x: Tensor) -> Any:
            hidden, policy, _ = super().forward(x)
            return {"logits": policy, "balance": hidden.mean(0).square().sum()}

    with pytest.raises(Mistake, match=r"step 0: .*does the loss use 'balance', which has no row for each example\?"):
        trained(Balanced(lambda h, p, v: (h, p, v)), lambda a, x: likelihood(a["logits"], x) + a["balance"], "logits")


# --- Gradients that are not derivatives of the values: training uses the former, secants explain the latter.


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


def rounded(x: Tensor) -> Tensor:
    """Rounded values with the gradient of the identity."""
    return x + ((4 * x).round() / 4 - x).detach()


SURROGATES: Mapping[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "a stopped branch": lambda layer, h: h + layer(h.detach()).relu(),
    "a stopped factor": lambda layer, h: layer(h) * h.detach(),
    "rounded activations": lambda layer, h: rounded(layer(h)),
    "rounded weights": lambda layer, h: functional.linear(h, rounded(layer.weight), layer.bias),
    "a stopped norm": lambda layer, h: functional.linear(h, layer.weight / layer.weight.norm().detach()),
    "a custom function": lambda layer, h: h + Sign.apply(layer(h)),  # type: ignore[no-untyped-call]
}


class Surrogate(nn.Module):
    def __init__(self, body: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(2)
            self.first, self.layer, self.last = (nn.Linear(n, m).double() for n, m in ((INPUTS, 6), (6, 6), (6, 3)))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.last(self.body(self.layer, torch.tanh(self.first(x))))
        return hidden


@pytest.mark.parametrize("case", SURROGATES)
def test_surrogate_gradients_train_and_secants_explain(case: str) -> None:
    trace = trained(Surrogate(SURROGATES[case]), likelihood)
    found = trace.attribute(quiet=True)
    assert "not the derivatives of the model's values" in found.attrs["surrogate_gradients"]
    parts = found["contribution"].sum("example") + found["decay"]
    size = float(abs(found["contribution"]).sum("example").max())
    assert float(abs(parts - found["change"]).max()) <= ROUNDING * size
    assert float(found["gradient_error"].max()) <= ROUNDING


def test_effects_need_derivatives() -> None:
    trace = trained(Surrogate(SURROGATES["a stopped branch"]), likelihood)

    def loss(outputs: Tensor, call: SeenCall) -> Tensor:
        return functional.cross_entropy(outputs, (call.args[0][:, 0] > 0).long(), reduction="none")  # type: ignore[index]

    trace.loss = loss
    with pytest.raises(Mistake, match="effects: training used gradients that are not the derivatives"):
        trace.attribute(effects=True, quiet=True)
