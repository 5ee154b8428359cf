"""Sentences of tokens: sums against their definition, text against the file it comes from."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from ntkexp.data.base import AbstractSource, Data
from ntkexp.data.sequence import ModularAddition, Text

FEW = ("data.train=4", "data.probe=2", "data.test=2", "steps=3", "ladder.machine=[secant]")
LINE = b"the quick brown fox jumps over the lazy dog\n"


def shown(data: Data) -> list[tuple[list[int], int]]:
    """Tokens and label of every example, split by split."""
    splits = (data.train, data.probe, data.test)
    return [
        (tokens, label)
        for split in splits
        for tokens, label in zip(split.inputs.long().tolist(), split.target.tolist(), strict=True)
    ]


@pytest.mark.parametrize("equals", [False, True])
def test_every_sum_is_there_once(equals: bool) -> None:
    data = ModularAddition(modulus=7, train=20, probe=10, equals=equals).split()
    sign = [7] if equals else []
    expected = [([a, b, *sign], (a + b) % 7) for a, b in product(range(7), repeat=2)]
    assert sorted(shown(data)) == expected
    assert data.vocabulary == 7 + equals
    assert data.classes == tuple("0123456")


def test_one_hot_vectors_are_the_tokens() -> None:
    tokens, vectors = (
        ModularAddition(modulus=5, train=20, probe=5, encoding=encoding).split() for encoding in ("tokens", "one_hot")
    )
    assert (tokens.vocabulary, vectors.vocabulary) == (5, 0)
    assert vectors.train.inputs.shape == (20, 2, 5)
    assert torch.equal(vectors.train.inputs.argmax(2).double(), tokens.train.inputs)
    assert torch.equal(vectors.train.inputs.sum(2), torch.ones(20, 2, dtype=torch.float64))


def test_a_text_is_cut_into_windows_and_their_next_bytes(tmp_path: Path) -> None:
    """Every window stands in the file at a multiple of its length; bytes that do not occur are no tokens."""
    file = tmp_path / "a.txt"
    file.write_bytes(LINE * 3)
    data = Text(path=file, context=6, train=8, probe=4, test=None).split()
    letters = bytes(sorted(set(LINE)))
    found = {bytes(letters[token] for token in [*tokens, label]) for tokens, label in shown(data)}
    assert found == {(LINE * 3)[at : at + 7] for at in range(0, 3 * len(LINE) - 6, 7)}
    assert data.vocabulary == len(data.classes) == len(letters)
    assert data.classes[:3] == ("0x0a", "0x20", "a")


@pytest.mark.parametrize("content", [b"", b"a", LINE])
def test_a_text_that_is_too_short_is_refused(
    content: bytes, tmp_path: Path, refusal: Callable[[AbstractSource], str]
) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(content)
    words = refusal(Text(path=file, context=6, train=8, probe=4, test=4))
    assert f"holds {len(content)} bytes, and in them {len(content) // 7} different windows" in words
    assert "ask for 16" in words


def test_a_text_that_says_one_thing_is_refused(tmp_path: Path, refusal: Callable[[AbstractSource], str]) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"aaaaaab" * 9 + b"baaaaab" * 9)
    assert "every training example has the same target" in refusal(Text(path=file, context=6, train=2, probe=0, test=0))


def test_a_text_that_is_not_there_is_refused(tmp_path: Path, refusal: Callable[[AbstractSource], str]) -> None:
    (tmp_path / "book.txt").write_bytes(LINE)
    assert "did you mean 'book.txt'?" in refusal(Text(path=tmp_path / "bok.txt"))
    assert "is a folder" in refusal(Text(path=tmp_path))


def test_more_examples_than_sums_are_refused(refusal: Callable[[AbstractSource], str]) -> None:
    words = refusal(ModularAddition(modulus=5, train=20, probe=6))
    assert words == (
        "data.modulus=5 makes 25 sums, and data.train, data.probe and data.test ask for 26; lower one of them, or "
        "raise data.modulus"
    )
