"""The interfaces that plug-ins implement, and the read-only views that they are given.

Names and shapes: N = max_num_reqs rows, K = num_speculative_tokens, V = vocabulary, R = requests in
the step, T = tokens in the step, L = logits lines in the step. A *row* is a row of the state
tensors, a *place* a position in the step's batch, a *slot* a place in the KV cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from specdec.types import SamplingParams

API_VERSION = 1

DRAFT_KIND_NONE = 0
DRAFT_KIND_ONE_HOT = 1
DRAFT_KIND_WITH_Q = 2


@dataclass(frozen=True)
class KVSpec:
    """A drafter's own KV cache: the runner allocates it over the target's block tables."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype


@dataclass(frozen=True)
class DrafterCapabilities:
    """What a drafter needs and offers, as data: the runner never asks for a type or a name.

    `variable_length` is not read yet: every drafter may return -1. `can_score` says that it is a
    `ScoringDrafter`.

    `aux_layers` are counted from 0, the first decoder layer of the target; what is handed over is
    what a layer gives to the next one, before the norm behind the last.

    `graph_safe` promises fixed addresses, no host reads and no data-dependent shapes in
    `first_pass`, `propose` and `observe`: they are captured in CUDA graphs. A drafter without it
    runs eager, which is reported. `splits_first_pass` says that all work over the step's own
    tokens is in `first_pass`, so that `propose` can be a graph in any step. `reads_token_table`
    says that `state.all_token_ids` is read by torch operations, not by kernels alone, so that the
    table has to lie in device memory. `offers_confidence` says that `draft_confidence` is filled
    where the buffers have it. `on_cpu` says that it is a `HostDrafter`, which is known before
    `load`. `uses_history` says that drafts depend on more than the row's own committed text: on
    texts of other requests, or on what became of earlier drafts.
    """

    hidden_states: Literal["none", "last"] = "none"
    aux_layers: tuple[int, ...] = ()
    kv: KVSpec | None = None
    graph_safe: bool = True
    offers_q: bool = False
    variable_length: bool = False
    max_context: int | None = None
    on_cpu: bool = False
    can_score: bool = False
    splits_first_pass: bool = False
    reads_token_table: bool = True
    offers_confidence: bool = False
    uses_history: bool = False


@dataclass(frozen=True)
class StateView:
    """The rows of the request state; plug-ins read these tensors and never write them."""

    all_token_ids: Tensor  # [N, max_model_len] int32, committed tokens
    prompt_len: Tensor  # [N] int32
    prefill_len: Tensor  # [N] int32
    total_len: Tensor  # [N] int32, committed tokens
    num_computed_tokens: Tensor  # [N] int32, tokens whose target KV is valid
    last_sampled_tokens: Tensor  # [N, 1] int64
    block_table: Tensor  # [N, max_num_blocks] int32
    draft_limit: Tensor  # [N] int32, drafts that can still be used before the row ends


@dataclass(frozen=True)
class DraftBuffers:
    """Where a drafter writes; fixed addresses, bound once.

    The runner sets a step's rows to "no draft" before `propose`. Tokens with kind 0 are taken as
    one-hot drafts, so only a drafter that offers q has to set the kind.
    """

    draft_tokens: Tensor  # [N, K] int64, -1 = no draft here
    draft_kind: Tensor  # [N] int8
    draft_logits: Tensor | None  # [N, K, V] of the target, where capabilities.offers_q
    kv: Any | None  # the drafter's own paged KV cache, where capabilities.kv is given
    # [N, K] float32, the probability that the drafter gives each draft; where the draft length
    # depends on it.
    draft_confidence: Tensor | None = None
    # [N] int8, 1 where the drafts at hand came from the host; where capabilities.on_cpu.
    from_host: Tensor | None = None

    @property
    def num_speculative_tokens(self) -> int:
        """Return K."""
        return self.draft_tokens.shape[1]


@dataclass(frozen=True)
class TargetView:
    """What a drafter may take from the target when it loads."""

    model: Any  # the target's adapter: embedding, head and module tree are reachable from it
    vocab_size: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    num_speculative_tokens: int
    max_model_len: int
    tokenizer: Any | None = None


