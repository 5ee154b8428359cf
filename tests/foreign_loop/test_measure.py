"""A measure of the outputs is a part of the function that is followed: its parts add up to its own change."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from ntkexp.cli.main import run as command
from ntkexp.foreign_loop.example_names import SeenCall
from ntkexp.foreign_loop.follow import follow
from ntkexp.foreign_loop.trace import find_trace, load_trace
from ntkexp.mistake import Mistake
from tests.foreign_loop import loops
from tests.foreign_loop.loops import WORDS, Language, Loop, adamw, apart, followed, loop, plain, sgd
from tests.foreign_loop.test_casts import brain, cast_loop

EXACT = 1e-12  # relative to the change of a measure: rounding of some thousand sums
LABELS = torch.tensor([2, 0, 1])  # of the queries of every loop here


def questions(outputs: Tensor, call: SeenCall) -> dict[str, Tensor]:
    """Questions that people ask: on the label of a query, and on all its outputs."""
    log_probabilities, labels = outputs.log_softmax(1), LABELS[: len(outputs)]
    mine = functional.one_hot(labels, outputs.shape[1]).bool()
    return {
        "loss": functional.cross_entropy(outputs, labels, reduction="none"),
        "log_probability": log_probabilities.gather(1, labels[:, None]).squeeze(1),
        "probability": outputs.softmax(1)[torch.arange(len(outputs)), labels],
        "margin": outputs[mine] - outputs.masked_fill(mine, -1e30).amax(1),
        "soft margin": outputs[mine] - outputs.masked_fill(mine, -torch.inf).logsumexp(1),
        "entropy": -(log_probabilities.exp() * log_probabilities).sum(1),
        "norm": outputs.norm(dim=1),
        "product": outputs[:, 0] * outputs[:, 1] * outputs[:, 2],
        "longer": outputs.double().square().sum(1),
    }


def language(optimizers: loops.Maker) -> Loop:
    """The loop with texts in place of rows of numbers."""
    given, model = loop(optimizers), nn.Sequential(Language(3), Mean()).double()
    x, queries = torch.randint(WORDS, (len(given.x), 5)), torch.randint(WORDS, (3, 5))
    optimizer = torch.optim.SGD if optimizers is sgd else torch.optim.AdamW
    return replace(given, model=model, optimizers=[optimizer(model.parameters(), lr=0.05)], x=x, queries=queries)


class Mean(nn.Module):
    """A row of outputs for each text."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def asked(given: Loop) -> dict[str, Tensor]:
    """The present measures of the model."""
    with torch.no_grad():
        return questions(given.model.eval()(given.queries), SeenCall.of(given.queries))


@pytest.mark.parametrize("optimizers", [sgd, adamw])
@pytest.mark.parametrize("kind", [loop, language], ids=["dense", "attention"])
def test_parts_of_every_measure_add_up_to_its_change(kind: Callable[..., Loop], optimizers: loops.Maker) -> None:
    given = kind(optimizers)
    before = asked(given)
    found = followed(given, plain, measure=questions).attribute()
    assert found["out"].to_numpy().tolist() == list(before)
    measures_add_up(found, before, asked(given), EXACT)
    assert float(found["closure"].max()) < EXACT


def measures_add_up(found: Any, before: dict[str, Tensor], after: dict[str, Tensor], bound: float, *more: str) -> None:
    parts = (found["contribution"].sum("example") + sum(found[name] for name in ("decay", *more))).to_numpy()
    for place, name in enumerate(before):
        change = (after[name] - before[name]).numpy()
        assert np.abs(parts[:, place] - change).max() <= bound * (1 + np.abs(change).max()), name


@pytest.mark.slow
def test_a_measure_has_the_same_parts_among_many() -> None:
    """Large tapes are read without programs, and tables of words at their places."""
    given, mixtures = language(adamw), torch.randn(3, 700, dtype=torch.float64)
    given.queries = torch.randint(WORDS, (60, 5))

    def mixed(count: int) -> Any:
        return lambda f, call: {str(k): each for k, each in enumerate((f.sigmoid() @ mixtures[:, :count]).unbind(1))}

    start, found = deepcopy(given), list[Any]()
    for count in (2, 700):
        trace = followed(deepcopy(start), plain, end=2, measure=mixed(count))
        found.append(trace.attribute(by="parameter", quiet=True).isel(out=[0, 1]))
    rows, tables = found
    for name in ("contribution", "by_component"):
        assert apart(tables[name], rows[name]) <= EXACT


