"""Weights of VAR (``var_d16.pth``) and of HMAR (``hmar-d16.pth``), with the network
``gen.models.nets.var``.

All sizes are read from the shapes of the weights. The sides of the scales follow from the number of
scales and positions for the three published lists.

HMAR is published as one file, or trained as two: the next-scale model, whose last blocks and head
are those of ``fill``, and the model of masked tokens, which began as its copy and whose last blocks
and head are those of ``refine``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gen.core.errors import GenError, bad_value
from gen.models.adapters.base import ModelAdapter
from gen.models.adapters.slot_cache import SlotCache
from gen.models.load.reads import note_file
from gen.models.load.weights import (
    LazyWeights,
    Renames,
    Weights,
    fill,
    require_in_memory,
    without_storage,
)
from gen.models.nets.residual_scales import ResidualScales, Sides
from gen.models.nets.var import VAR, VARConfig

# sides of the square scales of the published models, by pixels of an image
SCALES = {
    256: (1, 2, 3, 4, 5, 6, 8, 10, 13, 16),
    512: (1, 2, 3, 4, 6, 9, 13, 18, 24, 32),
    1024: (1, 2, 3, 4, 5, 7, 9, 12, 16, 21, 27, 36, 48, 64),
}
HEAD_SIZE = 64  # channels of an attention head of the published models
TAIL = 8  # last blocks of each pass of HMAR
MASK = "attn_bias_for_masking"
# tables that follow from the sizes
DROP = (rf"^(lvl_1L|{MASK})$", r"\.zero_k_bias$")

VAR_KEYS: Renames = ((r"^(head|head_nm)\.", r"fill.\1."),)
HMAR_KEYS: Renames = (
    (r"^base_blocks\.", "blocks."),
    (r"^ns_blocks\.", "fill.blocks."),
    (r"^mask_blocks\.", "refine.blocks."),
    (r"^ns_(head|head_nm)\.", r"fill.\1."),
    (r"^mask_(head|head_nm)\.", r"refine.\1."),
    (r"^word_embed_bias$", "word_embed.bias"),
)


class MergedWeights(LazyWeights):
    """Weights of HMAR in two files, under the keys of the published single file.

    Args:
        base: weights of the next-scale model.
        mask: weights of the model of masked tokens.

    Raises:
        GenError: the files have another number of blocks, or one is not made of the other.
    """

    def __init__(self, base: Weights, mask: Weights):
        depth = _count(base.shapes, "blocks")
        if depth <= TAIL or depth != _count(mask.shapes, "blocks"):
            raise GenError(
                f"{base.path} has {depth} blocks and {mask.path} has"
                f" {_count(mask.shapes, 'blocks')}; expected the same number, more than {TAIL}"
            )
        if not torch.equal(base["pos_1LC"], mask["pos_1LC"]):
            raise GenError(
                f"{mask.path} was not trained from {base.path}: their pos_1LC differ; expected the"
                " two files of one HMAR model"
            )
        self._sources: dict[str, tuple[Weights, str]] = {}
        first = depth - TAIL
        for key in base:
            self._sources[_single_file_key(key, first, "base_blocks.", "ns_")] = (base, key)
        for key in mask:
            target = _single_file_key(key, first, "", "mask_")
            if target.startswith("mask_"):
                self._sources[target] = (mask, key)
        self.shapes = {k: source.shapes[key] for k, (source, key) in self._sources.items()}

    def __getitem__(self, key: str) -> Tensor:
        source, own = self._sources[key]
        return source[own]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def _single_file_key(key: str, first: int, base: str, prefix: str) -> str:
    """Return the key of the single file for a key of one of the two.

    Args:
        key: key of the file.
        first: number of the first block of the last ones.
        base: prefix of the blocks before them; empty for the copies in the second file.
        prefix: prefix of the last blocks, norm and head.
    """
    if match := re.match(r"blocks\.(\d+)\.(.*)", key):
        number = int(match[1])
        if number >= first:
            return f"{prefix}blocks.{number - first}.{match[2]}"
        return f"{base}{match[1]}.{match[2]}" if base else key
    if re.match(r"head(_nm)?\.", key):
        return prefix + key
    return "word_embed_bias" if key == "word_embed.bias" else key


def sides_of(
    scales: Sequence[Any] | None, shapes: Mapping[str, tuple[int, ...]], name: str
) -> Sides:
    """Return the sides of the scales.

    Args:
        scales: sides of the square scales, which a user gave; None for the published list that has
            as many scales and positions as the weights.
        shapes: shapes of the weights by key.
        name: name of the model, for messages.

    Raises:
        GenError: no published list fits, or the given one does not.
    """
    count, positions = shapes["lvl_embed.weight"][0], shapes["pos_1LC"][1]
    start = shapes["pos_start"][1]

    def fits(sides: Sequence[int]) -> bool:
        squares = [side**2 for side in sides]
        return len(squares) == count and sum(squares) == positions and squares[0] == start

    if scales is None:
        found = next((sides for sides in SCALES.values() if fits(sides)), None)
        if found is None:
            raise GenError(
                f"model {name} has {count} scales of {positions} positions in all, which is none of"
                f" the published lists ({'; '.join(map(str, SCALES.values()))}); expected the"
                " option scales with the sides, such as [1, 2, 3, 4]"
            )
        return tuple((side, side) for side in found)
    is_list = isinstance(scales, (list, tuple)) and bool(scales)
    if not is_list or any(type(side) is not int or side < 1 for side in scales) or not fits(scales):
        raise bad_value(
            "scales",
            scales,
            f"the sides of {count} square scales with {positions} positions in all, the first with"
            f" {start}",
        )
    return tuple((side, side) for side in scales)


def config_of(
    shapes: Mapping[str, tuple[int, ...]],
    name: str,
    scales: Sequence[int] | None = None,
    heads: int | None = None,
) -> VARConfig:
    """Read the sizes from shapes of published weights by key.

    Args:
        shapes: shapes by key.
        name: name of the model, for messages.
        scales: sides of the square scales; None for a published list.
        heads: attention heads; None for the number that the weights state, or for heads of 64
            channels where they state none.

    Raises:
        GenError: keys are missing, no list of scales fits, or a number of heads that does not fit.
    """
    refines = any(k.startswith(("base_blocks.", "mask_blocks.")) for k in shapes)
    first, head = ("base_blocks", "ns_head") if refines else ("blocks", "head")
    ranks = {
        "class_emb.weight": 2,
        "pos_start": 3,
        "pos_1LC": 3,
        "lvl_embed.weight": 2,
        "word_embed.weight": 2,
        f"{first}.0.ffn.fc1.weight": 2,
        f"{head}.weight": 2,
    }
    wrong = [k for k, rank in ranks.items() if len(shapes.get(k, ())) != rank]
    if wrong:
        raise GenError(
            f"the weights of {name} are not those of VAR or HMAR: {', '.join(wrong)} are missing or"
            " have another number of axes"
        )
    classes, width = shapes["class_emb.weight"]
    scale = shapes.get(f"{first}.0.attn.scale_mul_1H11")
    return VARConfig(
        sides=sides_of(scales, shapes, name),
        codes=shapes[f"{head}.weight"][0],
        channels=shapes["word_embed.weight"][1],
        classes=classes - 1,
        width=width,
        hidden=shapes[f"{first}.0.ffn.fc1.weight"][0],
        heads=_heads(heads, width, scale, name),
        blocks=_count(shapes, first),
        tail=_count(shapes, "mask_blocks"),
        shared="shared_ada_lin.1.weight" in shapes,
        l2_norm=scale is not None,
        markov=refines,
    )


def load_var(
    weights: LazyWeights,
    name: str,
    *,
    scales: Sequence[int] | None = None,
    heads: int | None = None,
    dtype: torch.dtype = torch.float32,
    **placement: Any,
) -> VAR:
    """Load the network of VAR or HMAR; its heads compute in float32 at least.

    Args:
        weights: tensors under published keys.
        name: name of the model, for messages.
        scales: sides of the square scales; None for a published list.
        heads: attention heads; None for the number that the weights state.
        dtype: dtype of the blocks.
        placement: device, or device map, of ``fill``.

    Raises:
        GenError: weights that do not fit, or a device map that leaves those on disk that the
            network reads beside its modules.
    """
    config = config_of(weights.shapes, name, scales, heads)
    model = without_storage(lambda: VAR(config))
    renames = HMAR_KEYS if config.tail else VAR_KEYS
    placement |= {"dtype": dtype, "name": name}
    fill(model, weights, rename=renames, drop=DROP, **placement)
    exact = torch.promote_types(dtype, torch.float32)
    heads_of = ["fill.head", *(["refine.head"] if config.tail else [])] if exact != dtype else []
    require_in_memory(model, ["lvl_embed", "word_embed", *heads_of], name)
    for head in heads_of:
        model.get_submodule(head).to(exact)
    return model


class VARState:
    """Classes of rows, and keys and values of their earlier scales; see ``ScalesState``.

    Attributes:
        classes: long [B].
        cache: keys and values of the scales so far; None for a Markov model.
    """

    def __init__(self, classes: Tensor, cache: SlotCache | None):
        self.classes, self.cache = classes, cache

    def select(self, rows: Tensor) -> VARState:
        """Return the state of some rows, long [n], which may repeat."""
        cache = None if self.cache is None else self.cache.of_rows(rows)
        return VARState(self.classes[rows], cache)


class VARLM(ModelAdapter):
    """VAR or HMAR as a next-scale model; see ``ScalesModel``.

    A prompt is the number of a class; the number of classes is the null class.

    Args:
        model: the network.
        quantize: quantiser of the frontend.
        leak: masked tokens reach their neighbours in the pass that refines, as the published
            weights were trained.
    """

    passes = ("fill", "refine")
    model: VAR
    prefix_length = 0

    def __init__(self, model: VAR, quantize: ResidualScales, leak: bool = True):
        self.model, self.quantize, self.leak = model.eval(), quantize, leak
        self.config, self.vocab_size = model.config, model.config.codes
        self.markov, self.refines = model.config.markov, model.refines

    @property
    def output_heads(self) -> list[nn.Linear]:
        """See ``ModelAdapter``."""
        passes = (False, True) if self.refines else (False,)
        return [self.model.last(refine).head for refine in passes]

    def begin(self, prompt: Tensor, lengths: Tensor) -> VARState:
        """Make the state of new rows; see ``ScalesModel``.

        Raises:
            GenError: conditions that are not one class each.
        """
        width, shortest = prompt.shape[1], int(lengths.min())
        if {width, shortest} != {1}:
            raise GenError(
                f"the conditions have {shortest} to {width} tokens; expected one, the number of a"
                " class"
            )
        blocks = len(self.model.blocks) + len(self.model.fill.blocks)
        cache = None if self.markov else SlotCache(blocks, sum(self.config.lengths))
        return VARState(prompt[:, 0], cache)

    @torch.no_grad()
    def fill(self, state: VARState, maps: Tensor, scale: int) -> Tensor:
        """Compute the logits [B, n_k, V] of a scale; see ``ScalesModel``."""
        x = self.model.embed(state.classes, maps, scale)
        if state.cache is None:
            return self.model.run(x, state.classes)
        first = sum(self.config.lengths[:scale])
        slots = torch.arange(first, first + x.shape[1], device=x.device).expand(len(x), -1)
        mask = state.cache.at(slots, x.dtype, slots[:, -1:].expand_as(slots))
        return self.model.run(x, state.classes, mask[0, 0], state.cache)

    @torch.no_grad()
    def refine(
        self, state: VARState, maps: Tensor, ids: Tensor, hidden: Tensor, scale: int
    ) -> Tensor:
        """Compute the logits [B, n_k, V] of a partly known scale; see ``ScalesModel``."""
        own = self.quantize.own(ids, hidden, scale, self.leak)
        x = self.model.embed(state.classes, maps, scale) + self.model.embed_own(own, hidden)
        return self.model.run(x, state.classes, refine=True)


def depth_of(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of blocks of one pass."""
    return sum(_count(shapes, part) for part in ("blocks", "base_blocks", "ns_blocks"))


