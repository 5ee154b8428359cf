"""Hydra's part: the chosen options of each group put together as one tree of YAML, by its compose API.

A user's folder goes *before* the package's in the search path. A `hydra.searchpath` override would come after it, and
Hydra's own listings would not know of it; a plugin has neither fault.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextvars import ContextVar

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ntkexp.config.choices import Choices, read
from ntkexp.mistake import Mistake

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
