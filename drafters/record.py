"""Records what a drafter would be given, to train one on it or to compare a trainer with serving.

Proposes nothing. For every request, the hidden states of the target are kept by position as they
come out of its steps (chunks of a prompt, verifications), and written as one safetensors file:

    token_ids           [n] int32
    hidden_states       [n, hidden], after the target's last norm
    aux_hidden_states   [n, A * hidden], where layers are asked for

Position i of the states belongs to token i. The file is written when the row gets another owner,
and by `flush`, which also runs when the drafter or the process ends. A request that was preempted
leaves one file for each time that it ran. A file may hold some tokens behind an end token or a stop
string: steps in flight run on, and drafts may be accepted behind it.
"""

import weakref
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from drafters.base import DrafterBase, DrafterConfig
from specdec.errors import ConfigError
from specdec.protocols import DraftContext, DrafterCapabilities, TargetView
from specdec.registry import register_drafter


@dataclass
class RecordConfig(DrafterConfig):
    """Parameters of recording.

    Args:
        folder: where the files go; it must not hold any yet.
        aux_layers: target layers whose outputs are recorded, too, counted from 0.
    """

    name: str = "record"
    folder: str = ""
    aux_layers: list[int] = field(default_factory=list)

    @property
    def is_recorder(self) -> bool:
        """Return True: see the base."""
        return True

    def __post_init__(self) -> None:
        """Check the folder."""
        if not self.folder:
            raise ConfigError("drafter record needs folder=<where the files go>, got none")
        if Path(self.folder).exists() and not Path(self.folder).is_dir():
            raise ConfigError(
                f"drafter record: {self.folder!r} is a file; give a folder, which is made if needed"
            )
        if any(Path(self.folder).glob("*.safetensors")):
            raise ConfigError(
                f"drafter record: folder {self.folder!r} holds recorded texts already; give another"
            )


@dataclass
class _Text:
    """What was recorded of the owner of a row."""

    chunks: list[tuple[int, dict[str, Tensor]]] = field(default_factory=list)  # first position, ...
    num_valid: int = 0  # positions that were committed

    def tensors(self) -> dict[str, Tensor]:
        """Put the chunks together; a later one stands for what an earlier one had rejected."""
        whole: dict[str, Tensor] = {}
        for name, part in self.chunks[0][1].items():
            whole[name] = part.new_empty(self.num_valid, *part.shape[1:])
        for first, parts in self.chunks:
            for name, part in parts.items():
                whole[name][first : first + len(part)] = part[: max(self.num_valid - first, 0)]
        return whole


class _Recording:
    """What was recorded and not written; it knows nothing of an engine, and may outlive it.

    Args:
        config: of the drafter.
    """

    def __init__(self, config: RecordConfig) -> None:
        self.texts: dict[int, _Text] = {}  # by row
        self._config, self._num_written = config, 0

    def write(self, row: int) -> None:
        """Write what was recorded of a row's owner."""
        text = self.texts.pop(row, None)
        if text is None:
            return
        path = Path(self._config.folder, f"{self._num_written:06d}.safetensors")
        layers = " ".join(map(str, self._config.aux_layers))
        save_file(text.tensors(), path, metadata={"aux_layers": layers})
        self._num_written += 1

    def flush(self) -> None:
        """Write what was recorded of every row."""
        for row in list(self.texts):
            self.write(row)


@register_drafter("record", RecordConfig)
class RecordDrafter(DrafterBase):
    """Writes the target's hidden states by request."""

    config: RecordConfig

    def __init__(self, config: RecordConfig) -> None:
        super().__init__(config)
        # Reads every step on the host, so no part of it can be captured.
        self.capabilities = DrafterCapabilities(
            hidden_states="last",
            aux_layers=tuple(config.aux_layers),
            graph_safe=False,
            splits_first_pass=True,
            reads_token_table=False,
        )
        self._recording = _Recording(config)
        # At exit at the latest: a reference from there would keep the engine's memory until then.
        weakref.finalize(self, self._recording.flush)

    def load(self, target: TargetView) -> None:
        """Make the folder.

        Raises:
            ConfigError: no drafts are asked for; then no drafter runs, and nothing is recorded.
        """
        if target.num_speculative_tokens == 0:
            raise ConfigError(
                "drafter record sees no step with num_speculative_tokens=0; give 1 or more (it "
                "proposes nothing all the same)"
            )
        Path(self.config.folder).mkdir(parents=True, exist_ok=True)

    def add_request(self, req_state_idx: int) -> None:
        """Write what was recorded of the row's last owner."""
        self._recording.write(req_state_idx)

    def first_pass(self, ctx: DraftContext) -> None:
        """Keep the states of the step's tokens."""
        rows, lens = ctx.idx_mapping.tolist(), ctx.query_lens.tolist()
        starts, first = ctx.query_start_loc.tolist(), ctx.positions.cpu()
        tensors = {"token_ids": ctx.input_ids.int(), "hidden_states": ctx.hidden_states}
        if ctx.aux_hidden_states is not None:
            tensors["aux_hidden_states"] = ctx.aux_hidden_states
        host = {name: part.cpu() for name, part in tensors.items() if part is not None}
        num_valid = ctx.state.num_computed_tokens.tolist()
        for row, start, length in zip(rows, starts, lens, strict=False):
            if row < 0 or length == 0:
                continue
            text = self._recording.texts.setdefault(row, _Text())
            parts = {name: part[start : start + length].clone() for name, part in host.items()}
            text.chunks.append((int(first[start]), parts))
            text.num_valid = num_valid[row]

    def propose(self, ctx: DraftContext) -> None:
        """Propose nothing."""

    def flush(self) -> None:
        """Write what was recorded of every row."""
        self._recording.flush()

    def state_bytes(self) -> int:
        """Return the bytes that are recorded and not written."""
        texts = self._recording.texts.values()
        return sum(part.nbytes for t in texts for _, ps in t.chunks for part in ps.values())
