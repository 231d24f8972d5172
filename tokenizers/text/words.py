"""Word tokenizer of a small fixed vocabulary, over a Hugging Face tokenizer, with a final eos
token.

A text is split at spaces and around signs and brackets; words have the token ids 0 to n - 1 in
their order, and ``<end>`` has n. A signal is the UTF-8 of a text, padded with zeros.
``tokenizer.json`` and ``tokenizer_config.json`` of the folder are those of any
``transformers.PreTrainedTokenizerFast``, so ``AutoTokenizer.from_pretrained`` reads it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from gen.contracts.frontend import FrontendConfig, Vocabulary, require_codes
from gen.core.errors import GenError, bad_value, unknown_word
from gen.core.registry import register
from gen.models.load.libraries import transformers
from gen.models.load.locate import locate, pick_device, quiet, read_config, readable
from gen.tokenizers.base.text_bytes import TextBytes

# the installed package; the room of the same name is gen.tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

END = "<end>"


@register("tokenizer", "text_words")
class TextWords(TextBytes):
    """Text tokenizer: codes int64 [B, 1, positions] of texts uint8 [B, bytes].

    Codes are the words, then ``eos_token_id`` up to the last position. Any number of positions can
    be decoded; codes after the first eos token are ignored. ``tokenizer``: a
    ``transformers.PreTrainedTokenizerFast`` whose last token is ``<end>``. Raises ``GenError`` for
    another one.
    """

    name = "text_words"

    def __init__(self, tokenizer: Any, positions: int, device: torch.device | str = "cpu"):
        if not isinstance(positions, int) or isinstance(positions, bool) or positions < 1:
            raise bad_value("positions", positions, "an integer of at least 1")
        self.tokenizer, self.positions, self.device = tokenizer, positions, pick_device(device)
        self.eos_token_id = len(tokenizer) - 1
        self.words = tuple(tokenizer.convert_ids_to_tokens(range(self.eos_token_id)))
        if (
            tokenizer.eos_token != END
            or tokenizer.eos_token_id != self.eos_token_id
            or None in self.words
        ):
            raise GenError(
                f"the end of the word tokenizer is {tokenizer.eos_token!r} with id"
                f" {tokenizer.eos_token_id}; expected {END!r} with the last id, {self.eos_token_id}"
            )
        self.config = FrontendConfig("text", "codes", (self.eos_token_id + 1,), (1,))

    @classmethod
    def of(cls, words: Sequence[str], positions: int, device: torch.device | str = "cpu") -> Self:
        """Build the frontend of a vocabulary. Raises ``GenError`` for words that are empty,
        repeated, in upper case or several words."""
        wrong = [
            w for i, w in enumerate(words) if w.lower().split() != [w] or w in words[:i] or w == END
        ]
        if wrong or not words:
            raise bad_value(
                "words", wrong[0] if wrong else words, "different lower-case words without spaces"
            )
        inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*words, END])}))
        inner.normalizer = normalizers.Lowercase()
        signs = "".join(f"\\{w}" for w in words if len(w) == 1 and not w.isalnum())
        at_signs = [pre_tokenizers.Split(Regex(f"[{signs}]"), "isolated")] if signs else []
        inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), *at_signs])
        end = AddedToken(END, special=True, normalized=False)
        return cls(
            transformers().PreTrainedTokenizerFast(
                tokenizer_object=inner, eos_token=end, clean_up_tokenization_spaces=False
            ),
            positions,
            device,
        )

    def split(self, text: str) -> list[str]:
        """Split a text into words of the vocabulary. Raises ``GenError`` for an unknown word, with
        the nearest one."""
        inner = self.tokenizer.backend_tokenizer
        words = [
            w for w, _ in inner.pre_tokenizer.pre_tokenize_str(inner.normalizer.normalize_str(text))
        ]
        for word in words:
            if word not in self.words:
                raise GenError(str(unknown_word(word, self.words, f"text {text[:80]!r}")))
        return words

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text, without the eos token. Raises ``GenError`` as ``split``
        does."""
        return self.tokenizer.convert_tokens_to_ids(self.split(text))

    def preprocess(self, media: Any) -> Tensor:
        """Convert a text to UTF-8, uint8 [bytes]. Raises ``GenError`` for unknown words, and for
        more words than positions."""
        if not isinstance(media, str):
            raise GenError(f"the text is a {type(media).__name__}; expected a string")
        if len(words := self.split(media)) > self.positions:
            raise GenError(f"the text has {len(words)} words; expected at most {self.positions}")
        return self._bytes(" ".join(words))

    def encode(self, x: Tensor) -> Tensor:
        if x.dtype != torch.uint8 or x.ndim != 2:
            raise GenError(
                f"the signals are {x.dtype} {tuple(x.shape)}; expected uint8 [B, bytes], the UTF-8"
                " of texts"
            )
        codes = torch.full((len(x), 1, self.positions), self.eos_token_id)
        for row, signal in zip(codes, x, strict=True):
            ids = self.ids(self.postprocess(signal))
            if len(ids) > self.positions:
                raise GenError(f"the text has {len(ids)} words; expected at most {self.positions}")
            row[0, : len(ids)] = torch.tensor(ids, dtype=torch.long)
        return codes.to(self.device)

    def decode(self, codes: Tensor) -> Tensor:
        require_codes(codes, self.config)
        lengths = (codes[:, 0] != self.eos_token_id).long().cumprod(1).sum(1).tolist()
        texts = [
            " ".join(self.tokenizer.convert_ids_to_tokens(row[:n]))
            for row, n in zip(codes[:, 0].tolist(), lengths, strict=True)
        ]
        return torch.nn.utils.rnn.pad_sequence([self._bytes(t) for t in texts], batch_first=True)

    @property
    def fingerprint(self) -> Tensor:
        """Digest of vocabulary and positions as 32 numbers of 0 to 255, exact in every
        floating-point dtype."""
        text = json.dumps([self.words, self.positions])
        return torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.float32)

    def vocabulary(self) -> Vocabulary:
        """Return the bytes of every word, with a space before it after other words."""
        words = [word.encode() for word in self.words]
        return Vocabulary((*words, None), (*(b" " + word for word in words), None))

    def grid_for(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the grid, the same for every number of bytes."""
        return (self.positions,)

    # --- folders

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the files of the tokenizer, and ``config.json``."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save_pretrained(path)
        (path / "config.json").write_text(
            json.dumps({"frontend_class": self.name, "positions": self.positions}, indent=1) + "\n"
        )

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str = torch.float32,
    ) -> Self:
        """Load a zoo name or local folder. Raises ``GenError`` for a folder that is missing or
        holds another frontend."""
        path = locate(folder, "frontend")
        if not isinstance(path, Path):
            raise GenError(
                f"frontend {folder} is not a folder on this machine; expected one with config.json"
            )
        config = read_config(path)
        if (
            not isinstance(config, dict)
            or config.get("frontend_class") != cls.name
            or set(config) != {"frontend_class", "positions"}
        ):
            raise GenError(
                f"the config of frontend {folder} is {config}; expected frontend_class {cls.name!r}"
                " and positions"
            )
        try:
            with readable("frontend", folder), quiet():
                tokenizer = transformers().PreTrainedTokenizerFast.from_pretrained(path)
        except GenError:
            raise
        except Exception as error:  # the library raises bare Exceptions
            raise GenError(
                f"the vocabulary of frontend {folder} cannot be read:"
                f" {' '.join(str(error).split())[:200]}"
            ) from None
        return cls(tokenizer, config["positions"], device)
