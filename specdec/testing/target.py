"""The kit's own target: a tiny random Llama in float32, built offline from a config.

Five of its tokens are far likelier than all others, so that any drafter that looks at the text or
at the model is accepted now and then, and so that a law over a few tokens can be enumerated. Its
sizes are fixed: a drafter that brings weights for a target brings them for these.
"""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from runner.loader import LoadedTarget
from runner.models.hf import HFModel

VOCAB_SIZE = 97
HIDDEN_SIZE = 64
NUM_LAYERS = 4
LIKELY_TOKENS = (7, 21, 40, 63, 88)

_SCALE = 3.0  # on all weights: at the usual initial size every text falls into a loop
_LIFT = 4.0  # how far the last layer lifts the one dimension that likely tokens look at
_WEIGHT = 0.7  # of that dimension in the head


def tiny_model(seed: int = 0, **changes: Any) -> Any:
    """Build the model; the global random generator is left as it was.

    Args:
        seed: of the weights.
        changes: fields of its `LlamaConfig`.
    """
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 128,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "mlp_bias": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(_SCALE)
        decoder: Any = model.get_decoder()
        last = decoder.layers[-1]
        last.mlp.down_proj.bias[0] = _LIFT
        head: Any = model.get_output_embeddings()
        head.weight[:, 0] = 0
        head.weight[list(LIKELY_TOKENS), 0] = _WEIGHT
    return model


def tiny_target(device: str | torch.device = "cpu", seed: int = 0) -> LoadedTarget:
    """Return the model behind the runner; it has no tokenizer: prompts are token ids."""
    return LoadedTarget("tiny", HFModel(tiny_model(seed).to(device)), None)
