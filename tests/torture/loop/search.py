"""Loops with plants are followed, and compared with plain replays.

    python -m tests.torture.loop --seed=0 --count=200      loops with plants, and half as many without

A record is right if f_0 and f_T agree with the live model, parts and decay add up to their difference, and the part of
each example agrees with the oracle. A loop may also be refused.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

import ntkexp
from ntkexp.foreign_loop.model_function import left_alone
from ntkexp.kernel.read.reader import Reader
from ntkexp.mistake import Mistake
from ntkexp.model.functional import function_of
from ntkexp.shapes import Function, Inputs, Weights
from tests.torture.loop.made import LINEAR, STEPS, WORLD, Loop, Oracle, Planted, Tampered, loop_of, trained
from tests.torture.loop.plants import GRADIENTS, READ, STRUCTURE, TRUE_TIMES, closure_cell, first, layer_of


@contextmanager
def fresh_world() -> Iterator[None]:
    """Restore the values outside the model that plants change."""
    WORLD.clear()
    Tampered.heat, linear = 1.0, functional.linear
    random.seed(3)
    try:
        yield
    finally:
        functional.linear = linear


def as_it_began(function: Function) -> Function:
    """Return the function with the original values outside the model."""

    def then(weights: Weights, inputs: Inputs) -> Tensor:
        now, heat, linear = dict(WORLD), Tampered.heat, functional.linear
        WORLD.clear()
        Tampered.heat, functional.linear = 1.0, LINEAR
        try:
            return function(weights, inputs)
        finally:
            WORLD.update(now)
            Tampered.heat, functional.linear = heat, linear

    return then


def live(loop: Loop, queries: Tensor) -> Tensor:
    """Return the outputs of the model."""
    with torch.no_grad(), left_alone(loop.net), torch.random.fork_rng(devices=()):
        loop.net.eval()
        found: Tensor = loop.net(queries)
        return found.clone()


@dataclass(frozen=True)
class Case:
    """A random loop and its plant."""

    number: int
    name: str
    when: int
    always: bool

    @property
    def between(self) -> bool:
        return self.name in GRADIENTS

    def loop(self) -> tuple[Loop, Planted]:
        """Return the loop, and its plant."""
        read, plant = READ.get(self.name, (None, GRADIENTS.get(self.name) or STRUCTURE.get(self.name)))
        if self.name == "closure":
            read, plant = closure_cell()
        made = loop_of(random.Random(self.number), read, self.number)
        if self.name == "hook_removed":
            made.past["hook"] = layer_of(made).register_forward_hook(lambda *seen: first(seen[2]) * 1.5)
        made.past["planted"] = self.name
        torch.manual_seed(7)
        multiplies = any(word in self.name for word in TRUE_TIMES)
        return made, Planted(plant, self.when, self.between, self.always, multiplies)

    def verdict(self) -> tuple[str, str]:
        """Return `recorded`, `refused` or `wrong`, and the reason."""
        with fresh_world():
            loop, planted = self.loop()
            queries = loop.x[:3] * 0.9
            begun = live(loop, queries)
            try:
                with ntkexp.follow(loop.net, loop.optimizers, queries=queries) as trace:
                    trained(loop, planted, None)
                ended = live(loop, queries)
                found = trace.attribute()
            except Mistake as error:
                return "refused", str(error)
            except RuntimeError as error:  # PyTorch refuses a backward hook before an in-place activation
                if "is being modified inplace" not in str(error):
                    raise
                return "refused", str(error)
        change = torch.from_numpy(found["change"].to_numpy())
        bound = 1e-9 if loop.dtype == torch.float64 else 3e-3
        size = float(begun.norm() + ended.norm())
        moved = float(change.norm())
        casts = torch.from_numpy(found["rounding"].to_numpy()) if "rounding" in found else torch.zeros_like(change)
        room = bound * (size + moved) + (2e-2 * size if loop.casts else 0.0)
        explained = torch.from_numpy((found["contribution"].sum("example") + found["decay"]).to_numpy()) + casts
        for what, missed in (
            ("f_0", float((torch.from_numpy(found["start"].to_numpy()) - begun).norm())),
            ("f_T", float((torch.from_numpy(found["start"].to_numpy()) + change - ended).norm())),
            ("sum", float((explained - change).norm()) - found.attrs.get("rounding", 0.0) * moved),
        ):
            if not missed <= room:
                return "wrong", f"{what} is off by {missed:.2g}, of {moved:.2g}"
        return self.by_example(found, room)

    def by_example(self, found: Any, room: float) -> tuple[str, str]:
        """Compare the parts of examples with the oracle."""
        with fresh_world():
            loop, planted = self.loop()
            if loop.casts:
                return "recorded", ""
            queries, copy = loop.x[:3] * 0.9, deepcopy(loop.net).eval()
            reader = Reader(as_it_began(function_of(copy)), frozenset(dict(loop.net.named_parameters())))
            oracle = Oracle(loop, reader, queries)
            live(loop, queries)
            torch.manual_seed(7)
            trained(loop, planted, oracle)
        worst = 0.0
        for name in found["example"].to_numpy().tolist():
            ours = torch.from_numpy(found["contribution"].sel(example=name).to_numpy())
            theirs = oracle.parts.get(name, torch.zeros_like(ours))
            worst = max(worst, float((ours - theirs).norm()))
        rounding = float(found.attrs.get("rounding", 0.0)) * float(np.linalg.norm(found["change"].to_numpy()))
        if not worst <= room + rounding:
            return "wrong", f"an example's part is off by {worst:.2g}, of {float(abs(found['contribution']).max()):.2g}"
        return "recorded", ""


def cases(seed: int, count: int) -> Iterator[Case]:
    """Yield loops with every plant in turn."""
    chance = random.Random(seed)
    names = [*READ, "closure", *STRUCTURE, *GRADIENTS]
    for number in range(count):
        when = (
            chance.choice((0, 1, 3, 5, STEPS))
            if names[number % len(names)] not in GRADIENTS
            else chance.choice((0, 2, 5))
        )
        yield Case(chance.randrange(2**31), names[number % len(names)], when, chance.random() < 0.7)


def plain_cases(seed: int, count: int) -> Iterator[Case]:
    """Return loops without plants."""
    chance = random.Random(seed + 1)
    return (Case(chance.randrange(2**31), "nothing", 0, False) for _ in range(count))


def search(seed: int, count: int, said: Callable[[str], object]) -> tuple[Counter[str], Counter[str]]:
    """Count the verdicts on loops with and without plants."""
    both = (Counter[str](), Counter[str]())
    for counts, several in zip(both, (cases(seed, count), plain_cases(seed, max(1, count // 2))), strict=True):
        for case in several:
            verdict, why = case.verdict()
            counts[verdict] += 1
            if verdict == "wrong" or (case.name == "nothing" and verdict != "recorded"):
                said(f"{verdict}: {case}: {why}")
    return both


def main() -> None:
    """Search, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    given = parser.parse_args()
    planted, plain = search(given.seed, given.count, print)
    print(f"planted: {dict(planted)}; loops without: {dict(plain)}")
    raise SystemExit(1 if planted["wrong"] or plain["wrong"] or plain["refused"] else 0)
