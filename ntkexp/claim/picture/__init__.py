"""Pictures of claims: of the rows as they were judged, or as the paper drew them, in its axes and order."""

from typing import TYPE_CHECKING

from ntkexp.chapter import classes_of

if TYPE_CHECKING:
    from ntkexp.claim.picture.base import AbstractPicture as AbstractPicture
    from ntkexp.claim.picture.base import PublishedNumber as PublishedNumber
    from ntkexp.claim.picture.rows import AccuracyTable as AccuracyTable
    from ntkexp.claim.picture.rows import ChangeByWidth as ChangeByWidth
    from ntkexp.claim.picture.rows import InterpolationPeak as InterpolationPeak
    from ntkexp.claim.picture.rows import JudgedRows as JudgedRows
    from ntkexp.claim.picture.rows import ScalarStep as ScalarStep
    from ntkexp.claim.picture.rows import ScalarTraining as ScalarTraining
else:
    __getattr__ = classes_of(__name__)
