"""The tangent kernel of a language model of the size of GPT-2's smallest (124 M weights), untrained, on texts,
exact and sketched: the output is a text's mean log-likelihood. Seconds, of a clock and of processors, the largest
memory so far, and the error bar.
"""

from __future__ import annotations

import resource
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

from ntkexp.library import tangent_kernel
from tests.bench.cell import Table


class Block(nn.Module):
    """Causal attention and a layer of four times the width, each after a norm and beside a skip."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.read, self.write = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        texts, length, width = x.shape
        parts = self.read(self.before(x)).view(texts, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.write(seen.transpose(1, 2).reshape(x.shape))
        result: Tensor = x + self.down(functional.gelu(self.up(self.between(x)), approximate="tanh"))
        return result


class Language(nn.Module):
    """GPT-2 in its smallest size, its table of words read at both ends."""

    def __init__(self, words: int, longest: int, width: int, depth: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(longest, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.blocks(self.words(x) + self.places.weight[: x.shape[1]]))
        scores = torch.log_softmax(hidden[:, :-1] @ self.words.weight.t(), dim=2)
        return scores.gather(2, x[:, 1:, None]).mean((1, 2))


def report(quick: bool = False) -> list[Table]:
    """A kernel in single precision, each way."""
    torch.manual_seed(0)
    words, texts, length = (50, 4, 6) if quick else (50257, 32, 32)
    module = Language(words, 1024, 64, 2) if quick else Language(words, 1024, 768, 12)
    x = torch.randint(words, (texts, length))
    rows = [line(module.eval(), x, size) for size in ((None, 64) if quick else (None, 1024, 8192))]
    header = ("M weights", "texts", "words", "k", "seconds", "of processors", "GB", "bar/‖K̂‖")
    return [Table("Language: a kernel of texts, exact and sketched", header, rows)]


def line(module: nn.Module, x: Tensor, size: int | None) -> list[str]:
    """One kernel, by this many dimensions."""
    start, worked = time.perf_counter(), time.process_time()
    error = ""
    if size is None:
        tangent_kernel(module, x)
    else:
        kernel, bar = tangent_kernel(module, x, sketch=size)
        error = f"{bar / float(kernel.norm()):.3f}"
    seconds, worked = time.perf_counter() - start, time.process_time() - worked
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    weights = sum(weight.numel() for weight in module.parameters()) / 1e6
    cells = [f"{weights:.1f}", *map(str, x.shape), "exact" if size is None else str(size)]
    return [*cells, f"{seconds:.0f}", f"{worked:.0f}", f"{memory:.2f}", error]
