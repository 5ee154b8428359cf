"""`ntkexp explain` and `attribute`: which training examples made a prediction, what leaving some out changes, and the
same for a training loop that was followed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ntkexp.cli.options import Again, AsJson, Quiet, Trust, interruptible, write_out
from ntkexp.mistake import Mistake
from ntkexp.report.progress import progress_listener

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ntkexp.effects.sweep import MeanName
    from ntkexp.progress import AbstractProgress
    from ntkexp.records.contributions import Removal
    from ntkexp.report.explain import Explanation
    from ntkexp.report.ledger import LedgerEntry
    from ntkexp.report.run import Run


KINDS = (".svg", ".png")
FEW, ON_A_PAGE = 3, 12
"""The default numbers of explained points: on a terminal, and on a page."""


def explain(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    probe: Annotated[
        list[int] | None,
        typer.Option(
            "--probe",
            metavar="K",
            min=0,
            help="A point by its number in the split; may be repeated.",
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            metavar="SPLIT",
            help="The split whose points are explained: train, probe or test.",
        ),
    ] = None,
    worst: Annotated[
        int | None,
        typer.Option(
            "--worst", metavar="N", min=1, help="Explain the N points that the network misses most."
        ),
    ] = None,
    top: Annotated[
        int,
        typer.Option(
            "--top", metavar="N", min=1, help="How many training examples to list for each point."
        ),
    ] = 10,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", metavar="FILE", help="The file of the picture, .svg or .png."),
    ] = None,
    without: Annotated[
        str | None,
        typer.Option(
            "--without",
            metavar="GROUP",
            help="Train again without some examples, and split over them what that changed: places such as 3,20..29, "
            "#K for a number in the source, an id, class:NAME or top:N.",
        ),
    ] = None,
    again: Again = None,
    page: Annotated[
        bool,
        typer.Option(
            "--page",
            help="Write a page on which points can be chosen, with all that is known of each.",
        ),
    ] = False,
    as_json: AsJson = False,
    trust: Trust = None,
) -> None:
    """See which training examples made a prediction, and when; or what changes without some of them."""
    from ntkexp.report import explain as explanations
    from ntkexp.report.explain import format_explanations
    from ntkexp.report.forgetting import format_tasks
    from ntkexp.report.loaded_run import load_run
    from ntkexp.report.sentence import main_split

    numbers, trust = probe or [], trust or []
    if numbers and worst is not None:
        raise Mistake("--probe names points and --worst looks for them; give one of the two")
    if page and as_json:
        raise Mistake("--page and --json are two forms of one result; give one of the two")
    if page and picture is not None:
        raise Mistake("--page has pictures of its own; leave out --picture")
    if again is not None and without is None:
        raise Mistake("--again trains a loop without some examples; say which by --without=K,…")
    loaded = load_run(run.expanduser())
    chosen = split or ("probe" if numbers else main_split(loaded.ladder))
    chosen_points = list(numbers) or explanations.worst_points(
        loaded, chosen, worst or (ON_A_PAGE if page else FEW)
    )
    if without is not None and not page:
        leave_out(
            loaded, chosen, chosen_points, without, top, again=again, as_json=as_json, trust=trust
        )
        return
    explained = explanations.explain(loaded, chosen, chosen_points)
    if not explained:
        raise Mistake(f"no point of the split {chosen} of {loaded.name} can be explained")
    if page:
        write_out(
            f"{write_page(loaded, chosen, chosen_points, explained, without, trust, again)}\n"
        )
        return
    if as_json:
        from ntkexp.report.tables import format_json

        if picture is not None:
            draw(explained, picture.expanduser())
        write_out(format_json({"points": [each.as_json(top) for each in explained]}))
        return
    if tasks := format_tasks(loaded, top):
        write_out(f"{tasks}\n")
    write_out(f"{format_explanations(explained, top)}\n")
    # by default the picture goes into the report beside the runs
    name = "-".join(["explain", loaded.path.name, chosen, *map(str, chosen_points[:8])])
    where = (
        picture.expanduser() if picture else loaded.path.parent.parent / "report" / f"{name}.svg"
    )
    draw(explained, where)
    write_out(f"{where}\n")


def draw(explanations: Sequence[Explanation], where: Path) -> None:
    from ntkexp.report.plots.examples import save

    if where.suffix not in KINDS:
        raise Mistake(f"--picture={where}: it takes a file whose name ends in {' or '.join(KINDS)}")
    try:
        save(explanations, where)
    except (FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise Mistake(f"--picture={where}: {error.strerror}; choose another place") from None


def write_page(
    run: Run,
    split: str,
    numbers: list[int],
    explanations: Sequence[Explanation],
    without: str | None,
    trust: Sequence[str],
    again: str | None,
) -> Path:
    """Write what made the outputs of a run, and what would change them, as a page beside the reports of the runs."""
    from ntkexp.report.page.build import write_explanations

    removed = []
    if without is not None:
        entries, _ = removal(run, split, numbers, without, trust, again, quiet=False)
        removed = of_largest_outputs(entries)
    words = [
        *("ntkexp", "explain", str(run.path), "--page", f"--split={split}"),
        *(f"--probe={number}" for number in numbers),
        *([f"--without={without}"] if without else []),
        *([f"--again={again}"] if again else []),
        *(f"--trust={entry}" for entry in trust),
    ]
    page = run.path.parent.parent / "report" / f"explain-{run.name}.html"
    return write_explanations(run, explanations, removed, page, shlex.join(words))


# --- `ntkexp explain RUN --without=…`: trained again without some examples, and what came of it.


def leave_out(
    run: Run,
    split: str,
    numbers: list[int],
    text: str,
    top: int,
    *,
    again: str | None,
    as_json: bool,
    trust: Sequence[str],
) -> None:
    """Show what leaving out a group changes at these points of a split."""
    entries, found = removal(run, split, numbers, text, trust, again, quiet=as_json)
    order = order_of(run) if "top:" in text else ""
    if as_json:
        from ntkexp.report.tables import format_json

        ordered = {"top": order} if order else {}
        write_out(format_json({**ordered, "ledger": [entry.as_json for entry in entries]}))
        return
    from ntkexp.report.explain import known_effects
    from ntkexp.report.ledger import format_ledger

    known = known_effects(run)
    agreement = None if known is None else known.agreement
    write_out(format_ledger(of_largest_outputs(entries), found, agreement, top, order))


def removal(
    run: Run,
    split: str,
    numbers: list[int],
    text: str,
    trust: Sequence[str],
    again: str | None,
    *,
    quiet: bool,
) -> tuple[list[LedgerEntry], Removal]:
    """Find what leaving out a group changes, and put it in words of the run."""
    from ntkexp.report.examples import choose_group
    from ntkexp.report.explain import point_index
    from ntkexp.report.ledger import ledger_entries

    points = [point_index(run, split, number) for number in numbers]
    progress = progress_listener(quiet=quiet)
    chosen = choose_group(run, text, lambda: influences(run, points, progress))
    with interruptible(lambda: "; nothing was kept of it"):
        if "follow" in run.config:
            found = without_of_loop(run, chosen, points, again, trust, progress)
        elif again is not None:
            raise Mistake(
                f"--again is for followed loops; {run.path} is an experiment, which needs none"
            )
        else:
            from ntkexp.config.build import admit

            admitted = admit(trust)
            from ntkexp.run.execute import remove_group

            found = remove_group(run.path, chosen, points, progress, admitted)
    return ledger_entries(run, split, numbers, found), found


def without_of_loop(
    run: Run,
    group: list[int],
    points: list[int],
    again: str | None,
    trust: Sequence[str],
    progress: AbstractProgress,
) -> Removal:
    """Let the user's function carry a followed loop out without a group."""
    from ntkexp.config.build import load_function
    from ntkexp.foreign_loop.loop_breakdown import loop_without
    from ntkexp.foreign_loop.trace import find_trace
    from ntkexp.records.contributions import read_removal, write_removal

    if (recorded := read_removal(run.path, group, points)) is not None:
        return recorded
    if again is None:
        raise Mistake(
            f"{run.path} is of a loop of your own; give a function that runs it again, --again=FILE.py:FUNCTION"
        )
    files, effect = find_trace(run.path), run.contributions.get("effect")
    mean: MeanName = (
        "fixed" if effect is not None and effect.attrs["mean"] == "fixed" else "renormalised"
    )
    function = load_function(again, "again", trust)
    with files.folder.claim():
        found = loop_without(files, function, mean, group, points, progress)
        write_removal(run.path, found)
    return found


