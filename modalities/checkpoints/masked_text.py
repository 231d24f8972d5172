"""Base of the families of masked language models: a canvas of masked positions behind the prompt.

The eos token is an id like any other to these models; tokens behind the first one are not read. No
code of a checkpoint's folder runs: networks are classes of transformers or of ``gen.models``,
filled with the published weights.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from gen.contracts.checkpoint import CheckpointFiles, LoadOptions
from gen.contracts.modality import Binding
from gen.core.errors import GenError, bad_value
from gen.core.token_space import TokenSpace
from gen.modalities.checkpoints.options import answer_length, is_integer
from gen.modalities.checkpoints.token_counts import read_rarity
from gen.modalities.checkpoints.turns_and_ids import Conversation, LanguagePrompts, TokenIds
from gen.modalities.open_vocabulary import FreeText
from gen.models.adapters.language_models import MaskedLM
from gen.models.load.chat import uses_chat_template
from gen.models.load.generation_config import GENERATION, config_ends, end_ids
from gen.models.load.pretrained import tokenizer_of
from gen.tokenizers.text.hf_text import HFText

# field of a config -> its value where the config has none, and the values that can be loaded
Rules = Mapping[str, tuple[Any, tuple[Any, ...]]]


class MaskedText(LanguagePrompts):
    """Masked language model whose vocabulary is its tokenizer's.

    Classifier-free guidance compares with the prompt masked: as many mask tokens as it has tokens.

    Args:
        max_new_tokens: positions of an answer (128, or half of the model's where that is less).
        chat: put prompts into the tokenizer's chat template as the user's message. The default is
            to do so where the tokenizer has a template.
        mask_token_id: the default is the config's, else the tokenizer's.
        delimiters: token ids, or texts of one token each, that end a block where ``blocks`` is
            ``adaptive``. The default is the family's newline tokens.
        token_counts: file with how often each token occurs, for the order ``position``: ``.json``
            with counts by token id, or ``.npy`` with one count per token id
            (``gen.modalities.checkpoints.token_counts``).
    """

    modalities = ("text",)
    protocols = ("masked",)
    sampling = {"temperature": 1.0}
    # token that ends a turn of a chat, where the tokenizer has it
    turn_end: ClassVar[str]
    needed: ClassVar[tuple[str, ...]]  # fields that a config must have
    rules: ClassVar[Rules]

    @abstractmethod
    def network(self, files: CheckpointFiles, load: LoadOptions) -> nn.Module:
        """Load the model; its config has ``vocab_size``."""

    def tokenize(self, files: CheckpointFiles, load: LoadOptions) -> Any:
        """Load the tokenizer."""
        return tokenizer_of(files.folder, name=files.name, trust_remote_code=load.trust_remote_code)

    def __init__(
        self,
        files: CheckpointFiles,
        modality: str,
        load: LoadOptions,
        *,
        max_new_tokens: int | None = None,
        chat: bool | None = None,
        mask_token_id: int | None = None,
        delimiters: Sequence[int | str] | None = None,
        token_counts: str | Path | None = None,
    ):
        max_new_tokens = answer_length(files, max_new_tokens)
        require_fields(files, self.needed, self.rules)
        self.tokenizer = self.tokenize(files, load)
        self.chat = uses_chat_template(self.tokenizer, chat, files.name)
        self.model = self.network(files, load)
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
                f"neither the config nor the tokenizer of {files.name} has a mask token;"
                " expected mask_token_id"
            )
        ends = self._ends(files)
        for name, i in (("mask_token_id", mask), *(("eos_token_id", i) for i in ends)):
            if not isinstance(i, int) or not 0 <= i < size:
                raise GenError(
                    f"model {files.name}: {name} is {i!r}; expected an id below {size}, the size of"
                    " its vocabulary"
                )
        self.frontend = HFText(self.tokenizer, size, ends, load.device)
        legal = torch.ones(1, size, dtype=torch.bool)
        legal[0, mask] = False
        space = TokenSpace(
            (max_new_tokens,),
            size,
            legal.expand(max_new_tokens, -1),
            mask,
            eos_token_id=ends[0] if ends else None,
            end_token_ids=ends,
            delimiters=self._delimiters(delimiters),
            rarity=None if token_counts is None else read_rarity(token_counts, size),
        )
        self.binding = Binding(space, self.prompt, lambda text: [mask] * len(self.prompt(text)))
        self.modality = FreeText(self)

    def _ends(self, files: CheckpointFiles) -> tuple[int, ...]:
        """Ids that end a text or a turn."""
        stated = files.json(GENERATION).get("eos_token_id"), config_ends(files.config)
        turn = self.tokenizer.get_vocab().get(self.turn_end)
        return end_ids(*stated, self.tokenizer.eos_token_id, turn)

    def newline_ids(self) -> tuple[int, ...]:
        """Token ids that end a block by default: the newline alone."""
        return tuple(i for i, text in newline_tokens(self.tokenizer).items() if text == "\n")

    def _delimiters(self, given: Sequence[int | str] | None) -> tuple[int, ...]:
        """Token ids that end a block. Raises ``GenError`` for a text that is not one token."""
        if given is None:
            return self.newline_ids()
        if isinstance(given, (str, int)):
            raise bad_value("delimiters", given, "a list of token ids or texts")
        found = []
        for delimiter in given:
            if is_integer(delimiter):
                found.append(delimiter)
                continue
            ids = (
                self.tokenizer(delimiter, add_special_tokens=False)["input_ids"]
                if isinstance(delimiter, str)
                else []
            )
            if len(ids) != 1:
                raise bad_value("delimiters", delimiter, "a token id, or the text of one token")
            found += ids
        return tuple(dict.fromkeys(found))

    def prompt(self, text: str | Conversation | TokenIds) -> list[int]:
        """Token ids of a prompt.

        Raises:
            GenError: the text has no tokens.
        """
        given = self.ids_of(text)
        if given is not None:
            return given
        if self.chat:
            return self.chat_ids(text)
        ids = self.tokenizer(text)["input_ids"]
        if not ids:
            raise GenError(
                f"the tokenizer has no tokens for the prompt {text!r}; expected a text that it"
                " knows"
            )
        return ids

    def adapter(self, protocol: str) -> Any:
        return MaskedLM(self.model)


def newline_tokens(tokenizer: Any) -> dict[int, str]:
    """Text of every token that has a newline in its text, by token id."""
    # spellings of a newline in vocabularies of characters, of bytes and of SentencePiece
    ids = [
        i
        for token, i in tokenizer.get_vocab().items()
        if "\n" in token or "\u010a" in token or token == "<0x0A>"
    ]
    texts = {i: tokenizer.decode([i], clean_up_tokenization_spaces=False) for i in sorted(ids)}
    return {i: text for i, text in texts.items() if "\n" in text}


def require_fields(files: CheckpointFiles, needed: tuple[str, ...], rules: Rules) -> None:
    """Check a config before anything is loaded.

    Args:
        files: the checkpoint.
        needed: fields that must be present.
        rules: field -> default, and the values that can be loaded.

    Raises:
        GenError: a field is missing, or has a value that cannot be loaded.
    """
    config = files.config
    missing = [key for key in needed if config.get(key) is None]
    if missing:
        raise GenError(f"the config of model {files.name} lacks {', '.join(missing)}")
    for key, (usual, fine) in rules.items():
        if config.get(key, usual) not in fine:
            stated = repr(config[key]) if key in config else f"missing, which means {usual!r}"
            raise GenError(
                f"the config of model {files.name} cannot be served: {key} is {stated}; expected"
                f" {' or '.join(map(repr, fine))}"
            )
