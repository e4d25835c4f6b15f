"""Small EAGLE-style heads: files of every published layout, and the heads in plain torch.

The plain head shares no code with ours nor with transformers: dense attention over a whole text,
norms and rotary embedding written out.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, silu

HEADS, KV_HEADS, HEAD_DIM, INNER = 4, 2, 24, 40
EPS, THETA = 1e-5, 500.0
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
AUX_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class HeadCase:
    """A head and the layout of its files.

    Args:
        method: "eagle" or "eagle3".
        layout: "EAGLE", "SpecForge" or "speculators".
        aux_layers: outputs of the target that it fuses; None leaves them out of the files.
        draft_vocab_size: None drafts the whole vocabulary, with the target's output head.
        config: more keys of config.json.
    """

    method: str
    layout: str
    aux_layers: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None
    model_type: str = "llama"
    fc_bias: bool = False
    own_embedding: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    rope_scaling: dict[str, Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES = {
    "EAGLE": HeadCase("eagle", "EAGLE", fc_bias=True),
    "EAGLE, own embedding": HeadCase("eagle", "EAGLE", own_embedding=True, rope_scaling=LLAMA3),
    "EAGLE, speculators": HeadCase("eagle", "speculators"),
    "EAGLE-3": HeadCase("eagle3", "EAGLE", draft_vocab_size=11),
    "EAGLE-3, SpecForge": HeadCase(
        "eagle3", "SpecForge", (0, 3, 2), 12, own_embedding=True, rope_scaling=LLAMA3
    ),
    "EAGLE-3, speculators": HeadCase(
        "eagle3", "speculators", (1, 0, 4), 13, norm_before_residual=True
    ),
    "EAGLE-3, normed, qwen3": HeadCase(
        "eagle3", "speculators", (4, 2, 0), 9, "qwen3", norm_before_fc=True
    ),
    "EAGLE-3, normed everywhere": HeadCase(
        "eagle3", "SpecForge", (4, 2, 1), 12, fc_norm=True, norm_output=True
    ),
    "EAGLE-3, whole vocabulary": HeadCase("eagle3", "SpecForge", (3, 1, 0)),
}
DEFAULT_AUX_LAYERS = (1, 2, 2)  # of a target of six layers


class HeadFiles:
    """A random head, its files and its plain implementation.

    Args:
        case: which.
        target: a transformers model of six layers.
        folder: where the files go.
        seed: of the weights.
    """

    def __init__(self, case: HeadCase, target: Any, folder: Path, seed: int = 0) -> None:
        self.case, self.path = case, str(folder)
        self.size: int = target.config.hidden_size
        self.vocab_size: int = target.config.vocab_size
        self.aux_layers = case.aux_layers or DEFAULT_AUX_LAYERS
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors = self._layer_tensors()
        ids = torch.randperm(self.vocab_size, generator=self.generator)[: case.draft_vocab_size]
        self.target_ids = ids.sort().values if case.draft_vocab_size else None
        self.embedding: Tensor = target.get_input_embeddings().weight.detach()
        self.head: Tensor = target.get_output_embeddings().weight.detach()
        if case.own_embedding:
            self.embedding = self.tensors["embed_tokens.weight"] = self._random(
                self.vocab_size, self.size
            )
        if case.draft_vocab_size:
            self.head = self.tensors["lm_head.weight"] = self._random(
                case.draft_vocab_size, self.size
            )
        self.write()

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator) * (2 / math.sqrt(shape[-1]))

    def _norm(self, size: int) -> Tensor:
        return 1 + 0.3 * torch.randn(size, generator=self.generator)

    def _layer_tensors(self) -> dict[str, Tensor]:
        """Return what both methods have, under the names of this file."""
        case, size = self.case, self.size
        is_eagle3 = case.method == "eagle3"
        width = 2 * size if is_eagle3 else size
        tensors = {
            "fc.weight": self._random(size, (3 if is_eagle3 else 2) * size),
            "layer.self_attn.q_proj.weight": self._random(HEADS * HEAD_DIM, width),
            "layer.self_attn.k_proj.weight": self._random(KV_HEADS * HEAD_DIM, width),
            "layer.self_attn.v_proj.weight": self._random(KV_HEADS * HEAD_DIM, width),
            "layer.self_attn.o_proj.weight": self._random(size, HEADS * HEAD_DIM),
            "layer.mlp.gate_proj.weight": self._random(INNER, size),
            "layer.mlp.up_proj.weight": self._random(INNER, size),
            "layer.mlp.down_proj.weight": self._random(size, INNER),
            "layer.post_attention_layernorm.weight": self._norm(size),
        }
        if case.fc_bias:
            tensors["fc.bias"] = self._random(size)
        if case.model_type == "qwen3":
            tensors["layer.self_attn.q_norm.weight"] = self._norm(HEAD_DIM)
            tensors["layer.self_attn.k_norm.weight"] = self._norm(HEAD_DIM)
        if is_eagle3:
            for name in ("layer.input_layernorm", "layer.hidden_norm", "norm"):
                tensors[f"{name}.weight"] = self._norm(size)
        if case.norm_before_fc:
            tensors["input_norm.weight"] = self._norm(3 * size)
        if case.fc_norm:
            tensors |= {f"fc_norm.{i}.weight": self._norm(size) for i in range(3)}
        return tensors

    # --- files ----------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """Return config.json of the layout."""
        case = self.case
        layer: dict[str, Any] = {
            "model_type": case.model_type,
            "hidden_size": self.size,
            "intermediate_size": INNER,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "rope_scaling": case.rope_scaling,
            "max_position_embeddings": 256,
            "hidden_act": "silu",
            "torch_dtype": "float32",
        }
        flags = {name: getattr(case, name) for name in FLAGS}
        own: dict[str, Any] = {name: True for name, on in flags.items() if on}
        if case.draft_vocab_size:
            own["draft_vocab_size"] = case.draft_vocab_size
        if case.layout == "speculators":
            own |= {
                "architectures": ["Eagle3Speculator"],
                "speculators_model_type": case.method,
                "speculators_config": {"algorithm": case.method},
                "transformer_layer_config": layer,
                **flags,
            }
            if case.aux_layers:
                own[AUX_IDS] = [layer + 1 for layer in case.aux_layers]
        else:
            own |= {**layer, "architectures": ["LlamaForCausalLM"], "bias": case.fc_bias}
            if case.layout == "SpecForge":
                own["architectures"] = ["LlamaForCausalLMEagle3"]
            if case.aux_layers:
                own["eagle_config"] = {AUX_IDS: list(case.aux_layers)}
        return {**own, **case.config}

    def stored(self) -> dict[str, Tensor]:
        """Return the tensors under the names of the layout."""
        case = self.case
        is_eagle3, speculators = case.method == "eagle3", case.layout == "speculators"
        layer = "layers.0." if speculators or not is_eagle3 else "midlayer."
        names = {"layer.": layer}
        if speculators and not is_eagle3:
            names = {"layer.": "transformer.", "fc.": "fusion_fc."}
        stored = {}
        for name, tensor in self.tensors.items():
            prefix = next((p for p in names if name.startswith(p)), "")
            stored[names.get(prefix, "") + name.removeprefix(prefix)] = tensor
        if self.target_ids is not None:
            known = torch.zeros(self.vocab_size, dtype=torch.bool)
            known[self.target_ids] = True
            stored["t2d"] = known
            stored["d2t"] = self.target_ids - torch.arange(len(self.target_ids))
        return stored

    def write(
        self, config: dict[str, Any] | None = None, tensors: dict[str, Tensor] | None = None
    ) -> None:
        """Write the files; what is given stands for the head's own."""
        folder = Path(self.path)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config or self.config()))
        tensors = self.stored() if tensors is None else tensors
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")

    # --- the plain head -------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, token_ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run over a whole text at once.

        Args:
            token_ids: [T], the token behind each position.
            features: [T, size], fused ones.

        Returns:
            What is fed back, [T, size], and the layer's keys and values, [T, KV_HEADS, HEAD_DIM].
        """
        t = self.tensors
        embedded = self.embedding[token_ids]
        if self.case.method == "eagle":
            x = linear(torch.cat((embedded, features), 1), t["fc.weight"], t.get("fc.bias"))
            residual = x
        else:
            normed = self.rms(features, "layer.hidden_norm")
            residual = normed if self.case.norm_before_residual else features
            x = torch.cat((self.rms(embedded, "layer.input_layernorm"), normed), 1)
        q = linear(x, t["layer.self_attn.q_proj.weight"]).view(-1, HEADS, HEAD_DIM)
        k = linear(x, t["layer.self_attn.k_proj.weight"]).view(-1, KV_HEADS, HEAD_DIM)
        v = linear(x, t["layer.self_attn.v_proj.weight"]).view(-1, KV_HEADS, HEAD_DIM)
        if self.case.model_type == "qwen3":
            q, k = self.rms(q, "layer.self_attn.q_norm"), self.rms(k, "layer.self_attn.k_norm")
        q, k = self._turned(q), self._turned(k)
        mixed = []
        for head in range(HEADS):
            shared = head * KV_HEADS // HEADS
            scores = q[:, head] @ k[:, shared].T / math.sqrt(HEAD_DIM)
            future = torch.ones_like(scores).triu(1).bool()
            mixed.append(scores.masked_fill(future, float("-inf")).softmax(1) @ v[:, shared])
        x = residual + linear(torch.cat(mixed, 1), t["layer.self_attn.o_proj.weight"])
        y = self.rms(x, "layer.post_attention_layernorm")
        y = silu(linear(y, t["layer.mlp.gate_proj.weight"])) * linear(
            y, t["layer.mlp.up_proj.weight"]
        )
        x = x + linear(y, t["layer.mlp.down_proj.weight"])
        return (self.rms(x, "norm") if self.case.norm_output else x), k, v

    @torch.inference_mode()
    def fused(self, hidden_states: tuple[Tensor, ...]) -> Tensor:
        """Return the features of a text from transformers' `hidden_states`, the last one normed."""
        if self.case.method == "eagle":
            return hidden_states[-1][0]
        outputs = [hidden_states[layer + 1][0] for layer in self.aux_layers]
        if self.case.fc_norm:
            outputs = [self.rms(output, f"fc_norm.{i}") for i, output in enumerate(outputs)]
        aux = torch.cat(outputs, 1)
        if self.case.norm_before_fc:
            aux = self.rms(aux, "input_norm")
        return linear(aux, self.tensors["fc.weight"])

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [T, V] over the target's vocabulary of what is fed back."""
        if self.case.method == "eagle3" and not self.case.norm_output:
            hidden = self.rms(hidden, "norm")
        logits = linear(hidden, self.head)
        if self.target_ids is None:
            return logits
        wide = torch.full((len(logits), self.vocab_size), float("-inf"))
        wide[:, self.target_ids] = logits
        return wide

    def chain(self, text: Tensor, drafts: list[int], features: Tensor) -> Tensor:
        """Return the logits [D, V] that the drafts of a text were chosen from.

        Args:
            text: [L], committed tokens.
            drafts: D of them.
            features: [L - 1 or more, size], fused ones of the text.
        """
        features, tokens, logits = features[: len(text) - 1], text[1:], []
        for draft in drafts:
            hidden = self.run(tokens, features)[0][-1:]
            logits.append(self.logits(hidden)[0])
            features, tokens = torch.cat((features, hidden)), torch.cat((tokens, text.new([draft])))
        return torch.stack(logits)

    def rms(self, x: Tensor, name: str) -> Tensor:
        """Return the root-mean-square norm of the last dimension."""
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * self.tensors[f"{name}.weight"]

    def _turned(self, x: Tensor) -> Tensor:
        """Return x [T, heads, HEAD_DIM] turned by its positions 0 .. T - 1."""
        half = HEAD_DIM // 2
        frequencies = [THETA ** (-i / half) for i in range(half)]
        scaling = self.case.rope_scaling
        if scaling is not None:
            frequencies = [self._llama3(f, scaling) for f in frequencies]
        angles = torch.outer(torch.arange(len(x)).float(), torch.tensor(frequencies))[:, None]
        a, b = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    @staticmethod
    def _llama3(frequency: float, scaling: dict[str, Any]) -> float:
        """Return a frequency as Llama 3.1 scales it: low ones by the factor, high ones not."""
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        return kept * frequency + (1 - kept) * frequency / scaling["factor"]
