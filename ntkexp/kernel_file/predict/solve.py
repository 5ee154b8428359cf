"""Coefficients of one kernel, by whichever way the question asks for, and what is needed for variances."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.closed_form.conjugate_gradients import conjugate_gradients
from ntkexp.closed_form.factor import factorise
from ntkexp.closed_form.gain import AbstractGain
from ntkexp.closed_form.held_out import folds, held_out, ridges
from ntkexp.closed_form.modes import Learned, Modes, modes_of
from ntkexp.kernel_file.predict.entries import Entries
from ntkexp.kernel_file.predict.question import Question

REMARKS = 25  # products between two remarks


@dataclass(frozen=True)
class SolvedKernel:
    """g(R) y of one way to train; `learned` is g, `twice` g of twice the time: None where they cost too much."""

    when: str
    ridge: float
    coefficients: Float[Tensor, "entry column"]
    said: str
    learned: Learned | None = None
    twice: Learned | None = None
    left_out: Float[Tensor, "entry column"] | None = None  # predictions of training examples by the others


def solve(entries: Entries, kernel: str, question: Question, tell: Callable[[str], None]) -> Iterator[SolvedKernel]:
    """Solve way by way."""
    targets = entries.columns(entries.targets[: entries.train])
    solver, ways = question.way_to_solve(entries), question.ways(entries.train)
    if solver == "eigen":
        yield from by_modes(entries, kernel, question, ways, targets)
        return
    (when,) = ways
    ridge = question.ridge or 0.0
    if solver == "cholesky":
        factor = factorise(entries.among(kernel), ridge)
        said = f"Cholesky, jitter {factor.jitter:.0e}" if factor.jitter else "Cholesky"
        yield SolvedKernel(when, ridge, factor.solve(targets), said, factor.solve, factor.solve)
    else:
        hold = 2 * 8.0 * entries.count**2 <= question.memory_gb * 1e9
        yield by_products(entries, kernel, when, ridge, targets, tell, hold=hold)


def by_modes(
    entries: Entries,
    kernel: str,
    question: Question,
    ways: dict[str, AbstractGain],
    targets: Float[Tensor, "entry column"],
) -> Iterator[SolvedKernel]:
    """Solve every way by one eigendecomposition."""
    matrix = entries.among(kernel)
    modes = modes_of(matrix)
    outputs = entries.matrix.layout.outputs
    parts = folds(entries.train, question.folds or entries.train, outputs)
    ridge = best_ridge(modes, ridges(matrix), targets, parts) if question.ridge is None else question.ridge
    wanted = question.ridge is None or question.folds is not None
    left_out = held_out(modes, ridge, targets, parts) if wanted else None
    for k, (when, gain) in enumerate(ways.items()):
        learned, twice = modes.at(gain, ridge), modes.at(gain.doubled, ridge)
        said = f"{int((modes.values > 0).sum())} of {len(modes.values)} modes"
        yield SolvedKernel(when, ridge, learned(targets), said, learned, twice, None if k else left_out)


def best_ridge(modes: Modes, tried: list[float], targets: Float[Tensor, "entry column"], parts: list[Tensor]) -> float:
    """Find the ridge with the smallest squared error on what was left out."""
    return min(tried, key=lambda ridge: float((held_out(modes, ridge, targets, parts) - targets).square().sum()))


def by_products(
    entries: Entries,
    kernel: str,
    when: str,
    ridge: float,
    targets: Float[Tensor, "entry column"],
    tell: Callable[[str], None],
    *,
    hold: bool,
) -> SolvedKernel:
    """Solve by conjugate gradients: the kernel is read from the disk for every product, unless it can be held."""
    blocks = entries.blocks(slice(0, entries.train))
    held = [entries.rows(kernel, block) for block in blocks] if hold else None

    def product(vectors: Tensor) -> Tensor:
        rows = held or (entries.rows(kernel, block) for block in blocks)
        return torch.cat([part @ vectors for part in rows]) + ridge * vectors

    def heard(count: int, residual: float) -> None:
        if count % REMARKS == 0:
            tell(f"{kernel}: {count} products, residual {residual:.0e}")

    diagonal = entries.own(kernel, slice(0, entries.train)) + ridge
    found = conjugate_gradients(product, diagonal, targets, tell=heard)
    return SolvedKernel(when, ridge, found.solution, found.words)
