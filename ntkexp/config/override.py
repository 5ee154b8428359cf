"""KEY=VALUE, as it stands on the command line.

    text      ['+' | '++'] KEY '=' VALUE         + adds in Hydra; every key is known here, so it says nothing new
    KEY       words joined by dots
    VALUE     Hydra's grammar; where only text can be meant, the text itself, unless it is quoted, null or ${…}

>>> split("model.width=64")
Override(key='model.width', value='64')
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from pydantic.fields import FieldInfo

from ntkexp.config.field_types import is_list, is_text, may_be_text, takes
from ntkexp.mistake import HydraSetting, Mistake

KEY = re.compile(r"[A-Za-z_]\w*(\.\w+)*", re.ASCII)
LONGEST = 5000  # letters of a value: Hydra's grammar takes a second for them
MARKED = re.compile(r"""null|'.*'|".*"|.*\$\{.*\}.*""", re.DOTALL)


@dataclass(frozen=True)
class Override:
    """A key, and the value as it was written; an empty one where none was."""

    key: str
    value: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


def split(text: str) -> Override:
    """Split an override into its two sides."""
    if re.match(r"\+{0,2}hydra([./@=]|$)", text):
        raise HydraSetting(f"{text}: settings of Hydra have no effect here")
    if text.startswith("~"):
        raise Mistake(
            f"{text}: nothing can be taken away; leave a key out and it keeps its default, or give it a value"
        )
    key, equals, value = text.partition("=")
    key = re.sub(r"^\+{1,2}", "", key).strip()
    if not key:
        raise Mistake(f"{text or repr(text)}: there is no key; write KEY=VALUE, such as seed=3")
    if not KEY.fullmatch(key):
        raise Mistake(f"{text}: '{key}' is no key; write KEY=VALUE with words joined by dots, such as model.width=64")
    return Override(key, value.strip() if equals else "")


def value(override: Override, field: FieldInfo) -> Any:
    """What an override gives to a field."""
    if not override.value or override.value == "???":
        raise Mistake(f"{override.key} is given no value; write {override.key}=VALUE: it takes {takes(field)}")
    if is_text(field.annotation) and not MARKED.fullmatch(override.value):
        return override.value
    if len(override.value) > LONGEST:
        raise Mistake(
            f"{override.key} is given {len(override.value)} letters, and an override is read up to {LONGEST}; write "
            "what is longer into a YAML file of yours"
        )
    try:
        parsed = OverridesParser.create().parse_override(str(override))
        swept, found = parsed.is_sweep_override(), parsed.value()
    except (HydraException, ValueError, RecursionError):  # the last two: 5000 digits, 500 brackets
        if may_be_text(field.annotation):
            return override.value
        raise Mistake(f"{override}: the value cannot be read; {override.key} takes {takes(field)}") from None
    if not swept:
        return found
    if may_be_text(field.annotation):
        return override.value
    raise Mistake(f"{override}: a run has one value for each key; write {single(override, field)}")


def single(override: Override, field: FieldInfo) -> str:
    """Put one value in place of several.

    >>> single(Override("model.width", "64,128"), FieldInfo(annotation=int))
    'model.width=64'
    """
    if is_list(field.annotation):
        return f"a list as {override.key}=[{override.value}]"
    first = re.search(r"[\w.+-]+(?=\s*[,)])", override.value)
    return f"{override.key}={first.group() if first else 'VALUE'}"
