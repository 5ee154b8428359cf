"""The fast tests as other processors would run them: `python -m tests.processors [NAME…] [--tests FOLDER…|--every N]`.

Libraries choose their instructions by the processor, and with them the order in which they add numbers up. Here they
are made to choose as on older and other ones, with one thread and two, with other orders of sets, and with memory that
is aligned otherwise. What fails in one of these compares sums in different orders more closely than rounding allows.
The tests are run once for each, one after the other; on two cores all of them take half an hour. `--every N` runs every
N-th file of tests on each, other files on the next.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from typing import NamedTuple
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).parents[1]
UNALIGNED = Path(__file__).with_name("unaligned.c")
THREADS = "NTKEXP_TEST_THREADS"  # read by conftest.py

OLDEST = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",  # products of matrices as on every x86, those without FMA too
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OPENBLAS_CORETYPE": "Prescott",  # NumPy's and SciPy's
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
    "NUMBA_CPU_NAME": "generic",
}
MIDDLE = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
    "NUMBA_CPU_NAME": "haswell",
}
NEWEST = {"ATEN_CPU_CAPABILITY": "avx512", "MKL_ENABLE_INSTRUCTIONS": "AVX512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
# A processor of AMD has AVX-512, on which MKL does not rely there.
MIXED = NEWEST | {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "MKL_CBWR": "AVX2", "OPENBLAS_CORETYPE": "Zen"}
SCATTERED = {
    # Arrays from 4 KB on are pages of their own, others are never where another was just before.
    "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=4096:glibc.malloc.tcache_count=0",
    "MALLOC_PERTURB_": "165",  # and nothing that was not written is zero
}
# oneDNN's code for AVX2 reads 32 bytes that begin at a multiple of 32, and breaks down elsewhere.
ELSEWHERE = MIDDLE | SCATTERED | {"ONEDNN_MAX_CPU_ISA": "SSE41", THREADS: "2", "PYTHONHASHSEED": "1"}


class Processor(NamedTuple):
    """What a process is told, so that it computes as on another machine."""

    settings: Mapping[str, str]
    capability: str = ""  # what a processor must have to play this one
    unaligned: bool = False

    def missing(self) -> str:
        """Why it cannot be played here, if so."""
        has = {"": True, "avx2": torch.cpu._is_avx2_supported(), "avx512": torch.cpu._is_avx512_supported()}
        if not has[self.capability]:
            return f"this processor has no {self.capability}"
        if self.unaligned and which("cc") is None:
            return "there is no C compiler"
        return ""

    def environment(self, folder: Path) -> dict[str, str]:
        plain = {"PYTHONHASHSEED": "0", THREADS: "1"}
        given: dict[str, str] = {**os.environ, **plain, **self.settings}
        if not self.unaligned:
            return given
        library = folder / "unaligned.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, UNALIGNED], check=True)
        return given | {"LD_PRELOAD": str(library)}


PROCESSORS = {
    "this": Processor({}),
    "default": Processor(OLDEST),
    "avx2": Processor(MIDDLE, "avx2"),
    "avx512": Processor(NEWEST, "avx512"),
    "mixed": Processor(MIXED, "avx512"),
    "threads": Processor({THREADS: "2", "PYTHONHASHSEED": "1"}),
    "unaligned": Processor(SCATTERED, unaligned=True),
    "unaligned-avx2": Processor(ELSEWHERE, "avx2", unaligned=True),
}


class Outcome(NamedTuple):
    """How many tests there were, and those that failed, with the first line that says why."""

    tests: int
    failed: Sequence[str]

    @property
    def sound(self) -> bool:
        """Whether there were tests, all of which passed."""
        return self.tests > 0 and not self.failed


def played(processor: Processor, tests: Sequence[str]) -> Outcome:
    """Run the tests on it, and read what came out."""
    with TemporaryDirectory() as folder:
        record = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", f"--junit-xml={record}", *tests]
        environment = processor.environment(Path(folder))
        ended = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        if not record.exists():  # it did not come as far as a test
            return Outcome(0, [ended.stdout.strip()])
        return read(ElementTree.parse(record).iter("testcase"))


def every_nth(count: int, first: int) -> list[str]:
    """Every so manieth file of tests, from another one on for each `first`."""
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    return files[first % count :: count]


def read(record: Iterable[ElementTree.Element]) -> Outcome:
    """Read pytest's record: what failed or could not begin."""
    cases = list(record)
    failed = [
        f"{case.get('classname')}::{case.get('name')}: {reason(case)}"
        for case in cases
        if any(part.tag in {"failure", "error"} for part in case)
    ]
    return Outcome(len(cases), failed)


def reason(case: ElementTree.Element) -> str:
    """The first line that says why a test failed."""
    return next(iter((case[0].get("message") or "").splitlines()), "")


def main() -> int:
    """Play each, and say what failed there."""
    parser = argparse.ArgumentParser(prog="python -m tests.processors", description="Tests as on other processors.")
    parser.add_argument("name", nargs="*", default=list(PROCESSORS), help=f"of {', '.join(PROCESSORS)}")
    parser.add_argument("--tests", nargs="*", default=[], help="what pytest takes; all fast tests if not given")
    parser.add_argument("--every", type=int, metavar="N", help="every N-th file alone, others for each NAME")
    asked = parser.parse_args()
    if asked.every is not None and (asked.every < 1 or asked.tests):
        parser.error("--every takes a whole number > 0, and no --tests beside it")
    if unknown := [name for name in asked.name if name not in PROCESSORS]:
        parser.error(f"{unknown[0]}: there is {', '.join(PROCESSORS)}")
    sound = True
    for place, name in enumerate(asked.name):
        if missing := PROCESSORS[name].missing():
            sys.stdout.write(f"{name}: left out, {missing}\n")
            continue
        found = played(PROCESSORS[name], every_nth(asked.every, place) if asked.every else asked.tests)
        sound = sound and found.sound
        sys.stdout.write(f"{name}: {len(found.failed)} of {found.tests} failed\n")
        sys.stdout.write("".join(f"    {line}\n" for line in found.failed))
        sys.stdout.flush()
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
