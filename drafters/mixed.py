"""Several drafters at once: in every step each row takes the drafts of one of them.

All children on the device propose, into scratch buffers of their own; one kernel then takes, for
each row, the drafts of one that has any. "first" prefers them in the order in which they are given:
for instance prompt lookup where it matches, else a draft model. "best" prefers the one of whose
drafts the row accepted most of late, and gives each its turn now and then. A choice never looks at
what a child drew in this step, only at whether it proposes, so verification stays lossless.

A child that runs on the host comes first: where it proposes, its drafts replace those of the
others before the next step.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor

from drafters.base import DrafterBase, DrafterConfig
from drafters.select_drafts import ChildDrafts, select_drafts
from runner.postprocess import clear_drafts
from runner.rows import scatter_rows
from specdec.errors import ConfigError
from specdec.protocols import (
    DraftBuffers,
    DraftContext,
    Drafter,
    DrafterCapabilities,
    HostDrafter,
    HostRequest,
    HostRow,
    SplitDrafter,
    StateView,
    TargetView,
    VerifyContext,
)
from specdec.registry import PluginEntry, build_config, register_drafter


@dataclass
class MixedConfig(DrafterConfig):
    """Parameters of a mixture.

    Args:
        drafters: two or more, in order of preference: names, or mappings with a key "name".
        policy: "first" takes the first that proposes, "best" the one that was accepted most.
        decay: of "best": weight of what was accepted before the last step, in [0, 1).
        explore_every: of "best": every so many steps of a row a child has its turn, one after the
            other; 0 = never.
    """

    name: str = "mixed"
    drafters: list[Any] = field(default_factory=list)
    policy: Literal["first", "best"] = "first"
    decay: float = 0.9
    explore_every: int = 16

    @property
    def is_recorder(self) -> bool:
        """Return whether a child is one."""
        return self._has_recorder

    def __post_init__(self) -> None:
        """Check every child's own parameters, and whether they go together."""
        if len(self.drafters) < 2:
            raise ConfigError(
                f"drafter mixed: drafters={self.drafters} is not allowed; give two or more, for "
                f"instance [{{name: suffix}}, {{name: ngram}}]"
            )
        if self.policy not in ("first", "best"):
            raise ConfigError(
                f"drafter mixed: policy={self.policy!r} is not allowed; give 'first' or 'best'"
            )
        if not 0 <= self.decay < 1 or self.explore_every < 0:
            raise ConfigError(
                f"drafter mixed: decay={self.decay} and explore_every={self.explore_every} are not "
                f"allowed; give decay in [0, 1) and explore_every >= 0"
            )
        children = children_of(self)
        # Told once: a recorder's own check refuses its folder as soon as a text lies there.
        self._has_recorder = any(getattr(own, "is_recorder", False) for _, own in children)
        for index, (entry, _) in enumerate(children):
            where = f"drafter mixed: drafters[{index}]={entry.name!r}"
            if entry.cls is MixedDrafter or getattr(entry.cls, "never_drafts", False):
                raise ConfigError(f"{where} is not allowed; give drafters that propose themselves")
            # A class may leave its capabilities to its instances.
            _check_place(self, index, entry, getattr(entry.cls, "capabilities", None))


def _check_place(
    config: MixedConfig, index: int, entry: PluginEntry, wants: DrafterCapabilities | None
) -> None:
    """Check that a child on the host comes first, where its drafts win.

    Raises:
        ConfigError: it does not, or the drafts are chosen by another rule.
    """
    if wants is not None and wants.on_cpu and (index > 0 or config.policy == "best"):
        raise ConfigError(
            f"drafter mixed: drafters[{index}]={entry.name!r} runs on the host and wins wherever "
            f"it proposes; put it in front, alone of its kind, with policy='first'"
        )


def children_of(config: MixedConfig) -> list[tuple[PluginEntry, Any]]:
    """Return the children's classes and configurations.

    Raises:
        ConfigError: a child's name, key or value is wrong.
    """
    found = []
    for index, spec in enumerate(config.drafters):
        try:
            found.append(build_config("drafter", spec))
        except ConfigError as error:
            raise ConfigError(f"drafter mixed: drafters[{index}]: {error}") from error
    return found


