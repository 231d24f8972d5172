"""Drafts by a context table: what followed these neighbours before.

q are counts with back-off (``context_table``), restricted to the allowed tokens; neighbours are
committed tokens and drafts. Drafts follow from q as from a draft model's (``iterated``).

Counts come from sequences of the model's training world, in ``table.safetensors`` beside its
weights (``python -m gen.recipes.tables``), and so never from other items. A model in memory, which
lies in no folder, begins with an empty table, whose q is uniform. With ``scope: call`` the call's
finished items are counted as well, as soon as they have finished. The number of forward passes then
depends on their order, so that only a coupling whose tokens do not depend on the drafts takes it.

Guarantee: that of the coupling. q is fixed by tokens below n.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from gen.core.errors import GenError
from gen.core.registry import register
from gen.models.load.locate import locate, readable
from gen.models.targets.base import legal_at
from gen.models.targets.causal import CausalTarget
from gen.samplers.causal.initialisers.base import Entering, Filled
from gen.samplers.causal.initialisers.context_table import (
    ContextTable,
    Offset,
)
from gen.samplers.causal.initialisers.copies import Uniform
from gen.samplers.causal.initialisers.iterated import IteratedInitialiser
from gen.samplers.engine.draft import Verdict
from gen.samplers.engine.host import to_device
from gen.samplers.engine.outputs import CALL, ITEM, NONE, Outputs
from gen.samplers.engine.step_context import CausalStep

FILE, WEIGHTS, KIND = "table.safetensors", "model.safetensors", "context_table"
EMPTY = "empty"


def digest(folder: Path) -> str:
    """Digest the weights of a model's folder."""
    return hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()


def write_table(
    folder: Path, sequences: Tensor, grid: tuple[int, ...], size: int, offsets: list[Offset]
) -> Path:
    """Write ``table.safetensors`` beside a model's weights.

    Args:
        folder: folder of the model.
        sequences: token ids that it generated, int64 [n, T].
        grid: sizes of the axes, slowest first.
        size: number of token ids V.
        offsets: neighbours (``choose_offsets``).
    """
    facts = {
        "kind": KIND,
        "model": digest(folder),
        "grid": json.dumps(grid),
        "size": str(size),
        "offsets": json.dumps(offsets),
    }
    dtype = torch.uint8 if size <= 256 else torch.uint16
    save_file({"tokens": sequences.to(dtype).contiguous()}, folder / FILE, facts)
    return folder / FILE


def read_table(file: Path, model: str) -> ContextTable:
    """Read a table and check that it is the model's.

    Args:
        file: table.
        model: name or folder of the model.

    Raises:
        GenError: the file cannot be read, or the table is of another model.
    """
    with readable("context table", file), safe_open(file, "pt") as opened:
        facts, tokens = opened.metadata() or {}, opened.get_tensor("tokens").long()
        if facts.get("kind") != KIND:
            raise GenError(f"{file} is no context table; expected a file of gen.recipes.tables")
        grid, size = tuple(json.loads(facts["grid"])), int(facts["size"])
        offsets = [tuple(x) for x in json.loads(facts["offsets"])]
    folder = locate(model) if model else None
    if not isinstance(folder, Path) or not (folder / WEIGHTS).is_file():
        raise GenError(
            f"table {file} came with a model that has no {WEIGHTS} to compare it with; expected"
            " sampler.table=empty"
        )
    if digest(folder) != facts["model"]:
        raise GenError(
            f"table {file} was counted with other weights than those of model {model}; expected"
            f" its own table (python -m gen.recipes.tables {model}), or sampler.table=empty"
        )
    return ContextTable(tokens, grid, size, offsets)


def table_of(target: CausalTarget, table: str | None) -> ContextTable:
    """Find the table of a target's model.

    Args:
        target: the model.
        table: file, name of a model or its folder, or ``empty``; None for the one beside the
            model's weights, which a model in memory has not.

    Raises:
        GenError: there is none, or it is of another model or of other tokens.
    """
    size, grid = target.legal.shape[1], target.space.grid
    if table == EMPTY or (table is None and not target.name):
        nothing = torch.zeros(0, target.length, dtype=torch.long)
        axes = [tuple(-int(a == b) for b in range(len(grid))) for a in range(len(grid))]
        return ContextTable(nothing, grid, size, axes[::-1])
    file = Path(table or "")
    if not (table and file.is_file()):
        folder = locate(table or target.name)
        file = Path(folder) / FILE
        if isinstance(folder, str) or not file.is_file():
            raise GenError(
                f"model {table or target.name} has no {FILE}; expected sampler.table=empty, or a"
                f" table made by python -m gen.recipes.tables {table or target.name}"
            )
    known = target.learned
    if (KIND, file) not in known:
        known[KIND, file] = read_table(file, target.name)
    found: ContextTable = known[KIND, file]
    if found.size != size or len(found.where) < target.length:
        raise GenError(
            f"table {file} has {found.size} ids on the grid {found.grid}; expected {size} ids and"
            f" at least {target.length} positions"
        )
    return found


@register("initialiser", "table")
class TableInitialiser(IteratedInitialiser):
    """Tokens that followed the same neighbours before; they correct the iterate, too.

    Args:
        table: counts that it begins with.
        target: the model with its items.
        redrafts: whether drafts that are carried on are corrected.
        scope: item, or call to count finished items too.
        corrects: whether they are corrected from what the target said.
    """

    has_table = True

    def __init__(
        self,
        table: ContextTable,
        target: CausalTarget,
        redrafts: bool,
        scope: str = ITEM,
        corrects: bool = True,
    ):
        super().__init__(target.space, Uniform(), None, redrafts, corrects=corrects)
        self.counts, self.legal = table, target.legal
        self.table = table.to(target.device)
        self.outputs = Outputs(target) if scope == CALL else None
        # the target's positions are the last ones of the table's grid
        self.shift = len(table.where) - target.length
        where = table.where[self.shift :] - self.shift
        self.where = where.clamp_min(-1).to(target.device)

    @classmethod
    def make(cls, sampler, target, draft):
        table = table_of(target, sampler.table)
        return cls(table, target, sampler.redrafts, sampler.scope, sampler.corrects)

    def accept(self, step: CausalStep, verdict: Verdict) -> None:
        super().accept(step, verdict)
        if self.outputs is not None:
            self.outputs.accept(step, verdict)

    def fill(self, entering: Entering) -> Filled:
        if self.outputs is not None:
            left = self.outputs.begin(entering.step)
            if len(left):
                self._count(self.outputs.tokens[to_device(left, self.legal.device)].cpu())
        return super().fill(entering)

    def _count(self, sequences: Tensor) -> None:
        """Count the tokens of finished items, long [n, T]."""
        end = self.space.eos_token_id
        if end is not None:  # what follows the eos token is the eos token
            sequences = torch.where(sequences == NONE, end, sequences)
        self.counts = self.counts.plus(sequences, self.where.cpu())
        self.table = self.counts.to(self.legal.device)

    def predict(self, entering: Entering, canvas: Tensor, is_first: bool) -> Tensor:
        n = entering.active.shape[1]
        at = entering.step.positions[:, entering.first : entering.first + n]
        where = self.where[at]
        context = canvas[:, None].expand(-1, n, -1).gather(2, where.clamp_min(0))
        context = torch.where(where < 0, self.table.size, context)
        q = self.table.distribution(context.flatten(0, 1)).unflatten(0, at.shape)
        q = q * legal_at(self.legal, at)
        return (q / q.sum(-1, keepdim=True)).log()
