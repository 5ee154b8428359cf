"""The stored contributions to one output at one query: by example, step,
component and token.

    f_T − f_0 = Σᵢ 𝒮(x, xᵢ) + decay + … = Σ over steps = Σ over components       𝒮(x, xᵢ) = Σ over positions of xᵢ

`OutputParts` reads all these arrays for explanations, tables and pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ntkexp.records.contributions import (
    BY_COMPONENT,
    BY_COMPONENT_STEP,
    BY_POSITION,
    BY_STEP,
    COMPONENT,
    COUPLING,
    DECAY,
    DECAY_BY_COMPONENT,
    HALF_BY,
    JUMPS,
    LAST_STEP,
    OUTSIDE,
    ROUNDING,
    STATISTICS,
)
from ntkexp.records.results import RETRACED
from ntkexp.report.examples import Example
from ntkexp.report.run import Run, blocks
from ntkexp.report.tables import (
    Column,
    Table,
    format_signed,
    signed_column,
    text_column,
)
from ntkexp.text import MISSING, percent, printable

if TYPE_CHECKING:
    import xarray as xr

Array: TypeAlias = NDArray[np.float64]

NO_EXAMPLE = {
    DECAY: "weight decay",
    ROUNDING: "rounding",
    STATISTICS: "running statistics",
    JUMPS: "discrete choices",
    COUPLING: "batch statistics",
    OUTSIDE: "changes outside the steps",
    "carried": "earlier momentum",
    "other_steps": "other steps",
}
"""Names, in words, of the parts of the change that no example caused."""


@dataclass(frozen=True)
class OutputParts:
    """The arrays of `records.contributions` at one output of one query. If the run has
    several attribution rules, use the first in `RULE_ORDER`."""

    arrays: xr.Dataset
    query: int  # index along the axis `query`
    out: int  # index along the axis `out`

    def read(self, kind: str) -> Array | None:
        """Return an array at this query and output. Return None if it is missing."""
        stored = self.arrays.get(kind)
        if stored is None:
            return None
        values = stored.isel(query=self.query, out=self.out).to_numpy()
        return np.asarray(values, dtype=float)

    @property
    def last_step(self) -> NDArray[np.int64]:
        """The last step of each interval of `by_step`."""
        if LAST_STEP in self.arrays.coords:
            return np.asarray(self.arrays[LAST_STEP].to_numpy())
        return np.arange(self.arrays.sizes["step"])

    def total(self, kind: str) -> float:
        """Return a part that no example caused, such as `decay`, as a number. Return 0
        if this part is missing."""
        part = self.read(kind)
        if part is None:
            return 0.0
        return float(part)


def strongest_first(values: Array) -> list[int]:
    """Return the indices that sort `values` by absolute value, the largest first.

    >>> strongest_first(np.array([1.0, -3.0, 2.0, 1.0]))
    [1, 2, 0, 3]
    """
    order: list[int] = np.argsort(-np.abs(values), kind="stable").tolist()
    return order


# --- Attributed outputs. With some optimizers, only a few queries are attributed.
# Contributions to all other outputs are NaN.


def attributed(contributions: Array) -> NDArray[np.bool_]:
    """Return a mask of the attributed outputs, [...], given contributions [...,
    example]."""
    return np.asarray(np.isfinite(contributions).all(axis=-1))


def attributed_in_blocks(contributions: xr.DataArray) -> NDArray[np.bool_]:
    """Return a mask of the attributed outputs.

    Read contributions in blocks that fit into memory.
    """
    return np.concatenate([attributed(block) for block in blocks(contributions)])


def largest_attributed(outputs: Array, contributions: Array) -> int:
    """Return the index of the largest attributed output."""
    return int(np.where(attributed(contributions), outputs, -np.inf).argmax())


# --- By step: when training changed an output.
#
# d(s) is the sum of `by_step` over the first s of T steps.
#
#     most_by: the smallest s ≥ 1 with |d(t) − d(T)| ≤ ½ |d(T)| for all t ≥ s
#
# Without momentum, d(s) = f_s − f_0 up to the error of the quadrature rule, where f_s is
# the output after s steps. With momentum, d(s) is the whole effect of the gradients of
# the first s steps. It includes the part that momentum applies later.


@dataclass(frozen=True, eq=False)
class Movement:
    """The change of an output in each interval of steps,
    and the last step of each interval."""

    by_step: Array
    last_step: NDArray[np.int64]

    @property
    def steps(self) -> int:
        """The number of steps of the training."""
        return int(self.last_step[-1]) + 1

    @property
    def most_by(self) -> int | None:
        """The number of steps after which the output stays close to its final value: the
        distance is at most half of the total change.

        None if the output did not change.

        >>> Movement(np.array([1.0, -3.0, 4.0, 0.5]), np.arange(4)).most_by
        3
        """
        so_far = np.cumsum(self.by_step)
        change = so_far[-1]
        if not change:
            return None
        far_away = np.flatnonzero(np.abs(so_far - change) > abs(change) / 2)
        if not len(far_away):
            return int(self.last_step[0]) + 1
        return int(self.last_step[far_away[-1] + 1]) + 1

    @property
    def sentence(self) -> str:
        """A sentence that states when most of the change happened.

        >>> Movement(np.array([3.0, 1.0, 0.5, 0.5]), np.arange(4)).sentence
        'most of the change was made in the first 25 % of the steps (1 of 4)'
        """
        most_by = self.most_by
        if most_by is None:
            return ""
        return (
            f"most of the change was made in the first {percent(most_by / self.steps)} "
            f"of the steps ({most_by} of {self.steps})"
        )


def movement(parts: OutputParts) -> Movement | None:
    """Return the change of an output by steps, if the run recorded it."""
    by_step = parts.read(BY_STEP)
    if by_step is None or not len(by_step) or not np.isfinite(by_step).all():
        return None
    return Movement(by_step, parts.last_step)


# --- By example: the path time h after which half
# of an example's contribution was added.
#
#     mᵢ(t) = |Σ_c K_t(x, xᵢ)_c ℓ′ᵢ(t)_c|,    ∫₀ʰ mᵢ = ½ ∫₀ᵀ mᵢ
#
# mᵢ is computed from the stored tangent kernels, and the integrals by the trapezoidal
# rule. If the data have phases, kernels are stored at the start and end of each phase,
# and the integrals are over the phase of the example. An optimizer with momentum
# applies gradients later, so kernels at single steps do not determine h. For runs with
# momentum, h is known only if `path.backward` stored it.


def halfway(run: Run, parts: OutputParts) -> Array:
    """Return the fraction h of the path time after which half of each example's
    contribution was added, [example].

    Unknown entries are NaN.
    """
    stored = parts.read(HALF_BY)
    if stored is not None:
        return stored
    fractions = np.full(run.kernels.sizes["train"], np.nan)
    gradients = run.kernels.get("output_gradient")
    has_memory = (run.path / RETRACED).is_file()
    if has_memory or "tangent" not in run.kernels or "time" not in run.metrics:
        return fractions
    if gradients is None or gradients.sizes["snapshot"] < 2:
        return fractions

    # compute mᵢ at the steps of the stored kernels, [snapshot, example]
    steps = run.kernels["step"].to_numpy()
    times = run.metrics.set_index("step")["time"].reindex(steps).to_numpy(dtype=float)
    kernel = (
        run.kernels["tangent"]
        .isel(query=parts.query, out=run.outs[parts.out])
        .to_numpy()
    )
    mass = np.abs(np.einsum("sic,sic->si", kernel, gradients.to_numpy()))

    path_time = times[-1] - times[0]
    for i in range(len(fractions)):
        snapshots = learning_snapshots(run, i, steps)
        own_times = times[snapshots]
        if len(own_times) and times[-1] > times[0]:
            h = half(own_times, mass[snapshots, i])
            since_start = own_times[0] - times[0] + h * (own_times[-1] - own_times[0])
            fractions[i] = since_start / path_time
    return fractions


def learning_snapshots(run: Run, example: int, steps: NDArray[np.int64]) -> slice:
    """Return the slice of kernel snapshots in the phase of an example. Without phases,
    return all snapshots."""
    if "train_phase" not in run.data:
        return slice(None)
    learned = run.metrics["step"][
        run.metrics["phase"] == run.data["train_phase"][example]
    ]
    if learned.empty:
        return slice(0)
    return slice(
        *np.searchsorted(steps, [learned.iloc[0], learned.iloc[-1] + 2]).tolist()
    )


def half(times: Array, mass: Array) -> float:
    """Return the fraction of the time range after which half of the integral
    of `mass` is reached.

    >>> half(np.array([0.0, 1.0, 2.0]), np.array([1.0, 1.0, 1.0]))
    0.5
    """
    # the integral up to each time, by the trapezoidal rule
    areas = np.diff(times) * (mass[1:] + mass[:-1]) / 2
    integral = np.concatenate([[0.0], np.cumsum(areas)])
    if not np.isfinite(integral).all() or integral[-1] <= 0 or times[-1] <= times[0]:
        return float("nan")
    time = np.interp(integral[-1] / 2, integral, times)
    return float((time - times[0]) / (times[-1] - times[0]))


# --- By component of the network: the parameters through which examples and weight
# decay changed the output.


@dataclass(frozen=True, eq=False)
class ComponentPart:
    """The change of an output through the parameters of one component."""

    name: str
    added: float  # sum of the examples' contributions, Σᵢ 𝒮(x, xᵢ; component)
    mass: float  # sum of the magnitudes of contributions, Σᵢ |𝒮(x, xᵢ; component)|
    decay: float
    movement: Movement  # `together`, split by steps

    @property
    def together(self) -> float:
        """The component's share of f_T − f_0."""
        return self.added + self.decay


