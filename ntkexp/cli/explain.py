"""`ntkexp explain` and `ntkexp attribute`: contributions of training examples
to predictions."""

from __future__ import annotations

import errno
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, overload

import typer

from ntkexp.cli.options import (
    Again,
    AsJson,
    Quiet,
    Trust,
    interruptible,
    wrap,
    write_json,
    write_out,
)
from ntkexp.engine.base import DENIED
from ntkexp.mistake import Mistake
from ntkexp.report.progress import progress_listener

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import nn

    from ntkexp.effects.sweep import MeanName
    from ntkexp.foreign_loop.rule import AbstractOptimizerRule
    from ntkexp.progress import AbstractProgress
    from ntkexp.records.atomic import Json
    from ntkexp.records.contributions import Removal
    from ntkexp.report.breakdown import BreakdownEntry
    from ntkexp.report.explain import Explanation
    from ntkexp.report.run import Run


PICTURE_SUFFIXES = (".svg", ".png")
QUERIES_ON_TERMINAL = 3  # default number of explained queries
QUERIES_ON_PAGE = 12


def explain(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")
    ],
    query: Annotated[
        list[int] | None,
        typer.Option(
            metavar="K",
            min=0,
            help="The number of a point in the split; may be repeated.",
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="SPLIT",
            help="The split of the explained points: train, query or test.",
        ),
    ] = None,
    worst: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Explain the N points with the largest errors.",
        ),
    ] = None,
    top: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="The number of training examples to list for each point.",
        ),
    ] = 10,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The file of the picture, .svg or .png."),
    ] = None,
    without: Annotated[
        str | None,
        typer.Option(
            metavar="GROUP",
            help=(
                "Retrain without these examples, and split the resulting change among them: indices "
                "such as 3,20..29, #K for a number in the source, an id, class:NAME or top:N."
            ),
        ),
    ] = None,
    again: Again = None,
    page: Annotated[
        bool,
        typer.Option(
            "--page",
            help="Write an HTML page with all results, on which points can be selected.",
        ),
    ] = False,
    as_json: AsJson = False,
    trust: Trust = None,
) -> None:
    """Show which training examples made a prediction.

    With --without, train again without some examples, and show what changes.
    """
    from ntkexp.report import explain as explanations
    from ntkexp.report.loaded_run import load_run
    from ntkexp.report.sentence import main_split

    numbers = query or []
    if numbers and worst is not None:
        raise Mistake("--query and --worst both choose points; give one of the two")
    check_outputs(picture, page=page, as_json=as_json)
    if again is not None and without is None:
        raise Mistake(
            "--again retrains a loop without some examples; choose them by --without=K,…"
        )
    loaded = load_run(run.expanduser())
    split = split or ("query" if numbers else main_split(loaded.ladder))
    if not numbers:
        count = worst or (QUERIES_ON_PAGE if page else QUERIES_ON_TERMINAL)
        numbers = explanations.worst_points(loaded, split, count)
    queries = Queries(loaded, split, numbers)
    removal = None if without is None else RemovalRequest(without, again, trust or [])
    if removal is not None and not page:
        leave_out(queries, removal, top, as_json=as_json)
        return
    explained = explanations.explain(loaded, split, numbers)
    if not explained:
        raise Mistake(
            f"no point of the split {split} of {loaded.name} can be explained"
        )
    if page:
        write_out(f"{write_page(queries, explained, removal, trust or [])}\n")
    elif as_json:
        if picture is not None:
            draw(explained, picture.expanduser())
        write_json({"points": [explanation.as_json(top) for explanation in explained]})
    else:
        write_text(queries, explained, picture, top)


@dataclass(frozen=True)
class Queries:
    """The explained queries: examples of a split of a run,
    by their index in the split."""

    run: Run
    split: str
    numbers: list[int]


@dataclass(frozen=True)
class RemovalRequest:
    """The options `--without`, `--again` and `--trust`."""

    group: str
    again: str | None
    trust: Sequence[str]


def write_text(
    queries: Queries, explained: Sequence[Explanation], picture: Path | None, top: int
) -> None:
    """Print the explanations, and write their picture to a file."""
    from ntkexp.report.explain import format_explanations
    from ntkexp.report.forgetting import format_tasks

    run = queries.run
    if tasks := format_tasks(run, top):
        write_out(f"{tasks}\n")
    write_out(f"{wrap(format_explanations(explained, top))}\n")
    name = "-".join(
        ["explain", run.path.name, queries.split, *map(str, queries.numbers[:8])]
    )
    file = run.report_folder / f"{name}.svg"
    if picture is not None:
        file = picture.expanduser()
    draw(explained, file)
    write_out(f"{file}\n")


