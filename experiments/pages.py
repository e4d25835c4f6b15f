"""How a page is written: a template of `experiments/templates`, filled in."""

import inspect
from pathlib import Path
from typing import Any

import jinja2

from specdec import metrics
from specdec.errors import CapacityError

_OF_A_GPU = ("linear_choices",)  # facts that there are none of on a CPU


def write_page(path: Path, template: str, **values: Any) -> Path:
    """Write a page that needs no other file.

    Args:
        path: the page.
        template: a file of `experiments/templates`.
        values: all that the template names; `formulas` is there already.

    Returns:
        The path.

    Raises:
        OSError: it cannot be written.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    formulas = inspect.cleandoc(metrics.__doc__ or "")
    page = environment.get_template(template).render(formulas=formulas, **values)
    path.write_text(page, encoding="utf-8")
    return path


def unknown_text(fact: str) -> str:
    """Return what a page says of a fact of the surroundings that has no value.

    Args:
        fact: its key.
    """
    return "-" if fact in _OF_A_GPU else "unknown"


def cannot_write(folder: Path, error: OSError, app: str = "experiments.report") -> CapacityError:
    """Return the error of a folder in which an app could not write its files."""
    return CapacityError(
        f"{folder} cannot be written ({error.strerror or error}); free some space or make it "
        f"writable, then run `python -m {app}` on it"
    )
