"""What a drafter proposes at every start of a text, in a few calls of its own `score`.

A row stands for a start: it holds the text up to there. All rows have one KV cache of pages of one
token. While the drafter runs over the text, the tables of all rows name the same pages, so that a
place reads what the places before it have just written, as a pass over the whole text would. Then
the tables are forked: from a row's last committed position on it gets pages of its own, and the
drafts of the starts do not meet.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafters.base import DrafterBase
from experiments.shadow_texts import Text, TextStates
from experiments.shadow_walk import StartScores
from runner.dispatch import on_device
from runner.kv_cache import PagedKVCache
from runner.loader import LoadedTarget
from runner.models.hf import HFModel
from sampler.draft_noise import draft_noise
from sampler.noise import mix_seed
from specdec.checks import check_pairing, check_wants
from specdec.errors import ConfigError
from specdec.protocols import (
    DRAFT_KIND_WITH_Q,
    DraftBuffers,
    DraftContext,
    Drafter,
    Noise,
    ScoringDrafter,
    StateView,
    TargetView,
    Verifier,
)

_MAX_LAW_ELEMENTS = 1 << 25  # of the table of laws q, in float32


@dataclass(frozen=True)
class ScoreSizes:
    """Sizes of a scorer.

    Args:
        max_model_len: of the runs that are predicted.
        max_text_len: of the texts at hand.
        num_drafts: K at most.
        num_rows: starts a call at most.
    """

    max_model_len: int
    max_text_len: int
    num_drafts: int
    num_rows: int


def load_drafter(drafter: Drafter, target: LoadedTarget, sizes: ScoreSizes) -> Drafter:
    """Let a drafter load what it needs, as the runner does, and check what it asks for.

    Raises:
        ConfigError, WeightsError, UnsupportedError: it does not go with the target, its files
            cannot be used, or it says that it can score and cannot.
    """
    model = target.model
    view = TargetView(
        model=model,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        dtype=model.dtype,
        device=model.device,
        num_speculative_tokens=sizes.num_drafts,
        max_model_len=sizes.max_model_len,
        tokenizer=target.tokenizer,
    )
    with on_device(model.device):
        drafter.load(view)
    check_wants(drafter, "device", len(model.layers))
    wants, name = drafter.capabilities, type(drafter).__name__
    if wants.can_score and not hasattr(drafter, "score"):
        raise ConfigError(f"drafter {name} says can_score and has no method score; add it")
    default = getattr(type(drafter), "score", None) is DrafterBase.score
    if wants.can_score and default and wants.kv is not None and not wants.splits_first_pass:
        raise ConfigError(
            f"drafter {name} says can_score, and writes the KV of the text in propose; give it a "
            f"score of its own, or split off its first pass"
        )
    return drafter


class Scorer:
    """A drafter beside tables of its own, where rows are starts of one text.

    Args:
        drafter: loaded, says `can_score`.
        verifier: whose runs are predicted.
        model: the target of the texts.
        temperature: of the texts.
        sizes: of the tables.

    Raises:
        ConfigError: the verifier cannot judge the drafter's drafts.
    """

    def __init__(
        self,
        drafter: ScoringDrafter,
        verifier: Verifier,
        model: HFModel,
        temperature: float,
        sizes: ScoreSizes,
    ) -> None:
        self.drafter, self.sizes = drafter, sizes
        self._device, k = model.device, sizes.num_drafts
        check_pairing(drafter, verifier, k)
        wants = drafter.capabilities
        # Under a rule that judges by p and q the laws are to be those behind the text's own tokens.
        self._forces = temperature > 0 and not verifier.text_equal and wants.offers_q
        law_width = k * model.vocab_size if wants.offers_q else 1
        self.num_rows = max(1, min(sizes.num_rows, _MAX_LAW_ELEMENTS // law_width))
        self._context = min(wants.max_context or sizes.max_model_len, sizes.max_model_len)
        self._make_tables(temperature, model.vocab_size)
        self._noise = draft_noise(verifier, self._temperature, self._seeds, self._state.total_len)
        with on_device(self._device):
            drafter.bind(self._state, self._buffers)

    def _make_tables(self, temperature: float, vocab_size: int) -> None:
        """Allocate what the runner would."""
        sizes, n, k = self.sizes, self.num_rows, self.sizes.num_drafts
        device, wants = self._device, self.drafter.capabilities

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._state = StateView(
            all_token_ids=ints(n, sizes.max_model_len),
            prompt_len=ints(n),
            prefill_len=ints(n),
            total_len=ints(n),
            num_computed_tokens=ints(n),
            last_sampled_tokens=torch.zeros(n, 1, dtype=torch.int64, device=device),
            block_table=ints(n, sizes.max_model_len),
            draft_limit=ints(n),
        )
        self._temperature = torch.full((n,), temperature, dtype=torch.float32, device=device)
        self._seeds = torch.zeros(n, dtype=torch.int64, device=device)
        self._kv: PagedKVCache | None = None
        self._own_pages = k + 1  # of a row, from its last committed position on
        if (kv := wants.kv) is not None:
            num_pages = sizes.max_text_len + n * self._own_pages
            self._kv = PagedKVCache(
                kv.num_layers, num_pages, 1, kv.num_kv_heads, kv.head_size, kv.dtype, device
            )
        self._buffers = DraftBuffers(
            draft_tokens=torch.full((n, k), -1, dtype=torch.int64, device=device),
            draft_kind=torch.zeros(n, dtype=torch.int8, device=device),
            draft_logits=torch.zeros(n, k, vocab_size, device=device) if wants.offers_q else None,
            kv=self._kv,
        )

    @torch.inference_mode()
    def score(self, text: Text, states: TextStates) -> StartScores:
        """Propose at every start of a text, and judge the drafts by it.

        Args:
            text: recorded.
            states: the target's, with the layers that the drafter asks for.
        """
        k, num_starts = self.sizes.num_drafts, text.num_starts
        num_drafts = np.zeros(num_starts, dtype=np.int64)
        accept = np.zeros((num_starts, k))
        with on_device(self._device):
            self._seeds.fill_(mix_seed(text.seed, 0))
            for row in range(self.num_rows):
                self.drafter.add_request(row)
            for begin in range(0, num_starts, self.num_rows):
                end = min(begin + self.num_rows, num_starts)
                counts, kept = self._score_starts(text, states, begin, end)
                num_drafts[begin:end] = counts.cpu().numpy()
                accept[begin:end] = kept.double().cpu().numpy()
        return StartScores(text.first_start, len(text.token_ids), num_drafts, accept)

    def _score_starts(
        self, text: Text, states: TextStates, begin: int, end: int
    ) -> tuple[Tensor, Tensor]:
        """Return valid drafts [R] and their acceptance [R, K] at R starts of a text."""
        starts = torch.arange(begin, end, device=self._device) + text.first_start
        self._fill_rows(text, states.token_ids, starts)
        ctx = self._step(text, states, starts)
        tables, count = self._buffers, len(starts)
        tables.draft_tokens.fill_(-1)
        tables.draft_kind.zero_()
        self.drafter.score(ctx, lambda: self._fork(starts))
        return self._judge(states, starts, tables.draft_tokens[:count])

    def _fill_rows(self, text: Text, token_ids: Tensor, starts: Tensor) -> None:
        """Write the state that a step has left at each start."""
        state, n, length = self._state, len(starts), len(token_ids)
        columns = torch.arange(length, device=self._device)
        state.all_token_ids[:n, :length] = torch.where(columns < starts[:, None], token_ids, 0)
        state.prompt_len[:n] = state.prefill_len[:n] = text.prompt_len
        state.total_len[:n] = starts
        state.num_computed_tokens[:n] = starts - 1
        state.last_sampled_tokens[:n, 0] = token_ids[starts - 1]
        limit = torch.minimum(text.max_total_len - starts - 1, self._context - starts)
        state.draft_limit[:n] = limit.clamp(0, self.sizes.num_drafts)
        state.block_table[:n, :length] = columns.int()

    def _step(self, text: Text, states: TextStates, starts: Tensor) -> DraftContext:
        """Build the steps that ended in these starts, as one.

        The first start of a text lies behind its prompt, every other behind one verified token.
        """
        n, device, wants = len(starts), self._device, self.drafter.capabilities
        has_prompt = int(starts[0]) == text.first_start
        query_lens = torch.ones(n, dtype=torch.int32, device=device)
        is_verify = torch.ones_like(query_lens)
        if has_prompt:
            query_lens[0], is_verify[0] = text.prompt_len, 0
        query_start_loc = torch.zeros(n + 1, dtype=torch.int32, device=device)
        query_start_loc[1:] = query_lens.cumsum(0)
        # The tokens that the target ran: all before the last committed one of each start.
        first = 0 if has_prompt else int(starts[0]) - 2
        ran = slice(first, int(starts[-1]) - 1)
        aux = [states.aux[layer][ran] for layer in wants.aux_layers]
        noise = _forced(self._noise, states.token_ids) if self._forces else self._noise
        return DraftContext(
            state=self._state,
            idx_mapping=torch.arange(n, dtype=torch.int32, device=device),
            query_lens=query_lens,
            samples=torch.ones_like(query_lens),
            is_verify=is_verify,
            query_start_loc=query_start_loc,
            positions=torch.arange(ran.start, ran.stop, device=device),
            input_ids=states.token_ids[ran],
            seq_lens=(starts - 1).int(),
            hidden_states=states.hidden[ran] if wants.hidden_states == "last" else None,
            aux_hidden_states=torch.cat(aux, 1) if aux else None,
            num_sampled=torch.ones_like(query_lens),
            num_rejected=torch.zeros_like(query_lens),
            temperature=self._temperature,
            noise=noise,
            block_size=1,
            max_seq_len=int(starts[-1]),
            max_query_len=text.prompt_len if has_prompt else 1,
            num_last_chunks=int(has_prompt),
            num_drafts=self.sizes.num_drafts,
        )

    def _fork(self, starts: Tensor) -> None:
        """Give each row pages of its own, from its last committed position on."""
        kv, n, device = self._kv, len(starts), self._device
        if kv is None:
            return
        shared = self.sizes.max_text_len
        last = starts - 1
        for table in (*kv.keys, *kv.values):
            # Own pages of all rows are side by side; what lies at the position goes along.
            table[shared : shared + n * self._own_pages : self._own_pages] = table[last]
        offsets = torch.arange(self._own_pages, device=device)
        pages = shared + torch.arange(n, device=device)[:, None] * self._own_pages + offsets
        columns = last[:, None] + offsets
        rows = torch.arange(n, device=device)[:, None].expand_as(columns)
        fits = columns < self._state.block_table.shape[1]
        self._state.block_table[rows[fits], columns[fits]] = pages[fits].int()

    def _judge(self, states: TextStates, starts: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
        """Cut drafts to valid runs, as the runner does, and compare them with the text."""
        n, k = drafts.shape
        index = torch.arange(k, device=drafts.device)
        usable = (drafts >= 0) & (index < self._state.draft_limit[:n, None])
        counts = usable.int().cumprod(1).sum(1)
        positions = starts[:, None] + index
        known = positions < len(states.token_ids)
        positions = positions.clamp(max=len(states.token_ids) - 1)
        tokens = states.token_ids[positions]
        kept = (drafts == tokens).float()
        laws = self._buffers.draft_logits
        if self._forces:
            assert laws is not None
            assert states.logprobs is not None, "laws are judged by the target's own"
            own = laws[:n].gather(2, tokens[:, :, None])[:, :, 0] - laws[:n].logsumexp(2)
            ratio = (own - states.logprobs[positions]).exp().nan_to_num(0.0, posinf=1.0)
            with_q = self._buffers.draft_kind[:n, None] == DRAFT_KIND_WITH_Q
            kept = torch.where(with_q, ratio.clamp(max=1.0), kept)
        return counts, kept * known


def _forced(noise: Noise, token_ids: Tensor) -> Noise:
    """Return noise under which every draft that is drawn is the text's own token.

    Args:
        noise: what draws nothing stays as it is.
        token_ids: [L] int64.
    """

    def own(positions: Tensor) -> Tensor:
        return token_ids[positions.clamp(max=len(token_ids) - 1)]

    def gumbel(rows: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        wins = ids == own(positions)[:, None]
        return torch.where(wins, torch.finfo(torch.float32).max, 0.0)

    def draw(logits: Tensor, idx_mapping: Tensor, positions: Tensor) -> Tensor:
        return own(positions)

    return Noise(gumbel=gumbel, uniform=noise.uniform, draw=draw)