def check_outputs(file: Path | None, *, page: bool, as_json: bool) -> None:
    """Raise if output options exclude each other, or if the format of the picture is
    unknown, before the slow explanation begins."""
    if page and as_json:
        raise Mistake(
            "--page and --json are two forms of one result; give one of the two"
        )
    if page and file is not None:
        raise Mistake("--page contains pictures; leave out --picture")
    if file is not None and file.suffix not in PICTURE_SUFFIXES:
        suffixes = " or ".join(PICTURE_SUFFIXES)
        raise Mistake(
            f"--picture={file}: it takes a file whose name ends in {suffixes}"
        )


def draw(explanations: Sequence[Explanation], file: Path) -> None:
    from ntkexp.report.plots.examples import save

    try:
        save(explanations, file)
    except OSError as error:
        if error.errno not in {errno.EEXIST, errno.ENOENT, *DENIED}:
            raise
        raise Mistake(
            f"--picture={file}: {error.strerror}; choose another place"
        ) from None


def write_page(
    queries: Queries,
    explanations: Sequence[Explanation],
    removal: RemovalRequest | None,
    trust: Sequence[str],
) -> Path:
    """Write the HTML page of the explanations and the removal, if any.
    Return its path."""
    from ntkexp.report.page.build import write_explanations

    run = queries.run
    arguments = [
        "ntkexp",
        "explain",
        str(run.path),
        "--page",
        f"--split={queries.split}",
    ]
    arguments += [f"--query={number}" for number in queries.numbers]
    entries: list[BreakdownEntry] = []
    if removal is not None:
        all_entries, _ = remove(queries, removal, quiet=False)
        entries = of_largest_outputs(all_entries)
        arguments += [f"--without={removal.group}"]
        arguments += [f"--again={removal.again}"] if removal.again else []
    arguments += [f"--trust={entry}" for entry in trust]
    page = run.report_folder / f"explain-{run.name}.html"
    return write_explanations(run, explanations, entries, page, shlex.join(arguments))


# --- `ntkexp explain RUN --without=…`: retrain without some examples.


def leave_out(
    queries: Queries, request: RemovalRequest, top: int, *, as_json: bool
) -> None:
    """Retrain without the group of examples, and print the breakdown of the change."""
    from ntkexp.report.breakdown import format_breakdown
    from ntkexp.report.known_effects import known_effects

    entries, removal = remove(queries, request, quiet=as_json)
    order = order_of(queries.run) if "top:" in request.group else ""
    if as_json:
        fields: dict[str, Json] = {"top": order} if order else {}
        fields["breakdown"] = [entry.as_json for entry in entries]
        write_json(fields)
        return
    known = known_effects(queries.run)
    agreement = None if known is None else known.agreement
    write_out(
        format_breakdown(of_largest_outputs(entries), removal, agreement, top, order)
    )


def remove(
    queries: Queries, request: RemovalRequest, *, quiet: bool
) -> tuple[list[BreakdownEntry], Removal]:
    """Retrain without a group of examples. Return the entries of the breakdown,
    and the removal."""
    from ntkexp.report.breakdown import breakdown_entries
    from ntkexp.report.removal_group import choose_group
    from ntkexp.report.run import point_index

    run = queries.run
    points = [point_index(run, queries.split, number) for number in queries.numbers]
    progress = progress_listener(quiet=quiet)
    group = choose_group(run, request.group, lambda: influences(run, points, progress))
    with interruptible(lambda: "; no result was stored"):
        if "follow" in run.config:
            removal = remove_from_loop(run, group, points, request, progress)
        elif request.again is not None:
            raise Mistake(
                f"--again is for followed loops; {run.path} is a run of an experiment, which "
                "needs none"
            )
        else:
            from ntkexp.config.build import admit

            admitted = admit(request.trust)
            from ntkexp.run.execute import remove_group

            removal = remove_group(run.path, group, points, progress, admitted)
    return breakdown_entries(run, queries.split, queries.numbers, removal), removal


