"""What claims measure of a path, on a run of two examples that is written down by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from ntkexp.claim.papers import PathFact, StoredExamples, TimeShare, WeightRank
from ntkexp.claim.quantity import AbstractQuantity, Column, Measured, Together
from ntkexp.mistake import Mistake
from ntkexp.report.run import Run

PARTS = np.array([[3.0, -1.0], [1.0, -2.0], [0.5, 0.25], [4.0, -1.0]])[:, None]
"""𝒮 of the points: two training examples, two probes."""

KERNEL = np.array([[4.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 0.5]])[:, None, :, None]


def run_of(parts: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = PARTS) -> Run:
    """A run whose stores are in memory."""
    metrics = pd.DataFrame({"step": [0, 1, 2], "time": [0.0, 1.0, 3.0], "loss": [2.0, 1.5, 1.0]})
    metrics["step_size"], metrics["contribution_mass"] = [1.0, 2.0, np.nan], [3.0, 1.0, np.nan]
    run = Run(Path("run"), {"path": {"probes": ["train", "probe"]}}, metrics, ())
    dims = ("probe", "out", "example")
    gradient = np.array([[1.0, 0.5], [1.0, 0.5], [0.0, 0.5]])[..., None]
    vars(run).update(
        contributions=xr.Dataset({"contribution": (dims, parts, {"rule": "secant", "error_bar": 1e-3})}),
        kernels=xr.Dataset(
            {
                "path_secant": (("probe", "out", "train", "out_"), KERNEL),
                "output_gradient": (("snapshot", "train", "out_"), gradient),
                "step": ("snapshot", np.array([0, 1, 2])),
            }
        ),
        predictions=xr.DataArray(
            np.array([[1.0, -1.0, 1.0, -1.0]])[..., None],
            dims=("machine", "probe", "out"),
            coords={"machine": ["f_T"]},
        ),
        data={
            "classes": np.array(["a", "b"]),
            "train_index": np.arange(2),
            "probe_index": np.arange(2),
            "train_inputs": np.array([[0.0], [1.0]]),
            "probe_inputs": np.array([[0.1], [0.9]]),
            "train_targets": np.array([[1.0], [-1.0]]),
        },
    )
    return run


def values(quantity: AbstractQuantity, run: Run) -> pd.DataFrame:
    table = pd.DataFrame({"runs": ["runs"], "run": ["run"], "seed": [0], "drift": [0.5]})
    return quantity.of(Measured(table, {"run": run}))


def test_a_fact_of_the_path() -> None:
    assert values(PathFact(fact="error_bar"), run_of())["value"].tolist() == [1e-3]
    with pytest.raises(Mistake, match=r"quantity\.fact=error_bra: a path has error_bar; did you mean"):
        values(PathFact(fact="error_bra"), run_of())


def test_a_rule_that_was_not_read_has_no_number() -> None:
    assert values(PathFact(fact="error_bar", rule="left"), run_of())["value"].isna().all()


def test_tenths_of_the_time() -> None:
    """Three quarters of the mass in the first third: 3/4 · 3/10 of it in each of the first three tenths."""
    shares = values(TimeShare(), run_of()).set_index("tenth")["value"]
    assert shares[[1, 3]].tolist() == pytest.approx([0.225, 0.225])
    assert shares[10] == pytest.approx(0.25 / (20 / 3))
    assert shares.sum() == pytest.approx(1)


def test_coefficients_are_ranked_beside_the_misfit() -> None:
    """Means of |𝒮/𝒦| over the probes are 5/4 and 9/8; ∫|ℓ′| is 2 and 1.5: both rank the first example higher."""
    assert values(WeightRank(), run_of())["value"].tolist() == [1.0]
    assert values(WeightRank(lag=1), run_of())["value"].tolist() == [-1.0]


def test_stored_examples() -> None:
    """The largest contributor to both probes is the first, with label +; predicted are + and −."""
    quantity = StoredExamples(
        shares=("same_class", "nearest_input", "nearest_kernel", "same_example", "top_share", "chance"), top=1
    )
    found = values(quantity, run_of()).set_index("quantity")["value"].to_dict()
    assert found == {
        "same_class": 0.5,
        "nearest_input": 1.0,
        "nearest_kernel": 0.0,  # 1/√4 against 1/√1, and 2/√4 against 0.5/√1
        "same_example": 0.0,
        "top_share": pytest.approx((2 / 3 + 4 / 5) / 2),
        "chance": 0.5,
    }


def test_several_outputs_are_refused() -> None:
    two = run_of()  # of which one was read
    vars(two)["predictions"] = two.predictions.isel(out=[0, 0])
    for quantity in (StoredExamples(), WeightRank()):
        with pytest.raises(Mistake, match="run has 2 outputs"):
            values(quantity, two)


def test_several_quantities_keep_their_names() -> None:
    both = Together(names=("a", "b"), parts=(PathFact(fact="error_bar"), Column(column="drift")))
    assert values(both, run_of()).set_index("quantity")["value"].to_dict() == {"a": 1e-3, "b": 0.5}


def test_names_are_each_its_own() -> None:
    with pytest.raises(ValueError, match="give each of the 1 parts a name of its own"):
        Together(names=("a", "b"), parts=(Column(column="drift"),))