def test_a_step_by_hand() -> None:
    """One step of a readout W at m = exp(f₀) f₁: Δm = b̄ s Δf₀ + ē Δf₁, with the chord s of exp, and the means b̄ of f₁
    and ē of exp(f₀); and an example adds Δf_c = −η ⟨xᵢ, x⟩ ∂L/∂f_ic."""
    model, x, queries, y = nn.Linear(4, 3, bias=False).double(), *torch.randn(2, 3, 4).double(), torch.randn(3, 3)
    given = Loop(model, [torch.optim.SGD(model.parameters(), lr=0.1)], x, y, queries)  # type: ignore[arg-type]

    def measure(outputs: Tensor, call: SeenCall) -> Tensor:
        return outputs[:, 0].exp() * outputs[:, 1]

    def step(given: Loop, batch: Tensor) -> None:
        if given.done == 0:
            (model(x) - y).square().sum().backward()
            given.step()

    with torch.no_grad():
        before, slope = model(queries), 2 * (model(x) - y)
    found = followed(given, step, measure=measure).attribute()
    with torch.no_grad():
        after = model(queries)
    powers = torch.stack([before[:, 0].exp(), after[:, 0].exp()])
    chord = (powers[1] - powers[0]) / (after - before)[:, 0]
    moved = -0.1 * (queries @ x.T)[:, :, None] * slope  # [query, example, output]
    first, second = (before + after)[:, 1] / 2 * chord, powers.mean(0)  # J̄ of m in f₀ and f₁
    expected = first[:, None] * moved[:, :, 0] + second[:, None] * moved[:, :, 1]
    assert np.abs(found["contribution"][:, 0].to_numpy() - expected.numpy()).max() < EXACT


DATA = loop(sgd)


def place_of(call: SeenCall) -> list[int]:
    return [next((k for k, each in enumerate(DATA.x) if torch.equal(each, row)), -1) for row in call.args[0]]  # type: ignore[attr-defined]


def cross_entropies(outputs: Tensor, call: SeenCall) -> Tensor:
    return functional.cross_entropy(outputs, DATA.y[[int(name) for name in call.ids]], reduction="none")


def test_the_effect_on_a_measure_is_its_gradient_times_those_on_outputs() -> None:
    """A derivative by an example's weight, at the end of training: ∂m/∂w = Σ_c ∂g/∂f_c ∂f_c/∂w."""
    more: dict[str, Any] = {"loss": cross_entropies, "ids": place_of}
    given = loop(adamw)
    found = followed(given, plain, measure=questions, **more).attribute(effects="derivative")["effect"]
    outputs = followed(loop(adamw), plain, **more).attribute(effects="derivative")["effect"].to_numpy()
    end = given.model(given.queries).detach()
    slopes = jacrev(lambda f: torch.stack([*questions(f, SeenCall.of(given.queries)).values()], 1))(end)
    mine = torch.stack([slopes[k, :, k] for k in range(len(end))]).numpy()
    expected = np.einsum("pmc,pce->pme", mine, outputs)
    assert np.abs(found - expected).max() < EXACT * np.abs(expected).max()


def test_each_batch_of_a_loader_is_one_call() -> None:
    """Names are places, counted over all calls."""
    sizes = list[int]()

    def measure(outputs: Tensor, call: SeenCall) -> Tensor:
        sizes.append(len(outputs))
        return outputs.log_softmax(1)[range(len(outputs)), LABELS[[int(name) for name in call.ids]]]

    given = loop(sgd)
    whole = followed(given, plain, measure=measure).attribute()
    assert set(sizes) == {3}
    sizes.clear()
    state = torch.get_rng_state()
    again = replace(loop(sgd), queries=DataLoader(given.queries, batch_size=2))  # type: ignore[arg-type]
    found = in_batches(again, measure)
    assert set(sizes) == {2, 1}
    assert torch.equal(state, torch.get_rng_state())
    assert np.abs(found["contribution"] - whole["contribution"]).max() < EXACT


def in_batches(given: Loop, measure: Any) -> Any:
    """The attribution of the loop, whose queries may be a DataLoader."""
    with follow(given.model, given.optimizers, queries=given.queries, measure=measure) as trace:
        for given.done, batch in zip(range(loops.STEPS), loops.batches()):  # noqa: B905  there is no last batch
            plain(given, batch)
    return trace.attribute()


@pytest.mark.slow
def test_under_casts_masks_and_changes_by_hand_a_measure_adds_up_too(tmp_path: Path) -> None:
    """In float32, with dropout and an average of weights that is loaded at the end."""
    given = cast_loop(adamw)
    before = asked(given)
    given.model.train()
    with follow(given.model, given.optimizers, queries=given.queries, measure=questions, to=tmp_path) as trace:
        for given.done, batch in zip(range(4), loops.batches()):  # noqa: B905  there is no last batch
            brain(given, batch)
        with torch.no_grad():
            for weight in given.model.parameters():
                weight.mul_(0.9)
    found = trace.attribute()
    measures_add_up(found, before, asked(given), 2e-5, "rounding", "outside")


