"""A child begins with the weights of its parent, wherever the parent is stored, and only with the same network."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import torch
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from ntkexp.cli.main import run as run_command
from ntkexp.experiment.identity import identity
from ntkexp.experiment.problem import draw_problem
from ntkexp.mistake import Mistake
from ntkexp.model.foreign import Adapted
from ntkexp.report.loaded_run import LoadedRun, load_run
from tests.run.commands import promised
from tests.run.small import execute_in, small
from tests.run.test_recorded import Interrupting, executed, saved_weights

TINY = (
    *("data.train=9", "data.query=5", "data.test=2", "model.width=6", "threads=1", "checkpoint_seconds=0"),
    *("path.rule=[left]", "ladder.machine=[frozen_limit]", "steps=6", "path.schedule=2", "optimizer.step_size=0.05"),
    "data.seed=0",
)
RECORDING = (*TINY, "path.record=[weights]")


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> LoadedRun:
    return executed(tmp_path_factory.mktemp("parent"), RECORDING)


def start_weights(words: Sequence[str]) -> dict[str, np.ndarray]:
    return {name: weight.numpy() for name, weight in draw_problem(small(*words)).weights.items()}


@pytest.mark.parametrize("step", [0, 2, 4])
def test_a_child_with_the_data_of_its_parent_goes_on_like_it(parent: LoadedRun, step: int, tmp_path: Path) -> None:
    """Descent has no memory, so both halves of a path are one path."""
    words = (*RECORDING, f"init.parent={parent.path}@{step}", f"steps={6 - step}", "seed=5")
    child = executed(tmp_path, words)
    np.testing.assert_equal(child.weights_at(0), parent.weights_at(step))
    np.testing.assert_equal(saved_weights(child, "end"), saved_weights(parent, "end"))
    limit = child.results.query("machine == 'frozen_limit'")
    assert limit["relative_error"].isna().all()
    assert "the weights are those of init.parent, and not drawn" in set(limit["note"])


def test_the_end_of_a_run_is_its_last_step(parent: LoadedRun) -> None:
    last, end = (small(*TINY, f"init.parent={parent.path}@{step}") for step in ("6", "end"))
    outputs = small(*TINY, f"init.parent={parent.path.parent.parent}@end")  # a folder with one run
    assert identity(last) == identity(end) == identity(outputs)
    np.testing.assert_equal(start_weights((*TINY, f"init.parent={parent.path}@end")), saved_weights(parent, "end"))


def test_the_identity_is_that_of_parent_and_step(parent: LoadedRun, tmp_path: Path) -> None:
    moved = shutil.copytree(parent.path, tmp_path / parent.path.name)
    other = executed(tmp_path, (*RECORDING, "seed=1"))
    texts = ("null", *(f"{path}@{step}" for path in (parent.path, other.path) for step in (2, 4)))
    identities = {text: identity(small(*TINY, f"init.parent={text}")) for text in texts}
    assert len(set(identities.values())) == 5
    assert identity(small(*TINY, f"init.parent={moved}@2")) == identities[f"{parent.path}@2"]
    grandchild = executed(tmp_path, (*RECORDING, f"init.parent={moved}@2"))
    np.testing.assert_equal(start_weights((*TINY, f"init.parent={grandchild.path}@2")), grandchild.weights_at(2))


def test_the_checkpoint_of_an_unfinished_run_is_a_step(parent: LoadedRun, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        execute_in(tmp_path, small(*RECORDING), RECORDING, Interrupting(4))
    (unfinished,) = (tmp_path / "runs").iterdir()
    words = (*TINY, f"init.parent={unfinished}@4")
    assert identity(small(*words)) == identity(small(*TINY, f"init.parent={parent.path}@4"))
    np.testing.assert_equal(start_weights(words), parent.weights_at(4))
    with pytest.raises(Mistake, match="its checkpoint is of step 4; finish it by ntkexp resume"):
        draw_problem(small(*TINY, f"init.parent={unfinished}@2"))
    content = bytearray((unfinished / "checkpoint.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (unfinished / "checkpoint.pt").write_bytes(content)
    with pytest.raises(Mistake, match=r"checkpoint\.pt is damaged"):
        draw_problem(small(*words))


def test_an_interrupted_child_ends_in_the_same_bytes(parent: LoadedRun, tmp_path: Path) -> None:
    words = (*TINY, f"init.parent={parent.path}@2", "seed=1", "optimizer=sgd", "optimizer.batch=3")
    whole = executed(tmp_path / "whole", words)
    with pytest.raises(KeyboardInterrupt):
        execute_in(tmp_path / "cut", small(*words), words, Interrupting(3))
    (cut,) = (tmp_path / "cut" / "runs").iterdir()
    assert run_command(["resume", str(cut), "--quiet"]) == 0
    same = {name: content for name, content in promised(cut).items() if not name.startswith("plots/")}
    assert same.items() == promised(whole.path).items()


REFUSALS = {
    "of another width": (("model.width=7",), "2", "its model.width is 6, and here 7; give the parent's"),
    "of another scale": (("init.alpha=2",), "2", "its init.alpha is 1.0, and here 2.0"),
    "of another kind": (("model=transformer",), "2", "its model._target_ is ntkexp.model.MLP, and here ntkexp.model"),
    "of another precision": (("dtype=float32",), "2", "its dtype is float64, and here float32"),
    "with more classes": (("data.classes=[0,1,2]",), "2", r"has shape \[1, 6\], and here \[3, 6\]; use data of"),
    "at another step": ((), "3", r"has weights of steps 0, 2, 4, 6; run it with .* path.schedule=\[3\]"),
    "without a step": ((), "", "it takes RUN@STEP, such as"),
    "centred": (("init.centred=true",), "2", "which a child does not have; leave out one of the two"),
}


@pytest.mark.parametrize(("words", "step", "reason"), REFUSALS.values(), ids=REFUSALS)
def test_a_parent_is_refused_in_one_line(parent: LoadedRun, words: Sequence[str], step: str, reason: str) -> None:
    with pytest.raises(Mistake, match=reason):
        draw_problem(small(*TINY, *words, f"init.parent={parent.path}@{step}"))


def test_an_absent_or_damaged_parent_is_refused(parent: LoadedRun, tmp_path: Path) -> None:
    with pytest.raises(Mistake, match="neither a run nor a folder of outputs with one run; give"):
        identity(small(*TINY, f"init.parent={tmp_path}@2"))
    moved = shutil.copytree(parent.path, tmp_path / parent.path.name)
    for name, step in (("weights.pt", 6), ("recorded.zarr/weights/c/1/0", 2)):
        content = bytearray((moved / name).read_bytes())
        content[len(content) // 2] ^= 1
        (moved / name).write_bytes(content)
        with pytest.raises(Mistake, match=r"is damaged: .* not as it was written"):
            draw_problem(small(*TINY, f"init.parent={moved}@{step}"))


FROZEN = dedent("""
    import torch
    from torch import nn

    def features(seed, shape, outputs, width):
        torch.manual_seed(seed)
        features = nn.Linear(64, width).requires_grad_(False)
        return nn.Sequential(nn.Flatten(), features, nn.ReLU(), nn.Linear(width, outputs))

    def fixed(shape, outputs, width):
        return features(0, shape, outputs, width)

    def drawn(shape, outputs, width, seed):
        return features(seed, shape, outputs, width)
