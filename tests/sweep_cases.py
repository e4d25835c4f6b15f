"""A tiny chat model in a folder, and what tests of sweeps read of a job."""

from pathlib import Path

import pandas as pd

from tests.models import byte_tokenizer, tiny_model

METRICS = ("accepted_length", "acceptance_rate", "tokens_per_s", "speedup")


def save_chat_model(folder: Path) -> Path:
    """Save a random model with a tokenizer of bytes that knows a chat template."""
    tokenizer = byte_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 2048}
    tiny_model("llama", eos_token_id=tokenizer.eos_token_id, **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def acceptance(folder: Path) -> dict[str, list[tuple[str, int, int, int]]]:
    """Return by job, arm and request: verification steps, valid drafts, accepted drafts."""
    found = {}
    for path in sorted(folder.glob("*/requests.parquet")):
        frame = pd.read_parquet(path)
        rows = frame[frame["is_verify"]].groupby(["arm", "request_id"])
        found[path.parent.name] = [
            (
                f"{arm} {name}",
                len(own),
                int(own["num_drafted"].sum()),
                int(own["num_accepted"].sum()),
            )
            for (arm, name), own in rows
        ]
    return found
