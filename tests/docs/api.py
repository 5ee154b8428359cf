"""The public functions and classes, as docs/api.md shows them: signature, table of arguments, returns, raises, example.

The page lists names as users type them, one directive `object` each. `place_of` finds the object of a name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import import_module
from typing import Any

from tests.docs.readme import ROOT

PAGE = ROOT / "docs" / "api.md"
NAMES = re.findall(r"^```\{object\} ([\w.]+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
"""The names in the order of the page."""
DIRECTIVE = re.compile(r"^```\{object\} ([\w.]+)\n```$", re.MULTILINE)
HOMES = {
    "Trace": "ntkexp.foreign_loop.trace.Trace",
    "Attribution": "ntkexp.report.scores.Attribution",
    "Attribution.plot": "ntkexp.report.plots.attribution_plots.AttributionPlots",
    "TangentKernel": "ntkexp.TangentKernel",
    "KernelMachine": "ntkexp.KernelMachine",
    "AbstractOptimizerRule": "ntkexp.AbstractOptimizerRule",
    "Run": "ntkexp.report.loaded_run.LoadedRun",
    "Sweep": "ntkexp.report.loaded_sweep.LoadedSweep",
    "Sweep.plot": "ntkexp.report.plots.sweep_plots.SweepPlots",
    "Validation": "ntkexp.validation.Validation",
    "QuandaExplainer": "ntkexp.bridges.QuandaExplainer",
    "DattriAttributor": "ntkexp.bridges.DattriAttributor",
}
"""Classes that the page names without their module."""
RETURNED = {"Trace", "Attribution", "Run", "Sweep", "Validation"}
"""Classes that functions return. Users do not call them, so they have attributes and no arguments."""
ALIASES = {
    "Again": "function () → Trace",
    "AbstractEngine": "engine",
    "BatchNormMode": "'exact' or 'constant'",
    "Blocks": "'all', 'trace' or 'diagonal'",
    "By": "str or dict",
    "Callable[[Any], Any]": "function (x) → tensor",
    "Callable[[Any], Inputs]": "function (batch) → inputs",
    "Casts": "'keep' or 'ignore'",
    "Coefficient": "float or tensor",
    "Decode": "function (token ids) → str",
    "Effects": "bool, 'one_step' or 'derivative'",
    "Engine": "'auto', 'torch' or 'fused'",
    "ExampleLoss": "function (outputs, call) → tensor",
    "Examples": "tensor, array or DataLoader",
    "Ids": "str, function (call) → names, or None",
    "Inputs": "tensor, or tuple or dict of tensors",
    "Kernel": "function (x1, x2) → tensor",
    "Layout": "'train,test' or 'test,train'",
    "LogStep": "function (numbers, step)",
    "LossFunction": "function (model, *batch) → tensor",
    "Mapping[str, Any]": "dict",
    "Mapping[str, Tensor]": "dict of tensors",
    "Mapping[str, object]": "dict of arrays",
    "MeanName": "'renormalised' or 'fixed'",
    "Measure": "function (outputs, call) → tensor or dict",
    "Output": "str, int or None",
    "OutputMode": "'all', 'trace', 'diagonal', or list of int",
    "ChosenOutputs": "'all', 'trace', or list of int",
    "Parametrisation": "'standard' or 'ntk'",
    "Sequence[AbstractOptimizerRule]": "list of rules",
    "Sequence[int]": "list of int",
    "Sequence[object]": "list of names",
    "Sequence[str]": "list of str",
    "Sequence[torch.optim.Optimizer]": "list of optimizers",
    "Spec": "list of layers, or JSON",
    "StepInput": "object with gradient, weight and state",
    "Steps": "int, or list or range of int",
    "Tensor": "tensor",
    "list[str | int]": "list of them",
    "nn.Module": "Module",
    "torch.optim.Optimizer": "Optimizer",
    "np.integer[Any]": "int",
    "DataLoader[Any]": "DataLoader",
}
"""Types of the package in words."""


STARS: Mapping[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


@dataclass(frozen=True)
class Argument:
    """A row of the table of arguments."""

    name: str
    type: str
    default: str
    meaning: str


def place_of(name: str) -> Any:
    """Return the object of a name, such as `ntkexp.follow` or `Trace.attribute`."""
    head, _, last = name.rpartition(".")
    if name in HOMES:
        return imported(HOMES[name])
    return getattr(imported(HOMES[head]), last) if head in HOMES else imported(name)


def imported(path: str) -> Any:
    """Return the object of an import path."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def parameters(name: str) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function, a method or the constructor of a class, without `self`."""
    found = place_of(name)
    if name.removeprefix("ntkexp.") in RETURNED or not callable(found):
        return {}
    if inspect.isclass(found) and (inspect.isabstract(found) or issubclass(found, Exception)):
        return {}
    if is_dataclass(found) and isinstance(found, type):
        return {field.name: parameter_of(field) for field in fields(found) if field.init}
    signature = inspect.signature(found)
    return {key: parameter for key, parameter in signature.parameters.items() if key != "self"}


def parameter_of(field: Any) -> inspect.Parameter:
    """Return the parameter of the constructor of a dataclass."""
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=field.type)


# The sections of a docstring in Google's style.


SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples):\n((?:(?: {4}.*)?\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^ {4}(\*{0,2}\w+)(?: \(([^)]*)\))?: (.*(?:\n(?: {8}.*)?)*)", re.MULTILINE)


def sections(name: str) -> dict[str, str]:
    """Return the text of each section, and under "" the text outside of sections."""
    text = inspect.getdoc(place_of(name)) or ""
    found = dict(SECTION.findall(f"{text}\n"))
    return {"": SECTION.sub("", f"{text}\n").strip("\n"), **found}


def described(name: str) -> dict[str, tuple[str, str]]:
    """Return the shape or type, and the meaning, of each documented argument."""
    body = sections(name).get("Args", "")
    return {entry: (shape, " ".join(text.split())) for entry, shape, text in ENTRY.findall(body)}


def arguments(name: str) -> Iterator[Argument]:
    """Yield the rows of the table of arguments."""
    texts = described(name)
    for key, parameter in parameters(name).items():
        star = STARS.get(parameter.kind, "")
        shape, meaning = texts.get(f"{star}{key}", texts.get(key, ("", "")))
        yield Argument(f"{star}{key}", shape or in_words(parameter.annotation), default(parameter), meaning)


def in_words(annotation: object) -> str:
    """Return a type in words.

    >>> in_words("Inputs | None"), in_words("Float[Tensor, 'query out']"), in_words("Literal['a', 'b']")
    ('tensor, or tuple or dict of tensors, or None', 'tensor [query out]', "'a' or 'b'")
    """
    text = "" if annotation is inspect.Parameter.empty else str(annotation)
    text = re.sub(r"\w+\[Tensor, ['\"]\s*([^'\"]*)['\"]\]", r"tensor [\1]", text)
    text = re.sub(r"Literal\[([^\]]*)\]", lambda match: match[1].replace(", ", " or "), text)
    parts = dict.fromkeys(ALIASES.get(part, part) for part in re.split(r" \| (?![^\[]*\])", text))
    if len(parts) > 1 and any("or None" in part for part in parts):
        parts.pop("None", None)
    return ", or ".join(parts)


def default(parameter: inspect.Parameter) -> str:
    """Return the default in Python, or an empty text."""
    return "" if parameter.default is parameter.empty else repr(parameter.default)


def signature(name: str) -> str:
    """Return the call of a function, with names and defaults."""
    words: list[str] = []
    keyword_only = False
    for parameter in parameters(name).values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only and not is_dataclass(place_of(name)):
            words.append("*")
        keyword_only = keyword_only or parameter.kind is parameter.KEYWORD_ONLY
        words.append(str(parameter.replace(annotation=parameter.empty)))
    return f"{name}({', '.join(words)})"


def is_called(name: str) -> bool:
    """Return true for functions, methods and classes that users call."""
    found = place_of(name)
    return callable(found) and bool(parameters(name) or not inspect.isclass(found))


# The page as Sphinx reads it: a directive of the Python domain for each name, in reStructuredText.


def with_objects(text: str) -> str:
    """Return the page with the description of each object in place of its name."""
    return DIRECTIVE.sub(lambda match: f"````{{eval-rst}}\n{restructured(match[1])}\n````", text)


def restructured(name: str) -> str:
    """Return the description of an object."""
    parts = sections(name)
    body, example = before_example(parts[""])
    found = place_of(name)
    kind = "class" if inspect.isclass(found) else "function"
    if inspect.isclass(found) and issubclass(found, Exception):
        kind = "exception"
    called = signature(name) if is_called(name) else name
    blocks = [body, *tables(name, parts), *fields_of(parts), example]
    lines = "\n\n".join(block for block in blocks if block).splitlines()
    return "\n".join([f".. py:{kind}:: {called}", "", *(f"   {line}".rstrip() for line in lines)])


def before_example(body: str) -> tuple[str, str]:
    """Return the text before the example, and the example with the line that introduces it."""
    start = body.find("\n>>>")
    if start < 0:
        return body, ""
    text = body[:start].rstrip()
    head, _, last = text.rpartition("\n\n")
    if last.endswith(":"):
        return head, f"{last}\n{body[start:]}"
    return text, f"Example:\n{body[start:]}"


def tables(name: str, parts: dict[str, str]) -> Iterator[str]:
    """Yield the tables of arguments and attributes."""
    rows = list(arguments(name)) if is_called(name) else []
    if rows:
        cells = [
            (f"``{row.name}``", row.type, f"``{row.default}``" if row.default else "", row.meaning) for row in rows
        ]
        yield table(("argument", "type", "default", "meaning"), cells)
    if "Attributes" in parts:
        entries = ENTRY.findall(parts["Attributes"])
        yield table(("attribute", "meaning"), [(f"``{entry}``", " ".join(text.split())) for entry, _, text in entries])


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table in reStructuredText."""
    lines = [".. list-table::", "   :header-rows: 1", "   :class: meanings arguments", ""]
    for row in (header, *rows):
        first, *others = [cell.replace("*", "\\*") if "``" not in cell else cell for cell in row]
        lines += [f"   * - {first}", *(f"     - {cell}".rstrip() for cell in others)]
    return "\n".join(lines)


def fields_of(parts: dict[str, str]) -> Iterator[str]:
    """Yield the results and the errors."""
    for title in ("Returns", "Yields"):
        if title in parts:
            yield re.sub(r"(?<=\w)_(?=[\],.\s])", r"\\_", f"**{title}:** {inspect.cleandoc(parts[title])}")
    for entry, _, text in ENTRY.findall(parts.get("Raises", "")):
        yield f"**Raises** ``{entry}`` {' '.join(text.split())}"
