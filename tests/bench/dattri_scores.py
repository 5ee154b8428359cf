"""Run by an interpreter that has dattri: its scores of training examples, each as what leaving one out does to outputs.

    TracIn, every step      TracInAttributor, a checkpoint before every step, weighted by its step size
    influence function      IFAttributorCG on the Hessian of the mean loss, with the damping that is given
    TRAK                    TRAKAttributor of the margin yf, of which ½(f − y)² = ½(1 − yf)² has the slope −(1 − yf)

Its 1 − p is the slope of the loss by the margin, so p = yf here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

Loaders: TypeAlias = tuple[DataLoader[Any], DataLoader[Any]]
ITERATIONS = (
    30  # of conjugate gradients; after 10, and after 100 of a Hessian that has negative curvature, it did worse
)


def main(asked: str, answer: str) -> None:
    """Answer case by case."""
    torch.set_default_dtype(torch.float64)  # of what it makes itself
    cases = torch.load(asked, weights_only=False)
    scores(cases[0])  # so that what is imported late is there
    torch.save([scores(case) for case in cases], answer)


def scores(case: Mapping[str, Any]) -> dict[str, tuple[Tensor, float]]:
    """Every score, [point, train], with its seconds."""
    torch.set_num_threads(case["threads"])
    ways: dict[str, Callable[[Mapping[str, Any], Loaders], Tensor]] = {
        "TracIn": tracin,
        "infl.": influence,
        "TRAK": trak,
    }
    found = {}
    for name, way in ways.items():
        start = time.process_time()
        told = way(case, loaders_of(case))
        found[name] = (told.T.detach().clone(), time.process_time() - start)
    return found


def loaders_of(case: Mapping[str, Any]) -> Loaders:
    """Training examples, and the points that are read, each all at once."""
    train = TensorDataset(case["inputs"], case["targets"])
    read = TensorDataset(case["read"], torch.ones(len(case["read"]), 1))
    return DataLoader(train, batch_size=len(train)), DataLoader(read, batch_size=len(read))


def tracin(case: Mapping[str, Any], loaders: Loaders) -> Tensor:
    from dattri.algorithm.tracin import TracInAttributor  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415  of another environment

    asked = task(case, case["checkpoints"], loss, output)
    attributor = TracInAttributor(
        asked, torch.tensor(case["sizes"]), normalized_grad=False, projector_kwargs={"proj_type": "identity"}
    )
    told: Tensor = attributor.attribute(*loaders)
    return told


def influence(case: Mapping[str, Any], loaders: Loaders) -> Tensor:
    from dattri.algorithm.influence_function import IFAttributorCG  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415  of another environment

    asked = task(case, case["ends"][:1], loss, output)
    attributor = IFAttributorCG(asked, max_iter=ITERATIONS, regularization=case["damping"])
    attributor.cache(loaders[0])
    told: Tensor = attributor.attribute(*loaders)
    return told


def trak(case: Mapping[str, Any], loaders: Loaders) -> Tensor:
    from dattri.algorithm.trak import TRAKAttributor  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415  of another environment

    network = case["network"]

    def probability(weights: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return margin(network, weights, batch)

    asked = task(case, case["ends"], margin, output)
    attributor = TRAKAttributor(asked, probability, projector_kwargs={"proj_dim": case["dimension"]})
    attributor.cache(loaders[0])
    told: Tensor = -attributor.attribute(loaders[1])  # what an example does, so leaving it out does the opposite
    return told


Of: TypeAlias = Callable[[nn.Module, dict[str, Tensor], tuple[Tensor, Tensor]], Tensor]


def task(case: Mapping[str, Any], checkpoints: list[dict[str, Tensor]], trained: Of, asked: Of) -> Any:
    """What was trained, and what is asked about."""
    from dattri.task import AttributionTask  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415  of another environment

    network = case["network"]
    return AttributionTask(
        loss_func=lambda weights, batch: trained(network, weights, batch),
        model=network,
        checkpoints=checkpoints,
        target_func=lambda weights, batch: asked(network, weights, batch),
    )


def outputs(network: nn.Module, weights: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """f and y of several examples, or of one."""
    inputs, targets = batch
    several = inputs if inputs.dim() == 4 else inputs[None]
    return functional_call(network, weights, (several,)).flatten(), targets.flatten()


def loss(network: nn.Module, weights: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean of ½(f − y)²."""
    found, targets = outputs(network, weights, batch)
    return (found - targets).square().mean() / 2


def output(network: nn.Module, weights: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """The f of one example."""
    return outputs(network, weights, batch)[0].sum()


def margin(network: nn.Module, weights: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """The yf of one example."""
    found, targets = outputs(network, weights, batch)
    return (found * targets).sum()


if __name__ == "__main__":
    main(*sys.argv[1:])
