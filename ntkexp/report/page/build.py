"""The page as one file: styles, script and pictures are in it, and its policy forbids to load or run anything else;
and the same in Markdown.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import jinja2

from ntkexp.records.atomic import make_folder, write_atomically
from ntkexp.records.claim import ClaimRecord
from ntkexp.records.folder import package_version
from ntkexp.report.analysis.laws import summary
from ntkexp.report.analysis.tables import save
from ntkexp.report.claims import summary as claims_summary
from ntkexp.report.explain import Explanation
from ntkexp.report.forgetting import forgettings, sentence
from ntkexp.report.ledger import LedgerEntry
from ntkexp.report.material import Material, tabulate_fits, tabulate_points, what_came_out, what_was_run
from ntkexp.report.page.claim_view import RULE, claim_view
from ntkexp.report.page.claim_view import overview as claims_overview
from ntkexp.report.page.run_view import check, lead, overview, point_views, run_views, sweep_view
from ntkexp.report.run import Run, combined
from ntkexp.report.tables import escaped, format_csv, format_markdown, of_frame

# --- The page as one file: styles, script and pictures are in it, and its policy forbids to load or run anything
# else.
#
#     outputs/report/index.html           the page
#     outputs/report/<sweep>.<picture>.*  its pictures of sweeps, and their numbers
#     outputs/report/runs.csv             the table of all runs
#     outputs/report/claims.html          the page of claims, if any was judged
#     outputs/report/explain-<run>.html   what made a run's outputs, and what would change them, where somebody asked


HERE = Path(__file__).parent
CLAIMS = "claims.html"
PER_PAGE = 25
"""Rows that a table shows at once."""


def write(material: Material, folder: Path, command: str) -> Path:
    """Write the page and the files beside it; the page's path is given back."""
    make_folder(folder)
    page = folder / "index.html"
    for analysis in material.analyses:
        save(analysis, folder)
    write_atomically(folder / "runs.csv", format_csv(combined(material.runs)))
    write_atomically(page, render(material, folder, command))
    return page


def render(material: Material, folder: Path, command: str) -> str:
    """Write the page as text."""
    return filled(
        "template.html",
        command,
        ran=what_was_run(material),
        came_out=what_came_out(material.runs),
        left_out=material.left_out,
        lead=None if material.analyses else lead(material, command, folder),
        sweeps=[sweep_view(analysis, material, folder) for analysis in material.analyses],
        runs=list(run_views(material, folder)),
        overview=overview(material),
        claims=CLAIMS if (folder / CLAIMS).is_file() else "",
    )


def write_claims(records: Sequence[ClaimRecord], folder: Path, command: str) -> Path:
    """Write the page of claims beside that of runs; its path is given back."""
    make_folder(folder)
    page = filled(
        "claims.html",
        command,
        summary=claims_summary(records),
        rule=RULE,
        overview=claims_overview(records),
        claims=[claim_view(record, folder) for record in records],
    )
    write_atomically(folder / CLAIMS, page)
    return folder / CLAIMS


def write_explanations(
    run: Run, found: Sequence[Explanation], removed: Sequence[LedgerEntry], page: Path, command: str
) -> Path:
    """Write the page of a run's explanations; its path is given back."""
    checked, picture = check(run)
    text = filled(
        "explain.html",
        command,
        run=run.name,
        outcome=run.outcome,
        tasks=[sentence(each) for each in forgettings(run)],
        points=point_views(found, removed),
        check=checked,
        check_picture=picture,
    )
    make_folder(page.parent)
    write_atomically(page, text)
    return page


def filled(template: str, command: str, **content: object) -> str:
    """Fill a template, with what all pages have."""
    script = (HERE / "script.js").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        loader=jinja2.FileSystemLoader(HERE),
    )  # fmt: skip
    return environment.get_template(template).render(
        **content,
        command=command,
        version=package_version(),
        style=(HERE / "style.css").read_text(encoding="utf-8"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        per_page=PER_PAGE,
    )


# --- A report for a paper or a terminal: the same sentences and tables, in Markdown.


def markdown(material: Material) -> str:
    """Write the whole report."""
    return "\n\n".join(parts(material)) + "\n"


def parts(material: Material) -> Iterator[str]:
    """Go through sentences and tables, in the order of the page."""
    yield f"# {escaped(what_was_run(material))}"
    yield escaped(what_came_out(material.runs))
    for analysis in material.analyses:
        yield f"## {escaped(analysis.sweep.name)}"
        if analysis.laws:
            yield escaped(summary(analysis.laws, analysis.draws))
            yield format_markdown(of_frame(tabulate_fits(analysis)))
        yield format_markdown(of_frame(tabulate_points(analysis)))
    yield "## All runs"
    yield format_markdown(of_frame(combined(material.runs)))
