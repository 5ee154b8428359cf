"""Adam (Kingma & Ba 2015): weight decay is part of the gradient, g + λθ, and passes through the memory."""

from __future__ import annotations

from ntkexp.optimizer.adaptive import AbstractAdam


class Adam(AbstractAdam):
    """An Adam whose decay is coupled: it passes through the memory."""
