"""Run by an interpreter that has traker: TRAK of training examples, as what leaving one out changes.

The output that it asks for is the margin m, with the slope −∂ℓ/∂m; tests/bench/attribution_asked.py has both.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tests.bench.answering import answer


def trak(case: Mapping[str, Any]) -> Tensor:
    """Scores that average over several trainings; the library keeps its numbers in float32."""
    from trak import TRAKer  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415  of another environment

    network, ends, train = case["network"], case["ends"], (case["inputs"], case["targets"])
    read = (case["read"], case["asked"].targets(case["read_targets"]))
    with tempfile.TemporaryDirectory() as place:
        traker = TRAKer(
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
            traker.load_checkpoint(end, model_id=number)
            traker.featurize(batch=train, num_samples=len(train[0]))
        traker.finalize_features()
        for number, end in enumerate(ends):
            traker.start_scoring_checkpoint("read", end, model_id=number, num_targets=len(read[0]))
            traker.score(batch=read, num_samples=len(read[0]))
        told: Tensor = torch.as_tensor(traker.finalize_scores("read")).double()
        changed: Tensor = -case["asked"].margin_raises * told.T.clone()  # what it does, so leaving it out the opposite
        return changed


def margin_task(asked: Any) -> Any:
    """The margin, and what the loss pulls on it."""
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
    answer(trak)