def component_parts(parts: OutputParts) -> tuple[ComponentPart, ...]:
    """Return the part of each component, in the run's order. Return
    () if the run has no components."""
    by_component = parts.read(BY_COMPONENT)  # [example, component]
    by_step = parts.read(BY_COMPONENT_STEP)  # [step, component]
    if by_component is None or by_step is None:
        return ()
    decay = parts.read(DECAY_BY_COMPONENT)
    if decay is None:
        decay = np.zeros(by_component.shape[1])
    return tuple(
        ComponentPart(
            name=str(name),
            added=float(by_component[:, k].sum()),
            mass=float(np.abs(by_component[:, k]).sum()),
            decay=float(decay[k]),
            movement=Movement(by_step[:, k], parts.last_step),
        )
        for k, name in enumerate(parts.arrays[COMPONENT].to_numpy())
    )


def tabulate_components(components: tuple[ComponentPart, ...]) -> Table:
    """Return a row for each component, the strongest first.

    The sum of the rows is the contribution of weight decay plus the contributions of
    all examples.
    """
    mass = sum(part.mass for part in components) or 1.0
    columns = (
        text_column("component"),
        signed_column("added"),
        signed_column("decay"),
        signed_column("in all"),
        Column("of all parts", spell=percent, adds=True),
        Column("most by step", others=MISSING),
    )
    rows = [
        (
            part.name,
            part.added,
            part.decay,
            part.together,
            part.mass / mass,
            part.movement.most_by,
        )
        for part in sorted(components, key=lambda part: -abs(part.together))
    ]
    return Table(columns, tuple(rows))