@register_drafter("mixed", MixedConfig)
class MixedDrafter(DrafterBase):
    """Asks all children, and takes the drafts of one for each row.

    Attributes:
        chosen: [N] int32, child on the device whose drafts a row was given last, -1 = none.
        num_chosen: [N, C] int32, verifications of the row's owner that judged each child's drafts,
            those from the host included.
    """

    config: MixedConfig

    def __init__(self, config: MixedConfig) -> None:
        super().__init__(config)
        found = children_of(config)
        self.children: list[Drafter] = [entry.cls(own) for entry, own in found]
        self._names = [entry.name for entry, _ in found]
        for index, (entry, _) in enumerate(found):
            _check_place(config, index, entry, self.children[index].capabilities)
        self.capabilities = self._union()

    @property
    def _on_device(self) -> list[tuple[int, Drafter]]:
        """Return the children that propose on the device, with their indices."""
        children = enumerate(self.children)
        return [(index, child) for index, child in children if not child.capabilities.on_cpu]

    def _union(self) -> DrafterCapabilities:
        """Return what all children together need and offer.

        Raises:
            ConfigError: two of them ask for what there is one of.
        """
        every = [child.capabilities for child in self.children]
        device = [child.capabilities for _, child in self._on_device]
        contexts = [wants.max_context for wants in device if wants.max_context is not None]
        return DrafterCapabilities(
            hidden_states="last" if any(w.hidden_states == "last" for w in device) else "none",
            aux_layers=self._only("outputs of target layers", [w.aux_layers for w in device]) or (),
            kv=self._only("a KV cache of its own", [w.kv for w in device], equal=False),
            graph_safe=all(wants.graph_safe for wants in device),
            offers_q=bool(
                self._only("a table of its own laws q", [w.offers_q for w in device], equal=False)
            ),
            variable_length=True,
            # The row's limit is one for all: a shorter context ends the drafts of the others, too.
            max_context=min(contexts, default=None),
            on_cpu=any(wants.on_cpu for wants in every),
            splits_first_pass=all(wants.splits_first_pass for wants in device),
            reads_token_table=any(wants.reads_token_table for wants in device),
            offers_confidence=all(wants.offers_confidence for wants in every),
            can_score=self.config.policy == "first"
            and all(wants.can_score and wants.splits_first_pass for wants in every),
            uses_history=self.config.policy == "best" or any(wants.uses_history for wants in every),
        )

    def _only(self, what: str, wanted: list[Any], equal: bool = True) -> Any:
        """Return what the only child that wants any wants (or all of them alike), else None."""
        wants = [want for want in wanted if want]
        if len(wants) > 1 and not (equal and all(want == wants[0] for want in wants)):
            raise ConfigError(
                f"drafter mixed: more than one of {', '.join(self._names)} asks for {what}, which "
                f"there is once; leave one out"
            )
        return wants[0] if wants else None

    def load(self, target: TargetView) -> None:
        """Load every child; what they need is known then."""
        for child in self.children:
            child.load(target)
        self.capabilities = self._union()

    def bind(self, state: StateView, buffers: DraftBuffers) -> None:
        """Give every child a scratch table, and the one that asked for it the cache."""
        super().bind(state, buffers)
        (num_rows, k), device = buffers.draft_tokens.shape, buffers.draft_tokens.device
        shape, with_confidence = (len(self.children), num_rows, k), buffers.draft_confidence
        confidence = None
        if self.capabilities.offers_confidence and with_confidence is not None:
            confidence = torch.zeros(shape, dtype=torch.float32, device=device)
        self._drafts = ChildDrafts(
            torch.full(shape, -1, dtype=torch.int64, device=device),
            torch.zeros(shape[:2], dtype=torch.int8, device=device),
            confidence,
        )
        for index, child in enumerate(self.children):
            own = child.capabilities
            child.bind(
                state,
                DraftBuffers(
                    self._drafts.tokens[index],
                    self._drafts.kind[index],
                    buffers.draft_logits if own.offers_q else None,
                    buffers.kv if own.kv is not None else None,
                    None if confidence is None else confidence[index],
                ),
            )
        children = torch.arange(len(self.children), device=device)
        self._child = children.int()  # [C]
        self._order = -children.float()[None]  # [1, C], the earlier the better
        self.chosen = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
        self.num_chosen = torch.zeros(shape[1], shape[0], dtype=torch.int32, device=device)
        # [N, C], drafts accepted a step, of late. As many as there can be at first: each is tried.
        self._accepted = torch.full((shape[1], shape[0]), float(k), device=device)
        self._turns = torch.zeros(num_rows, dtype=torch.int32, device=device)  # steps of the owner

    def add_request(self, req_state_idx: int) -> None:
        """Forget what the earlier owner accepted."""
        # Filled, not assigned: an assignment to one cell is a copy from the host that waits.
        self.chosen[req_state_idx].fill_(-1)
        self.num_chosen[req_state_idx].fill_(0)
        self._accepted[req_state_idx].fill_(self.buffers.num_speculative_tokens)
        self._turns[req_state_idx].fill_(0)
        for child in self.children:
            child.add_request(req_state_idx)

    def first_pass(self, ctx: DraftContext) -> None:
        """Run the children's first passes."""
        for _, child in self._on_device:
            if child.capabilities.splits_first_pass:
                cast(SplitDrafter, child).first_pass(ctx)

    def propose(self, ctx: DraftContext) -> None:
        """Let every child propose, and choose."""
        if not self.capabilities.splits_first_pass:  # then the runner did not call it
            self.first_pass(ctx)
        for index, child in self._on_device:
            clear_drafts(ctx.idx_mapping, self._drafts.tokens[index], self._drafts.kind[index])
            child.propose(ctx)
        scores = self._scores(ctx)
        select_drafts(ctx.idx_mapping, scores, self._drafts, self.buffers, self.chosen)

    def _scores(self, ctx: DraftContext) -> Tensor:
        """Return how much each place prefers each child, [R, C] float32."""
        if self.config.policy == "first":
            return self._order.expand(ctx.num_reqs, -1)
        rows, every = ctx.idx_mapping.long().clamp(min=0), self.config.explore_every
        scores, turns = self._accepted[rows], self._turns[rows]
        # A chunk of a prompt has no turn: whether one is proposed behind depends on its neighbours.
        scatter_rows(self._turns, ctx.idx_mapping, turns + ctx.samples)
        if every == 0:
            return scores
        has_turn = (turns % every == every - 1)[:, None]
        its_turn = self._child == (turns // every % len(self.children))[:, None]
        return torch.where(has_turn & its_turn, float("inf"), scores)

    def observe(self, ctx: VerifyContext) -> None:
        """Learn whose drafts were accepted, and let each child see what became of its own."""
        rows = ctx.idx_mapping.long().clamp(min=0)
        drafts = self.buffers.draft_tokens[rows]
        proposer = self.chosen[rows]
        if self.buffers.from_host is not None:
            proposer = torch.where(self.buffers.from_host[rows] > 0, 0, proposer)
        judged = (ctx.idx_mapping >= 0) & (ctx.is_verify > 0) & (drafts[:, 0] >= 0)
        credit = (proposer[:, None] == self._child) & judged[:, None]  # [R, C]
        scatter_rows(self.num_chosen, ctx.idx_mapping, self.num_chosen[rows] + credit.int())
        if self.config.policy == "best":
            decay, before = self.config.decay, self._accepted[rows]
            accepted = (ctx.num_sampled - 1).clamp(min=0)[:, None]
            after = torch.where(credit, decay * before + (1 - decay) * accepted, before)
            scatter_rows(self._accepted, ctx.idx_mapping, after)
        for index, child in self._on_device:
            if type(child).observe is DrafterBase.observe:
                continue  # it learns nothing
            # As after a step of its own: the drafts as they were cut, none where others' were
            # judged.
            own = credit[:, index]
            shown = torch.where(own[:, None], drafts, -1)
            scatter_rows(self._drafts.tokens[index], ctx.idx_mapping, shown)
            child.observe(dataclasses.replace(ctx, is_verify=own.int()))

    def propose_on_host(self, rows: Sequence[HostRow]) -> Sequence[Sequence[int]]:
        """Ask the child on the host."""
        return cast(HostDrafter, self.children[0]).propose_on_host(rows)

    def end_request(self, request: HostRequest) -> None:
        """Tell the child on the host."""
        cast(HostDrafter, self.children[0]).end_request(request)

    def state_bytes(self) -> int:
        """Return the bytes of scratch tables, of what was learned, and of the children."""
        own = [self._drafts.tokens, self._drafts.kind, self._drafts.confidence, self.chosen]
        own += [self.num_chosen, self._accepted, self._turns]
        children = sum(child.state_bytes() for child in self.children)
        return sum(tensor.nbytes for tensor in own if tensor is not None) + children
