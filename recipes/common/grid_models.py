"""Small language models over token grids: their shape, their batches, their losses, their training.

A sample is a condition, ``prefix`` slots, and a grid of codes. Ids are the codes, then the
condition words, then the mask.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gen.models.load.libraries import transformers
from gen.models.load.locate import save_model
from gen.models.nets.grid import GridLlamaConfig, GridLlamaForCausalLM
from gen.recipes.common.train import TrainConfig, fast_bfloat16, fit_average

# dtype of the weights that ``fit`` passes to a loss
WEIGHTS = torch.bfloat16 if fast_bfloat16() else torch.float32

# condition slots [B, P] and a generator -> condition words [B, P], some dropped
Words = Callable[[Tensor, torch.Generator], Tensor]


def unchanged(slots: Tensor, generator: torch.Generator) -> Tensor:
    """Return condition slots [B, P] as they are: nothing is left out in training."""
    return slots


@dataclass(frozen=True)
class Shape:
    """Sizes that the models of one modality share.

    Attributes:
        grid: sizes of the token grid.
        prefix: slots of a condition.
        codes: ids of the grid.
        words: ids of conditions.
    """

    grid: tuple[int, ...]
    prefix: int
    codes: int
    words: int

    @property
    def length(self) -> int:
        """Positions of the grid."""
        return math.prod(self.grid)

    @property
    def mask(self) -> int:
        """Id of the mask."""
        return self.codes + self.words


@dataclass(frozen=True)
class Run:
    """Training of one model.

    Attributes:
        start: model to start from, a folder or average weights in the work folder. It may have
            fewer layers: the others begin as the identity.
        block: positions per block of a model with full attention inside blocks and causal attention
            across them; 0 for none.
        share: share of the steps that train blocks. In the others the model sees the whole grid, so
            that it serves masked samplers too.
        tied: input and output ids share one table.
    """

    steps: int
    width: int
    layers: int
    causal: bool = True
    seed: int = 0
    batch: int = 32
    start: str | None = None
    keep_average_at: int | None = None
    cooldown: tuple[int, int] | None = None
    block: int = 0
    share: float = 1.0
    lr: float = 2e-3
    tied: bool = False


def sizes_of(shape: Shape, run: Run) -> dict[str, Any]:
    """Return the fields of a model's config, whose vocabulary is the codes, the words of
    conditions, and the mask.

    A model of blocks predicts each token at its own position: the position before, which may belong
    to another block, cannot see the block.
    """
    return dict(
        grid=shape.grid,
        prefix_length=shape.prefix,
        codebook_size=shape.codes,
        causal=run.causal,
        shifted=not run.block,
        block_length=run.block,
        whole=run.share < 1,
        mask_token_id=shape.mask,
        vocab_size=shape.mask + 1,
        hidden_size=run.width,
        intermediate_size=run.width * 8 // 3 // 32 * 32,
        num_hidden_layers=run.layers,
        num_attention_heads=run.width // 32,
        num_key_value_heads=run.width // 32,
        max_position_embeddings=shape.prefix + shape.length,
        tie_word_embeddings=run.tied,
        bos_token_id=None,
        eos_token_id=None,
    )


def new_lm(shape: Shape, run: Run) -> GridLlamaForCausalLM:
    """Create a model of these sizes."""
    return GridLlamaForCausalLM(GridLlamaConfig(**sizes_of(shape, run)))


def token_batches(
    path: Path, batch: int, seed: int, words: Words
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (condition words [B, P], codes [B, T]) from a file of ``codes`` [N, T] and ``slots``
    [N, P].
    """
    data = torch.load(path, weights_only=True)
    generator = torch.Generator().manual_seed(seed)
    while True:
        for rows in torch.randperm(len(data["codes"]), generator=generator).split(batch):
            if len(rows) == batch:
                yield words(data["slots"][rows].long(), generator), data["codes"][rows].long()