@dataclass(frozen=True)
class Noise:
    """Keyed noise of the framework; nothing else may be a source of randomness.

    `gumbel(rows, positions, token_ids)` returns float32 noise of the drafter's own stream, with
    `positions` the place in the text of the token that is being drawn. `draw(logits, idx_mapping,
    positions)` returns the Gumbel-max token [R] int64 of logits [R, V] (divided by the temperature)
    with that noise, and the argmax for rows of temperature 0 and for padding: one kernel on a GPU.
    """

    gumbel: Callable[[Tensor, Tensor, Tensor], Tensor]
    uniform: Callable[[Tensor, Tensor], Tensor]
    draw: Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DraftContext:
    """One step as a drafter sees it, after the target's tokens were committed.

    The tensors lie at fixed addresses in a captured graph, and the integers are then those of the
    captured shape: bounds, never counts of the step at hand.
    """

    state: StateView
    idx_mapping: Tensor  # [R] int32, place -> row, -1 in padding
    query_lens: Tensor  # [R] int32, tokens that the target ran
    samples: Tensor  # [R] int32, 1 where the place sampled (not a chunk before the last)
    is_verify: Tensor  # [R] int32, 1 where the step verified, 0 where it ran prompt tokens
    query_start_loc: Tensor  # [R+1] int32, the target's step
    positions: Tensor  # [T] int64
    input_ids: Tensor  # [T] int64
    seq_lens: Tensor  # [R] int32
    hidden_states: Tensor | None  # [T, hidden], where capabilities.hidden_states == "last"
    # [T, A * hidden], outputs of the A `capabilities.aux_layers`, side by side in that order
    aux_hidden_states: Tensor | None
    num_sampled: Tensor  # [R] int32
    num_rejected: Tensor  # [R] int32
    temperature: Tensor  # [N] float32
    noise: Noise
    block_size: int
    max_seq_len: int  # bound on total_len over the step's rows
    max_query_len: int  # bound on query_lens
    num_last_chunks: int  # prompts that ended in this step; 0 in a uniform step
    # How many to propose, 1..K: the columns behind are -1 already. 0 in a first pass behind which
    # nothing is proposed.
    num_drafts: int

    @property
    def num_reqs(self) -> int:
        """Return R, padding included."""
        return len(self.idx_mapping)


@dataclass(frozen=True)
class VerifyContext:
    """The outcome of a step, for drafters that learn from it.

    The drafts that were judged are still in `draft_tokens`; a place that ran prompt tokens
    (`is_verify` 0) had none.
    """

    idx_mapping: Tensor  # [R] int32
    is_verify: Tensor  # [R] int32
    num_sampled: Tensor  # [R] int32
    num_rejected: Tensor  # [R] int32


@runtime_checkable
class Drafter(Protocol):
    """Proposes up to K tokens for every row of a step; see `drafters/base.py` for defaults."""

    capabilities: DrafterCapabilities

    def load(self, target: TargetView) -> None:
        """Load weights; share the target's embedding and head where wanted."""
        ...

    def bind(self, state: StateView, buffers: DraftBuffers) -> None:
        """Receive the state and output tensors, whose addresses never change.

        Called a second time once the size of the KV cache is known: what comes then holds.
        """
        ...

    def add_request(self, req_state_idx: int) -> None:
        """Forget what was kept for this row: it has a new owner."""
        ...

    def propose(self, ctx: DraftContext) -> None:
        """Fill `buffers.draft_tokens[row, :ctx.num_drafts]` for the step's rows; some sampled."""
        ...

    def observe(self, ctx: VerifyContext) -> None:
        """See what became of the last drafts, after they were committed."""
        ...

    def state_bytes(self) -> int:
        """Return the bytes kept beside weights and the KV cache."""
        ...


class SplitDrafter(Drafter, Protocol):
    """A drafter whose capabilities say `splits_first_pass`."""

    def first_pass(self, ctx: DraftContext) -> None:
        """Run over the step's own tokens, before `propose`; what it leaves lies in fixed buffers.

        It runs in every step, also where none is to be drafted and `propose` is not called: the
        drafter's KV stays that of the committed text.

        `positions`, `input_ids`, `query_start_loc`, `seq_lens` and `hidden_states` are read here
        alone. A step that also runs prompt tokens is ragged, so there this method runs eager, while
        `propose`, whose tensors have one line a place, is a graph all the same (and is not given
        those fields).
        """
        ...


