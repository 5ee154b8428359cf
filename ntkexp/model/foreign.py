"""Foreign modules: adapt them to data and loss, load them from a user's files, and
import optional libraries."""

from __future__ import annotations

import ast
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ntkexp.mistake import Mistake, first_line
from ntkexp.model.base import LearningTask
from ntkexp.model.functional import hooked_parameters, training_modes
from ntkexp.records.atomic import read_object
from ntkexp.stream import global_seed
from ntkexp.text import counted

# --- Adapt a foreign module to the data and the loss: convert tokens to integers, outputs
# [example] to [example, 1], and give new tensors the dtype of the inputs.
#
# Before training, the module runs on two artificial examples, so that errors are
# reported early, in one line.


class Adapted(nn.Module):
    """A foreign module with converted inputs and outputs."""

    def __init__(self, module: nn.Module, tokens: bool) -> None:
        super().__init__()
        self.module = module
        self.tokens = tokens

    def forward(
        self, x: Float[Tensor, " example *shape"]
    ) -> Float[Tensor, "example out"]:
        outputs = self.module_output(x)
        assert isinstance(outputs, Tensor)  # checked by refuse_unfit
        return outputs[:, None] if outputs.dim() == 1 else outputs

    def module_output(self, x: Float[Tensor, " example *shape"]) -> object:
        """Return the output of the foreign module, of any type."""
        with default_dtype(x.dtype):
            return self.module(x.long() if self.tokens else x)


def adapt_module(
    make: Callable[[], nn.Module],
    task: LearningTask,
    seed: int,
    setting: str,
    file: Path | None = None,
) -> Adapted:
    """Build a module in double precision and evaluation mode,
    and check that it fits the task.

    While `make` runs, torch's global generator has a fixed seed. Error messages begin
    with `setting`, such as `model.path=net.py`, and report the
    line in the user's file `file`."""
    with (
        global_seed(seed),
        default_dtype(torch.float64),
        as_mistake(setting, file),
    ):
        module = Adapted(make().double().eval(), tokens=task.vocabulary > 0)
        for layer in module.modules():
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
                # dense gradients have the same values, and can be differentiated twice
                layer.sparse = False
        with as_mistake(f"{setting}: {task.description}, and the module says", file):
            refuse_unfit(setting, module, task)
    return module


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype for new tensors,
    such as the initial state of an RNN."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def refuse_unfit(setting: str, module: Adapted, task: LearningTask) -> None:
    """Run the module on artificial examples, and raise if it does not fit the task."""
    refuse_untrainable(setting, module.module)
    if reasons := list(training_modes(module.module)):
        raise Mistake(
            f"{setting}: {reasons[0]}, even after module.eval(); each output must depend on its own "
            "example"
        )
    # Forward pass: check the shape, and that the inputs did not change.
    x = task.sample()
    outputs = module.module_output(x)
    refuse_shape(setting, outputs, task)
    assert isinstance(outputs, Tensor)
    if not torch.equal(x, task.sample()):
        raise Mistake(
            f"{setting}: the module overwrites its inputs; let it work on a copy, such as x = "
            "x.clone()"
        )
    if not outputs.requires_grad:
        raise Mistake(
            f"{setting}: no output depends on a trained parameter; is there a detach, or no_grad?"
        )
    # Backward pass: gradients must be dense. A second call must give equal outputs.
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad(outputs.sum(), weights, allow_unused=True)
    if any(gradient is not None and gradient.is_sparse for gradient in gradients):
        raise Mistake(
            f"{setting}: there is a sparse gradient; call F.embedding and F.embedding_bag with "
            "sparse=False"
        )
    if not torch.equal(module(x).nan_to_num(), module(x).nan_to_num()):
        raise Mistake(
            f"{setting}: the module gives other outputs when it is called again, in evaluation mode; "
            "is there a dropout without training=self.training?"
        )


def refuse_untrainable(setting: str, module: nn.Module) -> None:
    """Raise if the module has no trained parameter,
    or if a parameter is complex or has a hook."""
    weights = dict(module.named_parameters())
    if not any(weight.requires_grad for weight in weights.values()):
        why = (
            f"none of its {len(weights)} parameters requires gradients"
            if weights
            else "it has no parameters"
        )
        raise Mistake(f"{setting}: the module has nothing to train: {why}")
    if unreal := [name for name, weight in weights.items() if weight.is_complex()]:
        raise Mistake(
            f"{setting}: the parameter '{unreal[0]}' is complex; take its real and imaginary part "
            "instead"
        )
    if (name := next(hooked_parameters(module), None)) is not None:
        raise Mistake(
            f"{setting}: the parameter '{name}' has a hook, which a run would not call; build the "
            "module without it"
        )


