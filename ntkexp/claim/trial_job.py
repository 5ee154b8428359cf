"""A trial as a job for a worker: its rows go into a sealed file, and one that is there is not carried out again.

    trials/<name>-<digest>-s<seed>.json      {"trial": …, "seed": …, "rows": [{…}, …], "seal": of all this}

It computes with one thread, whoever carries it out, so that the bytes are the same everywhere.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from ntkexp.claim.claim import without_files
from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.config.build import Builder, admit
from ntkexp.engine.base import AbstractJob, Ending, Tell
from ntkexp.mistake import Mistake
from ntkexp.records.atomic import read_sealed, sealed_text, write_atomically
from ntkexp.records.folder import results_version
from ntkexp.records.results import write_timings
from ntkexp.run.environment import Clock


@dataclass(frozen=True)
class TrialJob(AbstractJob):
    """One seed of a trial."""

    loads = ("torch._dynamo", "ntkexp.limit.fused.run")
    """What torch loads for its first optimizer, and numba: two seconds that each seed would take by itself."""

    fields: dict[str, Any]
    seed: int
    folder: str
    trust: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The trial with this seed has this name, which tells all that it reads."""
        files = self.digests
        kind = str(self.fields["_target_"]).rpartition(".")[2].lower()
        whole = {"trial": without_files(self.fields), "results_version": results_version}
        whole |= {"files": files} if files else {}
        digest = sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:12]
        return f"{kind}-{digest}-s{self.seed}"

    @property
    def digests(self) -> list[str]:
        """Those of the files that its words name, such as data.path=my.csv; there are none in most."""
        texts = [word for value in self.fields.values() if isinstance(value, list | tuple) for word in value]
        words = [word for word in texts if isinstance(word, str) and "=" in word]
        places = [word.partition("=")[2].partition(":")[0].strip("'\"") for word in words]
        if not any(place and Path(place).expanduser().exists() for place in places):
            return []
        from ntkexp.config.compose import compose  # noqa: PLC0415  slow, and most trials need none
        from ntkexp.experiment.identity import digest, files_of  # noqa: PLC0415  the same

        return [digest(file) for file in files_of(compose(words, None, self.trust))]

    @property
    def file(self) -> Path:
        """The rows lie here."""
        return Path(self.folder) / "trials" / f"{self.name}.json"

    @property
    def rows(self) -> list[dict[str, Any]] | None:
        """Read the rows, if they are there as they were written."""
        try:
            found: list[dict[str, Any]] = read_sealed(self.file, self.name)["rows"]
        except Mistake:
            return None
        return found

    @property
    def timings(self) -> Path:
        """How long it took stands here."""
        return self.file.with_suffix(".timings.csv")

    def carry_out(self, name: str, threads: int, tell: Tell) -> Ending:
        if self.rows is not None:
            return "found"
        import torch  # noqa: PLC0415  slow, and names of trials need none

        torch.set_num_threads(1)
        trial = Builder(admit(self.trust)).component(self.fields, (AbstractTrial,), "trial")
        assert isinstance(trial, AbstractTrial)
        clock = Clock()
        with clock.times("trial"):
            rows = [dict(row) for row in trial.rows(self.seed)]
        write_timings(self.timings, clock.parts)
        fields = {"trial": without_files(self.fields), "seed": self.seed, "rows": rows}
        write_atomically(self.file, sealed_text(fields, self.name))
        return "done"