def influences(run: Run, points: Sequence[int], progress: AbstractProgress) -> NDArray[np.float64]:
    """How much each training example matters at these points: by its effects, or by what it added; which is said."""
    from ntkexp.records.contributions import explained_rule
    from ntkexp.report.explain import effects_of_run, influence

    parts = effects_of_run(run)
    if parts is None:
        rule = explained_rule(run.rules)
        if rule is None:
            raise Mistake(
                f"{run.path} holds neither effects nor contributions, so its examples have no order"
            )
        parts = run.parts(rule).isel(probe=list(points)).to_numpy()
    else:
        parts = parts[list(points)]
    progress.say(f"at the top are examples {order_of(run)}")
    return influence(parts)


def order_of(run: Run) -> str:
    """By what examples are at the top, in words that follow 'examples'."""
    from ntkexp.report.explain import effects_of_run

    if effects_of_run(run) is None:
        return "that added most, as this run has no effects (path.effects=true)"
    return "of the largest effects"


def of_largest_outputs(entries: Sequence[LedgerEntry]) -> list[LedgerEntry]:
    """Of each point the output that the network gives it, where there are several."""
    best: dict[int, LedgerEntry] = {}
    for entry in entries:
        if entry.number not in best or entry.before > best[entry.number].before:
            best[entry.number] = entry
    return list(best.values())