def remove_from_loop(
    run: Run,
    group: list[int],
    points: list[int],
    request: RemovalRequest,
    progress: AbstractProgress,
) -> Removal:
    """Run the user's loop without a group of examples, or read the stored result."""
    from ntkexp.config.build import load_function
    from ntkexp.foreign_loop.loop_breakdown import loop_without
    from ntkexp.foreign_loop.trace import find_trace
    from ntkexp.records.contributions import read_removal, write_removal

    # leave out the examples in the same way as the predicted effects
    effect = run.contributions.get("effect")
    mean: MeanName = "renormalised"
    if effect is not None and effect.attrs["mean"] == "fixed":
        mean = "fixed"
    recorded = read_removal(run.path, group, points, mean)
    if recorded is not None:
        return recorded
    if request.again is None:
        raise Mistake(
            f"{run.path} is the trace of a followed loop; give a function that runs it again, "
            "--again=FILE.py:FUNCTION"
        )
    trace = find_trace(run.path)
    function = load_function(request.again, "again", request.trust)
    with trace.folder.claim():
        removal = loop_without(trace, function, mean, group, points, progress)
        write_removal(run.path, removal, mean)
    return removal


def influences(
    run: Run, points: Sequence[int], progress: AbstractProgress
) -> NDArray[np.float64]:
    """Return the influence of each training example on these queries.

    The influence is the norm of leave-out effects,
    or of contributions if effects are unknown."""
    from ntkexp.records.contributions import explained_rule
    from ntkexp.report.known_effects import effects_of_run, influence

    parts = effects_of_run(run)
    if parts is not None:
        parts = parts[list(points)]
    else:
        rule = explained_rule(run.rules)
        if rule is None:
            raise Mistake(
                f"{run.path} holds neither effects nor contributions, so its examples cannot be "
                "ranked"
            )
        parts = run.parts(rule).isel(query=list(points)).to_numpy()
    progress.say(f"at the top are examples {order_of(run)}")
    return influence(parts)


def order_of(run: Run) -> str:
    """Describe the ranking for `--without=top:N`, in words that follow 'examples'."""
    from ntkexp.report.known_effects import effects_of_run

    if effects_of_run(run) is None:
        return "that added most, as this run has no effects (path.effects=true)"
    return "of the largest effects"


def of_largest_outputs(entries: Sequence[BreakdownEntry]) -> list[BreakdownEntry]:
    """Select, at each query, the entry of the output that was largest before the
    removal."""
    largest: dict[int, BreakdownEntry] = {}
    for entry in entries:
        if entry.number not in largest or entry.before > largest[entry.number].before:
            largest[entry.number] = entry
    return list(largest.values())


# --- `ntkexp attribute FOLDER`: attribute a followed loop from its trace.


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
            metavar="FILE.py:FUNCTION",
            help="A function that builds the followed module.",
        ),
    ] = None,
    effects: Annotated[
        bool,
        typer.Option(
            "--effects",
            help="Also compute the leave-out effect of each example; needs --loss.",
        ),
    ] = False,
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="The loss of each example, as a function of the outputs and the call.",
        ),
    ] = None,
    measure: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="The measure of the outputs at the queries, as in ntkexp.follow.",
        ),
    ] = None,
    again: Again = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.py:CLASS",
            help="The rule of an optimizer that is not from PyTorch.",
        ),
    ] = None,
    losses: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="A function that the loop passed to trace.losses.",
        ),
    ] = None,
    decode: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="A function that converts a list of tokens to text, to show examples.",
        ),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            metavar="module|parameter|'{NAME: [PATTERN, …], …}'",
            help="Split contributions by the parameters through which they act.",
        ),
    ] = None,
    positions: Annotated[
        bool,
        typer.Option(
            "--positions",
            help="Split the contributions of texts by the position of the loss in the text.",
        ),
    ] = False,
    batch_norm: Annotated[
        str | None,
        typer.Option(
            metavar="exact|constant",
            help=(
                "Differentiate the batch statistics of BatchNorm in training mode, or treat them as "
                "constants."
            ),
        ),
    ] = None,
    quiet: Quiet = False,
    trust: Trust = None,
) -> None:
    """Attribute the outputs of a followed training to its examples."""
    from ntkexp.config.plain_yaml import parsed
    from ntkexp.foreign_loop.batch_norm import checked_mode
    from ntkexp.foreign_loop.trace import find_trace, load_trace, measure_name
    from ntkexp.report.loaded_run import load_run
    from ntkexp.report.sentence import ladder_sentence

    files = find_trace(folder)
    measured = measure_name(files)
    options = LoopOptions(model, loss, measure, again, rule or [], trust or [])
    refuse_incomplete(options, folder, measured, effects=effects)
    parts = load_parts(options, has_measure=measured is not None)
    functions = [load_option(path, "losses", options.trust) for path in losses or []]
    trace = load_trace(files, parts.module, parts.measure, parts.rules, functions)
    trace.loss = parts.loss
    if batch_norm is not None:
        trace.batch_norm = checked_mode(batch_norm)
    trace.attribute(
        effects=effects,
        by=None if by is None else parsed(by),
        positions=positions,
        decode=load_option(decode, "decode", options.trust),
        again=parts.again if effects else None,
        quiet=quiet,
    )
    run = load_run(files.folder.path)
    naming = f"examples: {trace.naming}\n" if trace.naming else ""
    sentences = f"{run.outcome}\n{ladder_sentence(run.ladder)}\n{naming}"
    write_out(f"{wrap(sentences)}{run.path}\n")


