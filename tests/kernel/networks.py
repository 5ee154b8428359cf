"""Networks in the style of libraries, each with the shape of an example."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

Maker = Callable[[], nn.Module]


class Formula(nn.Module):
    """A module that evaluates a function of the inputs and of named layers or parameters. Shapes define parameters."""

    def __init__(self, formula: Callable[..., Tensor], **parts: nn.Module | tuple[int, ...]) -> None:
        super().__init__()
        self.formula, self.order = formula, tuple(parts)
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(torch.empty(part)))

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(x, *(getattr(self, name) for name in self.order))


def drawn(module: nn.Module, size: float = 1.0, seed: int = 0) -> nn.Module:
    """Draw all weights of a module with this standard deviation, in double precision."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.double().parameters():
            weight.copy_(size * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return module


def drawn_formula(function: Callable[..., Tensor], seed: int = 0, **shapes: tuple[int, ...]) -> nn.Module:
    """Return a formula of parameters with random values."""
    return drawn(Formula(function, **shapes), seed=seed)


def own_weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach() for name, weight in module.named_parameters()}


def scaled(module: nn.Module, factor: float) -> dict[str, Tensor]:
    """Return the module's weights times a factor."""
    return {name: factor * weight for name, weight in own_weights(module).items()}


def last_state(cell: nn.Module) -> nn.Module:
    """Return a recurrent network that returns its last state."""
    return Formula(lambda x, cell: cell(x)[0][:, -1], cell=cell)


def attend(x: Tensor, norm: nn.Module, attention: nn.Module) -> Tensor:
    """Apply a layer of attention, and take the mean over positions."""
    h = norm(x)
    mixed: Tensor = attention(h, h, h, need_weights=False)[0]
    return mixed.mean(1)


def encoder(norm_first: bool, causal: bool) -> nn.Module:
    """Return a layer of a transformer. If it is causal, positions do not attend to later positions."""
    mask = nn.Transformer.generate_square_subsequent_mask(3) if causal else None
    return Formula(
        lambda x, layer: layer(x, src_mask=mask if mask is None else mask.to(x.dtype))[:, -1],
        layer=nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, norm_first=norm_first),
    )


def tied_embedding(x: Tensor, table: nn.Embedding, mix: nn.Module) -> Tensor:
    """Embed tokens (the ranks of the inputs) by a table that is also the readout."""
    hidden = torch.tanh(mix(table(x.argsort(1)))[:, :2].sum(1))
    return hidden @ table.weight.t()


def swiglu(x: Tensor, norm: nn.Module, inner: nn.Module, gate: nn.Module, outer: nn.Module) -> Tensor:
    h = norm(x)
    outputs: Tensor = outer(functional.silu(inner(h)) * gate(h))
    return outputs


def rotary(x: Tensor, pack: nn.Module, outer: nn.Module) -> Tensor:
    """Compute attention whose queries and keys are rotated by their positions."""
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.1], dtype=x.dtype)
    cos, sin = torch.cat([angle, angle], 1).cos(), torch.cat([angle, angle], 1).sin()
    q, k, v = pack(x).chunk(3, dim=-1)
    q, k = (u * cos + torch.cat([-u[..., 2:], u[..., :2]], -1) * sin for u in (q, k))
    outputs: Tensor = outer(functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, -1])
    return outputs


class LowRank(nn.Module):
    """W + ½ B A, as a parametrisation of the weight W."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.empty(2, 4)), nn.Parameter(torch.empty(5, 2))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + 0.5 * self.up @ self.down


class Standardised(nn.Conv2d):
    """A convolution whose kernels have mean zero and variance one, by batch norm of the weights."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.reshape(1, len(self.weight), -1)
        kernels = functional.batch_norm(rows, None, None, training=True, momentum=0.0, eps=1e-3)
        return functional.conv2d(x, kernels.view_as(self.weight), self.bias)


def old_weight_norm(layer: nn.Module) -> nn.Module:
    """Apply the function that torch has deprecated."""
    with catch_warnings():
        simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


