"""Run by an interpreter that has traker: TRAK of training examples, as what leaving one out does to outputs.

The output is the margin yf, of which ½(f − y)² = ½(1 − yf)² has the slope −(1 − yf); a point that is read has y = 1.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


def main(asked: str, answer: str) -> None:
    """Answer case by case."""
    cases = torch.load(asked, weights_only=False)
    scores(cases[0])  # so that what is imported late is there
    torch.save([scores(case) for case in cases], answer)


def scores(case: Mapping[str, Any]) -> dict[str, tuple[Tensor, float]]:
    """TRAK, [point, train], with its seconds."""
    torch.set_num_threads(case["threads"])
    start = time.process_time()
    told = trak(case)
    return {"TRAK": (told, time.process_time() - start)}


def trak(case: Mapping[str, Any]) -> Tensor:
    """Scores that average over several trainings; the library keeps its numbers in float32."""
    from trak import TRAKer  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415  of another environment

    network, ends, train = case["network"], case["ends"], (case["inputs"], case["targets"])
    read = (case["read"], torch.ones(len(case["read"]), 1).to(case["targets"]))
    with tempfile.TemporaryDirectory() as place:
        traker = TRAKer(
            model=network,
            task=margin_task(),
            train_set_size=len(train[0]),
            save_dir=place,
            device="cpu",
            proj_dim=case["dimension"],
            use_half_precision=False,
            logging_level=logging.ERROR,
        )
        for number, end in enumerate(ends):
            traker.load_checkpoint(end, model_id=number)
            traker.featurize(batch=train, num_samples=len(train[0]))
        traker.finalize_features()
        for number, end in enumerate(ends):
            traker.start_scoring_checkpoint("read", end, model_id=number, num_targets=len(read[0]))
            traker.score(batch=read, num_samples=len(read[0]))
        told: Tensor = torch.as_tensor(traker.finalize_scores("read")).double()
        return -told.T.clone()  # what an example does, so leaving it out does the opposite


def margin_task() -> Any:
    """The output yf, and what the loss pulls on it."""
    from trak.modelout_functions import (  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415
        AbstractModelOutput,
    )

    class Margin(AbstractModelOutput):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            pass

        @staticmethod
        def get_output(network: nn.Module, weights: Any, buffers: Any, x: Tensor, y: Tensor) -> Tensor:
            found: Tensor = functional_call(network, (weights, buffers), (x[None],))
            return found.sum() * y.sum()

        @staticmethod
        def get_out_to_loss_grad(network: nn.Module, weights: Any, buffers: Any, batch: Any) -> Tensor:
            found: Tensor = functional_call(network, (weights, buffers), (batch[0],))
            pulled: Tensor = (1 - found.flatten() * batch[1].flatten())[:, None]
            return pulled

    return Margin()


if __name__ == "__main__":
    main(*sys.argv[1:])
