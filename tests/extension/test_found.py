"""Whoever names a new part is understood: in lists, in the shell, in the reference, and by the tests of its kind."""

from __future__ import annotations

import pytest

from ntkexp.chapter import option
from ntkexp.config.choices import complete, tree
from ntkexp.config.plain_yaml import read
from ntkexp.mistake import Mistake
from tests.config import components
from tests.docs import reference
from tests.extension.outside import ADDED, Outside
from tests.loss import test_losses as of_losses
from tests.optimizer import test_optimizers as of_optimizers

LISTS = {"rule": "path.rule", "machine": "ladder.machine"}


@pytest.fixture
def known(outside: Outside, monkeypatch: pytest.MonkeyPatch) -> Outside:
    """The folder, where tests look as well."""
    outside.composer.resolve([])
    monkeypatch.setattr(components, "FOLDERS", [outside.configs, components.CONFIGS])
    monkeypatch.setattr(reference, "CHOICES", outside.choices)
    return outside


@pytest.mark.parametrize(("group", "name"), ADDED)
def test_a_part_is_offered_shown_described_and_called_by_its_name(known: Outside, group: str, name: str) -> None:
    key = LISTS.get(group, group)
    begun = f"{key}=[{name}" if group in LISTS else f"{key}={name}"
    assert begun in {word.rstrip("],") for word in complete([], begun[:-1], known.choices)}
    asked = f"{key}=[{name}]" if group in LISTS else begun
    assert asked in tree(known.choices)
    assert f"### {asked}\n\n{reference.described(reference.component(told(known, group, name)))}" in (
        reference.section(group)
    )
    assert option(str(told(known, group, name)["_target_"])) == name


def told(known: Outside, group: str, name: str) -> dict[str, object]:
    """What the YAML of a part says."""
    return read(known.choices.file(group, name))


@pytest.mark.parametrize(("group", "name"), ADDED)
def test_a_misspelt_part_is_answered_with_its_name(known: Outside, group: str, name: str) -> None:
    wrong = f"{LISTS[group]}=[{name}x]" if group in LISTS else f"{group}={name}x"
    with pytest.raises(Mistake, match=rf"choose from .*\b{name}\b.*did you mean '{name}'"):
        known.experiment(wrong)


@pytest.mark.parametrize(("group", "name"), ADDED)
def test_the_grids_of_tests_take_it_up(known: Outside, group: str, name: str) -> None:
    assert name in components.choices(group)
    made = components.configured(group, name)
    assert set(told(known, group, name)) == made.fields().keys()


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("name", ["doubled", "log_cosh"])
def test_a_new_loss_obeys_the_laws_of_losses(name: str) -> None:
    of_losses.test_the_output_gradient_is_the_derivative_of_the_value(name)
    of_losses.test_a_loss_is_quadratic_if_its_output_gradient_is_what_misses(name)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("name", ["in_turn", "averaged"])
def test_a_new_optimizer_obeys_the_laws_of_optimizers(name: str) -> None:
    of_optimizers.test_a_step_without_a_gradient_stays(name)
    of_optimizers.test_a_step_leaves_its_arguments_alone_and_goes_downhill(name)
