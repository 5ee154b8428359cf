"""What a claim expects of its figures, each a rule that judges a table: identity, slope, bound, order, and others."""

from typing import TYPE_CHECKING

from ntkexp.chapter import classes_of

if TYPE_CHECKING:
    from ntkexp.claim.expectation.average import AbstractAverage as AbstractAverage
    from ntkexp.claim.expectation.average import Bound as Bound
    from ntkexp.claim.expectation.average import Equality as Equality
    from ntkexp.claim.expectation.average import Location as Location
    from ntkexp.claim.expectation.average import Order as Order
    from ntkexp.claim.expectation.average import Slope as Slope
    from ntkexp.claim.expectation.base import AbstractExpectation as AbstractExpectation
    from ntkexp.claim.expectation.base import Identity as Identity
else:
    __getattr__ = classes_of(__name__)
