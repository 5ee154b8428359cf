"""Values that nobody means: beyond all sizes, of another type, or written to confuse whoever reads them."""

from __future__ import annotations

from random import Random

HUGE = ("1e11", "100000000000", str(10**20), str(10**24), str(2**63), str(2**63 - 1), str(2**64), f"1{'0' * 400}")
NUMBERS = (
    *(
        "0",
        "-0",
        "-0.0",
        "1",
        "2",
        "3",
        "-1",
        "0.5",
        "-1.5",
        "1e-320",
        "1e-9",
        "1e9",
        "1e30",
        "1e308",
        "1e400",
        "-1e400",
    ),
    *("nan", "NaN", ".nan", "inf", "-inf", ".inf", "0x10", "0b1", "0o17", "1_000", "1e", "1.", ".5", "+1", "٣", "½"),
    *HUGE,
)
WORDS = (
    *("", " ", "null", "~", "true", "false", "yes", "None", "???", "*", "&a", "!!python/object:os.system", "!x"),
    *("é", "日本語", "\u202e", "\ufeff", "\x1b[31m", "\t", "a\nb", "'", '"', "'a", "a'b", "\\", "%s", "{}", "{0}"),
    *(
        "../../etc/passwd",
        "/dev/null",
        "/proc/self/mem",
        "/",
        ".",
        "..",
        "~root",
        "a" * 5000,
        "-",
        "--",
        "=",
        "==",
        ",",
    ),
    *("==", "2020-13-45", "2020-01-01", "12:30:45", "1:1", "<<", "a: b", "# a", "relu", "mlp", "secant", "all", "log"),
    *("\udcff", "os.system", "ntkexp.model.MLP", "ntkexp.nope.Nope", "a.b.c", "__class__", "ntkexp"),
)
TREES = (
    *(
        "[]",
        "[[]]",
        "[1,",
        "{",
        "{}",
        "{a:1}",
        "{a:{b:[1,2]}}",
        "[null]",
        "[1,1]",
        "[-1]",
        "[1e400]",
        "[0,100000000000]",
    ),
    *("[secant]", "[secant,left,gauss]", "[a,b]", "{_target_:os.system}", "{_target_:ntkexp.model.MLP}", "[" * 300),
    *("1,2", "1,,2", "range(0,3)", "choice(1,2)", "interval(0,1)", "shuffle(1,2)", "sort(1)", "glob(*)", "int(3)"),
    *("{1:2}", "{null:1}", "{_target_:1}", "[true,false]", "[[1],[2]]", "{a:b,a:c}", "[]]", "[NaN]"),
)
REFERENCES = (
    *(
        "${seed}",
        "${model}",
        "${model.width}",
        "${nope}",
        "${..}",
        "${.}",
        "${",
        "${}",
        "${oc.env:HOME}",
        "${oc.env:NOPE}",
    ),
    *("${oc.decode:1}", "${oc.create:{a:1}}", "${oc.select:seed}", "${oc.dict.keys:model}", "${hydra:job.name}"),
    *("${now:%Y}", "${a:${b:${c}}}", "a${seed}b", "$", "$$", "\\${seed}", "${oc.deprecated:seed}", "${optimizer}"),
)


def value(luck: Random) -> str:
    return luck.choice(luck.choice((NUMBERS, NUMBERS, WORDS, TREES, REFERENCES)))


def letters(luck: Random, most: int = 12) -> str:
    """Text of letters from all over."""
    return "".join(
        luck.choice("aZ0_.-=[]{}(),:;~+!@#$%^&*|\\/'\" \tßé日\u0301\U0001f600") for _ in range(luck.randrange(most))
    )


def misspelt(text: str, luck: Random) -> str:
    """A letter too many, too few, or another one."""
    at = luck.randrange(len(text) + 1)
    return text[:at] + luck.choice(("", text[at : at + 1] * 2, letters(luck, 3))) + text[at + 1 :]
