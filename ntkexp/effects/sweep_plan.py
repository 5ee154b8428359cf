"""What a sweep for effects takes, and how many outputs it goes back for at once."""

from __future__ import annotations

from dataclasses import dataclass

from ntkexp.mistake import Mistake

BEGUN = 1  # row of an output beside its adjoints: ∂F/∂θ_T, of which the first is made
ROWS = 4  # of an output in a pass: what is pulled, what was moved, H γ, and one on the way
PASS = 6  # tapes of a pass: values, tangents, and gradients of both
IN_CACHE = 2**20  # numbers in the γ of one pass: as many as a processor keeps at hand


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """Sizes in numbers, and the bytes that are free."""

    free: float  # bytes
    points: int
    outputs: int  # of each
    steps: int
    parameters: int
    train: int
    rows: int  # of a batch
    adjoints: int  # of an output: of the weights, and of what the optimizer remembers
    tape_bytes: float  # per example
    number_bytes: int
    taken_out: int = 0  # rows whose gradients are needed one by one

    @property
    def chunk(self) -> int:
        """How many points at once."""
        each = self.outputs * self.per_output
        if self.free / 2 < max(each, self.least_pass):
            needed = (2 * max(each, self.least_pass) - self.free) / 1e9
            raise Mistake(
                f"effects: a sweep for one point needs {needed:.1f} GB more; raise memory_gb, or train a smaller "
                "network, with fewer examples or smaller batches"
            )
        return max(1, min(self.points, int(self.free / 2 / each)))

    @property
    def least_pass(self) -> float:
        """Bytes of a pass of one output, and of the gradients of single rows."""
        return max(self.per_pass, PASS * self.taken_out * self.parameters * self.number_bytes)

    @property
    def together(self) -> int:
        """How many outputs take a step back together."""
        return max(1, min(IN_CACHE // self.parameters, int(self.free / 2 / self.per_pass)))

    @property
    def per_output(self) -> float:
        """Bytes of an output throughout the sweep."""
        return ((self.adjoints + BEGUN) * self.parameters + self.train) * self.number_bytes

    @property
    def per_pass(self) -> float:
        """Bytes of an output in a pass."""
        return PASS * self.rows * self.tape_bytes + ROWS * self.parameters * self.number_bytes

    @property
    def sentence(self) -> str:
        """What it costs, said before it begins."""
        vectors, bytes_held = self.points * self.outputs, self.chunk * self.outputs * self.per_output
        return (
            f"effects: a sweep back of {self.steps} × {vectors} passes (steps × outputs), each of 1 to 6 gradients of "
            f"a batch; {self.chunk * self.outputs} outputs at a time take {bytes_held / 1e9:.2g} GB"
        )

    def spared(self, *, swept: bool = True) -> str:
        """What is said instead where trainings cost less; or where no sweep could be made, but they cost as little."""
        trainings = f"effects: {self.train} trainings, each without one example,"
        if not swept:
            why = "nobody knows the derivative of what this optimizer does"
            return f"{trainings} are the truth; there is no other way, as {why}"
        outputs = self.points * self.outputs
        return f"{trainings} take less than a sweep back for {outputs} outputs and are the truth: no sweep is made"
