"""Numbers beyond reason are refused in a line, before anything is allocated; whatever is given is composed at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from resource import RUSAGE_SELF, getrusage
from typing import get_args, get_origin

import pytest
import torch
from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

import ntkexp
from ntkexp.component import Component
from ntkexp.config.compose import compose
from ntkexp.config.field_types import flat
from ntkexp.config.plain_yaml import refuse_reference_growth
from ntkexp.kernel.record.taping import MemoryLimit
from ntkexp.mistake import Mistake
from ntkexp.path.budget import refuse_endless
from ntkexp.run.setting import prepare
from tests.cli.conftest import Command, command

__all__ = ["command"]

MEMBERS = ("classes", "options")  # held against what there is
SMALL = ("data.train=12", "data.probe=6", "data.test=6", "threads=1", "path.count=3")


def components() -> Iterator[type[Component]]:
    for module in walk_packages(ntkexp.__path__, "ntkexp."):
        if module.name.split(".")[1] in {"data", "model", "init", "loss", "optimizer", "schedule", "path", "layer"}:
            import_module(module.name)
    import_module("ntkexp.experiment.experiment")
    left = [Component]
    while left:
        for kind in left.pop().__subclasses__():
            left.append(kind)
            if kind.__module__.startswith("ntkexp."):
                yield kind


def whole_numbers(field: FieldInfo) -> Iterator[list[object]]:
    """The limits of every whole number that a field can hold."""

    def within(kind: object, limits: list[object]) -> Iterator[list[object]]:
        if kind is int:
            yield limits
        elif get_origin(kind) is not None:
            metadata = list(getattr(kind, "__metadata__", ()))
            for part in get_args(kind)[:1] if metadata else get_args(kind):
                yield from within(part, [*limits, *metadata])

    return within(field.annotation, list(field.metadata))


def test_every_whole_number_has_two_ends() -> None:
    found = {
        f"{kind.__name__}.{name}": {type(limit) for limit in flat(limits)}
        for kind in components()
        for name, field in kind.model_fields.items()
        if name not in MEMBERS
        for limits in whole_numbers(field)
    }
    assert {name for name, limits in found.items() if not (limits & {Ge, Gt} and limits & {Le, Lt})} == set()
    assert len(found) > 50


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("model.width=100000000000", "model.width=100000000000: it takes a whole number ≥ 1 and ≤ "),
        ("model.width=10000000", "the network takes an array of [10000000, 64]"),
        ("model.depth=100000", "≤ 1000"),
        ("data=sphere data.train=100000", "kernels of 100012 points"),
        ("data=sphere data.dimension=10000000 data.probe=100000", "the data takes an array of [100018, 10000000]"),
        ("data=text data.path=x data.context=100000000000000000000", "data.context=1"),
        ("path.pieces=1000000000", "path.pieces=1000000000: it takes"),
        ("path.nodes=5000", "path.nodes=5000: it takes"),
        ("path.romberg=200", "path.romberg=200: it takes"),
        ("steps=1000000000000000000000000 path.schedule=5", "steps=1000000000000000000000000: it takes"),
        (
            "steps=1000000000000 path.schedule=5",
            "path.schedule=5: over steps=1000000000000 these are 200000000001 kernels",
        ),
        ("steps=1000000000000 model.width=8", "years on one core, more than 10 years; lower steps"),
        ("model=resnet model.stages=1000", "model.stages=1000: it takes"),
        ("model=resnet model.stages=16 model.width=1024", "lower one of the two"),
        ("model=cnn model.stride=1000000000000000000000", "model.stride=1000000000000000000000: it takes"),
        ("threads=1000000", "≤ 1024"),
    ],
    ids=lambda text: text[:60],
)
def test_beyond_reason(words: str, advice: str, command: Command, tmp_path: Path) -> None:
    status, out, err = command("train", *SMALL, *words.split(), f"--out={tmp_path}", "--quiet")
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert advice in err


def test_what_is_made_of_nothing_is_counted_together() -> None:
    with MemoryLimit(1e-3, "the data", "data.train"):
        torch.zeros(500, 100)  # 4 bytes each, as every number that nobody asks otherwise
        torch.randn(50_000, dtype=torch.float64).exp()  # as large as what was counted
        with pytest.raises(Mistake, match=r"\[100001\], with which there are 0\.001 GB; lower data.train"):
            torch.empty(100_001)


def test_the_copies_that_will_be_held_count_as_well() -> None:
    with MemoryLimit(1e-3, "the network", "model.width", copies=5) as limit:
        torch.zeros(40_000)
        with pytest.raises(
            Mistake, match=r"\[10001\], with which there are 0\.001 GB in all copies that are held; lower"
        ):
            torch.zeros(10_001)
    assert limit.taken == 5 * 4 * 50_001


def test_what_a_run_cannot_hold_is_refused_before_much_of_it_is_drawn() -> None:
    experiment = compose(["model.width=2048", "model.depth=50", "memory_gb=0.9", *SMALL])
    before = getrusage(RUSAGE_SELF).ru_maxrss
    with pytest.raises(Mistake, match="in all copies that are held; lower"):
        prepare(experiment)
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < 0.4e6  # KB: of the 1.6 GB that the weights alone would be


@pytest.mark.parametrize("name", ["mps", "{a:{b:[1,2]}}", "cuda:-1", "''"])
def test_a_device_that_nothing_computes_on_is_refused_before_it_is_looked_for(name: str) -> None:
    with pytest.raises(Mistake, match=r"device=.*: it takes cpu, cuda or cuda:K$"):
        compose([f"device={name}"])


def test_a_device_that_is_not_there_is_missed_before_a_network_is_drawn(command: Command) -> None:
    refused = command("kernel", "tangent", "device=cuda:99", *SMALL)
    assert refused.status == 2
    assert refused.err.startswith("ntkexp: device=cuda:99: it takes cpu, cuda or cuda:K; this machine has ")


def test_years_on_a_processor_are_months_on_a_thousand() -> None:
    refuse_endless(1e11, 1, "cuda:0")
    with pytest.raises(Mistake, match=r"steps=7: this would take about 3\.2e\+03 years on one core"):
        refuse_endless(1e11, 7, "cpu")


DOUBLED = {
    "texts": "${model.a%d}${model.a%d}",
    "lists": "['${model.a%d}', '${model.a%d}']",
    "steps up": "${.a%d}${.a%d}",
    "by a function": "${oc.select:.a%d}${oc.select:model.a%d}",
}


@pytest.mark.parametrize("pair", DOUBLED.values(), ids=DOUBLED)
def test_references_that_double_again_and_again_are_counted_and_not_followed(pair: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    lines = [f"a{k}: {pair % (k - 1, k - 1)}\n" for k in range(1, 60)]
    (tmp_path / "model" / "mine.yaml").write_text(f"_target_: ntkexp.model.networks.MLP\na0: x\n{''.join(lines)}")
    with pytest.raises(Mistake, match=r"its \$\{…\} stand for more than 1000 entries"):
        compose(["model=mine"], tmp_path)


@pytest.mark.parametrize(
    ("tree", "refused"),
    [
        ({"a": "${a}"}, ""),  # a circle is found by who follows it
        ({"a": "${b}${b}", "b": ["${a}"]}, ""),
        ({"a": ["x"] * 300, "b": ["${a}"] * 3}, ""),
        ({"a": ["x"] * 300, "b": ["${a}"] * 4}, "of this configuration stand for more than 1000"),
        ({"a": ["x"] * 1000, "b": "${a}"}, "b: its .* stand for more than 1000"),
        ({"a": "x" * 500_000, "b": "${a}${a}${a}"}, "b: its .* stand for more than 1000"),
        ({f"a{k}": f"${{a{k + 1}}}" for k in range(40)}, ""),
        ({f"a{k}": f"${{a{k + 1}}}" for k in range(52)}, "lead on more than 50 times"),
        ({f"a{k}": f"${{a{k - 1}}}" for k in range(52)}, "lead on more than 50 times"),
        ({"a": {"b": {f"c{k}": f"${{{'a' if k % 2 else '.'}.x{k}}}" for k in range(9)}}}, ""),
        ({f"a{k}": f"${{a${{z}}}}${{a{k - 1}}}" for k in range(40)}, "stand for more than 1000"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_references_are_counted_with_what_they_stand_for(tree: dict[str, object], refused: str) -> None:
    with pytest.raises(Mistake, match=refused) if refused else nullcontext():
        refuse_reference_growth(tree)


def test_an_override_that_would_be_read_for_minutes() -> None:
    with pytest.raises(Mistake, match=r"path\.schedule is given 28002 letters, and an override is read up to 5000"):
        compose([f"path.schedule=[{'1,' * 14_000}]"])
