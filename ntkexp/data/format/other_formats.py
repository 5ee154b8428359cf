"""What a file is by its first bytes, whatever its name says: of many formats, they are a text that is known.

>>> foreign(b"PK\\x03\\x04...")
'a ZIP archive (of Excel, NumPy or torch, perhaps)'
>>> foreign(b"size,price\\n1,2\\n")
"""

from __future__ import annotations

import re

KINDS = {
    rb"PK(?:\x03\x04|\x05\x06|\x07\x08)": "a ZIP archive (of Excel, NumPy or torch, perhaps)",
    rb"\x1f\x8b": "compressed by gzip",
    rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)": "compressed by bzip2",
    rb"\xfd7zXZ\0": "compressed by xz",
    rb"\x28\xb5\x2f\xfd": "compressed by zstd",
    rb"7z\xbc\xaf\x27\x1c": "a 7z archive",
    rb"PAR1[\0-\xff]*PAR1\Z": "a Parquet file",
    rb"ARROW1\0\0|FEA1[\0-\xff]*FEA1\Z": "an Arrow file",
    rb"\x89HDF\r\n\x1a\n": "an HDF5 file",
    rb"\x93NUMPY": "an array of NumPy",
    rb"\x80[\x02-\x05][\0-\xff]*\.\Z": "a pickle",
    rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "a file of an old Excel",
    rb"SQLite format 3\0": "a database of SQLite",
    rb"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a|RIFF[\0-\xff]{4}WEBP|II\*\0|MM\0\*|BM[\0-\xff]{4}\0\0\0\0": "an image",
    rb"%PDF-": "a PDF",
}
"""First bytes, and last ones where a text could begin alike."""


def foreign(raw: bytes) -> str | None:
    """The format of another kind that these bytes are in; None for a text, and for what nobody knows."""
    return next((kind for first, kind in KINDS.items() if re.match(first, raw)), None)
