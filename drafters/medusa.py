"""Medusa heads: each predicts one token further ahead from the target's last hidden state.

A head is a stack of residual blocks, x + SiLU(W x + b), and a projection to the vocabulary, its own
or the target's. The hidden state is that of the position *before* the last committed token: the
target's own head turned it into that token, head i (from 0) turns it into the token i + 1 behind.
The heads know nothing of one another's drafts.

Source: Cai et al. 2024 (Medusa), heads as a chain.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from drafters.draft_sampling import DraftSamplingConfig, SamplingDrafter
from runner.head_files import check_shape, read_head, write_head
from runner.weights import check_folder
from specdec.errors import ConfigError, WeightsError
from specdec.log import warn_once
from specdec.protocols import (
    DraftContext,
    TargetView,
)
from specdec.registry import register_drafter

logger = logging.getLogger(__name__)

# Tensor names, a prefix aside: the layout of the Medusa repository, whose projection is the module
# behind the blocks, and that of vLLM.
_PREFIX = re.compile(r"^(?:medusa_heads?\.)")
_BLOCK = re.compile(
    r"^(?:blocks\.)?(?P<head>\d+)\.(?:layers\.(?P<b>\d+)|(?P<a>\d+)\.linear)\.(?P<kind>weight|bias)$"
)
_PROJECTION = re.compile(r"^(?:lm_heads\.(?P<b>\d+)|(?P<a>\d+)\.\d+)\.weight$")
_SHARED_PROJECTION = "lm_head.weight"


@dataclass
class MedusaConfig(DraftSamplingConfig):
    """Parameters of Medusa heads, beside how drafts are chosen.

    Args:
        path: folder with config.json and *.safetensors, in the layout of the Medusa repository or
            of vLLM. The tensors say how many heads and blocks there are.
    """

    name: str = "medusa"
    path: str = ""

    def __post_init__(self) -> None:
        """Check the choices, and a local folder."""
        if not self.path:
            raise ConfigError("drafter medusa needs path=<folder of the heads>, got none")
        check_folder(self.path, "head")
        super().__post_init__()


class MedusaHead(nn.Module):
    """One head.

    Args:
        hidden_size: of the target.
        num_layers: residual blocks.
        vocab_size: of the head's own projection; None shares the target's.
    """

    def __init__(self, hidden_size: int, num_layers: int, vocab_size: int | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_layers))
        self.projection = None
        if vocab_size is not None:
            self.projection = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [R, V] from hidden states [R, hidden], or states where none is owned."""
        for block in self.blocks:
            hidden = hidden + silu(block(hidden))
        return hidden if self.projection is None else self.projection(hidden)


@register_drafter("medusa", MedusaConfig)
class MedusaDrafter(SamplingDrafter):
    """As many drafts as there are heads."""

    config: MedusaConfig

    def load(self, target: TargetView) -> None:
        """Load the heads.

        Raises:
            WeightsError: they cannot be read, or fit another target.
        """
        self._target: Any = target.model
        self.heads = load_medusa(self.config.path, target.hidden_size, target.vocab_size)
        if len(self.heads) < target.num_speculative_tokens:
            warn_once(
                logger,
                f"drafter medusa has {len(self.heads)} heads, so that many drafts at most; give "
                f"num_speculative_tokens={len(self.heads)}, or positions are verified for nothing",
            )
        self.heads.to(target.device, target.dtype).requires_grad_(False)
        self.set_up(
            target.vocab_size,
            target.hidden_size,
            target.dtype,
            hidden_states="last",
            variable_length=len(self.heads) < target.num_speculative_tokens,
        )

    def first_pass(self, ctx: DraftContext) -> None:
        """Take the hidden state that gave the last committed token of each place."""
        assert ctx.hidden_states is not None
        # A verification committed the tokens behind its first num_sampled ones; a prompt's last
        # chunk the one behind its last.
        num_tokens = torch.where(ctx.is_verify > 0, ctx.num_sampled, ctx.query_lens)
        index = ctx.query_start_loc[:-1] + (num_tokens - 1).clamp(min=0)
        # A place without tokens behind all others would point past the end.
        index = index.clamp(max=len(ctx.hidden_states) - 1)
        torch.index_select(ctx.hidden_states, 0, index, out=self._hidden[: ctx.num_reqs])

    def propose(self, ctx: DraftContext) -> None:
        """Choose a draft by each head; behind the last head there is none."""
        hidden = self._hidden[: ctx.num_reqs]
        drafts = []
        for i in range(min(len(self.heads), ctx.num_drafts)):
            drafts.append(self.sampler.choose(ctx, self.head_logits(i, hidden), i))
        self.sampler.write(ctx, drafts)

    def head_logits(self, index: int, hidden: Tensor) -> Tensor:
        """Return the logits [R, V] of one head from hidden states [R, hidden]."""
        head = self.heads[index]
        output = head(hidden)
        return output if head.projection is not None else self._target.compute_logits(output)


