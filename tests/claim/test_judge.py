"""Rules err at most at their level, the parts of a claim are joined, and a claim is judged from its files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ntkexp.claim.conduct import measure, plan_claim
from ntkexp.claim.expectation import (
    AbstractAverage,
    AbstractExpectation,
    Bound,
    Equality,
    Identity,
    Interval,
    Location,
    Order,
    Slope,
)
from ntkexp.claim.judge import Finding, far_from_null, join_parts, judge_interval, judge_look, judge_part, judge_table
from ntkexp.claim.look import Look
from ntkexp.claim.papers.scalar_functions import FiniteStepPeaks, FiniteSteps, ScalarCurve
from ntkexp.claim.quantity import Column, Columns, Crossing, Measured
from ntkexp.claim.read import claim_of
from ntkexp.claim.simulation import DESIGNS, SIMULATED_RULES, JudgingDesign, invent, look_of, try_design, try_judging
from ntkexp.config.compose import composer
from ntkexp.data.synthetic import Integers
from ntkexp.init import Standard
from ntkexp.mistake import Mistake
from ntkexp.model.scalar import LookupTable, RadialBasis, ScalarLinear
from ntkexp.records.claim import TIMINGS, claim_records, read_claim_record
from ntkexp.records.results import Seconds, write_timings
from ntkexp.records.sweep import Expected
from ntkexp.report.analysis.estimate import ONE_SIDED_LEVEL, Estimate, mean_of, student
from ntkexp.report.analysis.two_way import two_way_mean
from ntkexp.report.claims import ClaimFamily, format_claims, standing_verdicts
from ntkexp.run.environment import processor_seconds
from tests.claim.subject import CLAIM, OF_LINES, Line, judged, planned

ONE = Finding("supported", 1.0, low=0.9, high=1.1, p=0.001)


@pytest.mark.slow
@pytest.mark.parametrize("rule", SIMULATED_RULES, ids=lambda rule: rule.whole_words)
def test_rules_err_seldom_and_decide_often(rule: Slope) -> None:
    tried = try_judging(rule, tables=200)
    assert tried.false <= 0.05  # 2.5 % plus two standard deviations of 200 tables
    assert min(tried.support, tried.refute) >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("design", [DESIGNS[1], *DESIGNS[3:]], ids=lambda design: design.name)
def test_designs_err_seldom(design: JudgingDesign) -> None:
    tried = try_design(design)
    assert tried.false <= 0.05
    assert min(tried.support, tried.refute) >= 0.8  # one of three parts is refuted at 2.5 %/3


def test_seeds_alone_err_often_if_they_share_examples() -> None:
    """At the edge of the range, 500 tables of 40 seeds that share 20 examples."""
    rule, generator = Bound(limit=1.0, margin=0.1, side="upper", over_examples=True), np.random.default_rng(0)
    verdicts = {True: 0, False: 0}
    for table in (invent(rule, 0.0, generator, 40) for _ in range(500)):
        for over_examples in verdicts:
            found = judge_part(rule.model_copy(update={"over_examples": over_examples}), table)
            verdicts[over_examples] += found.verdict == "supported"
    assert verdicts[True] <= 0.046 * 500  # 2.5 % plus three standard deviations
    assert verdicts[False] >= 0.1 * 500


PLANS = ((24,), (6, 24), (6, 12, 24, 48))


@pytest.mark.parametrize("planned", PLANS, ids=str)
def test_several_looks_err_no_more_often_than_one(planned: tuple[int, ...]) -> None:
    """At the edge of the range, false verdicts of 20,000 tables stay below 2.5 %, plus two standard deviations of 0.2
    %.

    At the centre, with a standard deviation of 1.5 margins, looks at 6 and 24 seeds decide in 72 % of the cases, and
    one look at 24 seeds in 76 %.
    """
    tables, look = 20_000, look_of(Equality(value=0.0, margin=1.0), planned=planned)
    levels = [look.at(stage).level for stage in range(len(planned))]
    assert sum(levels) == pytest.approx(0.05)
    rates = {}
    for truth in (1.0, 0.0):
        draws = truth + 1.5 * np.random.default_rng(0).standard_normal((tables, planned[-1]))
        verdicts = np.zeros(tables)  # 1 supported, −1 refuted
        for size, level in zip(planned, levels, strict=True):
            mean, sd = draws[:, :size].mean(1), draws[:, :size].std(1, ddof=1)
            reach = student(size - 1, 1 - level / 2) * sd / math.sqrt(size)
            inside, outside = np.abs(mean) + reach <= 1, np.abs(mean) - reach >= 1
            verdicts += (verdicts == 0) * (inside * 1.0 - outside)
        rates[truth] = [(verdicts == word).mean() for word in (1, -1)]
    assert max(rates[1.0]) <= 0.025 + 0.002
    if planned[-1] == 24:
        assert rates[0.0][0] == pytest.approx(0.76 if planned == (24,) else 0.72, abs=0.01)


def test_claims_that_are_looked_at_until_they_are_supported_pay_for_it() -> None:
    """Five claims are at the edge of their range. Each is looked at with fresh seeds until the main look supports it,
    six times at most, and the second look lies inside the range. The rate of families with a false verdict after
    Holm's correction stays below 5 %, plus two standard deviations of 300 families.
    """
    generator, families = np.random.default_rng(0), 300
    wrong = {"all looks": 0, "claims alone": 0}
    for _ in range(families):
        records: list[Any] = []
        further = {}
        for name in ("a", "b", "c", "d", "e"):
            for looks in range(6):
                further[name] = looks
                figures = 1 + 0.4 * generator.standard_normal(5)
                found = judge_interval(Interval(mean_of(figures.tolist()), Expected(0.0, 1.0, "upper")))
                if found.verdict == "supported":
                    break
            supported = found.verdict == "supported"
            verdict, p = ("supported", found.p) if supported else ("not replicated", 1.0)
            records.append(SimpleNamespace(verdict=verdict, p=p, size="default", identity=False))
        for family, counted in (("all looks", further), ("claims alone", {})):
            wrong[family] += True in standing_verdicts(records, ClaimFamily(5, counted))
    assert wrong["all looks"] <= (0.05 + 0.026) * families
    assert wrong["claims alone"] > (0.05 + 0.026) * families


@pytest.mark.parametrize("spread", [0.5, 1.5, 3.0])
def test_a_planned_look_continues_until_it_is_decided(spread: float) -> None:
    look = look_of(Equality(value=0.0, margin=1.0), planned=(6, 24)).at(0)
    values = spread * np.random.default_rng(1).standard_normal(24)
    table = pd.DataFrame({"seed": range(24), "value": values, "quantity": 0})
    for size, level in ((6, 0.01), (24, 0.04)):
        assert look.seeds_now == tuple(range(size))
        assert look.level == pytest.approx(level)
        found = judge_table(look, table[:size])
        low, high = found.low, found.high
        reach = student(size - 1, 1 - level / 2) * values[:size].std(ddof=1) / math.sqrt(size)
        assert (high - low) / 2 == pytest.approx(reach)
        assert found.verdict == ("supported" if low >= -1 and high <= 1 else "undecided")
        assert found.p is None or found.p <= ONE_SIDED_LEVEL
        assert f"{size} of 24 seeds" in found.note
        if found.verdict == "supported":
            assert look.after(found.verdict) is look
            break
        look = look.after(found.verdict)
    assert look.at(1).after("undecided").stage == 1


@pytest.mark.parametrize("value", np.linspace(-1.5, 1.5, 13).tolist())
@pytest.mark.parametrize("bound", [None, "upper", "lower"])
def test_the_verdict_is_that_of_the_interval(value: float, bound: None) -> None:
    estimate, expected = Estimate(value, error=0.1, freedom=4), Expected(0.0, 0.5, bound)
    found = judge_interval(Interval(estimate, expected))
    inside = expected.low <= estimate.low and estimate.high <= expected.high
    outside = estimate.low > expected.high or estimate.high < expected.low
    assert found.verdict == ("supported" if inside else "refuted" if outside else "undecided")
    assert found.p is None or found.p <= ONE_SIDED_LEVEL


def test_all_parts_must_hold_and_one_refutes() -> None:
    refuted, open_ = replace(ONE, verdict="refuted", p=0.001), replace(ONE, verdict="undecided", p=None)
    assert join_parts([ONE, replace(ONE, p=0.02)]) == replace(ONE, p=0.02, part=1)
    assert join_parts([ONE, open_]).verdict == "undecided"
    assert join_parts([open_, refuted]).verdict == "refuted"
    assert join_parts([open_, refuted]).p == pytest.approx(0.002)
    assert join_parts([ONE, replace(refuted, p=0.02)]).verdict == "undecided"  # Holm's correction for two parts
    exact = replace(refuted, p=None)
    below = replace(refuted, verdict="below minimum", p=1e-6)
    assert [join_parts(parts).verdict for parts in ([below, ONE], [below, refuted])] == ["below minimum", "refuted"]
    decided = ([ONE, ONE], [open_, refuted], [ONE, open_], [refuted, open_], [refuted, exact])
    assert [join_parts(parts).part for parts in decided] == [0, 1, 1, 0, 1]


def test_the_shown_figure_has_the_shown_p() -> None:
    """The largest p of supported parts, m times the smallest p of refuted parts."""
    parts = [replace(ONE, figure=float(k), p=p) for k, p in enumerate((0.002, 0.02, 0.001))]
    assert (join_parts(parts).figure, join_parts(parts).p) == (1.0, 0.02)
    refuted = [replace(part, verdict="refuted") for part in parts]
    assert join_parts(refuted).figure == 2.0
    assert join_parts(refuted).p == pytest.approx(0.003)


@pytest.mark.parametrize(
    ("origin", "figure", "verdict"),
    [
        ("minimum", 0.05, "below minimum"),  # the interval excludes 0 and the minimum 0.1
        ("minimum", 0.0, "refuted"),  # there is no direction
        ("minimum", -0.05, "refuted"),
        ("source", 0.05, "refuted"),  # the paper says 0.1
        ("minimum", 0.1, "undecided"),
        ("minimum", 0.2, "supported"),
    ],
)
def test_a_direction_below_the_minimum_is_neither_support_nor_refutation(
    origin: str, figure: float, verdict: str
) -> None:
    rows = rows_of([figure + spread for spread in (-0.01, 0.0, 0.01, 0.0)], seed=[0, 1, 2, 3])
    for side, sign in (("lower", 1), ("upper", -1)):
        rule = Bound(limit=0.1 * sign, side=side, margin=0)
        look = Look({}, None, (0, 1, 2, 3), Column(column="x"), (rule,), (0.0,), ({origin: "a reason"},))
        found = judge_table(look, rows.assign(value=sign * rows["value"]))
        assert found.verdict == verdict
        assert ("direction significant, size below" in found.note) == (verdict == "below minimum")


@pytest.mark.parametrize("nulls", [(), (None,)], ids=str)
def test_a_rule_whose_null_is_not_named_has_its_own(nulls: tuple[float | None, ...]) -> None:
    rule = Order(along="kind", above="a", below="b", margin=0.1)
    look = Look({}, None, (0, 1), Column(column="x"), (rule,), nulls, ({"minimum": "a reason"},))
    assert look.direction_null(0) == rule.null == 0


def test_a_missing_number_has_its_reason() -> None:
    rows = rows_of([0.4, math.nan, 0.6], seed=[0, 1, 2], reason=["", "all points are pinned", ""])
    found = judge_part(Bound(limit=1, side="upper", margin=0), rows)
    assert (found.verdict, found.note) == ("undecided", "1 of 3 rows have no number: all points are pinned")


@pytest.mark.parametrize(
    ("rule", "verdict"),
    [
        (Bound(limit=1, side="upper", margin=0, censored="below"), "supported"),
        (Bound(limit=0.1, side="upper", margin=0, censored="below"), "undecided"),  # the true values are lower
        (Bound(limit=1, side="upper", margin=0, censored="above"), "undecided"),
        (Bound(limit=0.1, side="lower", margin=0, censored="above"), "supported"),
        (Equality(value=0.5, margin=0.5, censored="below"), "undecided"),
        (Bound(limit=1, side="upper", margin=0), "undecided"),  # not declared: no number
    ],
)
def test_a_censored_value_counts_at_its_bound_if_the_verdict_is_safe(rule: AbstractExpectation, verdict: str) -> None:
    rows = rows_of([0.4, 0.5, 0.6, 0.5], seed=[0, 1, 2, 3], censored=[0, 1, 0, 0])
    assert judge_part(rule, rows).verdict == verdict
    assert judge_part(rule, rows.assign(censored=0)).verdict != "undecided"


def rows_of(value: Sequence[float], **columns: Sequence[object]) -> pd.DataFrame:
    return pd.DataFrame({**columns, "value": value})


SIDES: dict[str, Sequence[object]] = {"rule": ["a"] * 4 + ["b"] * 4, "seed": [0, 1, 2, 3] * 2}
SHARED = [1.0, 10.0, 100.0, 1000.0]
ORDER = Order(along="rule", above="a", below="b", margin=0.0)
RATIO = Order(along="rule", above="a", below="b", margin=0.0, scale="log")
BARELY = 2.0**-40
ERRORS = rows_of([1e-9, -1e-9], seed=[0, 1], bound=[1e-8, 1e-10])
DEVIATIONS = rows_of([1.2, 0.8, 1.0] * 4, width=[4, 8, 16] * 4, seed=sorted([*range(4)] * 3))
EQUAL = Equality(value=1.0, margin=0.05)
PEAKS = rows_of([1.0, 2.0, 3.0, 1.0, 3.0, 1.0], width=[1, 2, 4] * 2, seed=[0] * 3 + [1] * 3)
LINES = rows_of([1.0] * 4, width=[1, 1, 2, 2], seed=[0] * 4, depth=[1, 2, 1, 2])
FLAT = Slope(along="width", value=0.0, margin=0.1)

CHECK_CACHES: list[tuple[AbstractExpectation, pd.DataFrame, str, float, str]] = [
    # An error above its own bound refutes an identity.
    (Identity(), ERRORS, "refuted", 1e-9, "1 of 2 errors exceed their bounds"),
    (Identity(), ERRORS[:1], "supported", 1e-9, ""),
    # Pairs cancel what seeds share.
    (
        RATIO.model_copy(update={"margin": 0.5}),
        rows_of([2 * x for x in SHARED] + SHARED, **SIDES),
        "supported",
        2.0,
        "",
    ),
    # Equal figures are not larger, and without any spread the interval is the difference itself.
    *(
        (order, rows_of([1.0 + beyond] * 4 + [1.0] * 4, **SIDES), verdict, one + beyond, "")
        for order, one in ((ORDER, 0.0), (RATIO, 1.0))
        for beyond, verdict in ((0.0, "refuted"), (BARELY, "supported"), (-BARELY, "refuted"))
    ),
    (ORDER, rows_of([1.5, 0.5, 1.5, 0.5] + [1.0] * 4, **SIDES), "undecided", 0.0, ""),
    # Opposite deviations do not cancel if each level is judged.
    (EQUAL, DEVIATIONS, "supported", 1.0, ""),
    (EQUAL.model_copy(update={"each": ("width",)}), DEVIATIONS, "refuted", 1.2, "fails at width=4, holds at width=16"),
    # An extreme at an end is not located.
    (
        Location(along="width", value=2.0, margin=0.1),
        PEAKS,
        "undecided",
        2.0,
        "there is no interval; 1 of 2 seeds have it at an end of the axis",
    ),
    # Nor is one that an end reaches too, on either side.
    *(
        (
            Location(along="width", value=2.0, margin=0.1),
            rows_of([*curve, 1.0, 3.0, 1.0], width=[1, 2, 4] * 2, seed=[0] * 3 + [1] * 3),
            "undecided",
            2.0,
            "there is no interval; 1 of 2 seeds have it at an end of the axis",
        )
        for curve in ([1.0, 3.0, 3.0], [3.0, 3.0, 1.0])
    ),
]


@pytest.mark.parametrize(("rule", "rows", "verdict", "figure", "note"), CHECK_CACHES)
def test_rules_find_what_is_known(
    rule: AbstractExpectation, rows: pd.DataFrame, verdict: str, figure: float, note: str
) -> None:
    found = judge_part(rule, rows)
    assert found.verdict == verdict
    assert found.figure == pytest.approx(figure, rel=1e-12, abs=1e-15)  # a logarithm and its exponential
    assert note in found.note if verdict == "undecided" else note == found.note


SHARES = Bound(limit=0.5, side="lower", margin=0, within=(0, 1))
MISTAKES: list[tuple[AbstractExpectation, pd.DataFrame, str]] = [
    (EQUAL.model_copy(update={"each": ("widht",)}), DEVIATIONS, "each: the table has no column widht"),
    (SHARES, rows_of([0.9, 0.95, 1.2], seed=[0, 1, 2]), r"within=\[0.0, 1.0\]: the figure of a seed is 1.2"),
    (RATIO, rows_of(SHARED * 2, **SIDES)[:6], "have no pair"),
    (
        RATIO.model_copy(update={"over_examples": True}),
        rows_of(SHARED * 2, **SIDES),
        "over_examples: .* column example",
    ),
    (FLAT, LINES, "choose a curve by `where`"),
    (FLAT, LINES[:3:2].assign(width=[0, 2]), "along=width: a power law needs positions above 0, and there is 0;"),
    (FLAT.model_copy(update={"where": {"depth": 3}}), LINES, "where: no row has depth=3; there are 1, 2"),
]


@pytest.mark.parametrize(("rule", "rows", "message"), MISTAKES, ids=lambda case: case if isinstance(case, str) else "")
def test_rows_that_do_not_fit_a_rule_are_refused(rule: AbstractExpectation, rows: pd.DataFrame, message: str) -> None:
    with pytest.raises(Mistake, match=message):
        judge_part(rule, rows)


BOTH = Bound(limit=0.5, side="lower", margin=0, over_examples=True)
PAIRED = Order(along="rule", above="a", below="b", margin=0.0, over_examples=True)


def shared_examples() -> pd.DataFrame:
    """Return numbers at two levels of `rule`, for four seeds that share 30 examples."""
    seeds, examples = (index.ravel() for index in np.indices((4, 30)))
    generator = np.random.default_rng(0)
    values = 0.7 + 0.2 * generator.standard_normal(30)[examples] + 0.1 * generator.standard_normal(120)
    above = pd.DataFrame({"rule": "a", "seed": seeds, "example": examples, "value": values})
    return pd.concat([above, above.assign(rule="b", value=0.2)], ignore_index=True)


@pytest.mark.parametrize("rule", [BOTH.model_copy(update={"where": {"rule": "a"}}), PAIRED], ids=["bound", "order"])
def test_an_interval_over_examples_is_that_of_both(rule: AbstractAverage) -> None:
    table = shared_examples()
    found = judge_part(rule, table)
    of_seeds = judge_part(rule.model_copy(update={"over_examples": False}), table)
    chosen = table[table["rule"] == "a"]
    shift = 0.2 if isinstance(rule, Order) else 0.0
    expected = two_way_mean(chosen["seed"].tolist(), chosen["example"].tolist(), (chosen["value"] - shift).tolist())
    assert found.figure == pytest.approx(of_seeds.figure, rel=1e-12)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-12)
    assert found.high - found.low > 2 * (of_seeds.high - of_seeds.low)
    assert rule.whole_words.endswith(" over seeds and examples")


def test_more_seeds_are_no_advice_for_an_interval_over_examples() -> None:
    table = shared_examples()
    table = table[table["rule"] == "a"]
    over_both = judge_part(BOTH.model_copy(update={"limit": 0.7}), table)
    assert (over_both.verdict, over_both.more, over_both.note) == ("undecided", None, "")


def test_rules_spell_and_digest_their_fields() -> None:
    assert EQUAL.model_copy(update={"each": ("width",)}).whole_words == "1 ± 0.05 at each width"
    assert {"each", "within", "over_examples"}.isdisjoint(EQUAL.fields())  # claims without them keep their digests
    assert BOTH.fields()["over_examples"] is True
    with pytest.raises(ValueError, match="the interval over examples needs means"):
        Bound(limit=0.5, side="lower", margin=0, rows="least", over_examples=True)
    with pytest.raises(ValueError, match="give the lower end, then the upper one, with scale: linear"):
        Bound(limit=0.5, side="lower", margin=0, within=(1, 0))


@pytest.mark.parametrize("seeds", [5, 20])
def test_intervals_of_shares_stay_in_range_and_err_less_often_than_students(seeds: int) -> None:
    """Shares near 1 are skewed. The rates of 20,000 intervals are known to 0.3 %."""
    figures = np.random.default_rng(0).beta(8, 1, (20_000, seeds))
    missed = dict.fromkeys((None, (0.0, 1.0)), 0)
    for shares in figures:
        student_s = Estimate(float(shares.mean()), float(shares.std(ddof=1)) / math.sqrt(seeds), seeds - 1)
        for within in missed:
            low, high = replace(student_s, within=within).interval(0.05)
            missed[within] += low > 8 / 9
            assert within is None or 0 <= low <= high <= 1
    assert missed[(0.0, 1.0)] < 0.75 * missed[None]


def test_the_part_with_the_shown_figure_comes_first() -> None:
    identity, slope, bound = SIMULATED_RULES[:3]
    look = Look({}, None, (0,), Column(column="loss"), (identity, slope, bound))
    words_of = [look.words(part).split("; ") for part in range(3)]
    assert [words[0] for words in words_of] == [part.whole_words for part in (identity, slope, bound)]
    assert all(sorted(words) == sorted(words_of[0]) for words in words_of)


def test_the_part_that_needs_most_seeds_counts() -> None:
    few, many = (replace(ONE, verdict="undecided", p=None, more=more) for more in (3, 50))
    assert join_parts([few, ONE, many]).more == 50
    assert join_parts([many, replace(few, more=None)]).more is None  # no number of seeds decides
    edge = judge_interval(Interval(Estimate(0.5, error=0.1, freedom=4), Expected(0.0, 0.5)))
    assert (edge.verdict, edge.more) == ("undecided", None)
    assert "1000 seeds would not settle it" in edge.note


@pytest.mark.parametrize("rule", SIMULATED_RULES, ids=lambda rule: rule.whole_words)
def test_a_number_that_is_missing_decides_nothing(rule: Slope) -> None:
    table = invent(rule, -1.0, np.random.default_rng(0))
    table.loc[0, "value"] = np.nan
    found = judge_part(rule, table)
    assert found.verdict == "undecided"
    assert "1 of" in found.note


def test_a_claim_of_a_trial_is_judged_and_kept(tmp_path: Path) -> None:
    record = judged(planned(OF_LINES, tmp_path))
    assert {name: look.verdict for name, look in record.looks.items()} == {
        "main": "supported",
        "control": "refuted",
        "second": "supported",
    }
    assert read_claim_record(record.path) == record
    before = kept(record.path)
    for file in (tmp_path / "trials").glob("*-s0.json"):
        file.write_text("damaged")  # carried out again
    assert claim_records(tmp_path) == [judged(planned(OF_LINES, tmp_path))]
    assert kept(record.path) == before


def test_no_record_stands_beside_tables_of_another_stage(tmp_path: Path) -> None:
    """A kill may come after any file. Here the table of the second look cannot be written."""
    staged = OF_LINES | {"looks": [2, 4]}
    made = composer(None, ["tests"])
    claim = claim_of("tiny", staged, made.builder)
    first = claim.with_looks({name: look.at(0) for name, look in claim.looks.items()})
    record = judged(plan_claim(first, made, tmp_path, ("tests",)))
    assert claim_records(tmp_path) == [record]
    (record.path / "second.csv").unlink()
    (record.path / "second.csv").mkdir()
    with pytest.raises(IsADirectoryError):
        judged(plan_claim(claim, made, tmp_path, ("tests",)))
    assert claim_records(tmp_path) == []


def test_minutes_are_cpu_time(tmp_path: Path) -> None:
    """Each trial works for 0.75 s, in 30 s of wall time."""
    found = planned(OF_LINES, tmp_path)
    assert judged(found).cpu_minutes > 0
    for trial in found.trials:
        write_timings(trial.timings, {"trial": Seconds(wall=30.0, processor=0.75)})
    record = judged(found)
    assert record.cpu_minutes == len(found.trials) * 0.75 / 60
    assert record.json_fields["cpu_minutes"] == record.cpu_minutes
    looks = [record.minutes_of(name) for name in found.looks]  # the control uses the trials of the claim
    assert looks == [len(look.trials) * 0.75 / 60 for look in found.looks.values()]
    assert f" {record.cpu_minutes:.1f}" in format_claims([record])
    found.trials[0].timings.unlink()
    uncounted = judged(found)
    assert math.isnan(uncounted.cpu_minutes)
    assert format_claims([uncounted]).rstrip().endswith("–")


def test_children_count_as_work(monkeypatch: pytest.MonkeyPatch) -> None:
    children = SimpleNamespace(children_user=2.0, children_system=0.25)
    monkeypatch.setattr("os.times", lambda: children)
    monkeypatch.setattr("time.process_time", lambda: 1.0)
    assert processor_seconds() == 3.25


def test_trials_side_by_side_have_names(tmp_path: Path) -> None:
    line = {"_target_": "tests.claim.subject.Line"}
    both = {"_target_": "ntkexp.claim.trial.SideBySide", "names": ["falls", "rises"]}
    slope = OF_LINES["expectation"]
    record = judged(
        planned(
            OF_LINES
            | {
                "trial": {**both, "trials": [line, line | {"slope": 1.0}]},
                "expectation": [slope | {"where": {"runs": "falls"}}, slope | {"where": {"runs": "rises"}, "value": 1}],
                "control": {"trial": {"trials": [line | {"slope": 0.0}] * 2}},
                "second": {"trial": {"names": ["rises", "falls"]}},
            },
            tmp_path,
        )
    )
    assert {name: look.verdict for name, look in record.looks.items()} == {
        "main": "supported",
        "control": "refuted",
        "second": "refuted",
    }
    with pytest.raises(Mistake, match="give each of the 2 trials a name of its own"):
        planned(OF_LINES | {"trial": {**both, "trials": [line, line], "names": ["one", "one"]}}, tmp_path)


def test_a_place_is_where_the_power_law_crosses_the_level() -> None:
    places, widths = np.array([0.25, 1.0, 2.0]), (4.0, 16.0)
    rows = [
        {"width": w, "alpha": a, "moved": 1 / (a * w**0.5), "seed": 0, "runs": "trial"} for w in widths for a in places
    ]
    table = pd.DataFrame(rows)
    found = Crossing(column="moved", along="alpha", by="width").of(Measured(table, {}))
    assert found["width"].tolist() == [4.0, 16.0]
    assert found["value"].tolist() == pytest.approx([0.5, 0.25])  # α* = width^(−1/2)
    below = Crossing(column="moved", along="alpha", by="width", level=100.0).of(Measured(table, {}))
    assert below["value"].isna().all()
    with pytest.raises(Mistake, match=r"quantity\.by: the table has no column widht; .* 'width'"):
        Crossing(column="moved", along="alpha", by="widht").of(Measured(table, {}))


def test_a_control_away_from_the_null_is_noted(tmp_path: Path) -> None:
    elsewhere = judged(planned(OF_LINES | {"null": 0, "control": {"trial": {"slope": 1.0}}}, tmp_path / "one"))
    assert "the interval misses the null, 0" in elsewhere.looks["control"].note
    at_null = judged(planned(OF_LINES | {"null": 0, "control": {"trial": {"slope": 0.0}}}, tmp_path / "two"))
    assert (at_null.looks["control"].verdict, at_null.looks["control"].note) == ("refuted", "")


class BrokenLine(Line):
    """A line, which has no number at width 4 for some seeds."""

    def rows(self, seed: int) -> Sequence[dict[str, float]]:
        return [
            row | {"height": math.nan if seed == row["width"] == 1 else row["height"]} for row in super().rows(seed)
        ]


@pytest.mark.parametrize(
    ("control", "reason"),
    [
        ({"trial": {"slope": -1.01}}, "the control is supported too"),
        ({"trial": {"_target_": f"{__name__}.BrokenLine", "slope": 0.0}}, "the control has rows without a number"),
        ({"trial": {"slope": 20.0}}, "the control is far from its null value: 20 instead of 0"),
    ],
)
def test_a_control_that_shows_nothing_blocks_the_verdict(tmp_path: Path, control: Any, reason: str) -> None:
    record = judged(planned(OF_LINES | {"null": 0, "control": control}, tmp_path))
    assert (record.main.verdict, record.main.p) == ("undecided", None)
    assert reason in record.main.note


@pytest.mark.parametrize(("top", "said"), [(3.0, ""), (1e6, "1.0e6 instead of 3")])
def test_an_extreme_far_from_its_null_blocks_the_verdict(top: float, said: str) -> None:
    """In logarithms, 1e6 is more than ten times as far from the null value 3 as the edge 1.1 of the range."""
    rule = Location(along="width", value=1.0, margin=0.1)
    widths = [top / 2, top, 2 * top]
    table = rows_of([1.0, 3.0, 1.0] * 3, width=widths * 3, seed=sorted([*range(3)] * 3))
    parts = (judge_part(rule, table),)
    control = Look({}, None, (0, 1, 2), Column(column="value"), (rule,))
    finding = replace(parts[0], parts=parts)
    assert far_from_null(finding, control, replace(control, nulls=(3.0,))) == said


def test_a_claim_without_a_control_has_two_looks(tmp_path: Path) -> None:
    record = judged(planned(OF_LINES | {"control": {"without": "It is exact by construction."}}, tmp_path))
    assert [*record.looks] == ["main", "second"]
    assert record.verdict == "supported"
    assert read_claim_record(record.path) == record


@pytest.mark.slow
def test_a_claim_of_runs_is_judged_from_their_numbers(tmp_path: Path) -> None:
    record = judged(planned(CLAIM, tmp_path))
    table = pd.read_csv(record.path / "main.csv")
    slopes = [
        np.polyfit(np.log(rows["model.width"]), np.log(rows["weights_moved"]), 1)[0]
        for _, rows in table.groupby("seed")
    ]
    assert record.main.figure == pytest.approx(np.mean(slopes))
    assert record.looks["control"].verdict != "supported"
    assert 0 < record.cpu_minutes < math.inf
    assert len(list((tmp_path / "runs").iterdir())) == 12  # two widths and two seeds for each of three looks
    assert (record.path / "picture.svg").read_text().startswith("<?xml")


def test_a_column_that_no_run_yields_is_named() -> None:
    table = pd.DataFrame({"runs": ["a"], "seed": [0], "model.width": [8], "kernel_change": [0.1]})
    measured = Measured(table, {}, ("model.width",))
    assert Column(column="kernel_change").of(measured)["value"].tolist() == [0.1]
    with pytest.raises(
        Mistake, match=r"the runs yield no kernel_chnage; they yield kernel_change; did you mean 'kernel_change'"
    ):
        Column(column="kernel_chnage").of(measured)


def test_a_seed_without_any_number_leaves_columns_of_numbers() -> None:
    jobs = [SimpleNamespace(rows=[{"kind": "a", "mean": mean}], seed=seed) for seed, mean in ((0, 1.5), (1, None))]
    stand_in: Any = SimpleNamespace(look=SimpleNamespace(trial=None), plans={}, trials=jobs, trust=())
    found = measure(stand_in, {})
    assert found.numbers == ["mean"]
    assert found.table["mean"].isna().tolist() == [False, True]


def test_columns_leave_out_numbers_that_runs_did_not_compute() -> None:
    numbers = {"gauss.query": [1.0, np.nan, np.nan, np.nan], "secant.query": [np.nan, np.nan, 2.0, 3.0]}
    table = pd.DataFrame({"runs": ["a", "a", "b", "b"], "seed": [0, 1, 0, 1], **numbers})
    found = Columns(columns=("gauss.query", "secant.query")).of(Measured(table, {}))
    assert found["quantity"].tolist() == ["gauss.query"] * 2 + ["secant.query"] * 2
    assert found["value"].isna().tolist() == [False, True, False, False]  # a requested number is missing


def test_columns_keep_the_rows_of_a_sweep_whose_runs_all_diverged() -> None:
    """Otherwise the look would be judged without this sweep, and nobody would know."""
    numbers = {"gauss.query": [0.1, 0.2, np.nan, np.nan], "secant.query": [0.1, 0.2, np.nan, np.nan]}
    head = {"runs": ["a", "a", "b", "b"], "seed": [0, 1, 0, 1], "state": "done", "reason": ""}
    measured = Measured(pd.DataFrame({**head, **numbers}), {})
    columns = Columns(columns=("gauss.query", "secant.query"))
    assert columns.of(measured)["value"].isna().sum() == 4
    look = Look({}, None, (0, 1), columns, (Identity(tolerance=1.0),))
    finding = judge_look(look, measured)[1]
    assert (finding.verdict, finding.missing) == ("undecided", 4)


def kept(folder: Path) -> dict[str, bytes]:
    """Return the files of a claim, without its timings."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.name != TIMINGS}


