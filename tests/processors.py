"""Run the fast tests as on other processors: `python -m tests.processors [NAME…] [--tests FOLDER…|--every N]`.

The processor determines the instructions of numerical libraries, and so the order of their sums. The settings below
select the instructions of other processors, one or two threads, other orders of sets, and other alignments of memory.
A test that fails under one of them has a tolerance below the rounding error of sums in different orders. The settings
run one after the other, for half an hour in all on two cores. With `--every N`, each setting runs every N-th file of
tests, and the next setting other files.
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
    "MKL_CBWR": "COMPATIBLE",  # matrix products as on every x86, also without FMA
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
# AMD: MKL does not use the AVX-512 of these processors
MIXED = NEWEST | {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "MKL_CBWR": "AVX2", "OPENBLAS_CORETYPE": "Zen"}
SCATTERED = {
    # arrays from 4 KB on get separate pages, and freed memory is not reused at once
    "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=4096:glibc.malloc.tcache_count=0",
    "MALLOC_PERTURB_": "165",  # new memory is not zero
}
# oneDNN's code for AVX2 needs memory that is aligned to 32 bytes
ELSEWHERE = MIDDLE | SCATTERED | {"ONEDNN_MAX_CPU_ISA": "SSE41", THREADS: "2", "PYTHONHASHSEED": "1"}


class Processor(NamedTuple):
    """Environment variables by which a process computes as on another processor."""

    settings: Mapping[str, str]
    capability: str = ""  # instructions that this machine needs
    unaligned: bool = False

    def missing(self) -> str:
        """Return the reason why this machine cannot imitate the processor, or ""."""
        has = {"": True, "avx2": torch.cpu._is_avx2_supported(), "avx512": torch.cpu._is_avx512_supported()}
        if not has[self.capability]:
            return f"this processor has no {self.capability}"
        if self.unaligned and which("cc") is None:
            return "there is no C compiler"
        return ""

    def environment(self, folder: Path) -> dict[str, str]:
        defaults = {"PYTHONHASHSEED": "0", THREADS: "1"}
        variables: dict[str, str] = {**os.environ, **defaults, **self.settings}
        if not self.unaligned:
            return variables
        library = folder / "unaligned.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, UNALIGNED], check=True)
        return variables | {"LD_PRELOAD": str(library)}


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
    """The number of tests, and a line for each failure with its reason."""

    tests: int
    failed: Sequence[str]

    @property
    def sound(self) -> bool:
        """True if at least one test ran, and all tests passed."""
        return self.tests > 0 and not self.failed


def played(processor: Processor, tests: Sequence[str]) -> Outcome:
    """Run the tests with the settings of a processor. Return their outcome."""
    with TemporaryDirectory() as folder:
        record = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", f"--junit-xml={record}", *tests]
        environment = processor.environment(Path(folder))
        ended = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        if not record.exists():  # pytest failed before the first test
            return Outcome(0, [ended.stdout.strip()])
        return read(ElementTree.parse(record).iter("testcase"))


def every_nth(count: int, first: int) -> list[str]:
    """Return every `count`-th file of tests, beginning with the file number `first`."""
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    return files[first % count :: count]


def read(record: Iterable[ElementTree.Element]) -> Outcome:
    """Read the failures and errors in a record of pytest."""
    cases = list(record)
    failed = [
        f"{case.get('classname')}::{case.get('name')}: {reason(case)}"
        for case in cases
        if any(part.tag in {"failure", "error"} for part in case)
    ]
    return Outcome(len(cases), failed)


def reason(case: ElementTree.Element) -> str:
    """Return the first line of the message of a failure."""
    return next(iter((case[0].get("message") or "").splitlines()), "")


def main() -> int:
    """Run the tests for each processor, and print the failures."""
    parser = argparse.ArgumentParser(prog="python -m tests.processors", description="Tests as on other processors.")
    parser.add_argument("name", nargs="*", default=list(PROCESSORS), help=f"of {', '.join(PROCESSORS)}")
    parser.add_argument("--tests", nargs="*", default=[], help="arguments of pytest; by default, all fast tests")
    parser.add_argument("--every", type=int, metavar="N", help="run every N-th file, and other files for each NAME")
    asked = parser.parse_args()
    if asked.every is not None and (asked.every < 1 or asked.tests):
        parser.error("--every takes a whole number > 0, and excludes --tests")
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
