"""What a claim expects of its figures, each a rule that judges a table: identity, slope, bound, order, and others."""

from typing import TYPE_CHECKING

from ntkexp.chapter import classes_of

if TYPE_CHECKING:
    from ntkexp.claim.expectation.average import AbstractAverage as AbstractAverage
    from ntkexp.claim.expectation.base import AbstractExpectation as AbstractExpectation
    from ntkexp.claim.expectation.bound import Bound as Bound
    from ntkexp.claim.expectation.equality import Equality as Equality
    from ntkexp.claim.expectation.identity import Identity as Identity
    from ntkexp.claim.expectation.location import Location as Location
    from ntkexp.claim.expectation.order import Order as Order
    from ntkexp.claim.expectation.slope import Slope as Slope
else:
    __getattr__ = classes_of(__name__)
