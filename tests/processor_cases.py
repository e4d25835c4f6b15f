"""Lines of a step for logits processors: permuted rows, drafts, padding, and poison elsewhere."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.protocols import LogitsContext, ProcessorSetup, RequestContext
from specdec.types import SamplingParams
from tests.poison import fill_poison

MAX_LEN = 40
K = 3
EDGE = 6e4  # what lies behind the vocabulary beats every token


def setup_of(vocab_size: int, num_rows: int, device: torch.device) -> ProcessorSetup:
    return ProcessorSetup(num_rows, vocab_size, MAX_LEN, K, device)


def context_of(
    vocab_size: int, eos_token_ids: frozenset[int] = frozenset(), tokenizer: Any = None
) -> RequestContext:
    return RequestContext((), 0, vocab_size, eos_token_ids, tokenizer)


@dataclass
class Case:
    """Requests in some rows, each with K + 1 lines, then a line of padding."""

    rows: list[int]
    num_rows: int
    texts: list[list[int]]  # prompt and committed tokens of each request
    prompt_lens: list[int]
    drafts: list[list[int]]  # K of each request, -1 = none
    logits: Tensor  # [L, V], a view of wider memory
    ctx: LogitsContext

    def line_texts(self) -> list[tuple[int, list[int], list[int]]]:
        """Return request, prompt and new text before the line, for every line but padding."""
        lines = []
        for index, (text, length) in enumerate(zip(self.texts, self.prompt_lens, strict=True)):
            for i in range(K + 1):
                new = text[length:] + self.drafts[index][:i]
                lines.append((index, text[:length], new))
        return lines

    def copy_of_logits(self) -> tuple[Tensor, Tensor]:
        """Return logits to change, and the memory around them."""
        wide = torch.full_like(self.logits[:, :1], EDGE).repeat(1, self.logits.shape[1] + 3)
        view = wide[:, : self.logits.shape[1]]
        view.copy_(self.logits)
        return view, wide[:, self.logits.shape[1] :]


def make_case(vocab_size: int, seed: int, device: torch.device, num_reqs: int = 4) -> Case:
    """Draw a case; texts use few tokens, so that drafts repeat them."""
    rng = np.random.default_rng(seed)
    num_rows = 2 * num_reqs + 1
    rows = rng.permutation(num_rows)[:num_reqs].tolist()
    few = rng.integers(0, vocab_size, 5)
    table = {
        name: fill_poison(torch.empty(shape, dtype=torch.int32))
        for name, shape in (
            ("all_token_ids", (num_rows, MAX_LEN)),
            ("prompt_len", (num_rows,)),
            ("total_len", (num_rows,)),
        )
    }
    draft_tokens = fill_poison(torch.empty(num_rows, K, dtype=torch.int64))
    texts, prompt_lens, all_drafts, lines, local, places = [], [], [], [], [], []
    for row in rows:
        total_len = int(rng.integers(2, MAX_LEN - K))
        prompt_len = int(rng.integers(1, total_len))
        text, drafts = rng.choice(few, total_len).tolist(), rng.choice(few, K).tolist()
        drafts[int(rng.integers(1, K + 2)) :] = []
        drafts += [-1] * (K - len(drafts))
        table["all_token_ids"][row, :total_len] = torch.tensor(text, dtype=torch.int32)
        table["prompt_len"][row], table["total_len"][row] = prompt_len, total_len
        draft_tokens[row] = torch.tensor(drafts)
        texts.append(text)
        prompt_lens.append(prompt_len)
        all_drafts.append(drafts)
        lines += [row] * (K + 1)
        local += list(range(K + 1))
        places += list(range(total_len, total_len + K + 1))
    lines, local, places = [*lines, -1], [*local, 0], [*places, 0]
    logits = torch.from_numpy(rng.normal(size=(len(lines), vocab_size)) * 3).float()
    logits[:, ::7] *= -1
    logits[-1] = float("nan")
    state: Any = SimpleNamespace(**{name: t.to(device) for name, t in table.items()})
    ctx = LogitsContext(
        state=state,
        expanded_idx_mapping=torch.tensor(lines, dtype=torch.int32, device=device),
        expanded_local_pos=torch.tensor(local, dtype=torch.int32, device=device),
        draft_tokens=draft_tokens.to(device),
        draw_positions=torch.tensor(places, device=device),
    )
    return Case(rows, num_rows, texts, prompt_lens, all_drafts, logits.to(device), ctx)


def fill_rows(processor: Any, case: Case, params: list[SamplingParams], context: Any) -> list[Any]:
    """Poison a processor's tables, then give each request of a case its parameters."""
    for table in processor.tables:
        fill_poison(table.tensor)
    used = []
    for row, wanted in zip(case.rows, params, strict=True):
        processor.check_request(wanted, context)
        used.append(processor.add_request(row, wanted, context))
    for table in processor.tables:
        table.apply_write()
    return used
