"""Contributions by component are the partial sums of contributions over parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xarray as xr
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import weight_norm

import ntkexp
from ntkexp.mistake import Mistake
from ntkexp.path.components import By, components_of
from ntkexp.report.explain import explain, format_explanation
from ntkexp.report.page.build import explanation_pictures, point_view
from ntkexp.report.parts import tabulate_components
from ntkexp.report.tables import json_rows
from tests.foreign_loop.loops import fitted, followed, loop, momentum, plain
from tests.foreign_loop.test_adds_up import components_add_up


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
def test_components_of_any_module_add_up(
    build: Callable[[], nn.Module], draw: Callable[[int], Tensor], modules: list[str], parameters: int
) -> None:
    """Weights may be used twice, computed from others, or shared by pixels. Tied weights have one name."""
    model, x, y, asked = build().double(), draw(6), torch.tensor([0, 1, 2, 0, 1, 2]), draw(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)
    trace = fitted(model, optimizer, lambda _: cross_entropy(model(x), y), 3, queries=asked, by="module")
    found, alone = trace.attribute(), trace.attribute(by="parameter")
    for each in (found, alone):
        components_add_up(each, torch.finfo(torch.float64).eps)
    assert sorted(found["component"].values) == modules
    assert alone.sizes["component"] == parameters
    # a module is the sum of its parameters
    owners = components_of("module", alone["component"].values.tolist())
    for module, names in owners.items():
        parts = alone["by_component"].sel(component=sorted(names)).sum(dim="component")
        missed = abs(found["by_component"].sel(component=module) - parts)
        assert float(missed.max()) <= 1e-13 * float(abs(alone["by_component"]).max())


def test_the_order_of_components_changes_nothing_else() -> None:
    trace = followed(loop(momentum), plain)
    by = {"first": ["0.*"], "biases": ["2.bias", "4.bias"], "rest": ["*"]}
    found = trace.attribute(by=by)
    other = trace.attribute(by={name: by[name] for name in reversed(by)})
    assert list(other["component"].values) == ["rest", "biases", "first"]
    xr.testing.assert_identical(found["by_component"], other["by_component"].sel(component=list(by)))


REFUSED = {
    "by=layer: give": "layer",
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


def test_components_beyond_the_memory_are_refused() -> None:
    trace = followed(loop(momentum), plain)
    with pytest.raises(Mistake, match=r"GB of contributions .* by 6 components; raise it, or .* by fewer components"):
        trace.attribute(by="parameter", memory_gb=1e-6)


def test_explanations_show_components(tmp_path: Path) -> None:
    """In the table, in JSON and on the page. Their movement adds up to that by examples and decay."""
    followed(loop(momentum), plain, by="parameter", to=tmp_path / "run").attribute(quiet=True)
    (found,) = explain(ntkexp.load_run(tmp_path / "run"), "query", [0])
    rows = json_rows(tabulate_components(found.components))
    assert {row["component"] for row in rows} == {f"{k}.{kind}" for k in (0, 2, 4) for kind in ("weight", "bias")}
    decay = found.no_example["decay"]
    for column, whole in (("added", found.sum), ("decay", decay), ("in_all", found.sum + decay)):
        assert sum(float(str(row[column])) for row in rows) == pytest.approx(whole, rel=1e-12, abs=1e-14), column
    moved = sum(float(part.movement.by_step.sum()) for part in found.components)
    assert moved == pytest.approx(found.sum + decay, rel=1e-12, abs=1e-14)
    assert found.as_json(3)["components"] == list(rows)
    assert "component" in format_explanation(found, 3)
    view = point_view(found, None)
    assert "components-query-0" in str(view["components"])
    assert len([*explanation_pictures(found, None)]) == 5
