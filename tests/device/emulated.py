"""The emulated accelerator: compile it once in an environment, and load it into this process."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from shutil import which

import torch
from torch import Tensor
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

NAME = "emulated"
IS_EMULATED = not torch.cuda.is_available()
DEVICE = f"{NAME}:1" if IS_EMULATED else "cuda:0"
"""The second of two emulated devices, so that code without an index uses the wrong one; or the GPU of the machine."""
SOURCE = Path(__file__).with_name("emulated.cpp")
CACHE = Path(os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")).expanduser()


def missing() -> str:
    """Return why there is no device here, or an empty string."""
    if not IS_EMULATED:
        return ""
    if os.name != "posix":
        return "the emulated device is built on Linux and macOS"
    return "" if which("c++") else "there is no C++ compiler"


def compiled() -> Path:
    """Return the library. Compile it if this has not been done for this version of torch.

    Concurrent processes wait for each other.
    """
    key = sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    folder = CACHE / f"ntkexp-emulated-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "emulated.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            root, begun = Path(torch.__file__).parent, folder / "emulated.begun.so"
            options = ["-O1", "-std=c++20", "-shared", "-fPIC", "-w", f"-I{root / 'include'}", f"-L{root / 'lib'}"]
            command = ["c++", *options, "-o", str(begun), str(SOURCE), "-ltorch_cpu", "-lc10"]
            subprocess.run(command, check=True, capture_output=True, text=True)
            begun.rename(library)
    return library


class EmulatedModule:
    """The functions that torch calls in `torch.emulated`, as in `torch.cuda`."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return 2

    @staticmethod
    def current_device() -> int:
        return int(torch.ops.emulated.current())

    @staticmethod
    def set_device(device: torch.device | int | str) -> None:
        torch.ops.emulated.choose(index_of(device))

    @staticmethod
    @contextmanager
    def device(device: torch.device | int | str) -> Iterator[None]:
        before = torch.ops.emulated.current()
        torch.ops.emulated.choose(index_of(device))
        yield
        torch.ops.emulated.choose(before)

    @staticmethod
    def synchronize(device: object = None) -> None:
        """Return at once: every operation is complete when it returns."""

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def manual_seed(seed: int) -> None:
        torch.ops.emulated.seed(torch.ops.emulated.current(), seed)

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        for index in range(2):
            torch.ops.emulated.seed(index, seed)

    @staticmethod
    def get_rng_state(device: torch.device | int | str = NAME) -> Tensor:
        state: Tensor = torch.ops.emulated.state(index_of(device))
        return state

    @staticmethod
    def set_rng_state(state: Tensor, device: torch.device | int | str = NAME) -> None:
        torch.ops.emulated.set_state(index_of(device), state)


def index_of(device: torch.device | int | str) -> int:
    """Return the index of a device; without a name, the current index."""
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(torch.ops.emulated.current()) if index is None else index


def load(library: Path) -> None:
    """Register the device in this process, before the first gradient is computed."""
    torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]  # torch's own, as the last line
    rename_privateuse1_backend(NAME)
    generate_methods_for_privateuse1_backend()
    torch._register_device_module(NAME, EmulatedModule)  # type: ignore[no-untyped-call]


@contextmanager
def counted_reads() -> Iterator[dict[str, int]]:
    """Count how often the host reads numbers of the device inside the context, by the operation that reads."""
    found: dict[str, int] = {}
    torch.ops.emulated.reset()
    yield found
    found.update(torch.ops.emulated.reads())


def load_when_torch_is_imported() -> None:
    """Register the device; the entry point of `autoloading`."""
    load(compiled())


def autoloading(folder: Path) -> dict[str, str]:
    """Return the environment of a process in which torch loads the device like a vendor's extension."""
    if not IS_EMULATED:
        return {}
    about = folder / "emulated-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: emulated\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        f"[torch.backends]\nemulated = {__name__}:{load_when_torch_is_imported.__name__}\n"
    )
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(SOURCE.parents[2])])}
