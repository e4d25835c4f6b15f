"""Adapter over a transformers causal language model: flattened tokens in, hidden states out.

The runner feeds one sequence of T tokens that belong to any number of requests; our paged attention
(`runner.attention`), registered through transformers' attention interface, keeps them apart.
"""

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from runner.attention import ATTENTION_NAME, AttentionMetadata, single_request_metadata
from runner.dispatch import on_device
from runner.kv_cache import PagedKVCache
from runner.models.fp8 import WeightEffect, compare_logits
from runner.models.fused import FusedDecoder, fuse_decoder
from runner.models.layers import separate_packed, stream_linear, top1
from runner.models.packed_linear import PackedLinear, pack_linears
from runner.models.sharding import VocabularyHead, join_ranks, split_model
from runner.tensor_parallel import TensorParallel
from specdec.errors import UnsupportedError

logger = logging.getLogger(__name__)

# Families whose attention modules hand every option they use to the attention interface; the tests
# hold each to transformers' own generate. Any other family has to pass `check_parity` when loaded.
PROVEN_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_PARITY_TOKENS = 24
_PARITY_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class HFModel:
    """A transformers model behind the runner's interface.

    Args:
        model: causal language model, weights loaded, on its device. It is switched to our
            attention, what can be fused is fused, and on a CPU its bf16 linear layers are packed:
            it is ours from then on.
        fuse: run it by `runner.models.fused` where it matches; the tests compare with False.
        tensor_parallel: ranks that share its layers, each with such an adapter; a whole model is
            cut down to this rank's part. Hidden states and logits are whole on every rank;
            `num_kv_heads` is this rank's.

    Raises:
        UnsupportedError: the architecture cannot be run here, or not be split; the message says
            why.
        ConfigError: its heads or widths cannot be divided among the ranks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        fuse: bool = True,
        tensor_parallel: TensorParallel | None = None,
    ) -> None:
        config: Any = model.config
        refuse_unsound(config)
        self.model = model.eval().requires_grad_(False)
        self.decoder: nn.Module = model.get_decoder()
        self.layers: Sequence[nn.Module] = getattr(self.decoder, "layers", [])
        if model.get_output_embeddings() is None:
            raise UnsupportedError(f"model type {config.model_type!r} has no output head")
        self.config = config
        self.num_parameters: int = model.num_parameters()
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.num_layers: int = config.num_hidden_layers
        self.num_kv_heads: int = config.num_key_value_heads
        head_size = getattr(config, "head_dim", None)
        self.head_size: int = head_size or config.hidden_size // config.num_attention_heads
        self.max_position_embeddings: int = config.max_position_embeddings
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        reference = None
        if config.model_type not in PROVEN_FAMILIES:
            starts = sorted({0, max(0, self.max_position_embeddings - _PARITY_TOKENS)})
            reference = _parity_logits(model, self.vocab_size, self.device, starts)
        model.set_attn_implementation(ATTENTION_NAME)
        shared = tensor_parallel is not None and tensor_parallel.size > 1
        self.tensor_parallel = tensor_parallel if shared else None
        if self.tensor_parallel is not None:
            if not fuse:
                raise UnsupportedError("layers are shared by ranks in the fused model alone")
            self.num_parameters = split_model(model, self.tensor_parallel).num_parameters
        self.weight_effect: WeightEffect | None = None  # of 8-bit weights
        # Why it is not fused; None where it is.
        self.unfused_reason: str | None = "not asked for"
        self.fused = self._fuse() if fuse else None
        self.is_packed = pack_linears(model) > 0 or _has_packed(model)
        self.head: Any = model.get_output_embeddings()
        if self.tensor_parallel is not None and self.fused is not None:
            join_ranks(self.fused, self.tensor_parallel)
            self.num_kv_heads = self.fused.layers[0].attention.shape.num_kv_heads
            self.head = VocabularyHead(self.head, self.tensor_parallel, self.vocab_size)
        self._stream = stream_linear(self.head)
        if reference is not None:
            self._drop_wrong_fusion(*reference)
            self._check_parity(*reference)

    def _drop_wrong_fusion(self, token_ids: Tensor, expected: dict[int, Tensor]) -> None:
        """Run a model unfused whose parts are those of a fused one, but not what it does with them.

        Raises:
            UnsupportedError: ranks share its layers, which needs the fused model.
        """
        if self.fused is None:
            return
        error = self._parity_error(token_ids, expected)
        if error <= self._parity_allowed:
            return
        self.unfused_reason = (
            f"its parts match, but its logits would differ (relative difference {error:.2g})"
        )
        if self.tensor_parallel is not None:
            raise UnsupportedError(
                f"ranks cannot share the layers of model type {self.config.model_type!r}: "
                f"{self.unfused_reason}"
            )
        self.fused = None
        separate_packed(self.model)
        logger.info("model type %s runs unfused: %s", self.config.model_type, self.unfused_reason)

    def _fuse(self) -> FusedDecoder | None:
        """Fuse the decoder, or say why not."""
        try:
            fused = fuse_decoder(self.decoder, self.max_position_embeddings)
        except UnsupportedError as error:
            self.unfused_reason = str(error)
            logger.info("model type %s runs unfused: %s", self.config.model_type, error)
            return None
        self.unfused_reason = None
        logger.info(
            "model type %s: %d layers fused (QKV, gate and up joined; norm with residual; rotary "
            "positions with cache writes)",
            self.config.model_type,
            len(fused.layers),
        )
        return fused

    @torch.inference_mode()
    def quantize(self, token_ids: Tensor) -> WeightEffect:
        """Round the weights of the layers to 8 bits, in place; see `runner.models.fp8`.

        Args:
            token_ids: [T] int64, a text over which the model before and after is compared.

        Returns:
            What the rounding did to the law of the next token; also in `weight_effect`.

        Raises:
            UnsupportedError: the model is not fused, its weights are packed for a CPU, or they are
                8-bit already.
        """
        if self.fused is None:
            raise UnsupportedError(
                f"model type {self.config.model_type!r} cannot have 8-bit weights, for it is not "
                f"fused ({self.unfused_reason})"
            )
        if self.weight_effect is not None:
            raise UnsupportedError("the weights are 8-bit already; call quantize() once")
        ids = token_ids.to(self.device)
        before = self._logits_in_chunks(ids)
        self.fused.quantize(self.decoder)
        self.weight_effect = compare_logits(before, self._logits_in_chunks(ids))
        self.is_packed = True
        return self.weight_effect

    def make_kv_cache(self, num_blocks: int, block_size: int) -> PagedKVCache:
        """Allocate a paged KV cache of this model's shape."""
        return PagedKVCache(
            self.num_layers,
            num_blocks,
            block_size,
            self.num_kv_heads,
            self.head_size,
            self.dtype,
            self.device,
        )

    def first_layers(self, num_layers: int) -> "HFModel":
        """Return a model of the first layers, with this one's embedding, norm and head.

        Every module is shared: it has no weights of its own.
        """
        layers = nn.ModuleList(self.layers[:num_layers])
        decoder = copy.copy(self.decoder)
        # A module's copy still has the very table of its original's children.
        decoder._modules = {**self.decoder._modules, "layers": layers}
        model = copy.copy(self)
        model.decoder, model.layers, model.num_layers = decoder, list(layers), num_layers
        if self.fused is not None:
            model.fused = self.fused.first_layers(num_layers)
        return model

    @torch.inference_mode()
    def forward(
        self, input_ids: Tensor, positions: Tensor, attn_metadata: AttentionMetadata
    ) -> Tensor:
        """Run the decoder; it may be captured in a CUDA graph.

        Args:
            input_ids: [T] int64.
            positions: [T] int64.
            attn_metadata: which tokens belong together, and where their KV lies.

        Returns:
            Hidden states after the last norm, [T, hidden_size].
        """
        return self.forward_with_layers(input_ids, positions, attn_metadata, ())[0]

    @torch.inference_mode()
    def forward_with_layers(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attn_metadata: AttentionMetadata,
        layers: Sequence[int],
    ) -> tuple[Tensor, Tensor | None]:
        """Run the decoder, and keep what some of its layers give; see `forward`.

        Args:
            input_ids: [T] int64.
            positions: [T] int64.
            attn_metadata: of the pass.
            layers: A indices into `self.layers`; none cost nothing.

        Returns:
            Hidden states after the last norm, [T, hidden_size], and the outputs of the layers side
            by side in the order given, [T, A * hidden_size], or None where none is wanted.
        """
        if self.fused is not None:
            return self.fused.forward(input_ids, positions, attn_metadata, layers)
        with self._recorded(layers) as outputs:
            hidden = self._run_modules(input_ids, positions, attn_metadata)
        if not layers:
            return hidden, None
        return hidden, torch.cat([outputs[layer][0] for layer in layers], dim=1)

    def _run_modules(
        self, input_ids: Tensor, positions: Tensor, attn_metadata: AttentionMetadata
    ) -> Tensor:
        """Run the decoder by the modules of transformers; see `forward`.

        Positions are given and no mask function is registered for our attention, so that the
        decoder builds neither: looking for packed sequences, it would wait for the device.
        """
        output = self.decoder(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            attn_metadata=attn_metadata,
        )
        return output.last_hidden_state[0]

    @contextmanager
    def _recorded(self, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Keep the outputs of layers, [1, T, hidden_size] each, of the pass that runs inside."""
        outputs: dict[int, Tensor] = {}

        def keep(layer: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                outputs[layer] = output[0] if isinstance(output, tuple) else output

            return hook

        handles = [self.layers[layer].register_forward_hook(keep(layer)) for layer in set(layers)]
        try:
            yield outputs
        finally:
            for handle in handles:
                handle.remove()

    @torch.inference_mode()
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return logits [L, V] of hidden states [L, hidden_size]."""
        return self._stream(hidden_states)

    @torch.inference_mode()
    def top1(self, hidden_states: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return the likeliest token [L] int64 of hidden states [L, hidden_size].

        Args:
            hidden_states: [L, hidden_size].
            ids: [V] int64 that stand for the rows of the output head, None = their places.
        """
        if isinstance(self.head, VocabularyHead):
            return self.head.top1(hidden_states, ids)
        return top1(self._stream, hidden_states, ids)

    def head_rows(self, token_ids: Tensor) -> Tensor:
        """Return a copy of the output head's weights for some tokens, [n, hidden_size].

        Args:
            token_ids: [n] int64.

        Raises:
            UnsupportedError: the output head has a bias.
        """
        if getattr(self.head, "bias", None) is not None:
            raise UnsupportedError("an output head with a bias cannot be shared in part")
        ids = token_ids.to(self.device)
        if isinstance(self.head, VocabularyHead):
            return self.head.rows(ids)
        weight = getattr(self.head, "weight", None)
        if weight is None:  # packed: its product with the identity gives the weights back exactly
            unit = torch.eye(self.hidden_size, dtype=self.dtype, device=self.device)
            weight = self.head(unit).T
        return weight.detach()[ids].contiguous()

    def head_of(self, token_ids: Tensor) -> nn.Linear:
        """Return an output head over some tokens, [n] int64; its weights are a copy of the rows."""
        rows = self.head_rows(token_ids)
        with torch.device("meta"):
            head = nn.Linear(rows.shape[1], rows.shape[0], bias=False)
        head.weight = nn.Parameter(rows, requires_grad=False)
        return head

    def _check_parity(self, token_ids: Tensor, expected: dict[int, Tensor]) -> None:
        """Compare our forward with transformers' own on random tokens.

        Raises:
            UnsupportedError: the logits differ, or the architecture fails under our attention.
        """
        try:
            error = self._parity_error(token_ids, expected)
        except Exception as raised:  # whatever a foreign architecture does, the reason is shown
            raise UnsupportedError(
                f"model type {self.config.model_type!r} cannot run through our attention "
                f"({' '.join(str(raised).split())[:200]}); "
                f"proven families: {', '.join(sorted(PROVEN_FAMILIES))}"
            ) from raised
        allowed = self._parity_allowed
        if not error <= allowed:
            raise UnsupportedError(
                f"model type {self.config.model_type!r} gives other logits through our attention "
                f"(relative difference {error:.2g}, allowed {allowed:.0e}); "
                f"proven families: {', '.join(sorted(PROVEN_FAMILIES))}"
            )
        logger.info("model type %s: parity %.1e", self.config.model_type, error)

    @property
    def _parity_allowed(self) -> float:
        """Return the relative difference of logits that rounding explains."""
        return _PARITY_TOLERANCE.get(self.dtype, 5e-2)

    def _parity_error(self, token_ids: Tensor, expected: dict[int, Tensor]) -> float:
        """Return the relative difference between our logits and those of transformers, at most."""
        errors = [
            (self._logits_in_chunks(token_ids, start) - logits).norm() / logits.norm()
            for start, logits in expected.items()
        ]
        return float(torch.stack(errors).max())

    def _logits_in_chunks(self, token_ids: Tensor, start: int = 0) -> Tensor:
        """Return float32 logits of a text run in two passes, its positions counted from `start`.

        The second pass sees the first only through the paged KV cache: a model that does not call
        our attention would be right in a single pass.
        """
        num_tokens = len(token_ids)
        kv = self.make_kv_cache(num_blocks=1, block_size=num_tokens)
        logits, places = [], torch.arange(num_tokens, device=self.device)
        with on_device(self.device):  # a model is loaded before any runner sees to that
            for positions in places.split(-(-num_tokens // 2)):
                end = int(positions[-1]) + 1
                metadata = single_request_metadata(kv, positions, end)
                hidden = self.forward(token_ids[positions], start + positions, metadata)
                logits.append(self.compute_logits(hidden).float())
        return torch.cat(logits)


def _has_packed(model: nn.Module) -> bool:
    return any(isinstance(module, PackedLinear) for module in model.modules())


def refuse_unsound(config: Any) -> None:
    """Refuse what would run and be wrong.

    Raises:
        UnsupportedError: says what.
    """
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False) or not hasattr(config, "num_key_value_heads"):
        raise UnsupportedError(f"model type {kind!r} is no decoder with a KV cache of heads")
    layer_types = set(getattr(config, "layer_types", None) or [])
    odd = layer_types - {"full_attention", "sliding_attention"}
    if odd:
        raise UnsupportedError(f"model type {kind!r} has layers of type {sorted(odd)[0]!r}")
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    for values in (rope, *by_layer_type):
        if values.get("rope_type") in ("longrope", "dynamic"):
            raise UnsupportedError(
                f"model type {kind!r} turns positions by the longest text of a batch "
                f"(rope_type {values['rope_type']!r}): requests would change one another"
            )
    windowed = getattr(config, "sliding_window", None) or "sliding_attention" in layer_types
    if kind not in PROVEN_FAMILIES and windowed:
        raise UnsupportedError(
            f"model type {kind!r} uses a sliding window, which is proven only for "
            f"{', '.join(sorted(PROVEN_FAMILIES))}"
        )


@torch.inference_mode()
def _parity_logits(
    model: PreTrainedModel, vocab_size: int, device: torch.device, starts: Sequence[int]
) -> tuple[Tensor, dict[int, Tensor]]:
    """Return random token ids, and what transformers' own forward gives for them.

    Args:
        model: as it was loaded.
        vocab_size: of the ids.
        device: of the model.
        starts: positions of the first token: what a model does to far ones need not show near 0.

    Returns:
        [T] int64, and by start the logits [T, V] float32.
    """
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(vocab_size, (_PARITY_TOKENS,), generator=generator).to(device)
    logits = {}
    for start in starts:
        positions = start + torch.arange(_PARITY_TOKENS, device=device)
        # Some models count for themselves where nothing is given, and take no positions.
        given = {"position_ids": positions[None]} if start else {}
        output: Any = model(input_ids=token_ids[None], use_cache=False, **given)
        logits[start] = output.logits[0].float()
    return token_ids, logits
