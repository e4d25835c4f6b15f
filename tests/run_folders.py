"""Made-up run folders whose steps cost what a law says, for tests of overviews and models."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from specdec.trace import OPTIONAL_COLUMNS, REQUEST_COLUMNS, STEP_COLUMNS

DRAFTS = (("ngram", 2, 0.4), ("ngram", 4, 0.4), ("eagle3", 2, 0.7), ("eagle3", 4, 0.7))
CATEGORIES = ("writing", "code")
_PROMPT_LEN = 20


def target_ms(num_reqs: float, positions: float) -> float:
    """Return what the target's pass and the verification cost: linear in each of both."""
    return 8.0 + 0.25 * num_reqs * positions


def draft_ms(num_reqs: float, k: float) -> float:
    """Return what proposing costs."""
    return 0.6 * k + 0.05 * num_reqs * k


def host_ms(num_reqs: float) -> float:
    """Return what the host needs."""
    return 1.0 + 0.02 * num_reqs


def step_ms(num_reqs: float, k: float) -> float:
    """Return a decode step's time."""
    return target_ms(num_reqs, k + 1) + draft_ms(num_reqs, k) + host_ms(num_reqs)


def write_run(
    folder: Path,
    *,
    drafts: Sequence[tuple[str, int, float]] = DRAFTS,
    batch_size: int = 1,
    temperature: float = 0.0,
    arm_extra: dict[str, Any] | None = None,
    provenance: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    num_prompts: int = 8,
    num_tokens: int = 24,
    fused: bool = False,
) -> Path:
    """Write the folder of a finished run.

    Args:
        folder: is made.
        drafts: (drafter, K, chance that a draft is accepted given those before it).
        batch_size: requests that run together until the first of them ends.
        temperature: of the run.
        arm_extra: further keys of every entry of arms.json.
        provenance, config: what differs from the usual.
        num_prompts, num_tokens: of every arm.
        fused: the steps are one launch, of which only the whole time is known.
    """
    arms = [("none", 0, 0.0), *drafts]
    tables: dict[str, list[dict[str, Any]]] = {"requests": [], "steps": [], "timings": []}
    for drafter, k, chance in arms:
        name = f"{drafter} K={k}" if k else drafter
        rng = np.random.default_rng([k, batch_size, int(10 * chance)])
        _Player(name, k, chance, rng, tables, fused).play(num_prompts, batch_size, num_tokens)
    folder.mkdir(parents=True)
    for name, rows in tables.items():
        pd.DataFrame(rows).to_parquet(folder / f"{name}.parquet", index=False)
    entries = [_entry(*arm, temperature) | (arm_extra or {}) for arm in arms]
    (folder / "arms.json").write_text(json.dumps(entries))
    made = {
        "commit": "0123abcd" * 5,
        "dirty": False,
        "command": "python -m experiments.run drafter=ngram",
        "started": "2026-01-31T12:00:00+00:00",
        "duration_s": 12.5,
        "versions": {"python": "3.11.9", "torch": "2.11.0"},
        "device": "CPU of a test",
        "dtype": "bfloat16",
        "threads": 2,
        "seed": 0,
    }
    (folder / "provenance.json").write_text(json.dumps(made | (provenance or {})))
    settings = {
        "target": {"name": "tiny", "dtype": "auto"},
        "sampling": {"temperature": temperature, "max_tokens": num_tokens},
        "prompts": {"path": None, "per_category": 4},
        "batch_size": batch_size,
        "engine": {"max_num_reqs": batch_size},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings | (config or {})))
    return folder


def _entry(drafter: str, k: int, _: float, temperature: float) -> dict[str, Any]:
    compared = 4 if k else 0
    verdict = {"status": "equal" if k else "reference", "dtype": "float32", "note": ""}
    return {
        "arm": f"{drafter} K={k}" if k else drafter,
        "drafter": drafter,
        "drafter_config": {"name": drafter},
        "draft_length_config": {"name": "fixed"},
        "k": k,
        "verifier": "rejection",
        "temperature": temperature,
        "lossless": True,
        "device": "cpu",
        "graph_scope": "none",
        "launches": {"target eager: graph_scope is none": 130},
        "capture": {"num_graphs": 0, "seconds": 0.0, "num_bytes": 0},
        "draft_length": {"name": "fixed", "counts": {str(k): 130}, "why": []},
        "verdict": {**verdict, "num_compared": compared, "num_equal": compared},
    }


