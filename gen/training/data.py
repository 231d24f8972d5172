"""Token data of a training run: sequences with their conditions, split and batched.

Batches are functions of the seed and the step alone. A resumed run goes on with the next one, and
reads none of those before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.tables import plural
from gen.modalities.condition_medium import ConditionMedium
from gen.tokenizers.text.trained import FILE, TrainedTokenizer
from gen.training.frontends import Encoder, load_encoder, own_encoder
from gen.training.prompts import Captions
from gen.training.shards import fingerprint, read_folder

SPLIT = 1_000_003  # a prime: seeds of neighbouring steps and epochs share no generator


@dataclass(frozen=True)
class TokenData:
    """Samples of a folder of ``gen encode``.

    Attributes:
        folder: the folder.
        manifest: its manifest.
        encoder: frontend of the tokens.
        tokens: long [T] of every sample.
        conditions: parts of every sample's condition, or None.
        captions: captions with a tokenizer of their own; None for the modality's language.
        copies: long [T] of every sample's shifted copies, to train on beside it.
        medium: what is read of the media in the conditions; None where there are none.
        given: long [slots], tokens of the medium in every sample's condition.
    """

    folder: Path
    manifest: dict[str, Any]
    encoder: Encoder
    tokens: list[Tensor]
    conditions: list[dict[str, Any] | None]
    captions: Captions | None = None
    copies: list[list[Tensor]] = field(default_factory=list)
    medium: ConditionMedium | None = None
    given: list[Tensor] = field(default_factory=list)

    @property
    def prompt_sizes(self) -> tuple[int, int]:
        """Slots of a prompt of captions and media of one's own, and the number of their ids."""
        slots, words = 0, 1  # the word of an empty slot
        if self.captions is not None:
            slots, words = self.captions.slots, words + self.captions.tokenizer.size
        if self.medium is not None:
            slots, words = slots + self.medium.slots, words + self.medium.words
        return slots, words

    @property
    def mark(self) -> str:
        """Digest of the data: another encoding has another one."""
        return fingerprint({"shards": self.manifest["shards"], "plan": self.manifest["plan"]})


def load_data(folder: str | Path) -> TokenData:
    """Read a folder of tokens and load its frontend.

    Raises:
        GenError: no finished encoding, a damaged shard, or a frontend that has changed since.
    """
    manifest, shards = read_folder(folder)
    about = manifest["frontend"]
    own = about["name"] == FILE
    encoder = load_encoder(manifest["modality"], None if own else about["name"])
    if own:
        encoder = own_encoder(TrainedTokenizer.from_folder(folder), encoder)
    if encoder.digest != about["digest"]:
        raise GenError(
            f"the tokens of {folder} were made with codebook {about['digest']} of the frontend"
            f" {about['name']}, which has {encoder.digest} now; expected the same frontend"
        )
    captions = manifest.get("captions")
    tokens, each = [t for s in shards for t in s.tokens], manifest.get("copies", 1)
    return TokenData(
        Path(folder),
        manifest,
        encoder,
        tokens[::each],
        [c for s in shards for c in s.conditions][::each],
        None if captions is None else Captions.read(Path(folder), captions),
        [tokens[i + 1 : i + each] for i in range(0, len(tokens), each)] if each > 1 else [],
        ConditionMedium.of_dict(manifest["given"]) if "given" in manifest else None,
        [t for s in shards for t in s.given],
    )


def split(count: int, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Split samples: long indices to train on, and to measure the loss of.

    Args:
        count: number of samples.
        share: share of the samples that are measured; at least one if it is not 0.
        seed: seed of the choice.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    held = 0 if share == 0 or count < 2 else max(1, round(share * count))
    return order[held:].sort().values, order[:held].sort().values


class Batches:
    """Rows of every step: the samples in random order, each epoch in another one.

    Args:
        rows: long [N], indices of the samples.
        size: rows of a step.
        seed: seed of the order.

    Raises:
        GenError: fewer samples than rows of a step.
    """

    def __init__(self, rows: Tensor, size: int, seed: int):
        if len(rows) < size:
            raise GenError(
                f"the data have {plural(len(rows), 'sample')} to train on; expected at least"
                f" {size}, the batch_size"
            )
        self.rows, self.size, self.seed = rows, size, seed
        self._epoch: tuple[int, Tensor] = (-1, rows)

    def __call__(self, step: int) -> Tensor:
        """Return the rows of a step, long [size]."""
        epoch, number = divmod(step, len(self.rows) // self.size)
        if self._epoch[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed * SPLIT + epoch)
            order = torch.randperm(len(self.rows), generator=generator)
            self._epoch = (epoch, self.rows[order])
        return self._epoch[1][number * self.size : (number + 1) * self.size]
