"""Loops of processes that train together, as users write them. Tests read their traces and messages."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ntkexp.foreign_loop.follow import follow
from ntkexp.mistake import Mistake

WORLD, EXAMPLES, BATCH = 2, 14, 5
Scene: TypeAlias = Callable[[int, Path], object]


def network() -> nn.Sequential:
    """Return a network with frozen statistics, and with buffers that processes synchronise."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()
    net[1].eval()
    return net


def data() -> tuple[Tensor, Tensor, Tensor]:
    """Return examples, their targets, and queries."""
    generator = torch.Generator().manual_seed(1)
    x, queries = (torch.randn(count, 3, generator=generator).double() for count in (EXAMPLES, 3))
    return x, x[:, :2].sin(), queries


def batches(rank: int) -> Iterator[Tensor]:
    """Yield the examples of a rank in two epochs. The last batches are smaller, and differ in size."""
    for epoch in range(2):
        order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(epoch))
        yield from (each.tensor_split(WORLD)[rank] for each in torch.split(order, BATCH))


def accumulated(rank: int, folder: Path) -> None:
    """Accumulate and clip gradients, with a schedule. Follow the wrapped module."""
    x, y, queries = data()
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    before = model.module(queries).detach()
    with follow(model.module, optimizer, queries=queries, to=folder, every=4):
        for batch in batches(rank):
            optimizer.zero_grad()
            *most, last = torch.split(batch, 1)
            for part in [*most, last]:
                with nullcontext() if part is last else model.no_sync():
                    ((model(x[part]) - y[part]).square().sum() / len(batch)).backward()
            clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            schedule.step()
    keep_change(rank, folder, model.module(queries) - before)


def keep_change(rank: int, folder: Path, change: Tensor) -> None:
    """Save the change by training, for the tests."""
    if not rank:
        torch.save(change.detach(), folder.with_suffix(".pt"))


def plain(rank: int, folder: Path, steps: int = 6, in_step: Callable[[int], object] = lambda _: None) -> None:
    """Follow the wrapper of the model. `in_step` is called before each step of the optimizer."""
    x, y, queries = data()
    model = DistributedDataParallel(network(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = model.module(queries).detach()
    with follow(model, optimizer, queries=queries, to=folder):
        for index, batch in zip(range(steps), batches(rank), strict=False):
            optimizer.zero_grad()
            (model(x[batch]) - y[batch]).square().mean().backward()
            in_step(index)
            optimizer.step()
    keep_change(rank, folder, model.module(queries) - before)


def joined(rank: int, folder: Path) -> None:
    """Train with fewer batches in the second process."""
    x, y, queries = data()
    model = DistributedDataParallel(network(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with follow(model, optimizer, queries=queries, to=folder), model.join():
        for batch in list(batches(rank))[: 6 - 2 * rank]:
            optimizer.zero_grad()
            (model(x[batch]) - y[batch]).square().mean().backward()
            optimizer.step()


def compressed(rank: int, folder: Path) -> None:
    """Send gradients in float16."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook  # noqa: PLC0415  it warns

    x, y, queries = data()
    model = DistributedDataParallel(network())
    model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with follow(model, optimizer, queries=queries, to=folder):
        (model(x[rank::2]) - y[rank::2]).square().mean().backward()
        optimizer.step()


def absent(rank: int, folder: Path) -> None:
    """Follow the loop in the first process only."""
    x, _, queries = data()
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nullcontext() if rank else follow(model, optimizer, queries=queries, to=folder):
        model(x[:3]).square().mean().backward()
        optimizer.step()


def sharded_weights(_: int, folder: Path) -> None:
    """Shard weights over the processes."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  slow

    net = network()
    fully_shard(net)
    with follow(net, torch.optim.SGD(net.parameters()), queries=data()[2], to=folder):
        pass


def sharded_state(_: int, folder: Path) -> None:
    """Shard the state of the optimizer over the processes."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415  it warns

    net = network()
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    with follow(DistributedDataParallel(net), optimizer, queries=data()[2], to=folder):
        pass


SCENES: tuple[Scene, ...] = (accumulated, plain, joined, compressed, absent, sharded_weights, sharded_state)


def meet(rank: int, folder: Path) -> None:
    """Join the group of processes."""
    torch.set_num_threads(1)
    init_process_group("gloo", f"file://{folder / 'meeting'}", rank=rank, world_size=WORLD)


def play(rank: int, folder: Path) -> None:
    """Play all scenes, and write refusals into files."""
    meet(rank, folder)
    for scene in SCENES:
        try:
            scene(rank, folder / scene.__name__)
        except Mistake as error:
            (folder / f"{scene.__name__}-{rank}.txt").write_text(str(error), encoding="utf-8")
    destroy_process_group()
    # A thread of gloo outlives the group of a wrapped model; one that frees a tensor while Python ends aborts.
    os._exit(0)


def die(rank: int, folder: Path) -> None:
    """Kill the second process in its fifth step."""

    def kill_the_second(step: int) -> None:
        if step == 4 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    meet(rank, folder)
    plain(rank, folder / "killed", in_step=kill_the_second)
