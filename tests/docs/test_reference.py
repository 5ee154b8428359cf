"""The reference is what the components say, and says something about every key."""

from __future__ import annotations

import pytest

from ntkexp.config.plain_yaml import read
from tests.docs import commands
from tests.docs.reference import CHOICES, FILE, comments, component, reference


def test_it_is_as_it_would_be_written() -> None:
    assert FILE.read_text(encoding="utf-8") == reference(), "run `python -m tests.docs.reference`"


@pytest.mark.parametrize("group", CHOICES.groups())
def test_every_key_has_a_meaning(group: str) -> None:
    for name in CHOICES.options(group):
        file = CHOICES.file(group, name)
        told = comments(file)
        assert [key for key in component(read(file)).model_fields if not told.get(key)] == []


def test_every_key_that_belongs_to_no_group_has_a_meaning() -> None:
    told = comments(CHOICES.root())
    assert [key for key in CHOICES.common() if not told[key]] == []


@pytest.mark.parametrize("path", commands.ALL)
def test_every_option_that_takes_a_value_says_which(path: str) -> None:
    options = filter(commands.is_option, commands.ALL[path].params)
    assert [each.opts[0] for each in options if not each.is_flag and not each.metavar] == []
