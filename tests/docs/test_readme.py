"""The README is right: its commands parse, its keys and options exist, and its examples print the shown text."""

from __future__ import annotations

import re
import stat
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
from typer.main import get_command

from ntkexp.cli.main import app, run
from ntkexp.config.choices import Choices, config_folders
from tests.docs.pages import ALL, known_keys, options
from tests.docs.readme import COMMANDS, GUIDE, LINES, PEERS, PROSE, QUOTED, ROOT, SETUPS, TEXT, blocks

CI = ROOT / ".ci" / "run"


@pytest.mark.parametrize("command", ALL)
def test_every_command_is_shown_and_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{command} " in " ".join([*COMMANDS, *QUOTED, ""]), "the README shows no such command"
    assert run([*command.split()[1:], "--help"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert command in shown.out


@pytest.mark.parametrize("command", ALL)
def test_help_shows_two_examples_that_parse(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    run([*command.split()[1:], "--help"])
    examples = [line.strip() for line in capsys.readouterr().out.partition("Examples:")[2].strip().splitlines()]
    assert len(examples) == 2
    for example in examples:
        assert f"{example} ".startswith(f"{command} ")
        assert len(example) <= 78  # with the indentation, it fits 80 columns
        assert set(re.findall(r"--[a-z][a-z-]+", example)) <= options()
        parser: Any = get_command(app)  # of the click that typer contains
        names = command.split()[1:]
        for name in names:
            parser = parser.commands[name]
        with parser.make_context(command, example.split()[1 + len(names) :]) as context:
            assert context.params


@pytest.mark.parametrize("width", ["60", "80", "200"])
def test_descriptions_of_commands_are_not_cut(
    width: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    for group in ([], ["kernel"]):
        run([*group, "--help"])
        assert "..." not in capsys.readouterr().out.partition("Commands:")[2]


def test_every_shown_command_exists() -> None:
    said = [*COMMANDS, *(words for words in QUOTED if words.startswith("ntkexp "))]
    called = [line for line in said if not line.startswith("ntkexp --")]
    assert [line for line in called if not any(f"{line} ".startswith(f"{command} ") for command in ALL)] == []


def test_every_option_exists() -> None:
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PROSE)) <= options()


def test_every_key_exists() -> None:
    known = known_keys()
    heads = {key.split(".")[0] for key in known}
    named = {word.partition("=")[0] for word in QUOTED if re.fullmatch(r"[a-z_]+\.\w+(=\S*)?", word) and word[0] != "."}
    keys = {word for word in named if word.split(".")[0] in heads and not (word.endswith(("json", "csv", "npz")))}
    assert keys
    assert keys <= known


def test_kernel_machines_have_their_names() -> None:
    machines = set(Choices(config_folders(None)).options("machine"))
    for text, section in ((GUIDE, "## The ladder"), (TEXT, "## Theory")):
        ladder = text.partition(section)[2].partition("## ")[0]
        listed = re.findall(r"`(\w+)`", "".join(line for line in ladder.splitlines() if line.startswith("- ")))
        assert listed
        assert set(listed) <= machines


def test_it_is_short() -> None:
    assert len(TEXT.split()) <= 600


def test_it_counts_the_verdicts_that_survive_correction() -> None:
    """The page of claims begins with them, and counts identities apart."""
    page = (ROOT / "docs" / "claims" / "README.md").read_text(encoding="utf-8")
    found = re.search(r"(\d+) claims: (\d+) supported, (\d+) refuted\b.* (\d+) identities .*: (\d+) checked", page)
    assert found is not None
    claims, supported, refuted, identities, checked = found.groups()
    assert identities == checked
    judged = f"[{claims} claims are judged](docs/claims/README.md): after correction, {supported} supported and"
    assert f"{judged} {refuted} refuted. {identities} identities are exact." in " ".join(TEXT.split())


def test_the_errors_below_the_picture_are_those_of_the_guide() -> None:
    shown = dict(re.findall(r"(secant|textbook sum|frozen kernel|infinite width|RBF) ([0-9e.-]+\d)", TEXT))
    machines = ("secant", "left", "frozen_start", "frozen_limit", "rbf_regression")
    rows = [line.split() for line in blocks("text", GUIDE)[0].splitlines()]
    table = {row[0]: row[2] for row in rows if len(row) == 5}  # machine, train, query, test, agreement
    for said, machine in zip(shown.values(), machines, strict=True):
        assert float(said) == pytest.approx(float(table[machine]), rel=0.05)


def test_links_lead_to_files_and_pictures_are_small() -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", TEXT):
        assert (ROOT / target).is_file(), target
    assert all(file.stat().st_size < 100_000 for file in (ROOT / "docs").iterdir())


@pytest.mark.parametrize("text", [TEXT, GUIDE, PEERS], ids=["README", "guide", "coming from"])
def test_the_examples_print_the_shown_text(text: str) -> None:
    example, printed = "\n".join(blocks("python", text)), StringIO()
    with redirect_stdout(printed):
        exec(compile(example, "README.md", "exec"), {})  # the code of the README
    assert printed.getvalue().splitlines() == re.findall(r"^print\(.*\)  # (.*)$", example, flags=re.MULTILINE)


def test_setting_up_is_one_line_with_pinned_versions_which_ci_runs() -> None:
    assert len(SETUPS) == 2
    for line in SETUPS:
        assert line.startswith("python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e ")
    script = CI.read_text(encoding="utf-8")
    (pattern,) = re.findall(r"grep -E '([^']+)' README\.md", script)
    found = [line for line in TEXT.splitlines() if re.search(pattern, line)]
    assert found == [line for line in LINES if line.endswith("pytest")]
    assert len(found) == 1
    assert 'step "$test_command"' in script
    assert CI.stat().st_mode & stat.S_IXUSR