def branching(x: Tensor, inner: nn.Module, outer: nn.Module) -> Tensor:
    """Apply masks, maxima and clamps."""
    z = inner(x)
    z = torch.where(z > 0.1, z * z, z - 1)
    z = torch.maximum(z, torch.tanh(z) + 0.1).clamp(-1, 2)
    outputs: Tensor = outer(z.masked_fill(z < -0.5, 0.3)) * z.amax(1, keepdim=True)
    return outputs


def batch_norm() -> nn.Module:
    """Return a batch norm with statistics other than the initial ones."""
    norm = nn.BatchNorm2d(2)
    norm.running_mean, norm.running_var = torch.tensor([0.5, -1.0]), torch.tensor([2.0, 0.3])
    return norm


def stack(*layers: nn.Module) -> nn.Module:
    """Return layers with flattened outputs."""
    return nn.Sequential(*layers, nn.Flatten())


def normed(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(layers[0], nn.Tanh(), *layers[1:])


NETWORKS: dict[str, tuple[Maker, tuple[int, ...]]] = {
    "lstm": (lambda: last_state(nn.LSTM(3, 2, batch_first=True)), (3, 3)),
    "gru": (lambda: last_state(nn.GRU(3, 2, batch_first=True)), (3, 3)),
    "rnn": (lambda: last_state(nn.RNN(3, 2, batch_first=True)), (3, 3)),
    "time first": (lambda: Formula(lambda x, cell: cell(x.transpose(0, 1))[0][-1, :, :2], cell=nn.GRU(3, 4)), (3, 3)),
    "attention": (
        lambda: Formula(attend, norm=nn.LayerNorm(4), attention=nn.MultiheadAttention(4, 2, batch_first=True)),
        (3, 4),
    ),
    "encoder, norm after": (lambda: encoder(norm_first=False, causal=False), (3, 4)),
    "encoder, norm before": (lambda: encoder(norm_first=True, causal=True), (3, 4)),
    "tied embedding": (lambda: Formula(tied_embedding, table=nn.Embedding(4, 3), mix=nn.Linear(3, 3)), (4,)),
    "swiglu": (
        lambda: Formula(swiglu, norm=nn.RMSNorm(4), inner=nn.Linear(4, 5), gate=nn.Linear(4, 5), outer=nn.Linear(5, 2)),
        (4,),
    ),
    "convolution in one dimension": (lambda: stack(nn.Conv1d(2, 2, 3, stride=2), nn.Tanh()), (2, 7)),
    "convolution in two": (
        lambda: stack(
            nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.SiLU(), nn.Conv2d(4, 1, 2, dilation=2, stride=2, bias=False)
        ),
        (2, 4, 4),
    ),
    "convolution in three": (lambda: stack(nn.Conv3d(1, 2, 2, stride=2), nn.Tanh()), (1, 2, 4, 2)),
    "circular": (lambda: stack(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.GELU()), (1, 2, 3)),
    "transposed": (
        lambda: stack(
            nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1, groups=2), nn.Tanh(), nn.AvgPool2d(4)
        ),
        (2, 2, 2),
    ),
    "transposed in one dimension": (lambda: stack(nn.ConvTranspose1d(2, 2, 3, stride=2, dilation=2)), (2, 3)),
    "batch norm of pixels": (lambda: stack(nn.Conv2d(1, 2, 2), batch_norm(), nn.ReLU()), (1, 2, 3)),
    "group norm": (lambda: stack(nn.Conv1d(1, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), nn.AvgPool1d(2)), (1, 3)),
    "max pooling": (lambda: stack(nn.Conv2d(1, 2, 2), nn.MaxPool2d(2, stride=1), nn.Tanh()), (1, 4, 4)),
    "branching": (lambda: Formula(branching, inner=nn.Linear(4, 6), outer=nn.Linear(6, 2)), (4,)),
    "rotary positions": (lambda: Formula(rotary, pack=nn.Linear(4, 12, bias=False), outer=nn.Linear(4, 2)), (3, 4)),
    "adapter beside a weight": (
        lambda: Formula(
            lambda x, base, down, up, head: head(torch.tanh(base(x) + 0.5 * up(down(x)))),
            base=nn.Linear(4, 5),
            down=nn.Linear(4, 2, bias=False),
            up=nn.Linear(2, 5, bias=False),
            head=nn.Linear(5, 2),
        ),
        (4,),
    ),
    "adapter inside a weight": (
        lambda: nn.Sequential(parametrize.register_parametrization(nn.Linear(4, 5), "weight", LowRank()), nn.Tanh()),
        (4,),
    ),
    "bilinear": (
        lambda: Formula(
            lambda x, left, right, pairs: pairs(torch.tanh(left(x)), right(x)),
            left=nn.Linear(4, 3),
            right=nn.Linear(4, 2),
            pairs=nn.Bilinear(3, 2, 3),
        ),
        (4,),
    ),
    "bilinear in the inputs": (lambda: Formula(lambda x, layer: layer(x, x), layer=nn.Bilinear(3, 3, 2)), (3,)),
    "weight norm": (lambda: normed(weight_norm(nn.Linear(4, 5)), weight_norm(nn.Linear(5, 2))), (4,)),
    "weight norm of a convolution": (lambda: normed(weight_norm(nn.Conv1d(2, 2, 2)), nn.Flatten()), (2, 3)),
    "weight norm along another axis": (lambda: normed(weight_norm(nn.Linear(4, 3), dim=1)), (4,)),
    "weight norm of everything": (lambda: normed(weight_norm(nn.Linear(4, 3), dim=-1)), (4,)),
    "standardised convolution": (lambda: stack(Standardised(2, 3, 2), nn.Tanh()), (2, 3, 3)),
    "weight norm of old": (lambda: normed(old_weight_norm(nn.Linear(4, 3))), (4,)),
    "learned slopes": (lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 2), nn.PReLU()), (3,)),
}