def hidden_positions(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Choose masked positions [B, T]: MaskGIT's cosine-distributed share of each row."""
    share = torch.cos(math.pi / 2 * torch.rand(shape[0], 1, generator=generator))
    return torch.rand(shape, generator=generator).argsort(1) < (share * shape[1]).ceil()


def causal_loss(shape: Shape, hide: float = 0.0, generator: torch.Generator | None = None):
    """Loss of next-token prediction.

    Args:
        shape: sizes of the samples.
        hide: the input has the mask for some tokens, a share of every row that is uniform in
            [0, ``hide``]; all tokens are predicted (word dropout, Bowman et al., arXiv 1511.06349).
        generator: generator of the hidden ones.
    """

    def loss(m, batch):
        words, codes = batch
        seen = codes[:, :-1]
        if hide and torch.is_grad_enabled():
            share = hide * torch.rand(len(seen), 1, generator=generator)
            hidden = torch.rand(seen.shape, generator=generator) < share
            seen = seen.masked_fill(hidden.to(seen.device), shape.mask)
        out = m(
            input_ids=torch.cat([shape.codes + words, seen], 1),
            logits_to_keep=shape.length,
            use_cache=False,
        )
        return F.cross_entropy(out.logits.float().flatten(0, 1), codes.flatten()), {}

    return loss


def masked_loss(
    shape: Shape,
    generator: torch.Generator,
    hide: Callable = hidden_positions,
    shifted: bool = True,
):
    """Loss of the masked positions, which ``hide`` chooses. ``shifted`` models predict a token at
    the position before.
    """

    def loss(m, batch):
        words, codes = batch
        hidden = hide(tuple(codes.shape), generator).to(codes.device)
        ids = torch.cat([shape.codes + words, codes.masked_fill(hidden, shape.mask)], 1)
        full = torch.zeros(1, 1, ids.shape[1], ids.shape[1], dtype=WEIGHTS, device=ids.device)
        out = m(
            input_ids=ids,
            attention_mask=full,
            logits_to_keep=shape.length + shifted,
            use_cache=False,
        )
        return F.cross_entropy(out.logits[:, : shape.length][hidden].float(), codes[hidden]), {}

    return loss


def block_loss(shape: Shape, block: int, generator: torch.Generator):
    """Loss of all blocks at once: a masked copy stands beside the clean grid. Its blocks see the
    clean blocks before them and themselves, as in decoding block by block.
    """
    total, prefix = shape.length, shape.prefix
    block_of = torch.cat([torch.full((prefix,), -1), torch.arange(total) // block])
    clean = block_of[:, None] >= block_of  # [P + T, P + T]
    before = block_of[prefix:, None] > block_of
    same = block_of[prefix:, None] == block_of[prefix:]
    sees = torch.cat(
        [
            torch.cat([clean, clean.new_zeros(prefix + total, total)], 1),
            torch.cat([before, same], 1),
        ]
    )
    mask = torch.zeros(sees.shape, dtype=WEIGHTS).masked_fill(~sees, torch.finfo(WEIGHTS).min)[
        None, None
    ]
    positions = torch.cat([torch.arange(prefix + total), torch.arange(prefix, prefix + total)])

    def loss(m, batch):
        words, codes = batch
        hidden = hidden_positions((len(codes) * (total // block), block), generator)
        hidden = hidden.view(len(codes), total).to(codes.device)
        ids = torch.cat([shape.codes + words, codes, codes.masked_fill(hidden, shape.mask)], 1)
        out = m(
            input_ids=ids,
            position_ids=positions.to(ids.device).expand(len(ids), -1),
            attention_mask=mask.to(ids.device),
            logits_to_keep=total,
            use_cache=False,
        )
        return F.cross_entropy(out.logits[hidden].float(), codes[hidden]), {}

    return loss


def _deepened(weights: dict[str, Tensor], model: GridLlamaForCausalLM) -> dict[str, Tensor]:
    """Add to weights the layers of a deeper model, as residual branches that return zero."""
    out = dict(weights)
    for name, value in model.state_dict().items():
        if name not in weights and ".layers." in name:
            ends = name.endswith(("o_proj.weight", "down_proj.weight"))
            out[name] = torch.zeros_like(value) if ends else value
    return out


def train_lm(
    work: Path,
    shape: Shape,
    run: Run,
    name: str,
    words: Words,
    log=print,
) -> None:
    """Train a model on ``work / "tokens.pt"`` and save its average weights to ``work / name /
    "model"``.

    A start from another model reuses its knowledge of conditions and media, and both can then be
    trained side by side.
    """
    out, generator = work / name, torch.Generator().manual_seed(3)
    batches = token_batches(work / "tokens.pt", run.batch, run.seed, words)
    if run.causal:
        loss = causal_loss(shape)
    else:
        whole = masked_loss(shape, generator, shifted=not run.block)
        blocks = block_loss(shape, run.block, generator) if run.block else whole

        def loss(m, batch):
            return (blocks if torch.rand((), generator=generator) < run.share else whole)(m, batch)

    torch.manual_seed(0)
    model = new_lm(shape, run)
    if run.start:
        start = work / run.start
        weights = (
            type(model).from_pretrained(start).state_dict()
            if start.is_dir()
            else torch.load(start, weights_only=True)
        )
        model.load_state_dict(_deepened(weights, model))
    fit_average(
        model,
        batches,
        loss,
        TrainConfig(
            steps=run.steps,
            lr=run.lr,
            muon=(".layers.", 3 * run.lr),
            weight_decay=0.05,
            bfloat16_weights=True,
            save_every=250,
            cooldown=run.cooldown,
            keep_average_at=run.keep_average_at,
        ),
        out=out,
        log=log,
    )
    save_model(model, out / "model")


def export_lm(
    folder: Path, dest: Path, frontend: str, digest: str, counts: Tensor | None = None
) -> None:
    """Write half-precision weights that name their frontend.

    Args:
        folder: the trained model.
        dest: folder to write.
        frontend: zoo name of the frontend.
        digest: digest of its codebook.
        counts: occurrences in training of each of the first n ids, long [n].
    """
    model = transformers().AutoModelForCausalLM.from_pretrained(folder).half()
    model.config.frontend, model.config.codebook_digest = frontend, digest
    if counts is not None:
        model.config.code_counts = counts.tolist()
    save_model(model, dest)


def tidy(zoo: Path) -> None:
    """Remove the folders of the training machine from the configs."""
    for path in zoo.glob("*/config.json"):
        config = json.loads(path.read_text())
        config.pop("_name_or_path", None)
        path.write_text(json.dumps(config, indent=2) + "\n")