class ScoringDrafter(Drafter, Protocol):
    """A drafter whose capabilities say `can_score`: drafts follow from text, features and noise.

    So what it would propose at every start of a text that is known is found in one pass, and the
    first k of K drafts are those that it would propose were it asked for k.
    """

    def score(self, ctx: DraftContext, fork: Callable[[], None]) -> None:
        """Propose at many starts of one text at once, as a step of its own would at each.

        Args:
            ctx: each place is a step that committed one token (or the prompt and the token behind
                it), and its row holds the text up to there. While a pass runs over the tokens of
                the steps, the rows share the KV of the text: a place writes that of what it
                committed, and reads what the places before it, or earlier calls, have written.
            fork: gives each row KV of its own from its last committed position on; to be called
                once, before the KV of the first draft is written.
        """
        ...


@dataclass(frozen=True, eq=False, slots=True)
class HostRequest:
    """A sample of a request as a host drafter sees it: one object from its first step to its end.

    It is known by identity: the name of a request may come again once it has ended.
    """

    request_id: str
    sample_index: int
    prompt_len: int
    token_ids: Sequence[int]  # prompt and committed tokens; grows, and is never changed otherwise


@dataclass(frozen=True, slots=True)
class HostRow:
    """A row that can use drafts in the next step."""

    request: HostRequest
    row: int
    num_drafts: int  # how many it can use, 1..K


class HostDrafter(Drafter, Protocol):
    """A drafter whose capabilities say `on_cpu`: it proposes on the host, from token lists.

    Second class: nothing can be in flight while it is asked, so the device waits for it in every
    step. What it proposes is one-hot and stands in for what `propose` left in the row, if anything.
    """

    def propose_on_host(self, rows: Sequence[HostRow]) -> Sequence[Sequence[int]]:
        """Return the drafts of each row, at most its `num_drafts`; none where there is no match.

        Called before each step for all rows that can verify drafts in it; a step may be scheduled
        without some of them, which are then asked for again. Everything that depends on a row's
        text is to be kept by its `HostRequest`: rows change hands, and a preempted request comes
        back in another one.
        """
        ...

    def end_request(self, request: HostRequest) -> None:
        """See a text that ended, or was aborted, and forget what was kept for it."""
        ...


@dataclass(frozen=True)
class ProcessorSetup:
    """What a logits processor allocates its tables for."""

    max_num_reqs: int  # N
    vocab_size: int  # V
    max_model_len: int
    num_speculative_tokens: int  # K
    device: torch.device


@dataclass(frozen=True)
class RequestContext:
    """A request as a logits processor sees it on the host, when it asks for or takes a row."""

    token_ids: Sequence[int]  # the prompt, and after a preemption what was committed since
    prompt_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    tokenizer: Any | None


@dataclass(frozen=True)
class LogitsContext:
    """The lines of a step, before they are verified.

    Line i of a row comes after the row's committed tokens and its drafts 0..i-1: whatever depends
    on the text so far has to read these drafts from `draft_tokens[row, :i]`.
    """

    state: StateView
    expanded_idx_mapping: Tensor  # [L] int32: line -> row, -1 in padding
    expanded_local_pos: Tensor  # [L] int32: i, the drafts before the line
    draft_tokens: Tensor  # [N, K] int64: drafts that this step verifies, -1 = none
    draw_positions: Tensor  # [L] int64: place in the text of the token that the line draws


@dataclass(frozen=True)
class CommitContext:
    """What a step committed, for processors that keep something of the text."""

    state: StateView  # already advanced
    idx_mapping: Tensor  # [R] int32, place -> row, -1 in padding
    sampled_tokens: Tensor  # [R, W] int64
    num_sampled: Tensor  # [R] int32: of these so many were committed


