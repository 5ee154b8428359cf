"""What a configuration of the library transformers may not say here: to run, fetch or read what lies elsewhere.

A configuration comes from a command line, a YAML file, a run's folder or a folder with a model; none of these is code.

>>> refuse_elsewhere({"n_head": 2, "text_config": {"auto_map": {"AutoModel": "own.Net"}}}, "model.path=a")
Traceback (most recent call last):
ntkexp.mistake.Mistake: model.path=a: 'auto_map' would run or read what lies elsewhere, which is never done; remove it
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ntkexp.mistake import Mistake
from ntkexp.records.json_file import read_object

ELSEWHERE = frozenset(
    {
        "adapter_kwargs",
        "architecture",  # of timm, by an address
        "auto_map",  # Python files beside the configuration
        "backbone",  # a model by its name or folder
        "backbone_kwargs",
        "checkpoint_path",
        "custom_pipelines",
        "model_args",  # of timm, a checkpoint's path among them
        "quantization_config",  # kernels and packages of its own
        "transformers_weights",
        "trust_remote_code",
        "use_pretrained_backbone",
    }
)

PLAIN = {None, "eager", "sdpa", "batched_mm", "grouped_mm"}
"""Ways to calculate attention and experts that are torch's own; any other is fetched as compiled code."""


def refuse_elsewhere(fields: Mapping[str, Any], given: str) -> None:
    """Everything that a configuration says, however deep, must stay here."""
    for key, value in entries(fields):
        foreign = key.endswith("_implementation") and (not isinstance(value, str | None) or value not in PLAIN)
        if foreign or (key in ELSEWHERE and value not in (None, False, [], {})):
            raise Mistake(f"{given}: '{key}' would run or read what lies elsewhere, which is never done; remove it")


def entries(value: object) -> Iterator[tuple[str, Any]]:
    """Go through the keys of a tree with their values."""
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Mapping):
            yield from ((str(key), item) for key, item in node.items())
            waiting += node.values()
        elif isinstance(node, Sequence) and not isinstance(node, str):
            waiting += node


def refuse_parts_elsewhere(files: Sequence[Path], given: str) -> None:
    """Weights in several files are found by an index, and an adapter by the folder of its model: both must be here."""
    here = {file.name for file in files}
    if "adapter_config.json" in here:
        raise Mistake(f"{given} holds an adapter, whose model lies elsewhere; merge them, and save the whole")
    for file in files:
        if file.name.endswith(".index.json"):
            parts = read_object(file).get("weight_map")
            named = set(map(json.dumps, parts.values())) if isinstance(parts, dict) else {"no file"}
            if away := sorted(named - set(map(json.dumps, here))):
                raise Mistake(f"{given}: {file.name} names {away[0]}, which is no file of that folder")