@pytest.mark.slow
def test_a_later_process_needs_the_same_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sigmoid_measures.py").write_text(
        "from tests.foreign_loop.loops import loop, sgd\n"
        "def build(): return loop(sgd).model\n"
        "def first(outputs, call): return outputs[:, 0].sigmoid()\n"
        "def other(outputs, call): return outputs[:, 1].sigmoid()\n"
    )
    monkeypatch.chdir(tmp_path)

    def first(outputs: Tensor, call: SeenCall) -> Tensor:
        return outputs[:, 0].sigmoid()

    followed(loop(sgd), plain, measure=first, to="run")
    words = ["attribute", "run", "--model=sigmoid_measures.py:build", "--trust=sigmoid_measures.py"]
    for more, said in (
        ([], "it explains a measure of the outputs, 'first'"),
        (["--measure=sigmoid_measures.py:other"], "is measure= the followed one"),
    ):
        assert command([*words, *more]) == 2
        assert said in capsys.readouterr().err
    assert command([*words, "--measure=sigmoid_measures.py:first"]) == 0
    assert command(["explain", "run", "--query=0"]) == 0
    assert "measure = " in capsys.readouterr().out
    with pytest.raises(Mistake, match=r"whose measure is first .* and not None"):
        followed(loop(sgd), plain, to="run")
    with pytest.raises(Mistake, match="run explains first"):
        load_trace(find_trace(Path("run")), loop(sgd).model)


def given_queries(queries: Any) -> Loop:
    return replace(loop(sgd), queries=queries)


ROWS = loop(sgd).queries
DATASET: Any = ROWS  # a DataLoader takes it
UNEQUAL: Any = [{"input": ROWS}, {"input": ROWS, "more": ROWS}]


@pytest.mark.parametrize(
    ("measure", "queries", "said"),
    [
        (3, ROWS, "measure= is a int"),
        (lambda f, call: None, ROWS, "it returns a NoneType"),
        (lambda f, call: f.sum(), ROWS, r"it returns a tensor of shape \[\] for 3 queries"),
        (lambda f, call: f[:2, 0], ROWS, r"it returns a tensor of shape \[2\]"),
        (lambda f, call: {"a": f}, ROWS, r"it returns a tensor of shape \[3, 3\] for 'a'"),
        (lambda f, call: {}, ROWS, "a dict with the names"),
        (lambda f, call: f.argmax(1), ROWS, r"numbers of torch.int64, which have no gradient"),
        (
            lambda f, call: (f.argmax(1) == LABELS).double(),
            ROWS,
            "its values have no gradient with respect to the outputs",
        ),
        (lambda f, call: f.detach()[:, 0], ROWS, "its values have no gradient with respect to the outputs"),
        (lambda f, call: f[:, 0] * f[:, 1].detach(), ROWS, "are not the derivatives of its values"),
        (lambda f, call: (f[:, 0] - 100).log(), ROWS, "'measure' of query 0 is nan"),
        (lambda f, call: f[:, 0] - f[:, 0].mean(), ROWS, "the value of a query depends on other queries"),
        (lambda f, call: f[:, 0] * f[0, 0].item(), ROWS, "the value of a query depends on other queries"),
        (lambda f, call: f[:, 0] * torch.rand(len(f)), ROWS, "it returns other values when it runs again"),
        (
            lambda f, call: torch.special.entr(f.abs())[:, 2],
            ROWS,
            "no difference rule for the operation aten.special_entr",
        ),
        (lambda f, call: f[:, 7], ROWS, r"it fails at outputs of shape \[3, 3\] \(IndexError"),
        (lambda f, call: f[:, 0], DataLoader(DATASET, shuffle=True), "the DataLoader shuffles"),
        (lambda f, call: f[:, 0], DataLoader(TensorDataset(ROWS, ROWS)), "the model cannot be called with the queries"),
        (lambda f, call: f[:, 0] if len(f) > 1 else f[:, :2], DataLoader(DATASET, batch_size=2), "for one call and"),
        (
            lambda f, call: f[:, 0],
            DataLoader(UNEQUAL, batch_size=None),
            "batches of the DataLoader have different forms",
        ),
    ],
)
def test_other_functions_are_refused_before_training(measure: Any, queries: Any, said: str) -> None:
    given = given_queries(queries)
    with pytest.raises(Mistake, match=said):
        in_batches(given, measure)
    assert given.done == 0
