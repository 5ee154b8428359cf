"""Contributions by component are the partial sums of contributions over parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import ntkexp
from ntkexp.mistake import Mistake
from ntkexp.path.components import By, components_of
from ntkexp.report.explain import explain, format_explanation
from ntkexp.report.page.build import explanation_pictures, point_view
from ntkexp.report.parts import tabulate_components
from ntkexp.report.tables import json_rows
from tests.foreign_loop.loops import followed, loop, momentum, nesterov, plain
from tests.foreign_loop.test_adds_up import components_add_up
from tests.foreign_loop.test_names import CASES, CLOSE, WORDS, apart, by_hand
from tests.run.small import ran


def test_and_the_whole_is_what_it_is_without_them() -> None:
    trace = followed(loop(nesterov), plain)
    whole, parts = trace.attribute()["contribution"], trace.attribute(by="parameter")["contribution"]
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-13 * float(abs(whole).max()))


class Tied(nn.Module):
    """A table of words that reads and writes, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.scale = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.layer(torch.tanh(self.layer(self.table(words).mean(1)))) * self.scale
        logits: Tensor = self.out(hidden)
        return logits


def normed() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3))


def convolving() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 2), nn.Flatten(), nn.Linear(8, 3))


def words(count: int) -> Tensor:
    return torch.randint(5, (count, 3))


def rows(count: int) -> Tensor:
    return torch.randn(count, 4).double()


def images(count: int) -> Tensor:
    return torch.randn(count, 1, 5, 5).double()


MODULES = {
    "tied": (Tied, words, ["(root)", "layer", "table"], 4),
    "parametrised": (normed, rows, ["0", "2", "3"], 7),
    "convolution": (convolving, images, ["0", "2", "4"], 6),
}


@pytest.mark.parametrize(("build", "draw", "modules", "parameters"), MODULES.values(), ids=MODULES)
def test_of_any_module(
    build: Callable[[], nn.Module], draw: Callable[[int], Tensor], modules: list[str], parameters: int
) -> None:
    """Also of weights that are used twice, made of others, or shared by pixels; a tied one is named once."""
    torch.manual_seed(0)
    model, x, y = build().double(), draw(6), torch.tensor([0, 1, 2, 0, 1, 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    with ntkexp.follow(model, optimizer, queries=draw(2), by="module") as trace:
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    found, alone = trace.attribute(), trace.attribute(by="parameter")
    eps = torch.finfo(torch.float64).eps
    components_add_up(found, eps)
    components_add_up(alone, eps)
    assert sorted(found["component"].values) == modules
    assert alone.sizes["component"] == parameters
    # a module is the sum of its parameters
    owners = components_of("module", alone["component"].values.tolist())
    for module, names in owners.items():
        parts = alone["by_component"].sel(component=sorted(names)).sum(dim="component")
        size = float(abs(alone["by_component"]).max())
        np.testing.assert_allclose(found["by_component"].sel(component=module), parts, rtol=0, atol=1e-13 * size)


def test_the_order_of_components_changes_nothing_else() -> None:
    trace = followed(loop(momentum), plain)
    by = {"first": ["0.*"], "biases": ["2.bias", "4.bias"], "rest": ["*"]}
    found = trace.attribute(by=by)
    other = trace.attribute(by={name: by[name] for name in reversed(by)})
    assert list(other["component"].values) == ["rest", "biases", "first"]
    xr.testing.assert_identical(found["by_component"], other["by_component"].sel(component=list(by)))


REFUSED = {
    "by=layer is none of": "layer",
    "'0.wieght' of 'a' matches no trained parameter; did you mean '0.weight'?": {"a": ["0.wieght"], "rest": ["*"]},
    "'0.bias' is in both 'a' and 'b'": {"a": ["0.*"], "b": ["*.bias"], "rest": ["*"]},
    "no pattern matches '2.weight' (nearest: '4.weight')": {"a": ["0.*", "2.bias"], "b": ["4.weight", "4.bias"]},
    "the rest, '*', is both 'a' and 'b'": {"a": ["*"], "b": ["*"]},
    "'a' has no list of patterns": {"a": []},
    "no component": {},
}


@pytest.mark.parametrize(("said", "by"), REFUSED.items())
def test_other_components_are_refused_before_training(said: str, by: By) -> None:
    given = loop(momentum)
    with pytest.raises(Mistake) as refusal:
        followed(given, plain, by=by)
    assert said.replace("=layer", "='layer'") in str(refusal.value)
    assert given.done == 0


def test_what_they_take_is_refused_beyond_the_memory() -> None:
    trace = followed(loop(momentum), plain)
    with pytest.raises(Mistake, match=r"by 6 components take .* by fewer components, or attribute"):
        trace.attribute(by="parameter", memory_gb=1e-6)


def test_a_folder_knows_what_was_asked(tmp_path: Path) -> None:
    found = followed(loop(momentum), plain, by="module", to=tmp_path / "run").attribute()
    run = ntkexp.load_run(tmp_path / "run").contributions
    for name in ("by_component", "decay_by_component", "by_component_step"):
        np.testing.assert_array_equal(run[name], found[name])
    assert list(run["component"].values) == ["0", "2", "4"]


def test_explanations_show_what_components_did(tmp_path: Path) -> None:
    """In the table, in JSON and on the page; what they did adds up to what examples and decay did."""
    followed(loop(momentum), plain, by="parameter", to=tmp_path / "run").attribute(quiet=True)
    (found,) = explain(ntkexp.load_run(tmp_path / "run"), "query", [0])
    rows = json_rows(tabulate_components(found.components))
    assert {row["component"] for row in rows} == {f"{k}.{kind}" for k in (0, 2, 4) for kind in ("weight", "bias")}
    for column, whole in (("added", found.sum), ("decay", found.decay), ("in_all", found.sum + found.decay)):
        assert sum(float(str(row[column])) for row in rows) == pytest.approx(whole, rel=1e-12, abs=1e-14), column
    moved = sum(float(part.movement.by_step.sum()) for part in found.components)
    assert moved == pytest.approx(found.sum + found.decay, rel=1e-12, abs=1e-14)
    assert found.as_json(3)["components"] == list(rows)
    assert "component" in format_explanation(found, 3)
    view = point_view(found, None)
    assert "components-query-0" in str(view["components"])
    assert len([*explanation_pictures(found, None)]) == 5


@pytest.mark.parametrize("case", ["nesterov", pytest.param("adamw", marks=pytest.mark.slow)])
def test_they_are_the_runners(case: str) -> None:
    option, word, _ = CASES[case]
    run = ran(f"optimizer={option}", *WORDS, word, "path.by=parameter", "ladder.machine=[secant]")
    found = by_hand(run, case).attribute(by="parameter")
    expected, rows = run.outcome.by_component["secant"], run.setting.domain.rows
    order = [found["example"].to_numpy().tolist().index(str(k)) for k in range(12)]
    assert list(expected.components) == found["component"].to_numpy().tolist()
    assert apart(torch.from_numpy(found["by_component"].to_numpy()[:, :, order]), expected.parts[rows]) <= CLOSE
    assert apart(torch.from_numpy(found["decay_by_component"].to_numpy()), expected.decay[rows]) <= CLOSE
    by_step = expected.totals.stacked().movedim(0, 2)[rows]
    assert apart(torch.from_numpy(found["by_component_step"].to_numpy()), by_step) <= CLOSE
