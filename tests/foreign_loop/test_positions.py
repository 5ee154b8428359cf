"""Contributions by position are those of the loss at each position alone, and add up to the contribution."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional

import ntkexp
from ntkexp.foreign_loop import run_folder
from ntkexp.foreign_loop.trace import Trace
from ntkexp.mistake import Mistake
from ntkexp.report.explain import explain, format_explanation
from ntkexp.report.page.build import texts_view
from ntkexp.report.positions import shaded_texts, tabulate_positions
from ntkexp.report.tables import json_rows
from tests.foreign_loop.loops import followed, loop, plain, sgd

WORDS, LONGEST, IGNORED = 7, 5, -100
SUMMED = 100  # eps: some steps, each a sum of some tens of terms, in two orders


class Language(nn.Module):
    """A causal layer of attention over tokens, and a row of outputs for each of these."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.read, self.norm = nn.Embedding(WORDS, 6), nn.Linear(6, 18), nn.LayerNorm(6)
        self.dropout, self.out = nn.Dropout(dropout), nn.Linear(6, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.words(x)
        query, key, value = self.read(self.norm(hidden)).chunk(3, 2)
        hidden = hidden + functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        found: Tensor = self.out(self.dropout(hidden))
        return found


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """What a test seeds ends with it."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        yield


def labels_of(x: Tensor) -> Tensor:
    """The next token of each; the last has none, and the third is left out of the loss."""
    labels = torch.cat([x[:, 1:], torch.full((len(x), 1), IGNORED)], 1)
    labels[:, 2] = IGNORED
    return labels


def loss_of(outputs: Tensor, x: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), labels_of(x).flatten(), ignore_index=IGNORED)


def texts() -> list[Tensor]:
    """Two batches, of which the second has shorter texts."""
    return [torch.randint(WORDS, (4, LONGEST)), torch.randint(WORDS, (3, LONGEST - 1))]


def trained(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer], *, dropout: float = 0.0, parts: int = 1, **more: object
) -> tuple[Trace, list[Tensor]]:
    """A loop over texts, some of them of another length, with the gradients of `parts` calls in each step."""
    model, given = Language(dropout).double().train(), texts()
    steps, queries = optimizer(model), torch.randint(WORDS, (2, 3))
    asked = {"measure": lambda outputs, call: outputs[:, -1].logsumexp(1), **more}
    with ntkexp.follow(model, steps, queries=queries, **asked) as trace:  # type: ignore[arg-type]
        for batch in given:
            steps.zero_grad()
            for part in batch.tensor_split(parts):
                (loss_of(model(part), part) / parts).backward()  # type: ignore[no-untyped-call]
            steps.step()
    return trace, given


def adds_up(found: xr.Dataset) -> None:
    """Positions add up to the contribution of each example."""
    size = abs(found["by_position"]).sum("position")
    missed = abs(found["by_position"].sum("position") - found["contribution"])
    assert float((missed - SUMMED * torch.finfo(torch.float64).eps * size).max()) <= 0
    assert float(abs(found["by_position"]).sum()) > 0


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.02),
    "nesterov": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_positions_add_up(optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    """Also with dropout, calls that share a step, and components; positions without a loss have nothing."""
    trace, _ = trained(optimizer, dropout=0.3, parts=2)
    found = trace.attribute(positions=True, by="module", quiet=True)
    assert found["by_position"].sizes["position"] == LONGEST
    adds_up(found)
    assert not found["by_position"].isel(position=[2, 4]).any()
    assert not found["by_position"].isel(position=3, example=slice(4, 7)).any()  # the last of the shorter texts
    alone = trace.attribute(by="module", quiet=True)
    assert "by_position" not in alone
    for name in ("contribution", "by_component", "by_step"):
        np.testing.assert_allclose(found[name], alone[name], rtol=0, atol=1e-13 * float(abs(alone[name]).max()))


def test_they_are_those_of_the_loss_at_each_position() -> None:
    """One step of gradient descent: −η J̄ ∇ℓ_t of each text, with J̄ by quadrature and ∇ℓ_t by autograd."""
    rate, model, x = 0.01, Language().double(), texts()[0]
    optimizer, queries = torch.optim.SGD(model.parameters(), lr=rate), torch.randint(WORDS, (2, 3))
    start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    with ntkexp.follow(model, optimizer, queries=queries, measure=lambda f, call: f[:, -1].logsumexp(1)) as trace:
        loss_of(model(x), x).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    end = {name: weight.detach() for name, weight in model.named_parameters()}

    def asked(weights: dict[str, Tensor]) -> Tensor:
        found: Tensor = functional_call(model, weights, (queries,))[:, -1].logsumexp(1)
        return found

    def losses(weights: dict[str, Tensor]) -> Tensor:
        labels, outputs = labels_of(x), functional_call(model, weights, (x,))
        each = functional.cross_entropy(outputs.mT, labels, ignore_index=IGNORED, reduction="none")
        return each / (labels != IGNORED).sum()

    # a secant is the mean of J along its step, but for terms of second order in the step
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


@contextmanager
def no_painter() -> Iterator[Callable[[Path], tuple[()]]]:
    """Draws nothing."""
    yield lambda _: ()


def test_explanations_show_what_positions_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder, in the table, in JSON and on the page, with the tokens; what they did adds up."""
    monkeypatch.setattr(run_folder, "painter", no_painter)
    trace, _ = trained(OPTIMIZERS["adamw"], to=tmp_path / "run")
    found = trace.attribute(positions=True, decode=lambda tokens: "".join("abcd<&g"[k] for k in tokens), quiet=True)
    run = ntkexp.load_run(tmp_path / "run")
    np.testing.assert_array_equal(run.contributions["by_position"], found["by_position"])

    (explanation,) = explain(run, "probe", [1])
    rows = json_rows(tabulate_positions(explanation.positions))
    assert sum(float(str(row["added"])) for row in rows) == pytest.approx(explanation.sum, rel=1e-12, abs=1e-14)
    assert explanation.as_json(3)["positions"] == list(rows[:3])
    assert "token" in format_explanation(explanation, 3)
    # a text is shown whole, in order, its largest part strongest
    most = explanation.parts[0].example.index
    ((_, tokens),) = shaded_texts(explanation.positions, [most])
    assert "".join(token.text for token in tokens) == run.data["train_text"][most]
    added = found["by_position"].isel(probe=1, out=0, example=most).to_numpy()
    assert max(range(len(tokens)), key=lambda k: tokens[k].percent) == int(np.abs(added).argmax())
    assert len(texts_view(explanation)) == 7


def test_what_has_no_positions_is_refused() -> None:
    """Rows of outputs, and sums that exceed the memory."""
    with pytest.raises(
        Mistake, match=r"step 7: positions=True: .* shape \[6, 3\]; their axes have to be \[example, pos"
    ):
        followed(loop(sgd), plain).attribute(positions=True, quiet=True)
    trace, _ = trained(OPTIMIZERS["adamw"])
    least = 2 * (2 * 7 + 2) * 8 / 1e9  # two queries, without positions
    with pytest.raises(Mistake, match=r"4 positions of 7 examples add to 2 outputs .* GB"):
        trace.attribute(positions=True, memory_gb=least, quiet=True)


def test_texts_that_a_norm_couples_are_refused() -> None:
    model, x = nn.Sequential(nn.Embedding(WORDS, 6), nn.BatchNorm1d(LONGEST), nn.Linear(6, WORDS)).double(), texts()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ntkexp.follow(model, optimizer, queries=x) as trace:
        loss_of(model(x), x).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with pytest.raises(Mistake, match="step 0: positions=True: BatchNorm in training mode couples the texts"):
        trace.attribute(positions=True, quiet=True)