@pytest.mark.parametrize(("state", "verdict"), [("done", "supported"), ("failed", "undecided")])
def test_rows_of_a_trial_beside_runs_have_no_state(state: str, verdict: str) -> None:
    table = pd.DataFrame(
        {
            "runs": ["runs", "trial"],
            "state": [state, np.nan],
            "reason": ["", np.nan],
            "seed": [0, 0],
            "error": [0.0, 0.0],
        }
    )
    look = Look({}, None, (0, 1), Column(column="error"), (Identity(),))
    assert judge_look(look, Measured(table, {}))[1].verdict == verdict


# Trials of scalar functions.


def curve(**fields: Any) -> pd.DataFrame:
    return pd.DataFrame([*ScalarCurve(**fields).rows(0)]).set_index(["start", "ascended", "x"])


def test_scalar_curves_agree_with_hand_computations() -> None:
    table = curve(model=LookupTable(), delta=1.0)
    here = [table[name]["given", 0, 10] for name in ("before", "after", "kernel")]
    assert here == [32.0, pytest.approx(35.6), 1.0]
    elsewhere = table[table["place"] == "elsewhere"]
    assert (elsewhere[["moved", "kernel"]].to_numpy() == 0).all()

    # k(10, 10) = 101; the formula without the constant is off by 1 everywhere
    line = curve(model=ScalarLinear(), product=1.0, ascended=(0, 3))
    first = line.xs(0, level="ascended")
    assert [first["error"].min(), first["error"].max()] == pytest.approx([1 / 101, 1 / 101])
    assert line["before"]["given", 3, 10] - line["before"]["given", 0, 10] == pytest.approx(303)  # 3 k(10, 10)
    assert line.loc[("given", 0, 0), "before"] == 1.0 != line.loc[("drawn", 0, 0), "before"]
    with pytest.raises(Mistake, match=r"trial\.observed=30 is not in -10 … 20"):
        curve(model=ScalarLinear(), observed=30)


def test_the_maximum_of_a_finite_step_depends_on_its_size() -> None:
    """A small step has the maximum of the tangent kernel."""
    rows = pd.DataFrame([*FiniteStepPeaks(model=RadialBasis(), etas=(1e-6, 1.0)).rows(0)])
    given = rows[rows["start"] == "given"]
    peaks = given.dropna(subset=["eta"]).set_index("eta")["peak_at"]
    assert peaks.tolist() == [given["largest_at"].max(), given["finite_largest_at"].max()]
    assert peaks[1e-6] != peaks[1.0]


@pytest.mark.parametrize(("column", "order"), [("error", 1), ("centred_error", 2)])
def test_orders_of_finite_steps(column: str, order: int) -> None:
    """Half the step divides an error by 2^order, up to terms of the next order."""
    trial = FiniteSteps(
        model=RadialBasis(),
        init=Standard(W_std=1.0, b_std=0.0),
        data=Integers(),
        step_sizes=(0.02, 0.01),
        points=31,
        observed=1,
        scatter=0.1,
    )
    errors = pd.DataFrame([*trial.rows(0)])[column]
    assert errors[0] / errors[1] == pytest.approx(2**order, rel=0.02)