def attribute(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="The folder of a trace: ntkexp.follow(…, to=FOLDER)."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="FILE.py:FUNCTION",
            help="A function that builds the followed module.",
        ),
    ] = None,
    effects: Annotated[
        bool,
        typer.Option(
            "--effects", help="Also find what would change without each example; needs the loss."
        ),
    ] = False,
    loss: Annotated[
        str | None,
        typer.Option(
            "--loss",
            metavar="FILE.py:FUNCTION",
            help="The loss of each example, of outputs and the call.",
        ),
    ] = None,
    measure: Annotated[
        str | None,
        typer.Option(
            "--measure",
            metavar="FILE.py:FUNCTION",
            help="The measure of the outputs at the queries, as for follow.",
        ),
    ] = None,
    again: Again = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            "--rule",
            metavar="FILE.py:CLASS",
            help="The rule of an optimizer that is not PyTorch's.",
        ),
    ] = None,
    decode: Annotated[
        str | None,
        typer.Option(
            "--decode",
            metavar="FILE.py:FUNCTION",
            help="The text of a list of tokens, to show examples by.",
        ),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            "--by",
            metavar="module|parameter|'{NAME: [PATTERN, …], …}'",
            help="Split contributions by the parameters through which they came.",
        ),
    ] = None,
    positions: Annotated[
        bool,
        typer.Option(
            "--positions",
            help="Split the contributions of texts by position: where in the text the loss was.",
        ),
    ] = False,
    batch_norm: Annotated[
        str | None,
        typer.Option(
            "--batch-norm",
            metavar="exact|constant",
            help="Go through batch statistics of BatchNorm in training mode, or take them for constants.",
        ),
    ] = None,
    quiet: Quiet = False,
    trust: Trust = None,
) -> None:
    """Find what each example of a followed training added to the queries' outputs."""
    from torch import nn

    from ntkexp.config.build import load_function
    from ntkexp.config.plain_yaml import parsed
    from ntkexp.foreign_loop.again import trained_again
    from ntkexp.foreign_loop.batch_norm import checked_mode
    from ntkexp.foreign_loop.rule import AbstractOptimizerRule
    from ntkexp.foreign_loop.trace import find_trace, load_trace, measure_name
    from ntkexp.foreign_loop.user_loss import Weighing
    from ntkexp.report.loaded_run import load_run
    from ntkexp.report.sentence import ladder_sentence

    files = find_trace(folder)
    trust = trust or []
    if model is None and again is None:
        raise Mistake(
            f"{folder}: the module that was followed is not in it; give a function that builds it, "
            "--model=FILE.py:FUNCTION"
        )
    if effects and loss is None and again is None:
        raise Mistake(
            "--effects: effects are derivatives of the gradient; add --loss=FILE.py:FUNCTION, as for follow"
        )
    # module and loss: what is not given is what the loop itself gives to `follow`, once it is carried out as it is
    loop = None if again is None else load_function(again, "again", trust)
    module = None if model is None else load_function(model, "model", trust)()
    if not (module is None or isinstance(module, nn.Module)):
        raise Mistake(
            f"model={model}: it returns a {type(module).__name__}; let it return an nn.Module"
        )
    named = measure_name(files)
    if named is not None and measure is None and again is None:
        raise Mistake(
            f"{folder}: what it explains is a measure of the outputs, '{named}', whose code is not in it; give that "
            "function, --measure=FILE.py:FUNCTION"
        )
    if named is None and measure is not None:
        raise Mistake(
            f"--measure={measure}: {folder} explains outputs; leave it out, or follow the loop again with it"
        )
    first = (
        None
        if loop is None or (model and loss and (measure or not named))
        else trained_again(loop, Weighing())
    )
    if module is None:
        assert first is not None  # one of the two functions was given
        module = first.module
    rules = list[Any]()
    for path in rule or []:
        rules.append(load_function(path, "rule", trust)())
        if not isinstance(rules[-1], AbstractOptimizerRule):
            raise Mistake(
                f"rule={path}: it is not a rule of an optimizer; name a class of AbstractOptimizerRule"
            )
    rules += () if first is None else [each.rule for each in first.steps.known]
    asked = None if measure is None else load_function(measure, "measure", trust)
    trace = load_trace(files, module, asked or (None if first is None else first.measure), rules)
    given = None if loss is None else load_function(loss, "loss", trust)
    trace.loss = given or (None if first is None else first.loss)
    words = None if decode is None else load_function(decode, "decode", trust)
    components = None if by is None else parsed(by)
    trace.batch_norm = trace.batch_norm if batch_norm is None else checked_mode(batch_norm)
    trace.attribute(
        effects=effects,
        by=components,
        positions=positions,
        decode=words,
        again=loop if effects else None,
        quiet=quiet,
    )
    run = load_run(files.folder.path)
    named = f"examples: {naming}\n" if (naming := trace.naming) else ""
    write_out(f"{run.outcome}\n{ladder_sentence(run.ladder)}\n{named}{run.path}\n")
