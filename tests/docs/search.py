"""The search of the site: `python -m tests.docs.search SITE` searches for users' words in a built site, by Chromium.

It fails if a first hit is not the page with the answer. `.ci/run` builds the site and runs this.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from urllib.parse import quote, urlsplit

from playwright.sync_api import sync_playwright

ANSWERS = {
    "install": "install",
    "learning rate": "how-to-loop#learning-rate-and-schedule",
    "save figure": "how-to-loop#save-a-figure",
    "GPU": "how-to-loop#run-on-a-gpu-cuda-mps",
    "cuda": "how-to-loop#run-on-a-gpu-cuda-mps",
    "out of memory": "how-to-loop#avoid-running-out-of-memory",
    "LoRA": "how-to-loop#lora-and-other-adapters-peft",
    "AdamW": "how-to-loop#use-adamw-or-another-optimizer",
    "contribution influence": "attribution",
    "influence function": "attribution",
    "contribution": "attribution#names-signs-and-units",
    "add optimizer": "follow-optimizers#optimizers-of-your-own",
    "data attribution": "first-attribution",
    "attribute prediction": "first-attribution",
    "leave one out": "follow-effects",
    "empirical ntk": "glossary#kernels",
    "TracIn": "coming-from#dattri-tracin",
    "lazy": "how-to-sweeps#compare-the-lazy-and-the-rich-regime",
    "mislabeled": "how-to-loop#find-mislabelled-examples",
    "numpy": "how-to-loop#export-to-numpy-pandas-or-a-file",
    "wrong prediction": "how-to-explain#explain-a-wrong-prediction",
    "slurm": "how-to-sweeps#use-a-cluster",
    "Trainer": "follow#lightning-and-hugging-face",
}
"""Words that users search for, and the section with the answer, or the page if its beginning answers them."""
READY = "/found|did not match/.test(document.querySelector('#search-results .search-summary')?.innerText)"
FIRST = "a => a.href"
SECTION = """id => {
    const place = document.getElementById(id);
    const section = place.closest("section");
    const away = Math.abs(section.getBoundingClientRect().top - place.getBoundingClientRect().top);
    return section.querySelector("h1") || away > 100 ? "" : section.id;
}"""
"""A function that returns the section that begins at a target, or "" at the beginning of a page."""


def first_hits(site: Path) -> dict[str, str]:
    """Return the page and section of the first hit of each search."""
    chromium = shutil.which("chromium")
    hits = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        for words in ANSWERS:
            page.goto(f"{(site / 'search.html').resolve().as_uri()}?q={quote(words)}")
            page.wait_for_function(READY)
            address = urlsplit(page.eval_on_selector("#search-results ul.search > li > a", FIRST))
            page.goto(address.geturl())
            section = page.evaluate(SECTION, address.fragment) if address.fragment else ""
            hits[words] = "#".join(filter(None, [Path(address.path).relative_to(site.resolve()).stem, section]))
    return hits


if __name__ == "__main__":
    found = first_hits(Path(sys.argv[1]))
    missed = {words: page for words, page in found.items() if page != ANSWERS[words]}
    sys.exit(f"the first hit is another page: {missed}" if missed else 0)
