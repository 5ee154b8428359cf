"""YAML files of `--config-dir`: shipped files with changed letters, lines or values, or odd files."""

from __future__ import annotations

from pathlib import Path
from random import Random

from tests.torture.damage import CHOICES, CHOSEN, letters, value
from tests.torture.stage import SMALL, Outcome, Stage

WHOLE = (
    b"",
    b"\x00",
    b"\xff\xfe\x00",
    b"\xef\xbb\xbfwidth: 3\n",
    "width: é\n".encode("utf-16"),
    b"- a\n- b\n",
    b"3\n",
    b"null\n",
    b"--- 1\n--- 2\n",
    b"a: &a [*a]\n",
    b"a: 2020-13-45\n",
    b"width: 1" + b"0" * 5000 + b"\n",
    b"".join([b"a: &a0 [1]\n", *(f"b{n}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n".encode() for n in range(12))]),
    b"[" * 5000,
    b"{a: " * 3000,
    b"!!python/object/apply:os.system [true]\n",
    b"!!binary x\n",
    b"? [1, 2]\n: 3\n",
    b"1: 2\nnull: 3\ntrue: 4\n",
    b"<<: {a: 1}\n<<: 3\n",
    b"%YAML 9.9\n---\na: 1\n",
    b"a: |\n b\n\tc\n",
)


def play(luck: Random, stage: Stage) -> Outcome:
    group = luck.choice((*CHOSEN, *CHOSEN, "sweep", "study", ""))
    option = luck.choice(CHOICES.options(group)) if group else "config"
    source = CHOICES.file(group, option) if group else CHOICES.root()
    file = stage.folder / "own" / group / ("config.yaml" if not group else "tried.yaml")
    file.parent.mkdir(parents=True)
    file.write_bytes(changed(source, luck))
    return stage.outcome(*command(group, luck), "--config-dir=own")


def command(group: str, luck: Random) -> tuple[str, ...]:
    """Return a command that reads a file of this group."""
    match group:
        case "sweep":
            return ("sweep", "tried", "--dry-run", *SMALL[1:])
        case "study":
            return ("kernel", "study", "tried", "--quiet", "data.train=12", "data.test=6", "data.query=0")
        case "":
            return (*luck.choice((("config",), ("train", "--quiet"), ("config", "--tree"))), *SMALL)
    return (*luck.choice((("config",), ("config",), ("train", "--quiet"))), f"{group}=tried", *SMALL)


def changed(source: Path, luck: Random) -> bytes:
    """Return a changed shipped file."""
    lines = source.read_text("utf-8").splitlines(keepends=True)
    for _ in range(luck.choice((1, 1, 2, 3))):
        at = luck.randrange(len(lines) + 1)
        match luck.randrange(8):
            case 0:
                return luck.choice(WHOLE)
            case 1:
                lines[at : at + 1] = []
            case 2:
                lines[at:at] = lines[at : at + 1]
            case 3:
                lines[at:at] = [f"{luck.choice(('', '  ', chr(9)))}{letters(luck, 20)}\n"]
            case 4:
                lines = list("".join(lines))
                lines[luck.randrange(len(lines) + 1) :][:1] = letters(luck, 4)
                lines = "".join(lines).splitlines(keepends=True)
            case _:
                key = "".join(lines[at : at + 1]).partition(":")[0] or "width"
                lines[at : at + 1] = [f"{key}: {value(luck)}\n"]
        lines = lines or ["\n"]
    return "".join(lines).encode("utf-8", "surrogateescape")
