"""The pages: their links lead somewhere, and the figures they show are those of the records."""

import re
from pathlib import Path

import pytest

from experiments.bench_e2e import read_record
from experiments.e2e_tables import markdown_table

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_README_ROWS = {
    "8B shape, no drafter": ("8b", "none"),
    "8B shape, EAGLE-3 head": ("8b", "eagle3"),
    "135M shape, no drafter": ("135m", "none"),
    "135M shape, EAGLE-3 head": ("135m", "eagle3"),
}


def anchors(text: str) -> set[str]:
    """Return what a fragment may name: headings, as the common renderers spell them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(words.replace(" ", "-"))
    return found


def broken_links(text: str, page: Path) -> list[str]:
    """Return the links of a page to no file of the project, or to no heading of one."""
    broken = []
    for link in _LINK.findall(text):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, fragment = link.partition("#")
        target = page.parent / path if path else page
        missing = fragment and target.is_file() and fragment not in anchors(target.read_text())
        if not target.exists() or missing:
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert broken_links(page.read_text(), page) == []


def test_a_link_to_a_lost_heading_or_file_is_seen() -> None:
    page = ROOT / "README.md"
    text = "[a](docs/nothing.md), [b](benchmarks/README.md#no-such-words), [c](#no-such-words)"
    assert len(broken_links(text, page)) == 3
    assert broken_links("[d](benchmarks/README.md#whole-steps-on-a-gpu)", page) == []


def test_the_table_of_whole_steps_is_the_record() -> None:
    record = read_record(ROOT / "benchmarks" / "results" / "e2e_h200.json")
    assert markdown_table(record) in (ROOT / "benchmarks" / "README.md").read_text()


def test_the_first_page_shows_steps_as_recorded() -> None:
    record = read_record(ROOT / "benchmarks" / "results" / "e2e_h200.json")
    lines = {(line["model"], line["drafter"], line["batch"]): line for line in record["lines"]}
    page = (ROOT / "README.md").read_text()
    for title, kind in _README_ROWS.items():
        own = [lines[*kind, batch] for batch in (1, 8, 32, 64)]
        cells = [f"{line['ms']:.2f} ({line['peer_ms']:.2f})" for line in own]
        assert f"| {title} | {' | '.join(cells)} |" in page