def is_mask_model(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return True for weights of the second of two files of HMAR."""
    return "mask_embed.weight" in shapes and _count(shapes, "blocks") > 0


def is_merged(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return True for weights of HMAR in one file."""
    return "mask_embed.weight" in shapes and _count(shapes, "mask_blocks") > 0


def is_next_scale(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return True for weights of VAR, and of the first of two files of HMAR."""
    needed = {"pos_1LC", "lvl_embed.weight", "head.weight"}
    return needed <= set(shapes) and "mask_embed.weight" not in shapes


def is_autoencoder(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return True for weights of the autoencoder."""
    return any(k.startswith("quantize.quant_resi.") for k in shapes)


def hides_earlier_scales(weights: LazyWeights) -> bool:
    """Return True where the mask of the training, if the weights hold it, hides scale 0 from scale
    1: those of HMAR's next-scale model, which otherwise look like VAR's."""
    if len(weights.shapes.get(MASK, ())) != 4:
        return False
    mask, first = weights[MASK], weights.shapes["pos_start"][1]
    return mask.shape[2] > first and not math.isfinite(float(mask[0, 0, first, 0]))


def shapes_in(file: str | Path) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a file by key; empty where it cannot be read."""
    try:
        stat = os.stat(file)
    except OSError:
        return {}
    note_file(Path(file))
    return _shapes_of(str(file), stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=64)  # families are told apart by several looks at the same files
def _shapes_of(file: str, mtime: int, size: int) -> Mapping[str, tuple[int, ...]]:
    try:
        return Weights(file).shapes
    except GenError:
        return {}


def _heads(heads: int | None, width: int, scale: tuple[int, ...] | None, name: str) -> int:
    """Return the number of attention heads. Raises ``GenError`` for one that does not fit."""
    if scale is not None and (len(scale) != 4 or not scale[1] or width % scale[1]):
        raise GenError(
            f"the weights of {name} have attn.scale_mul_1H11 of shape {scale}; expected [1, heads,"
            f" 1, 1] with a divisor of the width {width}"
        )
    stated = scale[1] if scale is not None else width // HEAD_SIZE
    found = stated if heads is None else heads
    if type(found) is not int or found < 1 or width % found or (scale and found != stated):
        raise bad_value(
            "heads", heads, f"{stated}" if scale else f"a divisor of the width {width} of {name}"
        )
    return found


def _count(shapes: Mapping[str, tuple[int, ...]], part: str) -> int:
    """Count the blocks of a part."""
    return len({m[1] for k in shapes if (m := re.match(rf"{re.escape(part)}\.(\d+)\.", k))})
