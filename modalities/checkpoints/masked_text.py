"""What the families of masked language models share: a canvas of so many ids behind the prompt, all
of them empty at first.

The end is an id like any other to these models; what stands behind the first one is not read.
Nothing of a folder's own code runs: networks are classes of transformers or of ``gen.models``,
filled with the published weights.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from gen.contracts.checkpoint import Checkpoint, CheckpointFiles, LoadOptions
from gen.contracts.modality import Binding
from gen.core.errors import GenError, bad_value
from gen.core.token_space import TokenSpace
from gen.modalities.open_vocabulary import FreeText
from gen.models.adapters.language_models import MaskedLM
from gen.models.load.pretrained import chat_token_ids, tokenizer_of, uses_chat_template
from gen.tokenizers.text.hf_text import HFText

Rules = Mapping[
    str, tuple[Any, tuple[Any, ...]]
]  # field of a config -> what it is where the config says nothing, and what can be loaded


class MaskedText(Checkpoint):
    """A masked language model whose vocabulary is its tokenizer's.

    ``max_new_tokens``: the places of an answer. ``chat``: whether prompts are put into the
    tokenizer's chat template as what a user says; by default where there is one. ``mask_token_id``:
    by default what the config says, else the tokenizer. Guidance compares with a canvas behind one
    empty place.
    """

    modalities = ("text",)
    protocols = ("masked",)
    sampling = {"temperature": 1.0}
    turn_end: ClassVar[
        str
    ]  # the token that ends what one side of a chat says, where the tokenizer has it
    needed: ClassVar[tuple[str, ...]]  # fields that a config must have
    rules: ClassVar[Rules]

    @abstractmethod
    def network(self, files: CheckpointFiles, how: LoadOptions) -> nn.Module:
        """The model, loaded; its config has ``vocab_size``."""

    def tokenize(self, files: CheckpointFiles, how: LoadOptions) -> Any:
        """The tokenizer."""
        return tokenizer_of(files.folder, name=files.name, trust_remote_code=how.trust_remote_code)

    def __init__(
        self,
        files: CheckpointFiles,
        modality: str,
        how: LoadOptions,
        *,
        max_new_tokens: int = 128,
        chat: bool | None = None,
        mask_token_id: int | None = None,
    ):
        if (
            not isinstance(max_new_tokens, int)
            or isinstance(max_new_tokens, bool)
            or max_new_tokens < 1
        ):
            raise bad_value("max_new_tokens", max_new_tokens, "an integer of at least 1")
        require_fields(files, self.needed, self.rules)
        self.tokenizer = self.tokenize(files, how)
        self.chat = uses_chat_template(self.tokenizer, chat, files.name)
        self.model = self.network(files, how)
        size = self.model.config.vocab_size
        mask = next(
            (
                i
                for i in (
                    mask_token_id,
                    files.config.get("mask_token_id"),
                    self.tokenizer.mask_token_id,
                )
                if i is not None
            ),
            None,
        )
        if mask is None:
            raise GenError(
                f"neither the config nor the tokenizer of {files.name} says which id an empty place"
                " is; expected mask_token_id"
            )
        ends = self._ends(files)
        for name, i in (("mask_token_id", mask), *(("eos_token_id", i) for i in ends)):
            if not isinstance(i, int) or not 0 <= i < size:
                raise GenError(
                    f"model {files.name}: {name} is {i!r}; expected an id below {size}, the size of"
                    " its vocabulary"
                )
        self.frontend = HFText(self.tokenizer, size, ends, how.device)
        legal = torch.ones(1, size, dtype=torch.bool)
        legal[0, mask] = False
        space = TokenSpace(
            (max_new_tokens,),
            size,
            legal.expand(max_new_tokens, -1),
            mask,
            eos_token_id=ends[0] if ends else None,
        )
        self.binding = Binding(space, self.prompt, [mask])
        self.modality = FreeText(self)

    def _ends(self, files: CheckpointFiles) -> tuple[int, ...]:
        """The id that ends a text, and the one that ends a turn."""
        said = files.json("generation_config.json").get(
            "eos_token_id", files.config.get("eos_token_id")
        )
        said = self.tokenizer.eos_token_id if said is None else said
        turn = self.tokenizer.get_vocab().get(self.turn_end)
        found = [] if said is None else list(said) if isinstance(said, list) else [said]
        return tuple(dict.fromkeys(found if turn is None else [*found, turn]))

    def prompt(self, text: str) -> list[int]:
        """Raises ``GenError`` for a text that has no ids."""
        if self.chat:
            return chat_token_ids(self.tokenizer, text)
        ids = self.tokenizer(text)["input_ids"]
        if not ids:
            raise GenError(
                f"the tokenizer has no ids for the prompt {text!r}; expected a text that it knows"
            )
        return ids

    def adapter(self, protocol: str) -> Any:
        return MaskedLM(self.model)


def require_fields(files: CheckpointFiles, needed: tuple[str, ...], rules: Rules) -> None:
    """Raises ``GenError`` for a config without one of the fields, or with one that says what cannot
    be loaded."""
    config = files.config
    missing = [key for key in needed if config.get(key) is None]
    if missing:
        raise GenError(f"the config of model {files.name} lacks {', '.join(missing)}")
    for key, (usual, fine) in rules.items():
        if config.get(key, usual) not in fine:
            said = repr(config[key]) if key in config else f"not said, which is {usual!r}"
            raise GenError(
                f"the config of model {files.name} cannot be served: {key} is {said}; expected"
                f" {' or '.join(map(repr, fine))}"
            )
