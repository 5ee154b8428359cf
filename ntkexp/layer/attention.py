"""Self-attention over the pixels of an image or the positions of a sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from ntkexp.component import LARGEST, Count
from ntkexp.covariance.covariance import Covariance, Signal
from ntkexp.covariance.pairs import Pairs
from ntkexp.layer.base import AbstractLayer, NotNegative, Positive, detached_number
from ntkexp.mistake import Mistake


class SelfAttention(AbstractLayer):
    """Self-attention: at each pixel p, a sum over all pixels r of values, weighed by queries times keys.

        f[p] = OV_std Σ_h W_h Σ_r A_h[p, r] V_h x[r] + b_std · b,    A_h = ζ(G_h),    ζ softmax over r, or the identity,

        linear_scaling   G_h[p, r] = QK_std (Q_h x[p])·(Q_h x[r])/d     one matrix for queries and keys
        otherwise        G_h[p, r] = QK_std (Q_h x[p])·(K_h x[r])/√d    as usual

    for heads h of d channels, features/heads; weights are drawn from N(0, 1) and divided by the root of their inputs.
    The kernels are those of many heads and large d (Hron et al. 2020, arXiv 2006.10540; as in neural-tangents). By
    linear scaling, A is then A(x) = ζ(QK_std K(x, x)), and

        K′ = OV_std² A(x) K A(x′)ᵀ + b_std²,    Θ′ = OV_std² A(x) Θ A(x′)ᵀ + 2 (K′ − b_std²) + b_std²

    By the usual scaling there is a closed form for the identity alone, with s = QK_std OV_std:

        K′ = s² ‖K‖² K + b_std²,    Θ′ = s² (2 ⟨K, Θ⟩ K + ‖K‖² (Θ + 4 K)) + b_std²

    norm and product being sums over all pairs of pixels. `frozen` weights add nothing of their own to Θ′.

    >>> SelfAttention(features=8).shape((3, 5))
    (8, 5)
    """

    features: int = Field(ge=1, le=100 * LARGEST)
    heads: Count = 4
    QK_std: Positive = 1.0
    OV_std: Positive = 1.0
    b_std: NotNegative = 0.0
    attention: Literal["softmax", "identity"] = "softmax"
    linear_scaling: bool = True
    frozen: bool = False

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) == 1:
            raise Mistake(
                f"SelfAttention takes [channels, *pixels], and was given {list(shape)}; put it before the Flatten"
            )
        return (self.features, *shape[1:])

    def build(self, shape: tuple[int, ...], generator: torch.Generator) -> nn.Module:
        self.shape(shape)
        width = -(-self.features // self.heads)  # of a head, d

        def drawn(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*sizes, generator=generator, dtype=torch.float64))

        inner = (self.heads, shape[0], width)
        query, value, out = drawn(*inner), drawn(*inner), drawn(self.heads * width, self.features)
        key = None if self.linear_scaling else drawn(*inner)
        bias = drawn(self.features) if detached_number(self.b_std) > 0 else None
        scales = tuple(detached_number(each) for each in (self.QK_std, self.OV_std, self.b_std))
        module = Attention(query, key, value, out, bias, scales, self.attention == "softmax")
        return module.requires_grad_(not self.frozen)

    def carry(self, signal: Signal) -> Signal:
        if not self.linear_scaling and self.attention == "softmax":
            raise Mistake(
                "SelfAttention by softmax has no known limit of infinite width but with linear_scaling=true; choose "
                "that, or attention=identity, or method='monte_carlo'"
            )
        return signal.after_weights()

    def need(self, wanted: Pairs, shape: tuple[int, ...]) -> Pairs:
        return Pairs.all(shape[1:])

    def need_own(self, wanted: Pairs | None, shape: tuple[int, ...]) -> Pairs:
        return Pairs.all(shape[1:])

    def push(self, covariance: Covariance, shape: tuple[int, ...]) -> Covariance:
        pairs = covariance.pairs
        K = pairs.as_matrix(covariance.nngp)
        Theta = None if covariance.ntk is None else pairs.as_matrix(covariance.ntk)
        b2 = self.b_std**2
        if self.linear_scaling:
            covariance, left, right = self.weights(covariance, K)

            def attended(values: Tensor) -> Tensor:  # OV_std² A(x) · A(x′)ᵀ
                return self.OV_std**2 * (left @ values @ right.transpose(-1, -2))

            nngp = attended(K)
            ntk = None if Theta is None else attended(Theta)
            own = 2 * nngp  # of W and V; that of Q vanishes as d grows
        else:
            s2 = (self.QK_std * self.OV_std) ** 2
            norm = (K * K).sum((-2, -1), keepdim=True)
            nngp, ntk = s2 * norm * K, None
            if Theta is not None:
                ntk = s2 * (2 * (K * Theta).sum((-2, -1), keepdim=True) * K + norm * Theta)
            own = 4 * nngp  # of W, V, Q and K
        if ntk is not None and not self.frozen:
            ntk = ntk + own + b2
        known = None if ntk is None else pairs.from_matrix(ntk)
        return replace(covariance, nngp=pairs.from_matrix(nngp + b2), ntk=known)

    def weights(self, covariance: Covariance, K: Tensor) -> tuple[Covariance, Tensor, Tensor]:
        """A of both sides, which is collected where K is that of each example with itself, as variances are."""
        if covariance.ntk is None:
            A = self.QK_std * K
            A = A.softmax(-1) if self.attention == "softmax" else A
            return replace(covariance, left=(*covariance.left, A)), A, A
        left, right = (
            covariance.left[covariance.met][:, None],
            covariance.right[covariance.met][None],
        )
        return replace(covariance, met=covariance.met + 1), left, right


class Attention(nn.Module):
    """The module of `SelfAttention`, its scales being those of queries and keys, of values, and of the bias."""

    def __init__(
        self,
        query: Float[nn.Parameter, "head channel width"],
        key: Float[nn.Parameter, "head channel width"] | None,
        value: Float[nn.Parameter, "head channel width"],
        out: Float[nn.Parameter, "head_width feature"],
        bias: Float[nn.Parameter, " feature"] | None,
        scales: tuple[float, ...],
        softmax: bool,
    ) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out, self.bias = query, key, value, out, bias
        self.scales, self.softmax = scales, softmax

    def forward(
        self, x: Float[Tensor, "example channel *pixel"]
    ) -> Float[Tensor, "example feature *pixel"]:
        (QK_std, OV_std, b_std), (_, channels, width) = self.scales, self.query.shape
        rows = x.flatten(2).transpose(1, 2).unsqueeze(1)  # [example, 1, pixel, channel]
        queries, values = rows @ self.query, rows @ self.value  # [example, head, pixel, width]
        keys = queries if self.key is None else rows @ self.key
        G = (
            queries
            @ keys.transpose(2, 3)
            * (QK_std / (channels * width ** (1 if self.key is None else 0.5)))
        )
        heads = (G.softmax(3) if self.softmax else G) @ values
        joined = heads.transpose(1, 2).flatten(2)  # [example, pixel, head · width]
        outputs = joined @ self.out * (OV_std / (self.out.shape[0] * channels) ** 0.5)
        if self.bias is not None:
            outputs = outputs + b_std * self.bias
        found: Tensor = outputs.transpose(1, 2).reshape(len(x), -1, *x.shape[2:])
        return found