def refuse_shape(setting: str, outputs: object, task: LearningTask) -> None:
    """Raise unless the outputs have the shape that the data and the loss require."""
    if not isinstance(outputs, Tensor):
        raise Mistake(
            f"{setting}: the module returns a {type(outputs).__name__}; let it return one tensor, "
            "[examples, outputs]"
        )
    shape = list(outputs.shape)
    expected = [2, task.outputs]
    if expected not in (shape, [*shape, 1]):
        raise Mistake(
            f"{setting}: the module returns outputs of shape {shape} for 2 examples, but data and "
            f"loss need {expected}; let it return {counted(task.outputs, 'output')} for each example"
        )
    if not outputs.is_floating_point():
        raise Mistake(
            f"{setting}: the module gives {outputs.dtype}, and real numbers are expected"
        )


def refuse_irreproducible(setting: str, module: Adapted, again: Adapted) -> None:
    """Raise if two modules that were built with the same seed differ."""
    first = module.module.state_dict()
    second = again.module.state_dict()
    if first.keys() != second.keys():
        raise Mistake(
            f"{setting} builds another module when it is called again with the same seed"
        )
    for name, value in first.items():
        if isinstance(value, Tensor) and not torch.equal(
            value.nan_to_num(), second[name].nan_to_num()
        ):
            raise Mistake(
                f"{setting} draws another '{name}' when it is called again with the same seed; draw "
                "it by torch, which is seeded, or from the argument seed"
            )


# --- Load Python files of the user, and let them import other files in their folder.
#
# Loading a file runs its code. The command line asks the user for permission first.


VISION = {"timm", "torchvision", "transformers"}
"""Packages that need torchvision."""


class TrustedModules(MetaPathFinder):
    """An import hook by which trusted files can import modules from their own folders.

    The folders are not added to `sys.path`, because libraries search it for optional
    modules, and would run untrusted files. The finder is the last one in
    `sys.meta_path`, so that no file replaces a module of Python or
    of an installed package."""

    def __init__(self) -> None:
        self.folders = dict[str, str]()

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        folder = self.folders.get(fullname)
        if folder is None or path is not None:
            return None
        return PathFinder.find_spec(fullname, [folder])


TRUSTED = TrustedModules()
sys.meta_path.append(TRUSTED)


def allow_imports(files: Iterable[Path], folders: Sequence[Path]) -> None:
    """Let trusted files import modules from these folders, directly or indirectly."""
    waiting = list(files)
    while waiting:
        for name in imported_packages(waiting.pop()):
            if name not in sys.modules and find_spec(name) is None:
                waiting += allow_module(name, folders)


def allow_module(name: str, folders: Iterable[Path]) -> list[Path]:
    """Permit the import of a module or package from the first folder
    that contains it. Return its files."""
    for folder in folders:
        files = [folder / f"{name}.py", *(folder / name).rglob("*.py")]
        existing = [file for file in files if file.is_file()]
        if existing:
            TRUSTED.folders[name] = str(folder)
            return existing
    return []


