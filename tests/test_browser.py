"""The pages as a browser shows them, on a laptop and on a phone.

Set SPECDEC_BROWSER to a Chromium or Chrome that is not on the path, and SPECDEC_SCREENSHOTS to a
folder to keep the pictures in; without it they lie in pytest's temporary folder.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.overview import build_overview
from experiments.report import build_report, main
from tests.run_folders import DRAFTS, write_run

pytestmark = pytest.mark.browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SIZES = {"laptop": (1280, 900), "phone": (390, 844)}
# page -> how many figures and tables it has at least
PARTS = {"report": (5, 4), "overview": (5, 4), "against": (3, 2)}
SMALLEST_LETTERS = 11  # pixels, on the phone

# Text that is seen, by the size of its letters: of every element with text of its own.
_FONT_SIZES = """() => [...document.querySelectorAll("body *")]
  .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())
    && !["SCRIPT", "STYLE"].includes(e.tagName))
  .map(e => [parseFloat(getComputedStyle(e).fontSize), e.textContent.trim().slice(0, 40)])"""
_WIDER = """() => [...document.querySelectorAll("body *")]
  .filter(e => !e.closest(".scroll, pre") && e.getBoundingClientRect().right > innerWidth + 1)
  .map(e => e.tagName + " " + e.textContent.trim().slice(0, 40))"""
_IMAGES = """() => [...document.images]
  .map(i => [i.alt, i.complete ? i.naturalWidth : 0, i.getBoundingClientRect().width])"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write the report of a run, the overview of several, and these against those of an older
    commit, with all that a page may say."""
    folder, older = tmp_path_factory.mktemp("sweep"), tmp_path_factory.mktemp("older")
    for batch_size in (1, 4):
        for temperature in (0.0, 0.8):
            drafts = [(name, k, chance - temperature / 4) for name, k, chance in DRAFTS]
            name = f"batch{batch_size}-temperature{temperature}"
            extra = {"random_tokens": True} if temperature and batch_size == 4 else None
            made = {"threads": 4} if temperature else None
            write_run(
                folder / name,
                drafts=drafts,
                batch_size=batch_size,
                temperature=temperature,
                arm_extra=extra,
                provenance=made,
            )
            if batch_size == 1 or not temperature:
                write_run(
                    older / name,
                    drafts=[(*drafts[0][:2], 0.9), *drafts[1:]],
                    batch_size=batch_size,
                    temperature=temperature,
                    provenance={"commit": "89abcdef" * 5, "threads": 8},
                )
    assert main([str(folder), "--against", str(older)]) == 0
    return {
        "overview": build_overview(folder),
        "report": build_report(folder / name),
        "against": folder / "against.html",
    }


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start the browser of this machine."""
    from playwright.sync_api import sync_playwright

    given = os.environ.get("SPECDEC_BROWSER")
    found = [given] if given else [path for name in NAMES if (path := shutil.which(name))]
    if not found:
        pytest.fail(
            f"no browser: none of {', '.join(NAMES)} is on the path; install the package chromium, "
            "or set SPECDEC_BROWSER to the program"
        )
    with sync_playwright() as playwright:
        # A container's root may not use the sandbox; the pages are our own.
        started = playwright.chromium.launch(executable_path=found[0], args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(params=SIZES)
def device(request: pytest.FixtureRequest) -> str:
    """Name a size of the screen."""
    return request.param


@pytest.fixture(params=PARTS)
def shown(
    request: pytest.FixtureRequest,
    device: str,
    browser: Any,
    pages: dict[str, Path],
    tmp_path: Path,
) -> Iterator[Any]:
    """Open a page offline; fail on an error in the console, or if it asks for anything."""
    width, height = SIZES[device]
    size: Any = {"width": width, "height": height}
    context = browser.new_context(viewport=size, offline=True)
    page, complaints = context.new_page(), []
    page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else 0)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda asked: complaints.append(asked.url[:80]))
    page.goto(pages[request.param].as_uri())
    folder = Path(os.environ.get("SPECDEC_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / f"{request.param}_{device}.png", full_page=True)
    yield page
    assert complaints == []
    context.close()


def parts_of(shown: Any) -> tuple[int, int]:
    return PARTS[Path(shown.url).stem]


def test_every_figure_is_there(shown: Any) -> None:
    images = shown.evaluate(_IMAGES)
    assert len(images) >= parts_of(shown)[0]
    for alt, natural_width, width in images:
        assert natural_width > 0, alt
        assert width > 300, alt
        assert len(alt) > 20


def test_the_page_is_no_wider_than_the_screen(shown: Any, device: str) -> None:
    assert shown.evaluate("document.documentElement.scrollWidth") <= SIZES[device][0]
    assert shown.evaluate(_WIDER) == []


def test_letters_are_large_enough(shown: Any) -> None:
    sizes = shown.evaluate(_FONT_SIZES)
    assert len(sizes) > 50
    assert [text for size, text in sizes if size < SMALLEST_LETTERS] == []


def test_wide_tables_scroll_in_their_box(shown: Any, device: str) -> None:
    boxes = shown.evaluate(
        """() => [...document.querySelectorAll("table")].map(t => {
          const box = t.closest(".scroll");
          return [t.scrollWidth, box ? box.clientWidth : 0,
                  box ? getComputedStyle(box).overflowX : "none"];
        })"""
    )
    assert len(boxes) >= parts_of(shown)[1]
    assert all(overflow == "auto" for _, _, overflow in boxes)
    if device == "phone":
        assert any(table > box for table, box, _ in boxes)


@pytest.mark.parametrize("device", ["laptop"], indirect=True)
@pytest.mark.parametrize("shown", ["overview"], indirect=True)
def test_a_click_on_a_head_sorts_the_table(shown: Any) -> None:
    column = """() => [...document.querySelector("table").tBodies[0].rows]
      .map(row => parseFloat(row.cells[%d].textContent))"""
    heads = shown.locator("table").first.locator("th button").all_text_contents()
    index = heads.index("Speed-up")
    button = shown.locator("table").first.locator("th button").nth(index)
    before = shown.evaluate(column % index)
    button.click()
    assert shown.evaluate(column % index) == sorted(before, reverse=True)
    button.click()
    assert shown.evaluate(column % index) == sorted(before)
    assert sorted(before) != before