""")


@pytest.mark.parametrize("name", ["fixed", "drawn"])
def test_a_child_has_the_constants_of_its_parent(name: str, tmp_path: Path) -> None:
    """Random features that are not trained are part of the network."""
    file = tmp_path / f"{name}_features.py"
    file.write_text(FROZEN, encoding="utf-8")
    words = (*RECORDING, "model=module", f"model.path={file}:{name}", "ladder.machine=[]")
    trust = [str(file)]
    run = load_run(execute_in(tmp_path, small(*words, trust=trust), words))
    child = small(*words, f"init.parent={run.path}@2", "seed=1", trust=trust)
    file.write_text(FROZEN.replace("ReLU", "Tanh"), encoding="utf-8")
    with pytest.raises(Mistake, match=rf"{file.name} has changed since the parent began; restore it, or run"):
        draw_problem(child)
    file.write_text(FROZEN, encoding="utf-8")
    if name == "fixed":
        assert draw_problem(child).weights.keys() == run.weights_at(2).keys()
        return
    with pytest.raises(Mistake, match=r"1\.weight is not trained, and depends on the seed; use seed=0, the parent's"):
        draw_problem(child)


WHOLE = dedent("""
    import torch
    from torch import nn

    class Net(nn.Sequential):
        def __init__(self, outputs, width):
            layers = nn.Linear(64, width), nn.BatchNorm1d(width), nn.Linear(width, width), nn.Linear(width, width)
            super().__init__(nn.Flatten(), *layers, nn.ReLU(), nn.Linear(width, outputs))
            self[1].requires_grad_(False)
            self[4].weight = self[3].weight
            self.register_buffer("mask", torch.eye(width) > 0)
            self.register_buffer("computed", torch.eye(width), persistent=False)

    def build(shape, outputs, width, seed):
        torch.manual_seed(seed)
        return Net(outputs, width)
""")


def test_weights_are_whole_state_dicts(tmp_path: Path) -> None:
    """With frozen parameters, buffers and both names of a shared weight. A child and a kernel take the trained ones."""
    file = tmp_path / "whole_net.py"
    file.write_text(WHOLE, encoding="utf-8")
    words = (*TINY, "path.record=[outputs]", "model=module", f"model.path={file}:build", "ladder.machine=[]")
    trust = [str(file)]
    run = load_run(execute_in(tmp_path, small(*words, trust=trust), words))
    problem = draw_problem(small(*words, trust=trust))
    adapted = problem.module.network
    assert isinstance(adapted, Adapted)
    module = adapted.module
    for moment, step in (("start", 0), ("end", 6)):
        state = torch.load(run.path / "weights.pt")[moment]
        consume_prefix_in_state_dict_if_present(state, "network.module.")
        module.load_state_dict(state)
        outputs = module(problem.inputs).detach().numpy()
        np.testing.assert_allclose(run.outputs_at(step), outputs, rtol=1e-12)
        child = draw_problem(small(*words, f"init.parent={run.path}@{step}", trust=trust))
        for name, weight in child.weights.items():
            assert torch.equal(weight, state[name.removeprefix("network.module.")])
    out = f"--out={tmp_path / 'kernel.zarr'}"
    assert run_command(["kernel", "tangent", f"--run={run.path}", f"--trust={file}", out, "--quiet"]) == 0


def test_a_state_dict_without_arguments_loses_no_run(tmp_path: Path) -> None:
    file = tmp_path / "net_without_arguments.py"
    own = "    def state_dict(self):\n        return nn.Module.state_dict(self)\n"
    file.write_text(WHOLE.replace("\ndef build", f"{own}\ndef build"), encoding="utf-8")
    words = (*TINY, "model=module", f"model.path={file}:build", "ladder.machine=[]")
    run = load_run(execute_in(tmp_path, small(*words, trust=[str(file)]), words))
    names = torch.load(run.path / "weights.pt")["end"].keys()
    assert dict(draw_problem(small(*words, trust=[str(file)])).module.named_buffers()).keys() <= names
