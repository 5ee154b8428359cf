"""Trials of a claim that are no training runs: a function of a seed gives rows of the claim's table."""

from typing import TYPE_CHECKING

from ntkexp.chapter import classes_of

if TYPE_CHECKING:
    from ntkexp.claim.trial.base import AbstractTrial as AbstractTrial
    from ntkexp.claim.trial.base import SideBySide as SideBySide
else:
    __getattr__ = classes_of(__name__)
