"""What is known of a signal inside a network of infinite width, whatever its numbers are.

Its elements are independent Gaussians once fresh weights have mixed what came before; a pointwise function makes
something else of them. The formulas of pointwise layers and norms hold for Gaussians alone, and the covariance of a sum
is the sum of covariances only where all but one of its terms end in weights of their own. Shares of channels have a
limit only where all channels grow with the network's width, which those of inputs do not.

>>> Signal().after_weights()
Signal(gaussian=True, fresh=True, wide=True, uneven=False)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ntkexp.mistake import Mistake


@dataclass(frozen=True)
class Signal:
    """`gaussian`: elements are independent Gaussians, the channels of a pixel of one variance; `fresh`: independent of
    whatever entered the branch of the network that it belongs to; `wide`: there are as many channels as the network is
    wide; `uneven`: channels of different variances stand behind each other.
    """

    gaussian: bool = False
    fresh: bool = False
    wide: bool = False
    uneven: bool = False

    def after_weights(self) -> Signal:
        """The signal after weights is this."""
        return Signal(gaussian=True, fresh=True, wide=True)

    def after_nonlinearity(self, layer: str) -> Signal:
        """The signal after a function that is not linear."""
        self.refuse_unmixed(layer)
        return Signal(wide=self.wide)

    def branch(self) -> Signal:
        """The signal at the entry of a branch is this."""
        return replace(self, fresh=False)

    def refuse_beside(self, other: Signal) -> None:
        """One of two branches that are added up ends in weights of its own."""
        if not (self.fresh or other.fresh):
            raise Mistake(
                "a residual layer has no limit of infinite width unless one of its branches ends in weights "
                "(Dense or Conv) that follow the last activation"
            )

    def refuse_narrow(self) -> None:
        """A part of many channels has a share of them."""
        if not self.wide:
            raise Mistake(
                "a concatenation of the inputs themselves has no limit of infinite width: channels of the inputs do "
                "not grow with width; put a Dense or Conv layer into that branch"
            )

    def refuse_unmixed(self, layer: str) -> None:
        """Activations and norms follow weights."""
        if self.uneven:
            raise Mistake(
                f"{layer} has no known limit of infinite width right after a concatenation, whose channels differ in "
                "variance; put it into the branches, or a Dense or Conv layer before it"
            )
        if not self.gaussian:
            raise Mistake(
                f"{layer} has a limit of infinite width only after weights; put a Dense or Conv layer right before it"
            )
