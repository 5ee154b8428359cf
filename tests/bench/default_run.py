"""A step of the default experiment: what the descent takes, and what each rule adds to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice

from ntkexp.config.compose import compose
from ntkexp.path.integrals import Integrals, integrals_at_zero
from ntkexp.path.points import StepBlock
from ntkexp.run.setting import Setting, prepare
from tests.bench.cell import Table, medians, milliseconds

RULES = ("secant", "left", "gauss")
TINY = ("model.width=16", "data.train=16", "data.probe=8", "data.test=8")


def report(*, quick: bool) -> list[Table]:
    """A row for every part."""
    steps, times = (2, 2) if quick else (4, 5)
    setting = prepare(compose([f"path.rule=[{','.join(RULES)}]", "path.nodes=1", *(TINY if quick else ())]))
    path = setting.experiment.path
    integrals = {rule.option: integrals_at_zero(path.quadrature(rule), setting.domain) for rule in path.rule}
    acts: dict[str, Callable[[], object]] = {"descent": partial(walk, setting, {}, steps)}
    acts |= {name: partial(walk, setting, {name: integrals[name]}, steps) for name in RULES}
    found = medians(acts, times)
    alone = found["descent"]
    rows = [["descent alone", milliseconds(alone / steps)]]
    rows += [[f"{name} adds", milliseconds((found[name] - alone) / steps)] for name in RULES]
    counts = f"{len(setting.points.inputs)} points, {setting.points.train} training examples"
    return [Table(f"A step of the default experiment, {counts}", ("part", "ms"), rows)]


def walk(setting: Setting, integrals: dict[str, Integrals], steps: int) -> None:
    """Some steps from the start, with these integrals accumulated."""
    for step in islice(setting.descent.walk(setting.problem.weights), steps):
        for place in setting.domain.places:
            block = StepBlock(setting.points, step.segment, place)
            for each in integrals.values():
                each.add(step, block)