def load_medusa(path: str, hidden_size: int, vocab_size: int) -> nn.ModuleList:
    """Load Medusa heads for a target.

    Args:
        path: folder.
        hidden_size: of the target.
        vocab_size: of the target.

    Returns:
        A `MedusaHead` for each head; heads without a projection share the target's.

    Raises:
        WeightsError: unknown or missing tensors, or shapes of another target.
    """
    _, tensors = read_head(path)
    shared = tensors.pop(_SHARED_PROJECTION, None)
    states: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        head, key, wanted = _place_of(path, name, hidden_size, vocab_size)
        why = f"hidden size {hidden_size}, vocabulary {vocab_size}"
        check_shape(path, name, tensor, wanted, why)
        states.setdefault(head, {})[key] = tensor
    if sorted(states) != list(range(len(states))) or not states:
        raise WeightsError(
            f"head {path!r} has tensors of heads {sorted(states)}; heads are counted from 0 on "
            f"without a gap"
        )
    if shared is not None:
        check_shape(path, _SHARED_PROJECTION, shared, (vocab_size, hidden_size), "vocabulary, size")
    sizes = hidden_size, vocab_size
    heads = [_build_head(path, i, states[i], sizes) for i in sorted(states)]
    if shared is not None:
        # One module for all heads: a projection takes more memory than everything else of a head.
        projection = nn.Linear(hidden_size, vocab_size, bias=False, dtype=shared.dtype)
        projection.load_state_dict({"weight": shared}, assign=True)
        for head in heads:
            head.projection = head.projection or projection
    return nn.ModuleList(heads)


def _place_of(
    path: str, name: str, hidden_size: int, vocab_size: int
) -> tuple[int, str, tuple[int, ...]]:
    """Return head, key in its state and wanted shape of a checkpoint's tensor."""
    bare = _PREFIX.sub("", name)
    if match := _BLOCK.match(bare):
        layer = match["a"] or match["b"]
        shape = (hidden_size, hidden_size) if match["kind"] == "weight" else (hidden_size,)
        return int(match["head"]), f"blocks.{layer}.{match['kind']}", shape
    if match := _PROJECTION.match(bare):
        return int(match["a"] or match["b"]), "projection.weight", (vocab_size, hidden_size)
    raise WeightsError(
        f"head {path!r} holds a tensor {name!r} that is no part of Medusa heads; known are "
        f"'<head>.<block>.linear.weight' and '<head>.<blocks>.weight', or vLLM's names for them"
    )


def _build_head(
    path: str, index: int, state: dict[str, Tensor], sizes: tuple[int, int]
) -> MedusaHead:
    """Build one head from its tensors; a block without a bias gets one of zeros."""
    hidden_size, vocab_size = sizes
    num_layers = sum(key.startswith("blocks.") and key.endswith(".weight") for key in state)
    own = vocab_size if "projection.weight" in state else None
    for layer in range(num_layers):
        state.setdefault(f"blocks.{layer}.bias", torch.zeros(hidden_size))
    head = MedusaHead(hidden_size, num_layers, own)
    missing = sorted(set(head.state_dict()) ^ set(state))
    if missing:
        raise WeightsError(
            f"head {path!r}: the blocks of head {index} are not counted from 0 on without a gap "
            f"({missing[0]!r}); copy it again from its source"
        )
    head.load_state_dict(state)
    return head


def save_medusa(
    path: str | Path,
    heads: Sequence[MedusaHead],
    lm_head: Tensor | None = None,
    shares_lm_head: bool = False,
) -> None:
    """Save Medusa heads in the layout that vLLM loads; `load_medusa` loads it too.

    Args:
        path: folder, made where it is missing.
        heads: all with as many blocks, and all with or all without a projection of their own.
        lm_head: [V, hidden], the target's projection, for heads that share it: the layout wants it.
        shares_lm_head: write none all the same; only `load_medusa` loads such a folder.

    Raises:
        ConfigError: heads that share a projection, and none is given.
    """
    first = heads[0]
    projection = lm_head if first.projection is None else first.projection.weight
    if projection is None and not shares_lm_head:
        raise ConfigError(
            "save_medusa: these heads share the target's projection, which the layout stores; "
            "give it as lm_head"
        )
    tensors: dict[str, Tensor] = {}
    if first.projection is None and projection is not None:
        tensors[_SHARED_PROJECTION] = projection
    for i, head in enumerate(heads):
        for key, tensor in head.state_dict().items():
            _, _, rest = key.partition(".")
            own = key.startswith("projection")
            tensors[f"lm_heads.{i}.{rest}" if own else f"blocks.{i}.layers.{rest}"] = tensor
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": first.blocks[0].in_features,
        "vocab_size": None if projection is None else len(projection),
        "truncated_vocab_size": None if projection is None else len(projection),
        "num_heads": len(heads),
        "num_hidden_layers": len(first.blocks),
        "medusa_fc_bias": True,
        "original_lm_head": first.projection is None,
    }
    write_head(path, config, tensors)