# Networks that move rows, depending on values.
#
# An example has four positions with three numbers. A position counts if its first number is positive, as positions of
# words count in many networks, and padding does not.


POSITIONS = 4  # of each example
COUNTED = 9  # number of positions that count in five examples


def counts(x: Tensor) -> Tensor:
    return x[..., 0] > 0


class Layers(nn.Module):
    """A hidden layer at every position, and a readout. `routed` moves rows between the two."""

    def __init__(self, routed: Callable[[Layers, Tensor], Tensor], **more: nn.Module) -> None:
        super().__init__()
        self.inner, self.outer, self.routed = nn.Linear(3, 4), nn.Linear(4, 2), routed
        for name, layer in more.items():
            setattr(self, name, layer)

    def hidden(self, x: Tensor) -> Tensor:
        """Apply the hidden layer to rows of three numbers."""
        return torch.tanh(self.inner(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.routed(self, x)


def packed(net: Layers, x: Tensor) -> Tensor:
    """Compute only the positions that count, and write their rows into a tensor of zeros."""
    mask, canvas = counts(x), x.new_zeros(*x.shape[:2], 4)
    canvas[mask] = net.hidden(x[mask])
    outputs: Tensor = net.outer(canvas.sum(1))
    return outputs


def scattered(net: Layers, x: Tensor) -> Tensor:
    """Compute `packed` by `masked_scatter`."""
    mask, canvas = counts(x)[..., None].expand(-1, -1, 4), x.new_zeros(*x.shape[:2], 4)
    outputs: Tensor = net.outer(canvas.masked_scatter(mask, net.hidden(x[counts(x)])).sum(1))
    return outputs


def summed(net: Layers, x: Tensor, rows: Tensor, flat: Tensor) -> Tensor:
    """Sum rows by example, and apply the readout."""
    outputs: Tensor = net.outer(x.new_zeros(len(x), 4).index_add(0, rows, flat))
    return outputs


def selected(net: Layers, x: Tensor) -> Tensor:
    """Select positions that count by `masked_select`, after the layer."""
    mask = counts(x)
    return summed(net, x, mask.nonzero()[:, 0], net.hidden(x).masked_select(mask[..., None]).view(-1, 4))


def nested(net: Layers, x: Tensor) -> Tensor:
    """Mask the rows that a first mask has selected."""
    large = x[counts(x)][:, 1] > 0
    return summed(net, x, counts(x).nonzero()[:, 0][large], net.hidden(x[counts(x)])[large])


def pooled(net: Layers, x: Tensor) -> Tensor:
    """Take the mean over positions that count, by a product with the mask."""
    mask = counts(x).to(x.dtype)[..., None]
    outputs: Tensor = net.outer((net.hidden(x) * mask).sum(1) / (1 + mask.sum(1)))
    return outputs


def merge_uses(net: Layers, x: Tensor) -> Tensor:
    """Select the position with the largest first number, by `gather`."""
    place = x[..., 0].argmax(1)[:, None, None].expand(-1, 1, 4)
    outputs: Tensor = net.outer(net.hidden(x).gather(1, place)[:, 0])
    return outputs


def last_position(net: Layers, x: Tensor) -> Tensor:
    """Select the last position that counts, by an index."""
    place = (counts(x).sum(1) - 1).clamp(min=0)
    outputs: Tensor = net.outer(net.hidden(x)[torch.arange(len(x)), place])
    return outputs


def sorted_rows(net: Layers, x: Tensor) -> Tensor:
    """Sort examples by their first number, and restore their order at the end."""
    order = x[:, 0, 0].argsort()
    outputs: Tensor = net.outer(net.hidden(x[order]).sum(1))
    return outputs[order.argsort()]


def sorted_outside(net: Layers, x: Tensor) -> Tensor:
    """Compute `sorted_rows` with an order from NumPy, which torch cannot record."""
    order = torch.from_numpy(x[:, 0, 0].detach().numpy().argsort())
    outputs: Tensor = net.outer(net.hidden(x[order]).sum(1))
    return outputs[torch.from_numpy(order.numpy().argsort())]


def bucketed(net: Layers, x: Tensor) -> Tensor:
    """Divide examples into two buckets, with a layer for each."""
    bucket = (x[:, 0, 0] > 0).long()
    order = bucket.argsort(stable=True)
    one, two = torch.split(x[order], bucket.bincount(minlength=2).tolist())
    outputs: Tensor = net.outer(torch.cat([net.hidden(one), torch.sin(net.get_submodule("other")(two))]).sum(1))
    return outputs[order.argsort()]


def ragged(net: Layers, x: Tensor) -> Tensor:
    """Split the concatenated rows of all examples by lengths that Python reads."""
    mask = counts(x)
    parts = torch.split(net.hidden(x[mask]), mask.sum(1).tolist())
    outputs: Tensor = net.outer(torch.stack([part.sum(0) for part in parts]))
    return outputs


def segments(net: Layers, x: Tensor) -> Tensor:
    """Compute `ragged` by differences of cumulative sums."""
    ends = counts(x).sum(1).cumsum(0)
    flat = net.hidden(x[counts(x)])
    sums = torch.cat([flat.new_zeros(1, 4), flat.cumsum(0)])
    outputs: Tensor = net.outer(sums[ends] - sums[ends - counts(x).sum(1)])
    return outputs


def emptied(net: Layers, x: Tensor) -> Tensor:
    """Write in place into a bucket without rows."""
    nothing = net.inner(x[x[:, 0, 0] > 1e9]).mul_(2.0)
    return ragged(net, torch.cat([x, nothing[:, :, :3] + 1]))


def tokens_of(x: Tensor) -> Tensor:
    return (2 * x[counts(x)][:, 1].abs()).long().clamp(max=5)


def bags(x: Tensor, table: nn.Module, outer: nn.Module) -> Tensor:
    """Sum the embeddings of texts of different lengths, by an `EmbeddingBag`."""
    lengths = counts(x).sum(1)
    outputs: Tensor = outer(torch.tanh(table(tokens_of(x), lengths.cumsum(0) - lengths)))
    return outputs


def added_tokens(x: Tensor, table: nn.Module, outer: nn.Module) -> Tensor:
    """Sum the embeddings of texts of different lengths, by `index_add`."""
    rows = counts(x).nonzero()[:, 0]
    outputs: Tensor = outer(torch.tanh(x.new_zeros(len(x), 4).index_add(0, rows, table(tokens_of(x)))))
    return outputs


def mixture(x: Tensor, router: nn.Module, outer: nn.Module, experts: nn.ModuleList, best: int) -> Tensor:
    """Apply a mixture of experts. The router chooses `best` experts for each example."""
    x = x.flatten(1)
    gates, chosen = router(x).softmax(1).topk(best)
    mixed = x.new_zeros(len(x), 4)
    for number, expert in enumerate(experts):
        rows, places = (chosen == number).nonzero(as_tuple=True)
        mixed = mixed.index_add(0, rows, gates[rows, places, None] * torch.tanh(expert(x[rows])))
    outputs: Tensor = outer(mixed)
    return outputs


def switch(x: Tensor, router: nn.Module, outer: nn.Module, experts: nn.ModuleList) -> Tensor:
    """Apply one expert to each example, without a gate, and write the rows by a mask."""
    x = x.flatten(1)
    chosen, mixed = router(x).argmax(1), x.new_zeros(len(x), 4)
    for number, expert in enumerate(experts):
        mixed[chosen == number] = torch.tanh(expert(x[chosen == number]))
    outputs: Tensor = outer(mixed)
    return outputs


def experts(function: Callable[..., Tensor]) -> nn.Module:
    each = nn.ModuleList(nn.Linear(12, 4) for _ in range(3))
    return Formula(function, router=nn.Linear(12, 3), outer=nn.Linear(4, 2), experts=each)


def sequences(x: Tensor, cell: nn.Module, outer: nn.Module) -> Tensor:
    """Apply a recurrent network to packed sequences."""
    lengths = counts(x).sum(1).clamp(min=1)
    rows = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    states, _ = nn.utils.rnn.pad_packed_sequence(cell(rows)[0], batch_first=True, total_length=POSITIONS)
    outputs: Tensor = outer(states.sum(1))
    return outputs


ROUTED: dict[str, Maker] = {
    "packed padding": lambda: Layers(packed),
    "masked scatter": lambda: Layers(scattered),
    "masked select": lambda: Layers(selected),
    "nested masks": lambda: Layers(nested),
    "masked mean": lambda: Layers(pooled),
    "gathered": lambda: Layers(merge_uses),
    "last position": lambda: Layers(last_position),
    "sorted rows": lambda: Layers(sorted_rows),
    "sorted outside torch": lambda: Layers(sorted_outside),
    "bucketed": lambda: Layers(bucketed, other=nn.Linear(3, 4)),
    "ragged": lambda: Layers(ragged),
    "segments": lambda: Layers(segments),
    "an empty bucket": lambda: Layers(emptied),
    "embedding bags": lambda: Formula(bags, table=nn.EmbeddingBag(6, 4, mode="sum"), outer=nn.Linear(4, 2)),
    "tokens added up": lambda: Formula(added_tokens, table=nn.Embedding(6, 4), outer=nn.Linear(4, 2)),
    "top-1 experts": lambda: experts(partial(mixture, best=1)),
    "top-2 experts": lambda: experts(partial(mixture, best=2)),
    "switched experts": lambda: experts(switch),
    "packed sequences": lambda: Formula(sequences, cell=nn.GRU(3, 4, batch_first=True), outer=nn.Linear(4, 2)),
}


def routed_batch(generator: torch.Generator) -> Tensor:
    """Return five examples. `COUNTED` positions count, and three examples begin with a position that counts."""
    x = torch.randn(5, POSITIONS, 3, generator=generator, dtype=torch.float64)
    x[:, 0, 0] = x[:, 0, 0].abs() * torch.tensor([1, 1, 1, -1, -1])[torch.randperm(5, generator=generator)]
    later = -x[:, 1:, 0].abs().flatten()
    later[torch.randperm(len(later), generator=generator)[: COUNTED - 3]] *= -1
    x[:, 1:, 0] = later.view(5, -1)
    return x
