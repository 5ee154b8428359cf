"""Errors of the secant machine for networks × losses × optimizers.

`python -m tests.run.cells` prints the table of docs/guide.md: the largest error over losses and splits for each network
and optimizer. It needs no packages for development.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.run.small import Ran, ran

OWN = Path(__file__).with_name("own_nets.py")
NETWORKS = {
    "MLP, ReLU": ("model=mlp",),
    "CNN, max pooling": ("model=cnn", "model.pooling=max"),
    "ResNet, batch norm in evaluation": ("model=resnet", "model.norm=batch", "model.stages=2"),
    "transformer": ("model=transformer",),
    "RMS norm, rotary positions, SwiGLU": ("model=module", f"model.path={OWN}:Modern"),
    "LSTM": ("model=module", f"model.path={OWN}:Recurrent"),
    "tied embedding": ("data=modular_addition", "data.modulus=5", "model=transformer", "model.tied=true"),
}
LOSSES = ("squared", "cross_entropy", "logistic", "hinge")
OPTIMIZERS = {
    "GD": ("optimizer=gd",),
    "SGD": ("optimizer=sgd", "optimizer.batch=4"),
    "momentum": ("optimizer=momentum", "optimizer.batch=4"),
    "Nesterov": ("optimizer=nesterov", "optimizer.weight_decay=0.01"),
    "Adam": ("optimizer=adam", "optimizer.step_size=0.01"),
    "AdamW, decay, clipping": (
        *("optimizer=adamw", "optimizer.step_size=0.01", "optimizer.weight_decay=0.1"),
        *("optimizer.clip_norm=0.1", "optimizer.batch=5", "schedule=cosine"),
    ),
}
SIZES = ("data.train=6", "data.query=3", "data.test=3", "model.width=8", "steps=3")


def cell(network: str, loss: str, optimizer: str) -> Ran:
    """Return a short run with the secant machine."""
    torch.set_num_threads(1)
    chosen = (*NETWORKS[network], f"loss={loss}", *OPTIMIZERS[optimizer])
    return ran(*SIZES, *chosen, "path.rule=[secant]", "ladder.machine=[secant]", trust=[str(OWN)])


def table() -> str:
    """Return the table in Markdown."""
    lines = [f"| |{'|'.join(OPTIMIZERS)}|", f"|---{'|---' * len(OPTIMIZERS)}|"]
    for network in NETWORKS:
        errors = [
            max(row.relative_error or 0.0 for loss in LOSSES for row in cell(network, loss, optimizer).rows("secant"))
            for optimizer in OPTIMIZERS
        ]
        lines.append(f"|{network}|{'|'.join(f'{error:.0e}' for error in errors)}|")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n")
