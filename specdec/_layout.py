"""Guard: the top-level packages `runner`, `drafters` and `sampler` must be the ones beside us.

Their names are common; a foreign package of the same name would otherwise be mixed in silently.
"""

import importlib.util
from pathlib import Path

_HOME = Path(__file__).resolve().parent.parent


def check_layout(names: tuple[str, ...] = ("runner", "drafters", "sampler")) -> None:
    """Check where each package would be imported from, without importing it.

    Raises:
        ImportError: a package is missing or lies elsewhere; the message names the intruder.
    """
    for name in names:
        spec = importlib.util.find_spec(name)
        origin = spec.origin if spec is not None else None
        if origin is None or Path(origin).resolve().parent.parent != _HOME:
            raise ImportError(
                f"package {name!r} must lie beside specdec in {_HOME}, "
                f"found {origin or 'nothing'}; "
                f"remove the other {name!r} from the import path or start from the project folder"
            )


check_layout()
