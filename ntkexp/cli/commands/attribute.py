"""`ntkexp attribute`: a trace that a training loop left becomes a run, in a later process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ntkexp.cli.options import Again, Quiet, Trust
from ntkexp.mistake import Mistake


def attribute(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder of a trace: ntkexp.follow(…, to=FOLDER).")
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="FILE.py:FUNCTION", help="A function that builds the followed module."),
    ] = None,
    effects: Annotated[
        bool, typer.Option("--effects", help="Find also what would change without each example; needs the loss.")
    ] = False,
    loss: Annotated[
        str | None,
        typer.Option("--loss", metavar="FILE.py:FUNCTION", help="The loss of each example, of outputs and the call."),
    ] = None,
    measure: Annotated[
        str | None,
        typer.Option(
            "--measure", metavar="FILE.py:FUNCTION", help="What is asked of the outputs at the queries, as for follow."
        ),
    ] = None,
    again: Again = None,
    rule: Annotated[
        list[str] | None,
        typer.Option("--rule", metavar="FILE.py:CLASS", help="The rule of an optimizer that is not PyTorch's."),
    ] = None,
    decode: Annotated[
        str | None,
        typer.Option("--decode", metavar="FILE.py:FUNCTION", help="The text of a list of tokens, to show examples by."),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option(
            "--by",
            metavar="module|parameter|'{NAME: [PATTERN, …], …}'",
            help="Tell contributions apart by the parameters through which they came.",
        ),
    ] = None,
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
    from ntkexp.foreign_loop.again import Weighing, trained_again
    from ntkexp.foreign_loop.batch_norm import checked_mode
    from ntkexp.foreign_loop.rule import AbstractOptimizerRule
    from ntkexp.foreign_loop.trace import find_trace, load_trace, measure_name
    from ntkexp.report.run import load_run
    from ntkexp.report.sentence import sentence

    files = find_trace(folder)
    trust = trust or []
    if model is None and again is None:
        raise Mistake(
            f"{folder}: the module that was followed is not in it; give a function that builds it, "
            "--model=FILE.py:FUNCTION"
        )
    if effects and loss is None and again is None:
        raise Mistake("--effects: effects are derivatives of the gradient; add --loss=FILE.py:FUNCTION, as for follow")
    # module and loss: what is not given is what the loop itself gives to `follow`, once it is carried out as it is
    loop = None if again is None else load_function(again, "again", trust)
    module = None if model is None else load_function(model, "model", trust)()
    if not (module is None or isinstance(module, nn.Module)):
        raise Mistake(f"model={model}: it returns a {type(module).__name__}; let it return an nn.Module")
    named = measure_name(files)
    if named is not None and measure is None and again is None:
        raise Mistake(
            f"{folder}: what it explains is a measure of the outputs, '{named}', whose code is not in it; give that "
            "function, --measure=FILE.py:FUNCTION"
        )
    if named is None and measure is not None:
        raise Mistake(f"--measure={measure}: {folder} explains outputs; leave it out, or follow anew with it")
    first = None if loop is None or (model and loss and (measure or not named)) else trained_again(loop, Weighing())
    if module is None:
        assert first is not None  # one of the two functions was given
        module = first.module
    rules = list[Any]()
    for path in rule or []:
        rules.append(load_function(path, "rule", trust)())
        if not isinstance(rules[-1], AbstractOptimizerRule):
            raise Mistake(f"rule={path}: it is no rule of an optimizer; name a class of AbstractOptimizerRule")
    rules += () if first is None else [each.rule for each in first.steps.known]
    asked = None if measure is None else load_function(measure, "measure", trust)
    trace = load_trace(files, module, asked or (None if first is None else first.measure), rules)
    given = None if loss is None else load_function(loss, "loss", trust)
    trace.loss = given or (None if first is None else first.loss)
    words = None if decode is None else load_function(decode, "decode", trust)
    components = None if by is None else parsed(by)
    trace.batch_norm = trace.batch_norm if batch_norm is None else checked_mode(batch_norm)
    trace.attribute(effects=effects, by=components, decode=words, again=loop if effects else None, quiet=quiet)
    run = load_run(files.folder.path)
    sys.stdout.write(f"{run.outcome}\n{sentence(run.ladder)}\n{run.path}\n")