@runtime_checkable
class LogitsProcessor(Protocol):
    """Changes logits before they are verified; see `sampler/processors/base.py` for defaults.

    `apply` and `commit` are captured in CUDA graphs: fixed addresses, no host reads, no shapes that
    depend on data. State lies in rows that the host changes by staged writes alone. Lines of
    padding, and lines whose row does not use the processor, are left as they are.
    """

    @property
    def tables(self) -> Sequence[Any]:
        """Return the `StagedWriteTensor`s that `add_request` stages writes to."""
        ...

    @property
    def after_temperature(self) -> bool:
        """Return whether it sees logits that were divided by it; then greedy lines stay."""
        ...

    def check_request(self, params: SamplingParams, context: RequestContext) -> None:
        """Refuse a request that cannot be honoured, before it is queued.

        Raises:
            ConfigError: one sentence.
        """
        ...

    def add_request(self, row: int, params: SamplingParams, context: RequestContext) -> bool | None:
        """Stage what a row's new owner needs, and forget what was there.

        Returns:
            False where the request does not use the processor; then `apply` need not see its lines.
        """
        ...

    def prepare_rows(self, rows: Tensor, state: StateView) -> None:
        """Build what new rows, [M] int32, need of their tokens, before their first step."""
        ...

    def apply(self, logits: Tensor, ctx: LogitsContext) -> None:
        """Change logits, [L, V] float32, in place."""
        ...

    def commit(self, ctx: CommitContext) -> None:
        """See what the step committed."""
        ...


@dataclass(frozen=True)
class VerifyInputs:
    """Everything a verifier needs for one step; logits went through the whole pipeline.

    Lines of greedy rows are not divided by a temperature, nor truncated. Line i of a request judges
    its draft i; the last line of a request judges none. No method may read a tensor on the host:
    verification is part of the captured step.
    """

    logits: Tensor  # [L, V] float32; where all_greedy it may be the target's own dtype
    all_greedy: bool  # a hint: True where the host knows that every row has temperature 0
    draft_tokens: Tensor  # [L] int64: the draft that this line judges, -1 = none
    draft_kind: Tensor  # [L] int8
    draft_logits: Tensor | None  # [N, K, V]
    cu_num_logits: Tensor  # [R + 1] int32: lines before each place
    max_num_logits: int  # W, bound on the lines of a place
    expanded_idx_mapping: Tensor  # [L] int32: line -> row, -1 in padding
    expanded_local_pos: Tensor  # [L] int32
    draw_positions: Tensor  # [L] int64: place in the text of the token that the line draws
    temperature: Tensor  # [N] float32
    seeds: Tensor  # [N] int64

    @cached_property
    def line_valid(self) -> Tensor:
        """Return [R, W] bool: whether a place has a line at a local position."""
        j = torch.arange(self.max_num_logits, device=self.cu_num_logits.device)
        return j < self.cu_num_logits.diff()[:, None]

    @cached_property
    def line_grid(self) -> Tensor:
        """Return [R, W] int64: place, local position -> line (clamped where there is none)."""
        j = torch.arange(self.max_num_logits, device=self.cu_num_logits.device)
        grid = self.cu_num_logits[:-1, None].long() + j
        return grid.clamp(max=len(self.draft_tokens) - 1)


@dataclass
class VerifyOutputs:
    """What a verifier returns."""

    sampled_tokens: Tensor  # [R, W] int64, -1 after num_sampled
    num_sampled: Tensor  # [R] int32, accepted drafts + 1


@runtime_checkable
class Verifier(Protocol):
    """Decides how many drafts of a row are kept and draws the token after them.

    `sampler/verify/base.py` has defaults for what a rule may declare besides: `honours_masks` (no
    draft is kept that a logits processor excluded), `noise_epoch` (noise of drafters is fresh in
    every step), `draft_stream` (their noise stream), `favours_drawn` (keeps drawn drafts more often
    than the likeliest), `note` (shown beside the verdict of a lossy rule), `check` (refuses a
    number of drafts) and `bind` (makes tensors).
    """

    name: str
    draft_kinds: frozenset[int]  # which draft kinds it can judge
    lossless: bool
    text_equal: bool  # the text equals the autoregressive one for any drafter, seed and temperature
    greedy_only: bool  # refuses temperature > 0

    def verify(self, inputs: VerifyInputs) -> VerifyOutputs:
        """Judge the drafts of one step."""
        ...
