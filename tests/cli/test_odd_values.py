"""Any key takes an odd value or refuses it in one line: too large, of another type, or confusing to parse."""

from __future__ import annotations

from itertools import cycle

import pytest

from ntkexp.config.choices import Choices, config_folders
from tests.cli.conftest import Command, check

HUGE = ("1e11", "100000000000", str(10**20), str(10**24), str(2**63), str(2**63 - 1), str(2**64), f"1{'0' * 400}")
NUMBERS = (
    *("0", "-0", "-0.0", "1", "2", "3", "-1", "0.5", "-1.5", "1e-320", "1e-9", "1e9", "1e30", "1e308", "1e400"),
    *("-1e400", "nan", "NaN", ".nan", "inf", "-inf", ".inf", "0x10", "0b1", "0o17", "1_000", "1e", "1.", ".5", "+1"),
    *("٣", "½"),
    *HUGE,
)
WORDS = (
    *("", " ", "null", "~", "true", "false", "yes", "None", "???", "*", "&a", "!!python/object:os.system", "!x", "é"),
    *("日本語", "\u202e", "\ufeff", "\x1b[31m", "\t", "a\nb", "'", '"', "'a", "a'b", "\\", "%s", "{}", "{0}"),
    *("../../etc/passwd", "/dev/null", "/proc/self/mem", "/", ".", "..", "~root", "a" * 5000, "-", "--", "=", "=="),
    *(",", "==", "2020-13-45", "2020-01-01", "12:30:45", "1:1", "<<", "a: b", "# a", "relu", "mlp", "secant", "all"),
    *("log", "\udcff", "os.system", "ntkexp.model.MLP", "ntkexp.nope.Nope", "a.b.c", "__class__", "ntkexp"),
)
TREES = (
    *("[]", "[[]]", "[1,", "{", "{}", "{a:1}", "{a:{b:[1,2]}}", "[null]", "[1,1]", "[-1]", "[1e400]"),
    *("[0,100000000000]", "[secant]", "[secant,left,gauss]", "[a,b]", "{_target_:os.system}"),
    *("{_target_:ntkexp.model.MLP}", "[" * 300, "1,2", "1,,2", "range(0,3)", "choice(1,2)", "interval(0,1)"),
    *("shuffle(1,2)", "sort(1)", "glob(*)", "int(3)", "{1:2}", "{null:1}", "{_target_:1}", "[true,false]"),
    *("[[1],[2]]", "{a:b,a:c}", "[]]", "[NaN]"),
)
REFERENCES = (
    *("${seed}", "${model}", "${model.width}", "${nope}", "${..}", "${.}", "${", "${}", "${oc.env:HOME}"),
    *("${oc.env:NOPE}", "${oc.decode:1}", "${oc.create:{a:1}}", "${oc.select:seed}", "${oc.dict.keys:model}"),
    *("${hydra:job.name}", "${now:%Y}", "${a:${b:${c}}}", "a${seed}b", "$", "$$", "\\${seed}"),
    *("${oc.deprecated:seed}", "${optimizer}"),
)
CHOICES = Choices(config_folders(None))
KEYS = [
    *((f"{group}={option}", key) for group in CHOICES.defaults() for option in CHOICES.options(group)
      for key in CHOICES.keys(group, option)),
    *(("seed=0", key) for key in CHOICES.common()),
]  # fmt: skip
VALUES = (*NUMBERS, *WORDS, *TREES, *REFERENCES)
CASES = list(zip(cycle(VALUES), KEYS))  # every key, and every value twice


@pytest.mark.usefixtures("_forgetful")
@pytest.mark.sample(40)
@pytest.mark.parametrize(("value", "key"), CASES, ids=[str(number) for number in range(len(CASES))])
def test_an_odd_value_is_taken_or_refused_in_one_line(value: str, key: tuple[str, str], command: Command) -> None:
    option, name = key
    ended = command("config", option, f"{name}={value}")
    if ended.status:
        check(ended)