def load_module(file: Path, setting: str) -> ModuleType:
    """Load a file as the module named after its stem. The file can import other files
    in its folder or in the working folder."""
    file = file.resolve()
    loaded = sys.modules.get(file.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(file):
        return loaded
    if loaded is not None or not file.stem.isidentifier():
        raise Mistake(
            f"{setting}: '{file.stem}' cannot be the name of a new module; give the file another name"
        )
    allow_imports([file], [file.parent, Path.cwd()])
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    if not VISION.isdisjoint(imported_packages(file)):
        load_torchvision()
    module = sys.modules[file.stem] = module_from_spec(spec)
    try:
        with as_mistake(setting, file):
            spec.loader.exec_module(module)
    except Mistake:
        del sys.modules[file.stem]
        raise
    return module


def files_imported(file: Path) -> tuple[Path, ...]:
    """Return the file and all files in its folder that it imports,
    directly or indirectly."""
    files = {file}
    waiting = [file]
    while waiting:
        for name in imported_packages(waiting.pop()):
            module_file = file.parent / f"{name}.py"
            package_files = (file.parent / name).rglob("*.py")
            imported = {
                path for path in (module_file, *package_files) if path.is_file()
            }
            new = imported - files
            files |= new
            waiting += new
    return tuple(sorted(files))


def imported_packages(file: Path) -> Iterator[str]:
    """Yield the names of the top-level packages that a file imports. Yield nothing if
    the file is not Python."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


# --- Optional libraries.


Option = bool | int | float | str | None
"""The value of a setting of a library."""


# returns a module whose types are unknown here
def import_library(package: str, extra: str) -> Any:
    """Import an optional package. If it is missing,
    raise with the command that installs it."""
    if find_spec(package) is None:
        raise Mistake(
            f"model={extra} needs {package}, which is not installed: pip install 'ntkexp[{extra}]'"
        )
    with (
        as_mistake(f"model={extra}: {package} is installed, and cannot be imported"),
        warnings.catch_warnings(),
    ):
        # warnings during imports do not concern the user
        warnings.simplefilter("ignore")
        load_torchvision()
        return import_module(package)


# --- Import torchvision even if its compiled part does not match torch, for example
# because torch is a build for CPUs.
#
# timm and transformers use only the Python part of torchvision. During its import,
# torchvision registers functions for two of its compiled operators. So the import
# succeeds if these operators are declared first.


BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
DECLARED = {"torchvision::nms": BOXES, "torchvision::qnms": BOXES}


def load_torchvision() -> None:
    """Import torchvision if it is installed, so that later imports of timm and
    transformers succeed."""
    if find_spec("torchvision") is None:
        return
    try:
        import_module("torchvision")
    except RuntimeError:  # torchvision's compiled operators are missing
        for name, schema in DECLARED.items():
            torch.library.define(name, schema)
        import_module("torchvision")


EXTERNAL_KEYS = frozenset(
    {
        "adapter_kwargs",
        "architecture",  # a timm model by its address
        "auto_map",  # Python files next to the configuration
        "backbone",  # a model by its name or folder
        "backbone_kwargs",
        "checkpoint_path",
        "custom_pipelines",
        "model_args",  # arguments of timm, including the path of a checkpoint
        "quantization_config",  # may load further kernels and packages
        "transformers_weights",
        "trust_remote_code",
        "use_pretrained_backbone",
    }
)

PLAIN_ATTENTION = {None, "eager", "sdpa", "batched_mm", "grouped_mm"}
"""Implementations of attention and experts that need only torch. For others,
transformers may download compiled code."""


def refuse_external_code(fields: Mapping[str, Any], setting: str) -> None:
    """Raise if a configuration of transformers would run code, or read files,
    from outside its folder.

    Configurations come from a command line, a YAML file, a run folder or a model
    folder. Users do not expect these to run code.

    >>> refuse_external_code({"n_head": 2, "text_config": {"auto_map": {"AutoModel": "own.Net"}}}, "model.path=a")
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: model.path=a: 'auto_map' would run code or read files from elsewhere; remove it
    """
    for key, value in tree_entries(fields):
        foreign = key.endswith("_implementation") and (
            not isinstance(value, str | None) or value not in PLAIN_ATTENTION
        )
        if foreign or (key in EXTERNAL_KEYS and value not in (None, False, [], {})):
            raise Mistake(
                f"{setting}: '{key}' would run code or read files from elsewhere; remove it"
            )


def tree_entries(value: object) -> Iterator[tuple[str, Any]]:
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Mapping):
            yield from ((str(key), item) for key, item in node.items())
            waiting += node.values()
        elif isinstance(node, Sequence) and not isinstance(node, str):
            waiting += node


def refuse_external_weights(files: Sequence[Path], setting: str) -> None:
    """Raise if the folder holds an adapter, or an index of weights
    that names files outside the folder."""
    names = {file.name for file in files}
    if "adapter_config.json" in names:
        raise Mistake(
            f"{setting} holds an adapter without its model; merge them, and save the merged model"
        )
    # compare names as JSON, because a damaged index may hold any values
    allowed = set(map(json.dumps, names))
    for file in files:
        if not file.name.endswith(".index.json"):
            continue
        weight_map = read_object(file).get("weight_map")
        named = {"no file"}
        if isinstance(weight_map, dict):
            named = set(map(json.dumps, weight_map.values()))
        outside = sorted(named - allowed)
        if outside:
            raise Mistake(
                f"{setting}: {file.name} names {outside[0]}, which is not a file of that folder"
            )


@contextmanager
def as_mistake(setting: str, file: Path | None = None) -> Iterator[None]:
    """Convert errors in the block to a `Mistake` of one line: the argument,
    the line in the user's file, and the error.

    >>> with as_mistake("model.name=gpt3"):
    ...     raise KeyError("gpt3")
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: model.name=gpt3: KeyError: 'gpt3'
    """
    try:
        yield
    except Mistake:
        raise
    except (Exception, SystemExit) as error:
        where = line_in_file(error, file) if file else ""
        raise Mistake(
            f"{setting}{where}: {type(error).__name__}: {first_line(error)}"
        ) from None


def line_in_file(error: BaseException, file: Path) -> str:
    """Return ", line N" for the last line of the file in the traceback, or ""."""
    trace = inspect.getinnerframes(error.__traceback__) if error.__traceback__ else []
    lines = [frame.lineno for frame in trace if frame.filename == str(file.resolve())]
    if isinstance(error, SyntaxError) and error.filename == str(file.resolve()):
        lines = [error.lineno or 1]
    return f", line {lines[-1]}" if lines else ""
