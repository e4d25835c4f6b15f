"""The overview of many runs: `overview.csv`, the summaries of all finished runs below a folder."""

from pathlib import Path

import pandas as pd


def build_overview(folder: Path) -> Path:
    """Write the overview of the run folders below `folder`; return its path."""
    frames = [
        pd.read_csv(path).assign(run=str(path.parent.relative_to(folder)))
        for path in sorted(folder.rglob("summary.csv"))
    ]
    path = folder / "overview.csv"
    pd.concat(frames, ignore_index=True).to_csv(path, index=False)
    return path