class _Player:
    """Plays an arm's prompts, in groups that start together."""

    def __init__(
        self,
        arm: str,
        k: int,
        chance: float,
        rng: np.random.Generator,
        tables: dict[str, list[dict[str, Any]]],
        fused: bool,
    ) -> None:
        self.arm, self.k, self.chance, self.rng = arm, k, chance, rng
        self.tables, self.fused = tables, fused
        self.step = 0

    def play(self, num_prompts: int, batch_size: int, num_tokens: int) -> None:
        for group, first in enumerate(range(0, num_prompts, batch_size)):
            made = dict.fromkeys(range(first, min(first + batch_size, num_prompts)), 1)
            num_group = len(made)
            wall_ms = self._prefill(list(made))
            while made:
                wall_ms += self._decode(made, num_tokens)
                made = {prompt: n for prompt, n in made.items() if n < num_tokens}
            categories = {CATEGORIES[p % 2] for p in range(first, first + num_group)}
            self.tables["timings"].append(
                {
                    "arm": self.arm,
                    "k": self.k,
                    "group": group,
                    "category": categories.pop() if len(categories) == 1 else None,
                    "num_prompts": num_group,
                    "num_tokens": num_group * num_tokens,
                    "wall_s": wall_ms / 1e3,
                }
            )

    def _prefill(self, prompts: list[int]) -> float:
        for prompt in prompts:
            self._request(prompt, is_verify=False, context_len=_PROMPT_LEN, num_committed=1)
        parts = (20.0, 0.0, host_ms(len(prompts)))
        return self._end_step(len(prompts), _PROMPT_LEN * len(prompts), len(prompts), parts)

    def _decode(self, made: dict[int, int], num_tokens: int) -> float:
        num_reqs, committed = len(made), 0
        for prompt, before in made.items():
            left = num_tokens - before
            drafted = min(self.k, left - 1)
            accepted = int((self.rng.random(drafted) < self.chance).cumprod().sum())
            made[prompt] = before + accepted + 1
            committed += accepted + 1
            self._request(
                prompt,
                is_verify=True,
                context_len=_PROMPT_LEN + before,
                num_positions=self.k + 1,
                num_drafted=drafted,
                num_accepted=accepted,
                num_committed=accepted + 1,
                finish_reason="length" if left == accepted + 1 else "",
            )
        parts = (
            target_ms(num_reqs, self.k + 1),
            draft_ms(num_reqs, self.k),
            host_ms(num_reqs),
        )
        return self._end_step(num_reqs, num_reqs * (self.k + 1), committed, parts)

    def _request(self, prompt: int, **values: Any) -> None:
        row = dict.fromkeys(REQUEST_COLUMNS, 0) | dict.fromkeys(OPTIONAL_COLUMNS)
        row = {name: value for name, value in row.items() if name not in OPTIONAL_COLUMNS}
        row |= {"request_id": f"{prompt}/1", "label": CATEGORIES[prompt % 2], "step": self.step}
        row |= {"finish_reason": "", "arm": self.arm, "k": self.k, "turn": 1, **values}
        self.tables["requests"].append(row)

    def _end_step(
        self, num_reqs: int, num_tokens: int, committed: int, parts: tuple[float, float, float]
    ) -> float:
        target, draft, host = parts
        whole = target + draft + host
        row = dict.fromkeys(STEP_COLUMNS, 0.0)
        row = {name: value for name, value in row.items() if name not in OPTIONAL_COLUMNS}
        row |= {"step": self.step, "num_reqs": num_reqs, "num_tokens": num_tokens}
        row |= {"num_computed_tokens": num_tokens, "num_committed": committed}
        if self.fused:
            row |= dict.fromkeys(("inputs_ms", "target_ms", "verify_ms", "draft_ms"), np.nan)
            row |= {"launch_ms": target + draft, "host_ms": host}
        else:
            row |= {"inputs_ms": 0.5, "target_ms": target - 1.0, "verify_ms": 0.5}
            row |= {"draft_ms": draft, "host_ms": host}
        row |= {"step_ms": whole, "num_verified": self.k, "num_drafted": self.k, "arm": self.arm}
        self.tables["steps"].append(row)
        self.step += 1
        return whole