# --- By token position of a training text: contributions of the loss at each position.

# colour saturation of the position with the largest contribution
STRONGEST_COLOR_PERCENT = 60


@dataclass(frozen=True)
class PositionPart:
    """The contribution of the loss at one position of a training text to an output."""

    example: int  # index of the text along the axis `example`
    name: str  # name of the text
    position: int
    token: str  # token at this position; empty if unknown
    added: float


def position_parts(
    parts: OutputParts, shown: Callable[[int], Example]
) -> tuple[PositionPart, ...]:
    """Return the part of each position, text by text. Return () if there are no
    positions.

    `shown` returns a training text, given its index."""
    by_position = parts.read(BY_POSITION)  # [example, position]
    if by_position is None:
        return ()
    found = list[PositionPart]()
    for place, added in enumerate(by_position):
        text = shown(place)
        name = text.name if text.text else f"#{text.index}"
        tokens = token_names(text, len(added))
        found += [
            PositionPart(
                place, name, position, tokens[position], float(added[position])
            )
            for position in range(len(added))
            if added[position] or tokens[position]
        ]
    return tuple(found)


def token_names(text: Example, positions: int) -> list[str]:
    """Return the tokens of a text as words or token ids.

    Return empty strings unless there is a token for each position.
    """
    tokens = text.tokens
    if tokens is None or tokens.shape != (positions,) or tokens.dtype.kind not in "iuU":
        return [""] * positions
    if tokens.dtype.kind == "U":
        return [printable(str(word)) for word in tokens]
    return ["" if number < 0 else str(number) for number in tokens.tolist()]


def tabulate_positions(positions: tuple[PositionPart, ...]) -> Table:
    """Return a row for each position, the strongest first.

    The rows add up to the sum of all examples.
    """
    columns = (
        text_column("example"),
        Column("position"),
        text_column("token"),
        signed_column("added"),
    )
    ordered = sorted(positions, key=lambda part: -abs(part.added))
    rows = [(part.name, part.position, part.token, part.added) for part in ordered]
    return Table(columns, tuple(rows))


@dataclass(frozen=True)
class ShadedToken:
    """A token with a background that mixes `percent`
    of `color` into the colour of the page."""

    text: str
    added: str
    color: str
    percent: int


def shaded_texts(
    positions: tuple[PositionPart, ...], examples: list[int]
) -> list[tuple[str, list[ShadedToken]]]:
    """Return the names and shaded tokens of some texts."""
    texts: dict[int, list[PositionPart]] = {place: [] for place in examples}
    for part in positions:
        if part.example in texts:
            texts[part.example].append(part)
    strongest = max(
        (abs(part.added) for text in texts.values() for part in text), default=0.0
    )
    return [
        (text[0].name, [shaded(part, strongest or 1.0) for part in text])
        for text in texts.values()
        if text
    ]


def shaded(part: PositionPart, strongest: float) -> ShadedToken:
    """Return a token in blue if its loss raised the output, else in vermilion. The
    position with the contribution `strongest` gets the strongest colour."""
    color = "c0072b2" if part.added > 0 else "cd55e00"
    saturation = round(STRONGEST_COLOR_PERCENT * abs(part.added) / strongest)
    return ShadedToken(
        part.token or f"[{part.position}]", format_signed(part.added), color, saturation
    )
