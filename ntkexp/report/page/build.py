"""HTML pages of runs, claims and explanations, and the same tables in Markdown.

A page is a single file that contains its styles, script and pictures. Its content
security policy forbids any other content.

    outputs/report/index.html           the page of runs
    outputs/report/<sweep>.<picture>.*  the pictures of sweeps (SVG), and their data (CSV)
    outputs/report/runs.csv             the table of all runs
    outputs/report/claims.html          the page of claims
    outputs/report/explain-<run>.html   the explanations of a run, an interactive page

Functions named `…_view` return the dictionary with which a template shows a run, a
sweep, a query or a claim."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import jinja2
import pandas as pd
from markupsafe import Markup

from ntkexp.mistake import Mistake
from ntkexp.records.atomic import make_folder, write_atomically
from ntkexp.records.claim import (
    PICTURE,
    VERDICT,
    ClaimRecord,
    Exhibit,
    Judgement,
    read_exhibit,
)
from ntkexp.records.contributions import explained_rule
from ntkexp.records.folder import package_version
from ntkexp.records.register import RegisterEntry
from ntkexp.records.results import of_machines, read_timings
from ntkexp.report.analysis.laws import summary
from ntkexp.report.analysis.tables import Analysis, save
from ntkexp.report.breakdown import BreakdownEntry
from ntkexp.report.claims import (
    claim_family,
    describe_attempt,
    outlook,
    summarise_claims as claims_summary,
    tabulate_claims,
)
from ntkexp.report.comparison import combined, describe_loop, grouped, is_followed
from ntkexp.report.explain import (
    Explanation,
    describes_examples,
    explain,
    heading_of,
    notes as explanation_notes,
    tabulate_examples,
    tabulate_pieces,
    worst_points,
)
from ntkexp.report.forgetting import forgetting_sentence, forgettings
from ntkexp.report.known_effects import known_effects
from ntkexp.report.material import (
    Material,
    headline,
    sweep_extent,
    tabulate_fits,
    tabulate_points,
    tiles,
    what_came_out,
    what_was_run,
)
from ntkexp.report.page.fonts import with_fonts
from ntkexp.report.page.picture import (
    Shown,
    command_of,
    drawings_of,
    link,
    pictures_of_runs,
    show,
    show_file,
    slug,
)
from ntkexp.report.page.run_table import chips_by_run, run_table
from ntkexp.report.parts import ShadedToken, shaded_texts, tabulate_components
from ntkexp.report.plots import examples
from ntkexp.report.plots.figures import cost
from ntkexp.report.plots.rendering import Picture
from ntkexp.report.plots.run_plots import exhibition, figure_of, strip
from ntkexp.report.plots.style import house_style
from ntkexp.report.run import Run
from ntkexp.report.sentence import (
    ladder_notes,
    ladder_sentence,
    main_split,
    tabulate_ladder,
)
from ntkexp.report.tables import (
    PageTable,
    escaped,
    format_csv,
    format_html,
    format_markdown,
    table_of_frame,
    tabulate,
)
from ntkexp.text import listed, short

HERE = Path(__file__).parent
CLAIMS = "claims.html"
SCRIPTS = ("tables.js", "pictures.js", "pdf.js", "curves.js", "start.js")
TABLE_ROWS_AT_ONCE = 25  # number of rows of a table that are visible at a time
MAX_CHIPS = 6  # number of settings of a run that are visible; the others are folded
SHOWN_TEXTS = 8  # number of training texts that are shown in full
EXPLAINED_RUNS = 4  # number of runs with explanations on a page
# number of runs with a picture of errors against seconds (see `cost_view`)
RUNS_WITH_COST = 20
EXPLAINED_QUERIES = 3  # explained queries per run
MAX_EXPLAINED_EXAMPLES = 2000  # runs with more training examples are not explained
MAX_EXPLAINED_NUMBERS = 2**26  # runs with more contributions are not explained

View: TypeAlias = dict[str, object]


def write(material: Material, folder: Path, command: str) -> Path:
    """Write the page of runs, and the files with its tables and pictures.

    Return the path of the page.
    """
    make_folder(folder)
    for analysis in material.analyses:
        save(analysis, folder)
    write_atomically(folder / "runs.csv", format_csv(combined(material.runs)))
    # the page of several runs without sweeps begins with a picture of all runs
    first = None
    if len(material.runs) > 1 and not material.analyses:
        first = strip(material.runs)
    names = anchors(material.runs)
    page = fill(
        "template.html",
        command,
        headline=headline(material),
        tiles=tiles(material.runs),
        ran=what_was_run(material),
        came_out=what_came_out(material.runs),
        left_out=material.left_out,
        lead=first and show(first, "runs", folder),
        sweeps=[
            sweep_view(analysis, material, folder) for analysis in material.analyses
        ],
        runs=run_views(material, names, folder),
        table=run_table(material.runs, names),
        claims=CLAIMS if (folder / CLAIMS).is_file() else "",
    )
    write_atomically(folder / "index.html", page)
    return folder / "index.html"


def write_claims(
    records: Sequence[ClaimRecord],
    folder: Path,
    command: str,
    attempts: Mapping[str, Sequence[RegisterEntry]] | None = None,
) -> Path:
    """Write the page of claims. Return the path of the page.

    `attempts` are the registered versions of each claim, by its name.
    """
    make_folder(folder)
    attempts = attempts or {}
    family = claim_family(attempts)
    caption = "Claims, with 95 % intervals; stands: by Holm's correction over all main looks of their size, at 5 %"
    links = [f"#{claim_anchor(record)}" for record in records]
    page = fill(
        "claims.html",
        command,
        summary=claims_summary(records, family),
        rule=CLAIM_RULE,
        overview=format_html(
            tabulate_claims(records, family).select(*CLAIM_COLUMNS),
            "claims",
            caption,
            links,
        ),
        claims=[
            claim_view(record, folder, attempts.get(record.name, ()))
            for record in records
        ],
    )
    write_atomically(folder / CLAIMS, page)
    return folder / CLAIMS


def write_explanations(
    run: Run,
    explanations: Sequence[Explanation],
    removed: Sequence[BreakdownEntry],
    page: Path,
    command: str,
) -> Path:
    """Write the page with the explanations of a run. `removed` are the breakdowns of a
    removal. Add a link from the report to this page. Return the path of the page."""
    # a sentence on the agreement of predicted leave-out effects with retrainings
    check = ""
    picture = None
    known = known_effects(run)
    if known is not None and known.check is not None and known.agreement is not None:
        check = known.agreement.sentence
        picture = show(examples.checked(known.check, known.agreement), "check")
    entries = {entry.number: entry for entry in removed}
    report = page.with_name("index.html")
    report_text = report.read_text(encoding="utf-8") if report.is_file() else ""
    anchor = f"run-{slug(run.name)}"
    text = fill(
        "explain.html",
        command,
        run=run.name,
        report=report.name if report_text else "",
        run_in_report=f"{report.name}#{anchor}"
        if f'id="{anchor}"' in report_text
        else "",
        outcome=run.outcome,
        tasks=[forgetting_sentence(forgetting) for forgetting in forgettings(run)],
        points=[
            point_view(explanation, entries.get(explanation.number))
            for explanation in explanations
        ],
        check=check,
        check_picture=picture,
    )
    make_folder(page.parent)
    write_atomically(page, text)
    # the report was written without a link to this page
    without_link = NO_LINK.format(anchor)
    if without_link in report_text:
        write_atomically(
            report,
            report_text.replace(
                without_link, explanation_link(anchor, page, page.parent)
            ),
        )
    return page


NO_LINK = Markup('<span id="explained-{}"></span>')
"""The placeholder in the report for the link from a run to its explanations, which may
be written later."""


def explanation_link(anchor: str, page: Path, folder: Path) -> Markup:
    """Return the link from a run in the report to the page of its
    explanations, if this page exists."""
    if not page.is_file():
        return NO_LINK.format(anchor)
    href = link(page, folder)
    return Markup(
        '<span id="explained-{}"><a href="{}">Explained point by point</a> · </span>'
    ).format(anchor, href)


def fill(template: str, command: str, **content: object) -> str:
    """Render a template with its content, and with the style and script
    that all pages share."""
    script = "".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        loader=jinja2.FileSystemLoader(HERE),
    )  # fmt: skip
    page = environment.get_template(template).render(
        **content,
        command=command,
        version=package_version(),
        style=(HERE / "style.css").read_text(encoding="utf-8"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        per_page=TABLE_ROWS_AT_ONCE,
        max_chips=MAX_CHIPS,
    )
    return with_fonts(page)


def markdown(material: Material) -> str:
    """Return the sentences and tables of the page of runs in Markdown."""
    parts = [
        f"# {escaped(what_was_run(material))}",
        escaped(what_came_out(material.runs)),
    ]
    for analysis in map(without_failed_fits, material.analyses):
        parts.append(f"## {escaped(analysis.sweep.name)}")
        if analysis.laws:
            parts.append(escaped(summary(analysis.laws, analysis.draws)))
            parts.append(format_markdown(table_of_frame(tabulate_fits(analysis))))
        parts.append(format_markdown(table_of_frame(tabulate_points(analysis))))
    parts += ["## All runs", format_markdown(table_of_frame(combined(material.runs)))]
    return "\n\n".join(parts) + "\n"


# --- Single runs.


def anchors(runs: Sequence[Run]) -> dict[Path, str]:
    """Return the anchor of each run by its path. Runs with equal names get a number."""
    paths: dict[str, Path] = {}
    for run in runs:
        name = first_name = f"run-{slug(run.name)}"
        number = 2
        while name in paths:
            name = f"{first_name}-{number}"
            number += 1
        paths[name] = run.path
    return {path: name for name, path in paths.items()}


def run_views(material: Material, names: dict[Path, str], folder: Path) -> list[View]:
    """Return the views (template dictionaries) of all runs.

    The number of embedded pictures and explanations is limited. The first run at each
    point of a sweep has priority."""
    first_runs: dict[tuple[object, ...], Run] = {}
    for analysis in material.analyses:
        for row in analysis.sweep.runs:
            if row.folder in material.by_folder:
                point = (analysis.sweep.name, *row.point)
                first_runs.setdefault(point, material.by_folder[row.folder])
    unique = {run.path: run for run in [*first_runs.values(), *material.runs]}
    ordered = list(unique.values())
    figures = pictures_of_runs(ordered, names, folder)
    points = {
        run.path: points_of_run(run, names[run.path])
        for run in ordered[:EXPLAINED_RUNS]
    }

    with_cost = {run.path for run in ordered[:RUNS_WITH_COST]}
    chips = {
        path: of_run
        for group in grouped(material.runs)
        for path, of_run in chips_by_run(group).items()
    }
    views = []
    for run in material.runs:
        view = run_view(run, names[run.path], folder)
        view["chips"] = chips[run.path]
        view["figures"] = figures[run.path]
        if run.path in with_cost:
            ladder, others = figures[run.path][:1], figures[run.path][1:]
            view["figures"] = (*ladder, *cost_view(run, names[run.path]), *others)
        view["points"] = points.get(run.path, ())
        views.append(view)
    return views


def cost_view(run: Run, anchor: str) -> list[Shown]:
    """Draw the error of each kernel machine of a run against the seconds that it takes.

    This picture is not in the run folder, because a run has no timings before its end.
    Return [] if the run has no timings.
    """
    try:
        figure = figure_of(run, cost.draw)
        if figure is None:
            return []
        return [show(Picture("cost", figure, cost.table(run)), anchor)]
    except (
        Mistake,
        OSError,
    ):  # ignore damaged timings: they are optional, and DONE.json has no checksum
        return []


def points_of_run(run: Run, anchor: str) -> list[View]:
    """Explain the queries with the largest errors.

    Return [] if the run is unfinished, diverged or too large.
    """
    if not run.finished or run.diverged:
        return []
    try:
        rule = explained_rule(run.rules)
        if rule is None or run.contributions.sizes["example"] > MAX_EXPLAINED_EXAMPLES:
            return []
        if run.parts(rule).size > MAX_EXPLAINED_NUMBERS:
            return []
        split = main_split(run.ladder)
        explanations = explain(run, split, worst_points(run, split, EXPLAINED_QUERIES))
    except (Mistake, OSError):  # contributions are missing or damaged
        return []
    return [
        point_view(explanation, None, f"{anchor}-", rows=TABLE_ROWS_AT_ONCE)
        for explanation in explanations
    ]


def run_view(run: Run, anchor: str, folder: Path) -> View:
    seconds = dict[str, float]()
    # ignore damaged timings: they are optional, and DONE.json has no checksum
    with suppress(Mistake):
        seconds = of_machines(read_timings(run.path / "timings.csv"))
    ladder = tabulate_ladder(run.ladder, seconds)
    names = ["results.csv", "metrics.csv", "config.json", "provenance.json"]
    files = [name for name in names if (run.path / name).is_file()]
    files += [
        f"plots/{name}" for name in sorted(path.name for path in drawings_of(run))
    ]
    explanations = run.report_folder / f"explain-{run.name}.html"
    return {
        "anchor": anchor,
        "name": run.name,
        "kind": describe_loop(run) if is_followed(run) else "",
        "href": link(run.path, folder),
        "explained": explanation_link(anchor, explanations, folder),
        "sentence": ladder_sentence(run.ladder, diverged=run.diverged),
        "outcome": run.outcome,
        "command": command_of(run),
        "ladder": format_html(
            ladder, f"ladder-of-{anchor}", f"The ladder of {run.name}: relative errors"
        ),
        "notes": ladder_notes(run.ladder),
        "files": [(name, link(run.path / name, folder)) for name in files],
    }


# --- Sweeps: pictures, laws and means.


def sweep_view(analysis: Analysis, material: Material, folder: Path) -> View:
    sweep = analysis.sweep
    name = slug(sweep.name)
    laws = f"Power laws, with 95 % intervals over seeds, {analysis.draws}"
    means = f"Means over seeds, {analysis.draws}, with 95 % intervals"
    shown_analysis = without_failed_fits(analysis)
    pictures = exhibition(shown_analysis, material.by_folder)
    return {
        "anchor": f"sweep-{name}",
        "name": sweep.name,
        "extent": sweep_extent(sweep),
        "command": sweep.command,
        "base": " ".join(sweep.base),
        "figures": [show(picture, name, folder) for picture in pictures],
        "laws": summary(shown_analysis.laws, analysis.draws),
        "fits": format_html(
            table_of_frame(tabulate_fits(shown_analysis)), f"fits-{name}", laws
        )
        if shown_analysis.laws
        else None,
        "reasons": dict.fromkeys(
            f"{law.fit.quantity}: {law.reason}"
            for law in shown_analysis.laws
            if law.law is None
        ),
        "points": format_html(
            table_of_frame(tabulate_points(analysis)), f"points-{name}", means
        ),
        "failed": [
            f"{run.folder.name}: {run.reason or run.state}"
            for run in sweep.runs
            if run.state == "failed"
        ],
    }


def without_failed_fits(analysis: Analysis) -> Analysis:
    """If runs of the sweep are still missing, drop the
    laws that could not be fitted."""
    if all(run.state in ("done", "failed") for run in analysis.sweep.runs):
        return analysis
    return replace(
        analysis, laws=tuple(law for law in analysis.laws if law.law is not None)
    )


# --- Explained queries: the parts of the output, leave-out effects, and removals.


def point_view(
    explanation: Explanation,
    entry: BreakdownEntry | None,
    prefix: str = "",
    rows: int | None = None,
) -> View:
    """Return the view (template dictionary) of one query: its training examples (at
    most `rows`), and the removal.

    Anchors on the page begin with `prefix`.
    """
    point = explanation.point
    name = f"{explanation.split} {explanation.number}"
    anchor = prefix + slug(name.replace(" ", "-"))
    pieces = tabulate_pieces(explanation)
    pieces = replace(pieces, rows=(*pieces.rows, ("output", explanation.prediction)))
    caption = "All training examples"
    columns = ["example", "added", "half by"]
    if explanation.has_effects:
        columns.insert(2, "if left out")
    if describes_examples(explanation):
        columns.insert(1, "holds")
    if point.phase is not None:
        columns.insert(2, "phase")
    parts = tabulate_examples(explanation).select(*columns)
    if rows is not None and len(parts.rows) > rows:
        parts = replace(parts, rows=parts.rows[:rows])
        caption = f"The {rows} training examples with the largest contributions"
    title = heading_of(explanation)
    if point.text:
        output = f"{explanation.output} = {short(explanation.prediction)}"
        title = f"{name}: {point.text}, {output}"
    return {
        "anchor": anchor,
        "title": title,
        "pieces": format_html(pieces, f"pieces-{anchor}", "The terms of the output"),
        "examples": format_html(parts, f"examples-{anchor}", caption),
        "components": components_view(explanation, anchor),
        "texts": texts_view(explanation),
        "notes": explanation_notes(explanation),
        "pictures": [
            show(picture, anchor)
            for picture in explanation_pictures(explanation, entry)
        ],
        "removal": "" if entry is None else removal_sentence(entry),
    }


def components_view(explanation: Explanation, anchor: str) -> PageTable | None:
    """Return the table of components, if the run has components."""
    if not explanation.components:
        return None
    table = tabulate_components(explanation.components)
    return format_html(
        table, f"components-{anchor}", "Through which components it came"
    )


def texts_view(explanation: Explanation) -> list[tuple[str, list[ShadedToken]]]:
    """Return the training texts with the largest contributions, shaded by token.

    Return [] if the run has no contributions by position.
    """
    texts = [part.example.index for part in explanation.parts[:SHOWN_TEXTS]]
    if explanation.positions:
        return shaded_texts(explanation.positions, texts)
    return []


def explanation_pictures(
    explanation: Explanation, entry: BreakdownEntry | None
) -> Iterator[Picture]:
    """Yield the pictures of a query: examples, effects, timeline,
    components and removal."""
    added = tabulate_examples(explanation).select("index", "name", "added")
    with house_style():
        numbers = pd.DataFrame(added.rows, columns=["example", "holds", "added"])
        yield Picture("examples", examples.draw([examples.row(explanation)]), numbers)
    yield examples.picture_beside(explanation)
    moved = explanation.movement
    if moved is not None:
        yield examples.when(
            moved.by_step, "When training moved this output", moved.last_step
        )
    if explanation.components:
        yield examples.through(explanation)
        yield examples.through_by_step(explanation)
    if entry is not None:
        yield examples.shares(entry)
        yield examples.when(
            entry.by_step, "The steps at which the removal changed the output"
        )


def removal_sentence(entry: BreakdownEntry) -> str:
    """Return a sentence with the output before the removal, after it,
    and as predicted."""
    group = len(entry.places)
    predicted = ""
    if entry.predicted is not None:
        several = (
            f", by the sum of {group} effects, which do not add" if group > 1 else ""
        )
        predicted = f" (predicted: {short(entry.before + entry.predicted)}{several})"
    return (
        f"Trained again without {group} of the examples, the output is "
        f"{short(entry.before + entry.actual)} instead of {short(entry.before)}{predicted}."
    )


# --- Claims: pictures, tests and commands.


CLAIM_COLUMNS = (
    "claim",
    "verdict",
    "stands",
    "figure",
    "low",
    "high",
    "pool",
    "control",
    "second look",
    "CPU minutes",
    "size",
    "source",
    "expected",
    "digest",
)
LOOK_COLUMNS = (
    "look",
    "verdict",
    "figure",
    "low",
    "high",
    "seeds",
    "a seed draws",
    "expected",
)
LOOK_NAMES = {"main": "the claim", "second": "second look"}
CLAIM_RULE = (
    "Each claim states beforehand what would support it. Supported: the whole 95 % interval over seeds lies in the "
    "expected range, in the claim's own look and in the second look. Refuted: both intervals lie outside. Below "
    "minimum: the direction is significant in both, and the size lies below the stated minimum. Not replicated: the "
    "second look does not repeat the decision of the first. Undecided: anything else, also if the control is "
    "supported, has no numbers or lies far from its null value. Exact: an identity, which both looks confirm. CPU "
    "minutes are the time that one idle core needs for all runs of a claim; two cores need half as long. If claims "
    "share a run, each of them counts it."
)


def claim_anchor(record: ClaimRecord) -> str:
    return f"claim-{slug(record.path.name)}"


def claim_view(
    record: ClaimRecord, folder: Path, attempts: Sequence[RegisterEntry]
) -> View:
    anchor = claim_anchor(record)
    exhibit = read_exhibit(record.path)
    # add the size, so that titles are unique on the page
    title = record.name if record.size == "default" else f"{record.name}, {record.size}"
    picture = show_file(
        record.path / PICTURE,
        record.name,
        anchor,
        f"{title}: {record.verdict}",
        record.path / "main.csv",
        folder,
    )
    files = [*sorted(path.name for path in record.path.glob("*.csv")), VERDICT]
    return {
        "anchor": anchor,
        "name": record.name,
        "verdict": record.verdict,
        "size": record.size,
        "statement": record.statement,
        "source": record.source,
        "refutes": record.refutes,
        "digest": record.digest,
        "command": record.command,
        "href": link(record.path, folder),
        "picture": picture,
        "caption": exhibit.caption,
        "published": published_table(
            exhibit, anchor, f"{title}, by the protocol of {record.source}"
        ),
        "looks": looks_table(record, anchor, f"Looks at {title}"),
        "notes": claim_notes(record),
        "attempts": [describe_attempt(one, one is attempts[-1]) for one in attempts],
        "files": [(name, link(record.path / name, folder)) for name in files],
    }


def looks_table(record: ClaimRecord, anchor: str, caption: str) -> PageTable:
    rows = [
        (
            LOOK_NAMES.get(name, name),
            look.verdict,
            look.figure,
            look.low,
            look.high,
            seeds(look),
            look.draws,
            look.expected,
        )
        for name, look in record.looks.items()
    ]
    table = tabulate(LOOK_COLUMNS, rows, ("figure", "low", "high"))
    return format_html(table, f"looks-{anchor}", caption)


def claim_notes(record: ClaimRecord) -> list[str]:
    """Return the notes of all looks, and the seeds that undecided looks need."""
    notes = [
        f"{LOOK_NAMES.get(name, name)}: {look.note}."
        for name, look in record.looks.items()
        if look.note
    ]
    for look, name in LOOK_NAMES.items():
        sentence = outlook(record, look)
        if sentence:
            notes.append(f"{name}: {sentence}.")
    return notes


def published_table(exhibit: Exhibit, anchor: str, caption: str) -> PageTable | None:
    """Return the table with the results in the paper's protocol,
    or None if the claim has none."""
    if not exhibit.columns:
        return None
    columns = zip(exhibit.columns, zip(*exhibit.rows, strict=True), strict=False)
    numbers = {
        name
        for name, column in columns
        if all(isinstance(cell, float | int | None) for cell in column)
    }
    return format_html(
        tabulate(exhibit.columns, exhibit.rows, numbers), f"published-{anchor}", caption
    )


def seeds(look: Judgement) -> str:
    """Format the seeds of a test, as a range if possible.

    >>> from types import SimpleNamespace
    >>> seeds(SimpleNamespace(seeds=(0, 1, 2))), seeds(SimpleNamespace(seeds=(0, 7)))
    ('0 to 2', '0 and 7')
    """
    first, last = look.seeds[0], look.seeds[-1]
    if len(look.seeds) > 2 and look.seeds == tuple(range(first, last + 1)):
        return f"{first} to {last}"
    return listed(list(map(str, look.seeds)))
