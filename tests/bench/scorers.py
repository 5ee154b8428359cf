"""Scores of training examples by other programs, as the change caused by leaving an example out.

`python -m tests.bench.scorers PROGRAM` runs in the environment of the program. `tests.bench.peers` starts it:

    dattri    TracIn, every step      TracInAttributor, a checkpoint before every step, weighted by its step size
              influence function      IFAttributorCG on the Hessian of the mean loss, with the damping that is given
              TRAK                    TRAKAttributor of the margin m
    traker    TRAK                    TRAKer of the margin m; it keeps its numbers in float32

Their 1 − p is −∂ℓ/∂m for any loss ℓ; tests/bench/attribution_asked.py defines both.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

Loaders: TypeAlias = tuple[DataLoader[Any], DataLoader[Any]]
ITERATIONS = 30  # of conjugate gradients; 10 and 100 were worse
AT_ONCE = 4  # points of an influence function; the 12 points of a CNN would need 2.6 GB


def answer(score: Callable[[Mapping[str, Any]], Tensor]) -> None:
    """Answer every line of stdin. A line names the file of the question and the file of the answer."""
    for line in sys.stdin:
        asked, place = line.rstrip("\n").split("\t")
        case = torch.load(asked, weights_only=False)
        torch.set_num_threads(case["threads"])
        start = time.process_time()
        found = score(case)
        torch.save((found, time.process_time() - start), place)
        print("answered", flush=True)


def dattri(case: Mapping[str, Any]) -> Tensor:
    """Return a score of dattri, [point, train]."""
    torch.set_default_dtype(torch.float64)
    ways = {"TracIn": tracin, "infl.": influence, "TRAK": trak}
    return ways[case["score"]](case, loaders_of(case)).T.detach().clone()


def loaders_of(case: Mapping[str, Any]) -> Loaders:
    """Return loaders of the training examples and of the read points, each with one batch."""
    train = TensorDataset(case["inputs"], case["targets"])
    read = TensorDataset(case["read"], case["read_targets"])
    return DataLoader(train, batch_size=len(train)), DataLoader(read, batch_size=len(read))


def tracin(case: Mapping[str, Any], loaders: Loaders) -> Tensor:
    from dattri.algorithm.tracin import TracInAttributor  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415

    question = task(case, case["checkpoints"], loss, asked_of)
    attributor = TracInAttributor(
        question, torch.tensor(case["sizes"]), normalized_grad=False, projector_kwargs={"proj_type": "identity"}
    )
    found: Tensor = attributor.attribute(*loaders)
    return found


def influence(case: Mapping[str, Any], loaders: Loaders) -> Tensor:
    from dattri.algorithm.influence_function import IFAttributorCG  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415

    question = task(case, case["ends"][:1], loss, asked_of)
    attributor = IFAttributorCG(question, max_iter=ITERATIONS, regularization=case["damping"])
    attributor.cache(loaders[0])
    read = DataLoader(loaders[1].dataset, batch_size=AT_ONCE)
    found: Tensor = attributor.attribute(loaders[0], read)
    return found


def trak(case: Mapping[str, Any], loaders: Loaders) -> Tensor:
    from dattri.algorithm.trak import TRAKAttributor  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415

    def probability(weights: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        found: Tensor = 1 - case["asked"].pull(*outputs(case, weights, batch))
        return found

    question = task(case, case["ends"], margin, margin)
    attributor = TRAKAttributor(question, probability, projector_kwargs={"proj_dim": case["dimension"]})
    attributor.cache(loaders[0])
    inputs, targets = next(iter(loaders[1]))
    read = TensorDataset(inputs, case["asked"].targets(targets))
    found: Tensor = attributor.attribute(DataLoader(read, batch_size=len(read)))
    changed: Tensor = -case["asked"].margin_raises * found  # without the example
    return changed


Of: TypeAlias = Callable[[Mapping[str, Any], dict[str, Tensor], tuple[Tensor, Tensor]], Tensor]


def task(case: Mapping[str, Any], checkpoints: list[dict[str, Tensor]], trained: Of, asked: Of) -> Any:
    """Return a task of dattri."""
    from dattri.task import AttributionTask  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415

    return AttributionTask(
        loss_func=lambda weights, batch: trained(case, weights, batch),
        model=case["network"],
        checkpoints=checkpoints,
        target_func=lambda weights, batch: asked(case, weights, batch),
    )


def outputs(case: Mapping[str, Any], weights: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return f and y of one or several examples."""
    inputs, targets = batch
    is_single = inputs.dim() < case["inputs"].dim()
    several, wanted = (inputs[None], targets[None]) if is_single else (inputs, targets)
    found: Tensor = functional_call(case["network"], weights, (several,))
    return found, wanted


def loss(case: Mapping[str, Any], weights: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss."""
    found: Tensor = case["loss"].value(*outputs(case, weights, batch)).mean()
    return found


def asked_of(case: Mapping[str, Any], weights: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return F of one example."""
    found: Tensor = case["asked"].of(*outputs(case, weights, batch)).sum()
    return found


def margin(case: Mapping[str, Any], weights: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the margin of one example."""
    found: Tensor = case["asked"].margin(*outputs(case, weights, batch)).sum()
    return found


def traker(case: Mapping[str, Any]) -> Tensor:
    """Return a score of traker, averaged over several trainings. The library uses float32."""
    from trak import TRAKer  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415

    network, ends, train = case["network"], case["ends"], (case["inputs"], case["targets"])
    read = (case["read"], case["asked"].targets(case["read_targets"]))
    with tempfile.TemporaryDirectory() as place:
        scorer = TRAKer(
            model=network,
            task=margin_task(case["asked"]),
            train_set_size=len(train[0]),
            save_dir=place,
            device="cpu",
            proj_dim=case["dimension"],
            use_half_precision=False,
            logging_level=logging.ERROR,
        )
        for number, end in enumerate(ends):
            scorer.load_checkpoint(end, model_id=number)
            scorer.featurize(batch=train, num_samples=len(train[0]))
        scorer.finalize_features()
        for number, end in enumerate(ends):
            scorer.start_scoring_checkpoint("read", end, model_id=number, num_targets=len(read[0]))
            scorer.score(batch=read, num_samples=len(read[0]))
        found: Tensor = torch.as_tensor(scorer.finalize_scores("read")).double()
        changed: Tensor = -case["asked"].margin_raises * found.T.clone()  # without the example
        return changed


def margin_task(asked: Any) -> Any:
    """Return the margin and −∂ℓ/∂m as traker expects them."""
    from trak.modelout_functions import (  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415
        AbstractModelOutput,
    )

    class Margin(AbstractModelOutput):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            pass

        @staticmethod
        def get_output(network: nn.Module, weights: Any, buffers: Any, x: Tensor, y: Tensor) -> Tensor:
            found: Tensor = asked.margin(functional_call(network, (weights, buffers), (x[None],)), y[None]).sum()
            return found

        @staticmethod
        def get_out_to_loss_grad(network: nn.Module, weights: Any, buffers: Any, batch: Any) -> Tensor:
            found = functional_call(network, (weights, buffers), (batch[0],))
            pulled: Tensor = asked.pull(found, batch[1])[:, None]
            return pulled

    return Margin()


if __name__ == "__main__":
    answer({"dattri": dattri, "traker": traker}[sys.argv[1]])
