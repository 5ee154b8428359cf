"""Files with a mistake in them, each with the words in which it has to be said."""

from __future__ import annotations


def built(module: str) -> str:
    """A function that returns this, in its second line."""
    return f"def build():\n    return {module}"


def forward(*lines: str, arguments: str = "x") -> str:
    """A module of one layer with these lines in its forward, from line 9 on."""
    body = "".join(f"        {line}\n" for line in lines)
    return (
        "class build(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        self.layer = nn.Linear(64, 1)\n    def forward(self, {arguments}):\n{body}"
    )


UNFIT = {
    "1 / 0": r"\.py, line 4: ZeroDivisionError: division by zero",
    "raise SystemExit(3)": r"line 4: SystemExit",
    "def build(": r"line 4: SyntaxError",
    "import nowhere_to_be_found": r"line 4: ModuleNotFoundError: No module named 'nowhere_to_be_found'",
    "def biuld(): ...": r"there is no function build in the file; it has biuld; did you mean 'biuld'\?",
    "x = 1": r"there is no function build in the file; it has no function",
    "build = 3": r"build is a int, and a function is expected",
    "build = nn.Linear(64, 1)": r"build is a module that no seed can draw anew",
    "def build(hidden): ...": r"wants 'hidden', and can be given shape, outputs, width, seed, vocabulary; give it a",
    "def build(): ...": r"returns a NoneType; let it return an nn\.Module",
    built("nn.Linear(1, 'one')"): r":build, line 5: TypeError",
    built("nn.Flatten()"): r"nothing to train: it has no parameters",
    built("nn.Linear(8, 1).requires_grad_(False)"): r"none of its 2 parameters requires gradients",
    built("nn.Linear(8, 1, dtype=torch.complex64)"): r"'weight' is complex",
    "def build():\n    layer = nn.Linear(64, 1)\n    layer.bias.register_hook(torch.sign)\n    return layer": (
        r"the parameter 'bias' has a hook, which a run would not call"
    ),
    built("nn.Linear(7, 1)"): r"shape \[1, 8, 8\], and the module says: RuntimeError: mat1 and mat2 shapes",
    built("nn.Linear(8, 1)"): r"shape \[2, 1, 8, 1\] for 2 examples, and \[2, 1\] is expected",
    built("nn.Sequential(nn.Flatten(), nn.Linear(64, 10))"): r"shape \[2, 10\].*and \[2, 1\] is expected",
    built("nn.Sequential(nn.BatchNorm2d(1, track_running_stats=False), nn.Flatten())"): (
        r"layer '0' \(BatchNorm2d\) takes its statistics from the batch, even after module\.eval\(\)"
    ),
    "class build(nn.Sequential):\n    def __init__(self):\n"
    "        super().__init__(nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 1))\n"
    "    def train(self, mode=True):\n        return super().train(True)": (
        r"layer '1' \(Dropout, p=0\.1\) is random in training mode, even after module\.eval\(\)"
    ),
    forward("return x.nonsense"): r"and the module says, line 9: AttributeError",
    forward("return 1", arguments="x, y"): r"missing 1 required positional argument: 'y'",
    forward("return self.layer(x.flatten(1) + torch.ones(3))"): r"and the module says, line 9: RuntimeError",
    forward("return {'y': self.layer(x.flatten(1))}"): r"returns a dict; let it return one tensor",
    forward("return self.layer(x.flatten(1)).long()"): r"gives torch\.int64, and real numbers are expected",
    forward("return self.layer(F.dropout(x).flatten(1))"): r"dropout without training=self\.training",
    forward("x = F.embedding((x[:, 0, 0, :4] > 1e9).long(), self.layer.weight, sparse=True)", "return x.sum((1, 2))"): (
        r"there is a sparse gradient"
    ),
    forward("x -= 1", "return self.layer(x.flatten(1))"): r"overwrites its inputs",
    forward("return self.layer(x.flatten(1)).detach()"): r"is there a detach, or no_grad\?",
    forward("return self.layer((x - x.mean(0)).flatten(1))"): r"couples the examples",
    forward("return self.layer(x.flatten(1)) / 0"): r"not finite.*; look at how the module draws its weights",
    forward("return F.relu(self.layer(x.flatten(1)) - 1e3)"): r"are all units dead",
}