@dataclass(frozen=True)
class LoopOptions:
    """The options of `attribute` that name code of the followed loop."""

    model: str | None
    loss: str | None
    measure: str | None
    again: str | None
    rules: Sequence[str]
    trust: Sequence[str]


@dataclass(frozen=True)
class LoopParts:
    """The parts of a followed loop that its trace does not contain."""

    module: nn.Module
    loss: Callable[..., Any] | None
    measure: Callable[..., Any] | None
    again: Callable[..., Any] | None
    rules: Sequence[AbstractOptimizerRule]


def refuse_incomplete(
    options: LoopOptions, folder: Path, measured: str | None, *, effects: bool
) -> None:
    """Raise if an option is missing or superfluous. `measured` is the name of the
    measure that the trace explains, if any."""
    if options.again is None and options.model is None:
        raise Mistake(
            f"{folder}: the trace does not contain the followed module; give a function that "
            "builds it, --model=FILE.py:FUNCTION"
        )
    if options.again is None and options.loss is None and effects:
        raise Mistake(
            "--effects: effects are derivatives of the gradient; add --loss=FILE.py:FUNCTION, as for follow"
        )
    if options.again is None and options.measure is None and measured is not None:
        raise Mistake(
            f"{folder}: it explains a measure of the outputs, '{measured}', whose code is not "
            "stored; give that function, --measure=FILE.py:FUNCTION"
        )
    if measured is None and options.measure is not None:
        raise Mistake(
            f"--measure={options.measure}: {folder} explains outputs; leave it out, or follow the loop again with it"
        )


def load_parts(options: LoopOptions, *, has_measure: bool) -> LoopParts:
    """Load the parts that options name. Run the loop of `--again` once if it has to
    supply the other parts."""
    trust = options.trust
    again = load_option(options.again, "again", trust)
    module = None if options.model is None else built_module(options.model, trust)
    rules = [optimizer_rule(path, trust) for path in options.rules]
    measure = load_option(options.measure, "measure", trust)
    loss = load_option(options.loss, "loss", trust)
    lacks_measure = has_measure and measure is None
    if again is not None and (module is None or loss is None or lacks_measure):
        from ntkexp.foreign_loop.again import trained_again
        from ntkexp.foreign_loop.user_loss import Weighing

        first = trained_again(again, Weighing())
        module = first.module if module is None else module
        rules += [known.rule for known in first.steps.known]
        measure = measure or first.measure
        loss = loss or first.loss
    assert module is not None  # `model` or `again` was given
    return LoopParts(module, loss, measure, again, rules)


@overload
def load_option(path: str, key: str, trust: Sequence[str]) -> Callable[..., Any]: ...


@overload
def load_option(
    path: str | None, key: str, trust: Sequence[str]
) -> Callable[..., Any] | None: ...


def load_option(
    path: str | None, key: str, trust: Sequence[str]
) -> Callable[..., Any] | None:
    """Return the function FILE.py:FUNCTION of an option, or None if it is not given."""
    from ntkexp.config.build import load_function

    return None if path is None else load_function(path, key, trust)


def built_module(path: str, trust: Sequence[str]) -> nn.Module:
    """Call the function of `--model`, and return the module."""
    from torch import nn

    module = load_option(path, "model", trust)()
    if not isinstance(module, nn.Module):
        raise Mistake(
            f"model={path}: it returns a {type(module).__name__}; let it return an nn.Module"
        )
    return module


def optimizer_rule(path: str, trust: Sequence[str]) -> AbstractOptimizerRule:
    """Instantiate the class of `--rule`."""
    from ntkexp.foreign_loop.rule import AbstractOptimizerRule

    built = load_option(path, "rule", trust)()
    if not isinstance(built, AbstractOptimizerRule):
        raise Mistake(
            f"rule={path}: it is not a rule of an optimizer; name a class of AbstractOptimizerRule"
        )
    return built
