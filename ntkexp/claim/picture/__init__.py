"""How a claim is drawn; the pictures of single papers are in `ntkexp.claim.papers`."""

from typing import TYPE_CHECKING

from ntkexp.chapter import classes_of

if TYPE_CHECKING:
    from ntkexp.claim.picture.base import AbstractPicture as AbstractPicture
    from ntkexp.claim.picture.base import JudgedRows as JudgedRows
    from ntkexp.claim.picture.base import PublishedNumber as PublishedNumber
else:
    __getattr__ = classes_of(__name__)
