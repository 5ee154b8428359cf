"""The path kernel machine of Domingos: f̂(x) = f_0(x) + Σᵢ 𝒮(x, xᵢ) + 𝒟(x), coefficients that depend on the query x.

With 𝒮 by secants it is the trained network, to rounding; from left ends it is the published sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import final

from ntkexp.chapter import option
from ntkexp.machine.base import AbstractMachine, Prediction
from ntkexp.machine.evidence import DoesNotApply, Evidence
from ntkexp.on_disk import summed
from ntkexp.text import percent, short


class AbstractPathSum(AbstractMachine):
    """The sum by the rule whose name it has."""

    @final
    def predict(self, evidence: Evidence) -> Prediction:
        return path_sum(self.option, evidence)


def path_sum(rule: str, evidence: Evidence) -> Prediction:
    """The sum by a rule, if the path was integrated by it."""
    if rule not in evidence.paths:
        if evidence.training.is_flow:
            raise DoesNotApply("a flow has no finite steps; its path is integrated over time, by gauss")
        raise DoesNotApply(f"not accumulated: add {rule} to path.rule")
    path = evidence.paths[rule]
    change = summed(path.contributions) + path.decay
    return Prediction(evidence.after(change), path.detail, parts(path.facts), partial=True)


def without_machine(rules: Iterable[str]) -> list[str]:
    """The rules that no machine of this chapter, or of elsewhere, goes by.

    >>> without_machine(["secant", "my_rule"])
    ['my_rule']
    """
    named = {option(kind.__name__) for kind in AbstractPathSum.__subclasses__()}
    return [rule for rule in rules if rule not in named]


class Secant(AbstractPathSum):
    """The sum by secants, which is exact."""


class Gauss(AbstractPathSum):
    """The sum by Gauss nodes."""


class Left(AbstractPathSum):
    """The textbook's sum, by the left ends of the steps."""


def parts(facts: Mapping[str, float]) -> str:
    """How well the single contributions are known, though their sum may be exact.

    >>> parts({"cancellation": 20.3, "error_bar": 1.2e-4})
    'its parts exceed their sum 20.3-fold and are known to 1e-4'
    >>> parts({"cancellation": 3.0, "top_10": 0.5, "decay_share": 0.125})
    'its parts exceed their sum 3-fold, 50 % from the 10 largest; decay moved the outputs by 0.125 of what training did'
    >>> parts({"cancellation": 20.3, "error_bar": 3e-3, "sum_error_bar": 0.0067})
    'its parts exceed their sum 20.3-fold and are known to 0.003, their sum to 0.0067 by its own estimate'
    >>> parts({"cancellation": 3.0, "error_bar": float("nan")})
    'its parts exceed their sum 3-fold'
    """
    facts = {name: fact for name, fact in facts.items() if isfinite(fact)}
    if "cancellation" not in facts:
        return ""
    said = f"its parts exceed their sum {short(facts['cancellation'])}-fold"
    if "error_bar" in facts:
        said += f" and are known to {short(facts['error_bar'])}"
    if "top_10" in facts:
        said += f", {percent(facts['top_10'])} from the 10 largest"
    if "sum_error_bar" in facts:
        said += f", their sum to {short(facts['sum_error_bar'])} by its own estimate"
    if "flow_error" in facts:
        said += f"; the flow itself is followed to {short(facts['flow_error'])} of its way"
    if "decay_share" in facts:
        said += f"; decay moved the outputs by {short(facts['decay_share'])} of what training did"
    return said
