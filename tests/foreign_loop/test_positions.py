"""Contributions by position: each comes from the loss at one position, and they add up to the contribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import ntkexp
from ntkexp.capacity import MemoryBudget
from ntkexp.foreign_loop.call import ModelCall
from ntkexp.foreign_loop.model_function import CalledModule
from ntkexp.foreign_loop.positions import LoopPositions, Positions, positions_of
from ntkexp.foreign_loop.trace import Trace
from ntkexp.mistake import Mistake
from ntkexp.report.explain import explain, format_explanation
from ntkexp.report.page.build import texts_view
from ntkexp.report.parts import shaded_texts, tabulate_positions
from ntkexp.report.scores import Attribution
from ntkexp.report.tables import json_rows
from tests.foreign_loop.loops import WORDS, Language, apart, fitted, followed, loop, parts_of, plain, sgd

LONGEST, IGNORED = 5, -100
SUMMED = 100  # eps: some steps, each a sum of some tens of terms, in two orders


def labels_of(x: Tensor) -> Tensor:
    """The next token. The last position has no label, and the third has no loss."""
    labels = torch.cat([x[:, 1:], torch.full((len(x), 1), IGNORED)], 1)
    labels[:, 2] = IGNORED
    return labels


def loss_of(outputs: Tensor, x: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), labels_of(x).flatten(), ignore_index=IGNORED)


def texts() -> list[Tensor]:
    """Two batches; the second has shorter texts."""
    return [torch.randint(WORDS, (4, LONGEST)), torch.randint(WORDS, (3, LONGEST - 1))]


class ClassesFirst(nn.Module):
    """A language model with the outputs that cross_entropy takes, [example, class, position]."""

    def __init__(self, inner: Language) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x).mT
        return found


def trained(*, dropout: float = 0.0, parts: int = 1, classes_first: bool = False, **more: object) -> Trace:
    """A loop over texts, some of them of another length, with the gradients of `parts` calls in each step."""
    torch.manual_seed(0)
    model, given = Language(dropout=dropout).double().train(), texts()
    called: nn.Module = ClassesFirst(model) if classes_first else model
    optimizer, queries = torch.optim.AdamW(called.parameters(), lr=0.02), torch.randint(WORDS, (2, 3))

    def rows(outputs: Tensor) -> Tensor:
        return outputs.mT if classes_first else outputs

    asked = {"measure": lambda outputs, call: rows(outputs)[:, -1].logsumexp(1), **more}
    with ntkexp.follow(called, optimizer, queries=queries, **asked) as trace:  # type: ignore[arg-type]
        for batch in given:
            optimizer.zero_grad()
            for part in batch.tensor_split(parts):
                (loss_of(rows(called(part)), part) / parts).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return trace


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, xr.Dataset]:
    """A loop with dropout and two calls in a step, in a folder, and its attribution."""
    with torch.random.fork_rng(devices=()):
        trace = trained(dropout=0.3, parts=2, to=tmp_path_factory.mktemp("positions") / "run")
        found = trace.attribute(
            positions=True, by="module", decode=lambda tokens: "".join("abcd<&g"[k] for k in tokens), quiet=True
        )
    return trace, found


def test_positions_add_up(kept: tuple[Trace, xr.Dataset]) -> None:
    """Also with components. Positions without a loss have no part."""
    trace, found = kept
    assert found["by_position"].sizes["position"] == LONGEST
    size = abs(found["by_position"]).sum("position")
    missed = abs(found["by_position"].sum("position") - found["contribution"])
    assert float((missed - SUMMED * torch.finfo(torch.float64).eps * size).max()) <= 0
    assert float(size.min()) > 0
    assert not found["by_position"].isel(position=[2, 4]).any()
    assert not found["by_position"].isel(position=3, example=slice(4, 7)).any()  # the last of the shorter texts
    alone = parts_of(trace)
    assert "by_position" not in alone
    for name in ("contribution", "by_step"):
        assert apart(found[name], alone[name]) <= 1e-13


def test_positions_are_those_of_the_texts_on_either_axis(kept: tuple[Trace, xr.Dataset]) -> None:
    """Outputs [example, class, position] give the same positions as [example, position, class]."""
    first = trained(dropout=0.3, parts=2, classes_first=True).attribute(positions=True, quiet=True)["by_position"]
    assert apart(first, kept[1]["by_position"]) <= 1e-12


AXES = {
    "by the loss": (torch.zeros(2, 5, 5, dtype=torch.long), (2, 5, 5), 2, 1),
    "classes first": (torch.zeros(2, 5, 5, dtype=torch.long), (2, 5, 5), 1, 2),
    "by the texts": (torch.zeros(2, 5, dtype=torch.long), (2, 7, 5), None, 2),
    "by nothing": (torch.zeros(2, 5, dtype=torch.long), (2, 5, 5), None, None),
    "no texts": (torch.zeros(2, 7, 5), (2, 7, 5), None, None),
    "they disagree": (torch.zeros(2, 7, dtype=torch.long), (2, 7, 5), 1, None),
}


@pytest.mark.parametrize(("inputs", "shape", "softmax", "axis"), AXES.values(), ids=AXES)
def test_the_axis_of_positions_is_found_or_refused(
    inputs: Tensor, shape: tuple[int, int, int], softmax: int | None, axis: int | None
) -> None:
    """From a softmax over the axis of classes, and from the lengths of texts."""
    outputs = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    by_class = outputs if softmax is None else outputs.log_softmax(softmax)
    (by_class * torch.rand_like(outputs)).sum().backward()  # type: ignore[no-untyped-call]
    assert outputs.grad is not None
    calls, called = (
        [(ModelCall(0, inputs, shape=shape, gradient=outputs.grad.flatten(1)),)],
        CalledModule(Language(), None),
    )
    if axis is not None:
        assert positions_of(calls, called.couples) == Positions(axis, shape[axis], 2 * shape[axis])
        return
    with pytest.raises(Mistake, match=r"positions=True: outputs of shape \[2, .* show|disagree"):
        positions_of(calls, called.couples)


def test_contributions_by_position_are_those_of_the_loss_at_each_position() -> None:
    """One step of gradient descent: −η J̄ ∇ℓ_t of each text, with J̄ by quadrature and ∇ℓ_t by autograd."""
    rate, model, x = 0.01, Language().double(), texts()[0]
    optimizer, queries = torch.optim.SGD(model.parameters(), lr=rate), torch.randint(WORDS, (2, 3))
    start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    asked_of: dict[str, Any] = {"queries": queries, "measure": lambda f, call: f[:, -1].logsumexp(1)}
    trace = fitted(model, optimizer, lambda _: loss_of(model(x), x), 1, **asked_of)
    end = {name: weight.detach() for name, weight in model.named_parameters()}

    def asked(weights: dict[str, Tensor]) -> Tensor:
        found: Tensor = functional_call(model, weights, (queries,))[:, -1].logsumexp(1)
        return found

    def losses(weights: dict[str, Tensor]) -> Tensor:
        labels, outputs = labels_of(x), functional_call(model, weights, (x,))
        each = functional.cross_entropy(outputs.mT, labels, ignore_index=IGNORED, reduction="none")
        return each / (labels != IGNORED).sum()

    # a secant is the mean of J along its step, but for terms of second order in the step
    with sdpa_kernel(SDPBackend.MATH):  # jacrev has rules for it in every release of torch
        gradients, jacobian = jacrev(losses)(start), dict[str, Tensor]()
        for at, weight in ((0.0, 1 / 6), (0.5, 4 / 6), (1.0, 1 / 6)):
            here = jacrev(asked)({name: start[name] + at * (end[name] - start[name]) for name in start})
            jacobian = {name: weight * here[name] + jacobian.get(name, torch.zeros(())) for name in here}
    expected = sum(
        -rate * torch.einsum("qp,ntp->qnt", jacobian[name].flatten(1), gradients[name].flatten(2)) for name in start
    )
    found = trace.attribute(positions=True, quiet=True)["by_position"].isel(out=0).to_numpy()
    assert isinstance(expected, Tensor)
    assert np.abs(found - expected.numpy()).max() <= 0.1 * rate**2 * np.abs(found).max()


def test_explanations_show_positions(kept: tuple[Trace, xr.Dataset]) -> None:
    """In the folder, in the table, in JSON and on the page, with the tokens. Their parts add up."""
    trace, found = kept
    assert trace.folder is not None
    run = ntkexp.load_run(trace.folder.path)
    np.testing.assert_array_equal(run.contributions["by_position"], found["by_position"])

    (explanation,) = explain(run, "query", [1])
    rows = json_rows(tabulate_positions(explanation.positions))
    assert sum(float(str(row["added"])) for row in rows) == pytest.approx(explanation.sum, rel=1e-12, abs=1e-14)
    assert explanation.as_json(3)["positions"] == list(rows[:3])
    assert "token" in format_explanation(explanation, 3)
    # a text is shown whole, in order, its largest part strongest
    most = explanation.parts[0].example.index
    ((_, tokens),) = shaded_texts(explanation.positions, [most])
    assert "".join(token.text for token in tokens) == run.data["train_text"][most]
    added = found["by_position"].isel(query=1, out=0, example=most).to_numpy()
    assert max(range(len(tokens)), key=lambda k: tokens[k].percent) == int(np.abs(added).argmax())
    assert len(texts_view(explanation)) == 7
    # the attribution shows the same; without `decode`, it shows the ids of the tokens
    assert isinstance(found, Attribution)
    assert found.explain(1).positions == explanation.positions
    ids = trained(dropout=0.3, parts=2).attribute(positions=True, quiet=True).explain(1).positions
    words = {part.token for part in explanation.positions}
    assert {"abcd<&g"[int(part.token)] if part.token else "" for part in ids} == words


def test_outputs_without_positions_are_refused() -> None:
    """Rows of outputs, texts that a norm couples, and sums that exceed the memory."""
    with pytest.raises(Mistake, match=r"positions=True: .* shape \[6, 3\]; their axes must be \[example, pos"):
        followed(loop(sgd), plain).attribute(positions=True, quiet=True)

    parts, places = torch.zeros(2, 1, 7, dtype=torch.float64), Positions(axis=1, longest=LONGEST, rows=4 * LONGEST)
    numbers = 2 * (7 * LONGEST + 4 * LONGEST)  # of two outputs: in all, and in the larger step
    assert LoopPositions.at_zero(places, parts, MemoryBudget(numbers * 8)).parts.shape == (2, 1, 7, LONGEST)
    with pytest.raises(Mistake, match=r"GB of contributions of 5 positions of 7 examples to 2 outputs"):
        LoopPositions.at_zero(places, parts, MemoryBudget((numbers - 1) * 8))

    model, x = nn.Sequential(nn.Embedding(WORDS, 6), nn.BatchNorm1d(LONGEST), nn.Linear(6, WORDS)).double(), texts()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    coupled = fitted(model, optimizer, lambda _: loss_of(model(x), x), 1, queries=x)
    with pytest.raises(Mistake, match="step 0: positions=True: BatchNorm in training mode couples the texts"):
        coupled.attribute(positions=True, quiet=True)
