"""EAGLE-3 heads through the package `speculators` and back; run where it can be imported.

    python -m tests.exchange_speculators <empty folder>

prints a JSON object: for each case of `tests.head_cases` what was found, as plain values.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from speculators.models.eagle3 import Eagle3DraftModel
from torch import Tensor

from drafters.heads.checkpoint import load_head, save_head
from specdec import Engine, SamplingParams
from tests.head_cases import CASES, HeadFiles
from tests.models import random_prompts, tiny_model, tiny_target

# Deep enough that the usual three layers are different ones: else speculators refuses them.
LAYERS, V = 8, 17
PROMPTS = random_prompts([3, 7, 12], seed=1, vocab_size=V)
EIGHT_LAYERS = (1, 3, 4)  # the usual ones of so many


def draft_logits(model: Any, path: str) -> dict[tuple[int, ...], Tensor]:
    """Return the logits [V] of the first draft after each text, as the drafter computes them."""
    engine = Engine(
        tiny_target(model), {"name": "eagle3", "path": path, "sampling": "gumbel"}, "rejection", 2,
        max_model_len=32, max_num_batched_tokens=64, num_kv_blocks=40, max_steps_in_flight=1,
    )  # fmt: skip
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, SamplingParams(temperature=1.0, seed=i, max_tokens=9))
    engine.step()
    runner, found = engine.runner, {}
    for request in engine.scheduler.running:
        assert runner.draft_logits is not None
        found[tuple(request.token_ids)] = runner.draft_logits[request.row, 0].clone()
    return found


@torch.inference_mode()
def their_logits(model: Any, head: Any, text: tuple[int, ...], layers: tuple[int, ...]) -> Tensor:
    """Return the logits [V_draft] of the first draft after a text, by the package's own forward."""
    token_ids, kept = torch.tensor([text]), []
    hidden = model(token_ids[:, :-1], output_hidden_states=True).hidden_states
    features = torch.cat([hidden[layer + 1] for layer in layers], -1)
    handle = head.lm_head.register_forward_hook(lambda _, __, output: kept.append(output))
    head(features, token_ids[:, 1:], torch.zeros_like(token_ids[:, 1:]), ttt_steps=1)
    handle.remove()
    return kept[0][0, -1]


def exchange(name: str, model: Any, folder: Path) -> dict[str, Any]:
    """Take a head there and back."""
    case = CASES[name]
    files = HeadFiles(case, model, folder / "published")
    ours, theirs = str(folder / "ours"), str(folder / "theirs")
    head = load_head(files.path, "eagle3")
    lm_head = None if head.spec.owns_lm_head else files.head
    target = str(folder.parent / "target")
    save_head(ours, head, target, lm_head=lm_head, embedding=files.embedding)
    loaded = Eagle3DraftModel.from_pretrained(ours).eval()
    tensors = loaded.state_dict()
    names = {key: key.replace("layer.", "layers.0.", 1) for key in head.tensors}
    loaded.save_pretrained(theirs)
    again = load_head(theirs, "eagle3")
    aux_layers = case.aux_layers or EIGHT_LAYERS
    logits, back = draft_logits(model, files.path), draft_logits(model, theirs)
    ids = range(V) if files.target_ids is None else files.target_ids.tolist()
    errors = [
        float((line[list(ids)] - their_logits(model, loaded, text, aux_layers)).abs().max())
        for text, line in logits.items()
    ]
    return {
        "lost there": [
            key
            for key, other in names.items()
            if not torch.equal(tensors[other], head.tensors[key])
        ],
        "lost back": [
            key for key in head.tensors if not torch.equal(again.tensors[key], head.tensors[key])
        ],
        "layers there": list(loaded.target_layer_ids),
        "layers": [layer + 1 for layer in aux_layers],
        "layers back": [layer + 1 for layer in again.resolved_aux_layers(LAYERS)],
        "texts": len(logits),
        "same logits": logits.keys() == back.keys()
        and all(torch.equal(line, back[text]) for text, line in logits.items()),
        "largest error": max(errors),
        "spread": max(float(line[list(ids)].std()) for line in logits.values()),
    }


def main(folder: Path) -> None:
    """Print what was found."""
    model = tiny_model("llama", vocab_size=V, num_hidden_layers=LAYERS, scale=2.0)
    model.save_pretrained(folder / "target")
    names = [name for name, case in CASES.items() if case.method == "eagle3"]
    found = {name: exchange(name, model, folder / str(i)) for i, name in enumerate(names)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
