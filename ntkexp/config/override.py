"""KEY=VALUE as it stands on the command line, and Hydra's part: the chosen options put together as one tree of YAML.

    text      ['+' | '++'] KEY '=' VALUE         + adds in Hydra; every key is known here, so it says nothing new
    KEY       words joined by dots
    VALUE     Hydra's grammar; where only text can be meant, the text itself, unless it is quoted, null or ${…}

>>> split("model.width=64")
Override(key='model.width', value='64')
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from pydantic.fields import FieldInfo
from yaml import YAMLError

from ntkexp.config.choices import Choices
from ntkexp.config.field_types import is_list, is_text, may_be_text, takes
from ntkexp.config.plain_yaml import read
from ntkexp.mistake import HydraSetting, Mistake

KEY = re.compile(r"[A-Za-z_]\w*(\.\w+)*", re.ASCII)
LONGEST = 5000  # letters of a value: Hydra's grammar takes a second for them
MARKED = re.compile(r"""null|'.*'|".*"|.*\$\{.*\}.*""", re.DOTALL)


@dataclass(frozen=True)
class Override:
    """A key, and the value as it was written; an empty one where none was."""

    key: str
    value: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


def split(text: str) -> Override:
    """Split an override into its two sides."""
    if re.match(r"\+{0,2}hydra([./@=]|$)", text):
        raise HydraSetting(f"{text}: settings of Hydra have no effect here")
    if text.startswith("~"):
        raise Mistake(
            f"{text}: nothing can be taken away; leave a key out and it keeps its default, or give it a value"
        )
    key, equals, value = text.partition("=")
    key = re.sub(r"^\+{1,2}", "", key).strip()
    if not key:
        raise Mistake(f"{text or repr(text)}: there is no key; write KEY=VALUE, such as seed=3")
    if not KEY.fullmatch(key):
        raise Mistake(f"{text}: '{key}' is no key; write KEY=VALUE with words joined by dots, such as model.width=64")
    return Override(key, value.strip() if equals else "")


def value(override: Override, field: FieldInfo) -> Any:
    """What an override gives to a field."""
    if not override.value or override.value == "???":
        raise Mistake(f"{override.key} is given no value; write {override.key}=VALUE: it takes {takes(field)}")
    if is_text(field.annotation) and not MARKED.fullmatch(override.value):
        return override.value
    if len(override.value) > LONGEST:
        raise Mistake(
            f"{override.key} is given {len(override.value)} letters, and an override is read up to {LONGEST}; write "
            "what is longer into a YAML file of yours"
        )
    try:
        parsed = OverridesParser.create().parse_override(str(override))
        swept, found = parsed.is_sweep_override(), parsed.value()
    except (HydraException, ValueError, RecursionError):  # the last two: 5000 digits, 500 brackets
        if may_be_text(field.annotation):
            return override.value
        raise Mistake(f"{override}: the value cannot be read; {override.key} takes {takes(field)}") from None
    if not swept:
        return found
    if may_be_text(field.annotation):
        return override.value
    raise Mistake(f"{override}: a run has one value for each key; write {single(override, field)}")


def single(override: Override, field: FieldInfo) -> str:
    """Put one value in place of several.

    >>> single(Override("model.width", "64,128"), FieldInfo(annotation=int))
    'model.width=64'
    """
    if is_list(field.annotation):
        return f"a list as {override.key}=[{override.value}]"
    first = re.search(r"[\w.+-]+(?=\s*[,)])", override.value)
    return f"{override.key}={first.group() if first else 'VALUE'}"


# --- Hydra's part: the chosen options of each group put together as one tree of YAML, by its compose API.
#
# A user's folder goes *before* the package's in the search path. A `hydra.searchpath` override would come after
# it, and Hydra's own listings would not know of it; a plugin has neither fault.


user_folders: ContextVar[tuple[str, ...]] = ContextVar("user_folders", default=())


class UserFolders(SearchPathPlugin):
    """Puts the user's folders first. Hydra makes it without arguments, hence the context variable."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in reversed(user_folders.get()):
            search_path.prepend("ntkexp", f"file://{folder}")


def assemble(picked: Mapping[str, str], choices: Choices) -> tuple[DictConfig, dict[str, str]]:
    """Assemble the tree with these options, and the option of every group, those that nobody asked for included."""
    Plugins.instance().register(UserFolders)
    usual = choices.defaults()
    overrides = [f"{'' if group in usual else '+'}{group}={option}" for group, option in picked.items()]
    refuse_misread(choices, usual | dict(picked))
    token = user_folders.set(tuple(str(folder) for folder in choices.folders[:-1]))
    try:
        tree = composed(str(choices.folders[-1]), overrides)
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, RecursionError) as error:
        # The package's own YAML is tested: what cannot be put together is the user's.
        said = next(
            said for each in (error, error.__cause__, type(error).__name__) if (said := str(each or "").split())
        )
        raise Mistake(f"{choices.folders[0]}: {' '.join(said)}") from None
    finally:
        user_folders.reset(token)
    options = tree.hydra.runtime.choices
    with open_dict(tree):
        del tree["hydra"]
    return tree, {group: option for group, option in options.items() if group in choices.groups()}


def refuse_misread(choices: Choices, chosen: Mapping[str, str]) -> None:
    """Say what is wrong with a file, and in which line, more plainly than Hydra; and no file has a say in Hydra.

    Its search path could name packages, which are imported to be searched.
    """
    files = [choices.root(), *(choices.file(group, option) for group, option in chosen.items())]
    for file in files:
        if "hydra" in read(file):
            raise Mistake(f"{file}: settings of Hydra have no effect here; remove 'hydra'")
    if any("defaults" in read(file) for file in files[1:]):  # of files that are not chosen by themselves
        for file in (file for folder in choices.folders[:-1] for file in folder.rglob("*.yaml")):
            read(file)


def composed(folder: str, overrides: list[str]) -> DictConfig:
    """Call Hydra once."""
    with warnings.catch_warnings(), hydra.initialize_config_dir(folder, job_name="ntkexp", version_base="1.3"):
        warnings.simplefilter("ignore")  # about how a user's YAML is written; what cannot be read is an error
        tree = hydra.compose("config", overrides, return_hydra_config=True)
    OmegaConf.set_struct(tree, False)
    return tree
