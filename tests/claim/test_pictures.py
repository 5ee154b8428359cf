"""Claims: their pictures and quantities agree with their rows, and incomplete claims are refused."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from ntkexp.claim.conduct import draw
from ntkexp.claim.expectation import Equality, Order
from ntkexp.claim.judge import judge_part
from ntkexp.claim.judged import AbstractPicture, JudgedClaim, PublishedNumber
from ntkexp.claim.look import CONTROL, MAIN, SECOND
from ntkexp.claim.paper_figures import draw_change_by_width
from ntkexp.claim.papers.convolutional_kernels import AccuracyTable
from ntkexp.claim.papers.double_descent import InterpolationPeak
from ntkexp.claim.papers.lazy_and_rich import AccuracyByScale
from ntkexp.claim.papers.learned_features import MeansByLevel
from ntkexp.claim.papers.leaving_out import ScoresByTraining
from ntkexp.claim.papers.path_kernel import (
    EnoughExamples,
    KernelChange,
    MarginBound,
    PathFact,
    StoredExamples,
    TimeShare,
    WeightRank,
)
from ntkexp.claim.papers.scalar_functions import ScalarStep, ScalarTraining, ascents, changed_range, given, moved
from ntkexp.claim.papers.wide_networks import ChangeByWidth
from ntkexp.claim.picture import JudgedRows, drawable_groups
from ntkexp.claim.quantity import AbstractQuantity, Column, Measured, Together
from ntkexp.claim.read import claim_names, claim_of, read_claim
from ntkexp.config.build import Builder
from ntkexp.mistake import Mistake
from ntkexp.records.claim import ClaimRecord, Exhibit, Judgement, read_exhibit
from ntkexp.report.run import Run
from tests.claim.subject import CLAIM, SLOPE, changed_claim, planned
from tests.report.drawn import caption_of

LOOK = Judgement(
    verdict="supported", figure=1.0, low=1.0, high=1.0, p=None, more_seeds=None, expected="", seeds=(0, 1), draws="",
    note="",
)  # fmt: skip


def judged(tree: dict[str, Any], table: pd.DataFrame) -> JudgedClaim:
    """Return a claim whose looks were judged by this table."""
    claim = claim_of("mine", tree, Builder())
    looks = {MAIN: LOOK, CONTROL: LOOK, SECOND: LOOK}
    said: dict[str, Any] = {"name": "mine", "digest": "0", "size": "quick", "statement": ""}
    said |= {"source": "", "refutes": "", "command": ""}
    record = ClaimRecord(path=Path("mine"), looks=looks, **said)
    return JudgedClaim(claim.looks, record, dict.fromkeys(looks, table))


def of_scalars(name: str) -> JudgedClaim:
    """Return a shipped claim of a scalar function, with the rows of its trial."""
    look = read_claim(name, Builder(), "quick").looks[MAIN]
    assert look.trial is not None
    rows = pd.DataFrame([{**row, "seed": seed} for seed in (0, 1) for row in look.trial.rows(seed)])
    measured = pd.concat([rows.assign(quantity=name, value=0.0) for name in ("kernel", "share")])
    looks = read_claim(name, Builder()).looks
    return JudgedClaim(looks, judged(CLAIM, rows).record, dict.fromkeys((MAIN, CONTROL), measured))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lookup_table", "A step on (10, 50) moves f(10) from 32 to 35.6, and none of the 30 other values"),
        ("linear", "from 31 to 414.8, and all of the 30 other values, 10 of them the other way"),
        ("reparametrised_linear", "from 31 to 791, and 29 of the 30 other values"),  # k(−10, 10) = 0
    ],
)
def test_the_title_of_a_step_counts_all_values(name: str, said: str) -> None:
    found = of_scalars(name)
    look = found.looks[MAIN]
    assert moved(given(found), look.trial).endswith(said)  # type: ignore[arg-type]
    assert f"{said}." in caption_of(read_claim(name, Builder()).picture.figure(found))


def test_the_caption_of_two_bumps_has_their_extremes() -> None:
    caption = read_claim("radial_basis", Builder()).picture.caption(of_scalars("radial_basis"))
    assert (
        "is least at x = 0, −0.279, and largest at x = 8, 1.204. The kernel of the finite step is largest at x = 7"
        in (caption)
    )


def test_a_kernel_that_widens_does_not_flatten() -> None:
    found = of_scalars("kernel_during_training")
    assert "narrower each time: 1.483, " in ScalarTraining().here(found)
    rows = found.tables[MAIN]
    steps = rows["ascended"].max() - rows["ascended"]  # in reverse order
    back = JudgedClaim(found.looks, found.record, {MAIN: rows.assign(ascended=steps)})
    assert "The range of the kernel is not narrower each time" in ScalarTraining().here(back)
    assert changed_range(ascents(back)).endswith("a range of 0.859 … 1.137 to −0.279 … 1.204")


@pytest.mark.parametrize(("power", "nearer"), [(-0.5, "nearer to 1/√n than to 1/n"), (-1.0, "nearer to 1/n than")])
def test_captions_have_the_powers_of_the_width(power: float, nearer: str) -> None:
    rows = [
        {"model.width": w, "seed": seed, "depth": depth, "kernel_change": (1 + seed) * w ** (power if depth == 3 else
        7.0)} for w in (4, 16, 64) for seed in (0, 1) for depth in (1, 3)
    ]  # fmt: skip
    found = judged(CLAIM, pd.DataFrame(rows))
    picture = ChangeByWidth(
        where={"depth": 3}, panels={"weights": {"all": "kernel_change"}, "kernel": {"kernel": "kernel_change"}}
    )
    assert nearer in caption_of(picture.figure(found))
    assert f"all −{-power:.2g}" in picture.here(found)


def test_every_line_of_a_panel_is_drawn_and_looks_different() -> None:
    """Eight lines of arithmetic means, two more than there are colours, each with its name."""
    names = {f"layer {k}": f"change_{k}" for k in range(8)}
    rows = pd.DataFrame([
        {"width": w, "seed": seed} | {column: (1 + seed) * (k + 1) / w for k, column in enumerate(names.values())}
        for w in (4, 16, 64) for seed in (0, 1)
    ])  # fmt: skip
    (axes,) = draw_change_by_width(rows, "width", {"weights": names}, "They fall").axes
    means = [line for line in axes.get_lines() if line.get_marker() == "o"]
    for line, column in zip(means, names.values(), strict=True):
        np.testing.assert_allclose(np.asarray(line.get_ydata(), dtype=float), rows.groupby("width")[column].mean())
    assert len({(str(line.get_color()), line.get_linestyle()) for line in means}) == 8
    assert {*names} <= {text.get_text() for text in axes.texts}


def test_a_peak_at_the_end_does_not_fall() -> None:
    rows = [
        {"parameters": p, "seed": s, "test_error": error + 0.01 * s, "train_error": 1 / p**2, "condition": 10.0 * p}
        for p, error in ((10, 0.2), (60, 1.0), (100, 2.0)) for s in (0, 1)
    ]  # fmt: skip
    found, picture = judged(CLAIM, pd.DataFrame(rows)), InterpolationPeak(threshold=50)
    assert "largest at 100 parameters, 2, the largest number that was tried" in picture.title(found)
    assert "fitted, to 0.001, from 60 parameters on. Below the threshold the test error is least at 10" in (
        picture.here(found)
    )
    assert "is not less than that: 1 at 60" in picture.here(found)


def test_a_table_has_the_depths_of_both() -> None:
    lost = {3: 0.2, 6: -0.1}
    rows = [
        {"depth": depth, "family": family, "regressor": name, "seed": seed,
         "accuracy": 0.5 + 0.1 * seed - lost[depth] * (family == "CNTK-GAP")}
        for depth in lost for family in ("CNTK", "CNTK-GAP") for name in ("process", "kernel", "network")
        for seed in (0, 1)
    ]  # fmt: skip
    found, picture = judged(CLAIM, pd.DataFrame(rows)), AccuracyTable(per_cent={"CNTK": {3: 40.94, 11: 43.42}})
    table = picture.table(found).set_index("depth")
    assert list(table.index) == [3, 6, 11]
    assert table["CNTK paper, %"].tolist() == pytest.approx([40.94, math.nan, 43.42], nan_ok=True)
    assert table["CNTK-GAP kernel, %"].tolist() == pytest.approx([35.0, 65.0, math.nan], nan_ok=True)
    assert "by −20.0 points at depth 3 and 10.0 points at depth 6" in picture.here(found)


def test_the_caption_has_the_largest_mean_gain_of_single_examples_and_halves() -> None:
    """Gains of single seeds and of other groups are not in the caption."""
    gains = {"one": (0.1, -0.3), "50 %": (0.01, 0.02), "5 %": (0.5, 0.5)}
    labels = {"training": "a", "activation": "relu"}
    rows: list[dict[str, Any]] = []
    for group, pair in gains.items():
        for seed, gain in enumerate(pair):
            row = labels | {"left_out": group, "seed": seed}
            rows.append(row | {"score": "contributions", "quantity": "gain", "value": gain})
            rows += [
                row | {"score": name, "quantity": "correlation", "value": 0.5} for name in ("contributions", "tracin")
            ]
    picture = ScoresByTraining(scores={"contributions": "contribution", "tracin": "TracIn"}, trainings={"a": "Adam"})
    figure = picture.figure(judged(CLAIM, pd.DataFrame(rows)))
    assert caption_of(figure) == "Means of contributions and TracIn differ by at most 0.1."
    assert [axes.get_title() for axes in figure.axes] == ["relu"]


def test_the_caption_has_the_accuracies_at_both_ends_of_the_scale() -> None:
    rows = [
        {"init.alpha": alpha, "quantity": name, "seed": seed, "value": value + 0.1 * seed}
        for alpha, value in ((100.0, 0.4), (0.1, 0.8), (1.0, 0.6)) for seed in (0, 1)
        for name in ("accuracy_query", "loss")
    ]  # fmt: skip
    figure = AccuracyByScale(names={MAIN: "sums", SECOND: "digits"}).figure(judged(CLAIM, pd.DataFrame(rows)))
    assert caption_of(figure) == "Sums: 85 % at α = 0.1, 45 % at α = 100."


def test_means_by_level_are_those_of_seeds_in_the_order_of_the_levels() -> None:
    """A seed counts once, however many examples it has."""
    rows = [
        {"layer": layer, "moment": moment, "seed": seed, "value": value + 0.1 * seed}
        for layer, start in ((2, 0.2), (1, 0.4)) for moment, value in (("start", start), ("end", start + 0.3))
        for seed in (0, 1) for _ in range(1 + seed)
    ]  # fmt: skip
    picture = MeansByLevel(
        title="Means", panels={MAIN: "digits", SECOND: "clothes"}, along="layer", levels={"1": "first", "2": "last"},
        by="moment", lines={"start": "before", "end": "after"}, xlabel="layer", ylabel="alignment",
    )  # fmt: skip
    found = judged(CLAIM, pd.DataFrame(rows))
    figure = picture.figure(found)
    assert caption_of(figure) == "before: 0.45 (first), 0.25 (last); after: 0.75 (first), 0.55 (last)."
    assert [axes.get_title() for axes in figure.axes] == ["digits", "clothes"]
    drawn = [line.get_ydata() for line in figure.axes[0].get_lines() if line.get_marker() == "o"]
    np.testing.assert_allclose(np.array(drawn, dtype=float), [[0.45, 0.25], [0.75, 0.55]])
    alone = picture.model_copy(update={"by": "", "panels": {MAIN: "digits"}})
    assert caption_of(alone.figure(found)) == "digits: 0.6 (first), 0.4 (last)."


@pytest.mark.parametrize("picture", [ScalarStep(), ScalarTraining(), InterpolationPeak(threshold=1)])
def test_a_picture_of_other_rows_is_refused(picture: AbstractPicture) -> None:
    with pytest.raises(Mistake, match=r"^picture: "):
        picture.figure(judged(CLAIM, pd.DataFrame({"seed": [0], "value": [1.0]})))


def test_a_picture_changes_no_digest() -> None:
    picture = {"_target_": "ntkexp.claim.picture.JudgedRows", "published": "A line."}
    plain, told = (claim_of("mine", changed_claim(picture=one), Builder()) for one in (None, picture))
    assert plain.digest == told.digest
    assert plain.picture == JudgedRows()


def test_a_picture_is_kept_with_its_words_and_its_table(tmp_path: Path) -> None:
    class Tabled(JudgedRows):
        def table(self, judged: JudgedClaim) -> pd.DataFrame:
            return pd.DataFrame({"depth": [3, 4], "ours": [0.5, math.nan]})

    found = judged(CLAIM, pd.DataFrame({"model.width": [4, 8], "seed": [0, 0], "value": [1.0, 2.0]}))
    folder = replace(found.record, path=tmp_path)
    draw(Tabled(published="A line."), replace(found, record=folder))
    caption = "Published: A line. Here: blue is the main look, orange the second look."
    assert read_exhibit(tmp_path) == Exhibit(caption, ("depth", "ours"), ((3, 0.5), (4, None)))
    assert "<svg" in (tmp_path / "picture.svg").read_text()
    (tmp_path / "picture.json").write_text("{}")
    assert read_exhibit(tmp_path) == Exhibit()


@pytest.mark.parametrize("name", ["lookup_table", "radial_basis", "kernel_during_training"])
def test_published_numbers_stand_beside_those_found(name: str) -> None:
    """They agree in the published digits."""
    claim = read_claim(name, Builder(), "quick")
    look = claim.looks[MAIN]
    assert look.trial is not None
    rows = pd.DataFrame([{"runs": "trial", **row, "seed": seed} for seed in (0, 1) for row in look.trial.rows(seed)])
    found = JudgedClaim(claim.looks, judged(CLAIM, rows).record, {MAIN: look.quantity.of(Measured(rows, {}))})
    table = claim.picture.table(found)
    assert table is not None
    digits = 10.0 ** -table["published"].map(lambda value: len(repr(value).partition(".")[2]))
    assert ((table["here"] - table["published"]).abs() <= 0.5 * digits).all(), table
    assert set(table["published"]) <= {part.value for part in look.expectation if isinstance(part, Equality)}


def test_a_number_whose_rows_are_left_out_is_not_found() -> None:
    table = pd.DataFrame({"seed": [0, 1, 0], "depth": [3, 3, 4], "value": [1.0, 3.0, 9.0]})
    number = PublishedNumber(what="accuracy", value=2.5, where={"depth": 3})
    assert number.row(table)["here"] == 2.0
    assert math.isnan(float(number.model_copy(update={"where": {"depth": 6}}).row(table)["here"]))
    with pytest.raises(Mistake, match=r"numbers\.where: the table has no column dpth"):
        number.model_copy(update={"where": {"dpth": 3}}).row(table)


def test_an_unknown_picture_is_refused() -> None:
    with pytest.raises(Mistake, match=r"picture.*ScalarStp.*did you mean 'ScalarStep'"):
        claim_of("mine", changed_claim(picture={"_target_": "ntkexp.claim.papers.ScalarStp"}), Builder())


# The default picture.


def test_an_order_with_numbers_on_one_side_only_is_not_drawn() -> None:
    table = pd.DataFrame({"alpha": [1, 2, 1, 2], "seed": [0, 0, 1, 1], "value": [1.0, math.nan, 2.0, math.nan]})
    order = Order(along="alpha", above=2, below=1, margin=0.1)
    assert judge_part(order, table).verdict == "undecided"
    assert not drawable_groups(order, table)
    assert drawable_groups(order, table.fillna(5.0))


def test_the_deciding_part_is_drawn_first_and_the_caption_names_colours() -> None:
    """Three of five parts are drawn, including the deciding one."""
    bounds = [
        {"_target_": "ntkexp.claim.expectation.Bound", "limit": n, "side": "upper", "margin": 0} for n in range(5)
    ]
    table = pd.DataFrame({"seed": [0, 1], "value": [1.0, 2.0]})
    found = judged(changed_claim(expectation=bounds, control={"seeds": 3}), table)
    for decides in range(5):
        main = replace(LOOK, expected=found.looks[MAIN].words(decides))
        decided = replace(found, record=replace(found.record, looks={**found.record.looks, MAIN: main}))
        titles = [axes.get_title() for axes in JudgedRows().figure(decided).axes]
        assert titles[0] == f"≤ {decides} ± 0"
        assert len(titles) == 3
    said = "Here: blue is the main look, orange the second look; 3 of 5 parts are drawn."
    assert JudgedRows().caption(found) == said


def test_each_level_is_drawn_by_itself() -> None:
    bound = {"_target_": "ntkexp.claim.expectation.Bound", "limit": 9, "side": "upper", "margin": 0, "each": ["width"]}
    table = pd.DataFrame({"seed": [0, 1, 0, 1], "width": [4, 4, 8, 8], "value": [1.0, 2.0, 5.0, 6.0]})
    found = judged(changed_claim(expectation=[bound], control={"seeds": 3}), table)
    (axes,) = JudgedRows().figure(found).axes
    means = {float(np.asarray(line.get_ydata())[0]) for line in axes.get_lines() if line.get_linestyle() == "-"}
    assert means == {1.5, 5.5}


# Quantities of a path, for a run of two examples computed by hand.


PARTS = np.array([[3.0, -1.0], [1.0, -2.0], [0.5, 0.25], [4.0, -1.0]])[:, None]
"""𝒮 of two training examples and two queries."""

KERNEL = np.array([[4.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 0.5]])[:, None, :, None]


def run_of(parts: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = PARTS) -> Run:
    """Return a run with its stores in memory."""
    metrics = pd.DataFrame({"step": [0, 1, 2], "time": [0.0, 1.0, 3.0], "loss": [2.0, 1.5, 1.0]})
    metrics["step_size"], metrics["contribution_mass"] = [1.0, 2.0, np.nan], [3.0, 1.0, np.nan]
    run = Run(Path("run"), {"path": {"queries": ["train", "query"]}}, metrics, ())
    dims = ("query", "out", "example")
    gradient = np.array([[1.0, 0.5], [1.0, 0.5], [0.0, 0.5]])[..., None]
    vars(run).update(
        contributions=xr.Dataset({"contribution": (dims, parts, {"rule": "secant", "error_bar": 1e-3})}),
        kernels=xr.Dataset(
            {
                "path_secant": (("query", "out", "train", "out_"), KERNEL),
                "output_gradient": (("snapshot", "train", "out_"), gradient),
                "step": ("snapshot", np.array([0, 1, 2])),
            }
        ),
        predictions=xr.DataArray(
            np.array([[1.0, -1.0, 1.0, -1.0], [0.0, 0.0, 0.0, 0.0]])[..., None],
            dims=("machine", "query", "out"),
            coords={"machine": ["f_T", "f_0"]},
        ),
        data={
            "classes": np.array(["a", "b"]),
            "train_index": np.arange(2),
            "query_index": np.arange(2),
            "train_inputs": np.array([[0.0], [1.0]]),
            "query_inputs": np.array([[0.1], [0.9]]),
            "query_shown": np.array([[0.1], [0.9]]),
            "train_targets": np.array([[1.0], [-1.0]]),
            "query_targets": np.array([[1.0], [1.0]]),
        },
    )
    return run


def values(quantity: AbstractQuantity, run: Run) -> pd.DataFrame:
    table = pd.DataFrame({"runs": ["runs"], "run": ["run"], "seed": [0], "kernel_change": [0.5]})
    return quantity.of(Measured(table, {"run": run}))


@pytest.mark.parametrize(
    ("quantity", "value"),
    [
        (PathFact(fact="error_bar"), 1e-3),
        (PathFact(fact="error_bar", rule="left"), math.nan),  # the rule was not read
        # the means of |𝒮/𝒦| over the queries are 5/4 and 9/8, and ∫|ℓ′| is 2 and 1.5
        (WeightRank(), 1.0),
        (WeightRank(lag=1), -1.0),
        # the means of |𝒮| over the queries are 9/4 and 5/8
        (WeightRank(weight="contribution"), 1.0),
        # without the second example, the sums 0.75 and 3 at the queries miss 0.25 and 1, a third
        (EnoughExamples(tolerance=0.34), 0.5),
        (EnoughExamples(tolerance=0.33), 1.0),
    ],
    ids=repr,
)
def test_quantities_of_a_path(quantity: AbstractQuantity, value: float) -> None:
    assert values(quantity, run_of())["value"].tolist() == pytest.approx([value], nan_ok=True)


def test_ranks_change_with_the_contributions() -> None:
    swapped = run_of(PARTS[:, :, ::-1])
    assert values(WeightRank(weight="contribution"), swapped)["value"].tolist() == [-1.0]


def test_tenths_of_the_time() -> None:
    """Three quarters of the mass are in the first third: 3/4 · 3/10 in each of the first three tenths."""
    shares = values(TimeShare(), run_of()).set_index("tenth")["value"]
    assert shares[[1, 3]].tolist() == pytest.approx([0.225, 0.225])
    assert shares[10] == pytest.approx(0.25 / (20 / 3))
    assert shares.sum() == pytest.approx(1)


def test_a_bound_on_the_margin_is_put_on_the_path_kernel() -> None:
    """B² = 1²/4 + 1²/1, the trace is 5, and the margins are at least 1. One of two queries is classified wrong."""
    found = values(MarginBound(), run_of()).set_index("quantity")["value"]
    assert found["bound"] == pytest.approx(2 * (1.25 * 5) ** 0.5 / 2 + 3 * (np.log(40) / 4) ** 0.5, rel=1e-5)
    assert found["error"] == 0.5


def test_kernels_of_two_runs_on_the_same_inputs_are_compared() -> None:
    """A doubled kernel has changed by its norm."""
    one, other = run_of(), run_of()
    vars(other)["kernels"] = other.kernels.assign(path_secant=2 * other.kernels["path_secant"])
    table = pd.DataFrame({"runs": "runs", "run": ["one", "other"], "seed": 0, "noise": [0.0, 0.5]})
    measured = Measured(table, {"one": one, "other": other}, ("noise",))
    assert KernelChange(along="noise", one=0.0, other=0.5).of(measured)["value"].tolist() == [1.0]
    vars(other)["data"] = other.data | {"train_inputs": np.array([[0.0], [2.0]])}
    with pytest.raises(Mistake, match="learn from other inputs"):
        KernelChange(along="noise", one=0.0, other=0.5).of(measured)


def test_stored_examples() -> None:
    """The first example, with label +, contributes most to both queries, whose predictions are + and −."""
    quantity = StoredExamples(
        shares=("same_class", "nearest_input", "nearest_kernel", "same_example", "top_share", "chance"), top=1
    )
    found = values(quantity, run_of())
    assert found.groupby("quantity")["value"].apply(list).to_dict() == {
        "same_class": [1.0, 0.0],
        "nearest_input": [1.0, 1.0],
        "nearest_kernel": [0.0, 0.0],  # 1/√4 against 1/√1, and 2/√4 against 0.5/√1
        "same_example": [0.0, 0.0],
        "top_share": [pytest.approx(2 / 3), pytest.approx(4 / 5)],
        "chance": [0.5, 0.5],
    }
    first, second = found.groupby("quantity")["example"].agg(list)["chance"]
    assert (found["example"].to_numpy().reshape(-1, 2) == [first, second]).all()
    assert first != second


@pytest.mark.parametrize(
    ("quantity", "outputs", "message"),
    [
        (StoredExamples(), 2, "run has 2 outputs"),
        (WeightRank(), 2, "run has 2 outputs"),
        (KernelChange(along="seed", one=0, other=1), 1, "it is no axis of the runs"),
        (PathFact(fact="error_bra"), 1, r"quantity\.fact=error_bra: a path has error_bar; did you mean"),
    ],
    ids=repr,
)
def test_quantities_that_a_path_lacks_are_refused(quantity: AbstractQuantity, outputs: int, message: str) -> None:
    run = run_of()
    vars(run)["predictions"] = run.predictions.isel(out=[0] * outputs)
    with pytest.raises(Mistake, match=message):
        values(quantity, run)


def test_several_quantities_keep_their_names() -> None:
    both = Together(names=("a", "b"), parts=(PathFact(fact="error_bar"), Column(column="kernel_change")))
    assert values(both, run_of()).set_index("quantity")["value"].to_dict() == {"a": 1e-3, "b": 0.5}


def test_several_quantities_need_as_many_names() -> None:
    with pytest.raises(ValueError, match="give each of the 1 parts a name of its own"):
        Together(names=("a", "b"), parts=(Column(column="kernel_change"),))


# An incomplete claim is refused in one line before anything runs.


NO_MARGIN = {key: value for key, value in SLOPE.items() if key != "margin"}
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"runs": None}, "the claim has no runs; give it `runs` with axes and base, or a `trial`"),
    ({"expectation": NO_MARGIN}, "expectation.margin is missing; it takes a number > 0"),
    ({"expectation": []}, r"expectation=\[\]: nothing is expected, so nothing can be judged; give a rule or several"),
    ({"control": {"expectation": []}}, r"control: expectation=\[\]: nothing is expected"),
    ({"seeds": 1}, "seeds=1: one seed does not show how much results vary by chance; give two or more"),
    ({"second": {"seeds": 1}}, "second: seeds=1: one seed"),
    ({"second": {"seeds": True}}, "second: seed=true"),
    (
        {"second": {"seeds": [1, 8]}},
        "second: seed 1 belongs to the claim itself; give other seeds, or their number, as seeds: 20",
    ),
    ({"control": None}, "control is missing: a claim states it before anything is measured"),
    ({"control": {"expectation": {"value": 9.0}}}, "control: it judges the same runs by another rule or column"),
    ({"control": {"without": "none"}}, "give only a reason of at least 4 words"),
    ({"kind": "identity"}, "kind: identity: `slope −1 ± 5` leaves room for chance"),
    ({"kind": "law"}, "kind=law: it takes identity"),
    ({"margins": [{}, {}]}, "margins: there are 2 reasons for 1 rules"),
    ({"margins": {"guess": "it looks right"}}, "a reason is {source: TEXT}"),
    ({"contrl": {}}, "contrl: a claim has no such key; .*; did you mean 'control'"),
    ({"control": {"expectations": {}}}, "control.expectations: there is no such key; .* did you mean 'expectation'"),
    ({"quick": {"axes": {"model.widht": [1]}}}, "quick.axes.model.widht: .* did you mean 'model.width'"),
    ({"expectation": {"_target_": "ntkexp.claim.expectation.Slop"}}, "did you mean 'Slope'"),
    ({"expectation": SLOPE | {"margn": 1}}, "expectation.margn: Slope has no such key; .* did you mean"),
    ({"source": {"section": "2"}}, "source.paper is missing"),
    ({"runs": {"mlp": 3}}, "runs: they take axes and base"),
    ({"runs": {"mlp": ["steps=3"]}}, "runs: they take axes and base"),
]


@pytest.mark.parametrize(("changes", "said"), MISTAKES, ids=[said[:30] for _, said in MISTAKES])
def test_an_incomplete_claim_is_refused_in_one_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(Mistake, match=said):
        claim_of("mine", changed_claim(**changes), Builder())


def test_an_unknown_claim_is_answered_with_the_nearest() -> None:
    with pytest.raises(Mistake, match="did you mean 'kernel_stays'"):
        read_claim("kernel_stay", Builder())


def test_an_unknown_quantity_is_refused_before_any_run(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="'kernel_chnage' is not a number of a run; did you mean 'kernel_change'"):
        planned(changed_claim(quantity="kernel_chnage"), tmp_path)


@pytest.mark.parametrize("name", claim_names(Builder().choices))
@pytest.mark.parametrize("size", ["quick", "default", "full"])
def test_every_claim_that_is_shipped_can_be_read(name: str, size: Any) -> None:
    claim = read_claim(name, Builder(), size)
    assert claim.looks.keys() == ({MAIN, SECOND} if claim.without_control else {MAIN, CONTROL, SECOND})
    looks = (claim.looks[MAIN], claim.looks[SECOND])
    assert claim.identity or not any(look.unargued(part) for look in looks for part in range(len(look.expectation)))
    assert not set(claim.looks[MAIN].seeds) & set(claim.looks[SECOND].seeds)
    # a claim does not name the files of its parts, which may move
    assert not re.search(r"papers\.[a-z]", str(claim.fields))


@pytest.mark.parametrize(
    "changes",
    [{"expectation": SLOPE | {"margin": 0.3}}, {"refutes": "nothing"}, {"seeds": 3}, {"second": {"seeds": [8, 9]}}],
)
def test_a_changed_field_makes_another_claim(changes: dict[str, Any]) -> None:
    assert claim_of("mine", changed_claim(**changes), Builder()).digest != claim_of("mine", CLAIM, Builder()).digest


def test_settings_of_the_machine_change_no_digest() -> None:
    elsewhere = CLAIM["runs"] | {"base": [*CLAIM["runs"]["base"], "memory_gb=2"]}
    digests = {claim_of("mine", tree, Builder()).digest for tree in (CLAIM, changed_claim(runs=elsewhere))}
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("given", "size", "seeds"),
    [
        (None, "default", (1000, 1001)),
        (4, "default", (1000, 1001, 1002, 1003)),
        (4, "quick", (1000, 1001)),
        ("7..9", "default", (7, 8, 9)),
    ],
)
def test_the_second_look_has_its_own_seeds(given: object, size: Any, seeds: tuple[int, ...]) -> None:
    second = CLAIM["second"] | ({} if given is None else {"seeds": given})
    assert claim_of("mine", changed_claim(second=second), Builder(), size).looks[SECOND].seeds == seeds


def test_all_looks_have_one_size() -> None:
    claim = claim_of("mine", CLAIM, Builder(), "quick")
    assert {look.runs["runs"].axes["model.width"] for look in claim.looks.values()} == {(4, 8)}
    assert claim.looks[SECOND].runs["runs"].base[-2:] == ("data=sphere", "threads=1")
