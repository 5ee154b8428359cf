"""Contributions that do not fit into the memory lie on disk, with the same numbers, also after a kill."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ntkexp import on_disk
from ntkexp.mistake import NoPlace
from ntkexp.on_disk import blocks, is_on_disk, put_back, refuse_small_disk, summed, zeros_on_disk
from ntkexp.run.loop import run, train_steps
from ntkexp.run.outcome import Outcome
from ntkexp.run.setting import Setting, prepare
from ntkexp.run.state import begin, drop_sums, found_sums, keep_sums
from tests.run.small import Memory, small

ASKED = ("path.kernels=none", "steps=4", "path.error_samples=2", "optimizer.weight_decay=0.1")
CLASSES, SEQUENCE = ("data.classes=[1,3,8]",), ("data=sequence", "data.phases=[[0,1,2],[3,4,5]]")


def setting(*more: str, spills: bool) -> Setting:
    found = prepare(small(*ASKED, *more))
    return replace(found, domain=replace(found.domain, spills=spills))


def outcome(*more: str, spills: bool) -> Outcome:
    return run(setting(*more, spills=spills), Memory())


def test_a_run_says_the_same_wherever_its_sums_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_disk, "AT_ONCE", 7 * 3 * 24 * 8)  # blocks of seven points
    within = outcome(*CLASSES, spills=False).evidence.paths
    found = outcome(*CLASSES, spills=True).evidence.paths
    assert found.keys() == within.keys() == {"secant", "left"}
    for rule, path in found.items():
        assert is_on_disk(path.contributions)
        assert not is_on_disk(within[rule].contributions)
        assert torch.equal(path.contributions, within[rule].contributions)
        assert torch.equal(path.decay, within[rule].decay)
        assert path.facts == within[rule].facts
    assert {"error_bar", "cancellation", "top_1", "decay_share"} <= found["secant"].facts.keys()


def test_machines_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = "ladder.machine=[secant,left,rbf_identity,random_identity]"
    monkeypatch.setattr(on_disk, "AT_ONCE", 7 * 3 * 24 * 8)
    within = {rung.name: rung.outcome for rung in outcome(*CLASSES, machines, spills=False).rungs}
    for rung in outcome(*CLASSES, machines, spills=True).rungs:
        expected = within[rung.name]
        assert not isinstance(rung.outcome, Exception)
        assert not isinstance(expected, Exception)
        assert torch.equal(rung.outcome.outputs, expected.outputs), rung.name


@pytest.mark.parametrize(("more", "after"), [(CLASSES, 2), (SEQUENCE, 1), (SEQUENCE, 3)])
def test_a_run_goes_on_from_sums_that_were_kept(tmp_path: Path, more: tuple[str, ...], after: int) -> None:
    """The files at work have no name: a run that was killed leaves nothing of them."""
    chosen, listener = setting(*more, spills=True), Memory()
    whole = begin(chosen, listener.trajectory, tmp_path)
    train_steps(whole, listener)
    assert list(tmp_path.iterdir()) == []
    half = begin(replace(chosen, descent=replace(chosen.descent, steps=after)), listener.trajectory, tmp_path)
    train_steps(half, listener)
    state, seals = keep_sums(tmp_path, after, half.state)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(seals)
    assert not any(isinstance(leaf, Tensor) and is_on_disk(leaf) for leaf in tree_leaves(state))
    kept = io.BytesIO()
    torch.save(state, kept)
    rest = begin(chosen, listener.trajectory, tmp_path)
    rest.restore(found_sums(tmp_path, torch.load(io.BytesIO(kept.getvalue()), weights_only=True)))
    drop_sums(tmp_path)
    train_steps(rest, listener)
    assert list(tmp_path.iterdir()) == []
    for rule, integrals in whole.accumulator.integrals.items():
        assert torch.equal(integrals.contributions, rest.accumulator.integrals[rule].contributions)
        assert is_on_disk(rest.accumulator.integrals[rule].contributions)
    for mark, other in zip(whole.accumulator.marks, rest.accumulator.marks, strict=True):
        for rule, sums in mark.items():
            assert torch.equal(sums.contributions, other[rule].contributions)
            assert is_on_disk(other[rule].contributions)


def test_phases_say_the_same_wherever_their_sums_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_disk, "AT_ONCE", 7 * 3 * 24 * 8)
    within = outcome(*SEQUENCE, spills=False).phases
    found = outcome(*SEQUENCE, spills=True).phases
    assert within is not None
    assert found is not None
    for rule, shares in found.shares.items():
        for share, expected in zip(shares, within.shares[rule], strict=True):
            assert is_on_disk(share.end.contributions)
            assert not is_on_disk(expected.end.contributions)
            assert (share.contributions[:] == expected.contributions[:]).all()
            assert share.contributions[:].any()
            assert torch.equal(share.decay, expected.decay)


def resident() -> int:
    """The bytes of files that are in this process's memory now."""
    told = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(told["RssFile"].split()[0]) * 1024


def test_what_was_put_back_takes_no_memory_and_is_not_lost(tmp_path: Path) -> None:
    numbers, before = zeros_on_disk(tmp_path, (50, 2, 10_000), torch.float64), resident()
    numbers[:] = torch.arange(50.0)[:, None, None]
    assert resident() - before >= numbers.nbytes
    put_back(numbers[3:5])
    assert resident() - before < numbers.nbytes / 4
    assert torch.equal(summed(numbers), 10_000 * torch.arange(50.0, dtype=torch.float64)[:, None].expand(50, 2))
    assert resident() - before < numbers.nbytes / 4


def test_looking_at_all_of_it_takes_a_block_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_disk, "AT_ONCE", 4 * 10_000 * 8)
    numbers = zeros_on_disk(tmp_path, (50, 10_000), torch.float64)
    before, most = resident(), 0
    for block in blocks(numbers):
        block.add_(1)
        most = max(most, resident() - before)
    assert most < 8 * 10_000 * 8
    assert bool((numbers == 1).all())


def test_a_disk_that_is_too_small_is_said(tmp_path: Path) -> None:
    with pytest.raises(NoPlace, match=r"contributions, their checkpoints and results take 9\.2e\+09 GB of disk and "):
        refuse_small_disk(tmp_path, 2**63)
