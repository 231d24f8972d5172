"""Compare the engines of structured output on a folder of JSON schemas.

``python -m gen.recipes.text.structured FOLDER`` prints one row per engine that is installed:
``automaton`` (the default of ``json_schema``), ``llguidance`` and ``xgrammar``.

* Coverage: schemas that the engine takes.
* Validity: texts of random logits, in at most ``--tokens`` tokens of one byte each, that are
  complete and validate under ``jsonschema``.
* Compile time: seconds of CPU from a schema to its first mask, at a vocabulary of ``--vocabulary``
  tokens made of bytes, words, numbers and punctuation. The vocabulary itself is read before.
* Mask time: seconds of CPU for one mask per position of such a text, at that vocabulary.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gen.constraints.build import build
from gen.contracts.vocabulary import Vocabulary
from gen.core.errors import GenError, bad_value
from gen.core.token_space import TokenSpace
from gen.media.containers import require_package

POSITIONS = 32  # positions whose masks are timed, of each schema


class Row:
    """State of one text. ``mask`` returns the allowed tokens, bool [V], packed as the engine
    does."""

    def __init__(self, mask: Callable[[int], np.ndarray], advance: Callable[[int], bool]):
        self.mask, self.advance = mask, advance


Engine = Callable[[Any, int], Row]  # schema, positions -> row; raises for schemas that it refuses


def own_engine(name: str, tokens: Sequence[bytes | None]) -> Engine:
    """Return an engine of ``gen.constraints``."""
    vocabulary = Vocabulary(tuple(tokens), tuple(tokens))

    def compiled(schema: Any, positions: int) -> Row:
        legal = torch.ones(positions, len(tokens), dtype=torch.bool)
        space = TokenSpace((positions,), len(tokens), legal, eos_token_id=len(tokens) - 1)
        request = {"json_schema": schema, "engine": name}
        state = build(request, vocabulary, space).start()
        return Row(state.allowed_bitmask, state.advance)

    return compiled


def xgrammar_engine(tokens: Sequence[bytes | None]) -> Engine:
    """Return the engine of the package xgrammar."""
    library = import_module("xgrammar")
    end = len(tokens) - 1
    info = library.TokenizerInfo(
        [token or b"<end>" for token in tokens],
        vocab_type=library.VocabType.RAW,
        vocab_size=len(tokens),
        stop_token_ids=[end],
    )
    compiler = library.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compiled(schema: Any, positions: int) -> Row:
        grammar = compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)
        matcher = library.GrammarMatcher(grammar)
        words = library.allocate_token_bitmask(1, len(tokens))

        def mask(remaining: int) -> np.ndarray:
            matcher.fill_next_token_bitmask(words)
            return words[0].numpy()

        return Row(mask, matcher.accept_token)

    return compiled


def byte_tokens() -> list[bytes | None]:
    """Return a vocabulary of bytes and an eos token."""
    return [*(bytes([b]) for b in range(256)), None]


def word_tokens(size: int) -> list[bytes | None]:
    """Return a vocabulary of bytes, numbers, punctuation and made-up words, and an eos token."""
    rng = random.Random(0)
    found = dict.fromkeys(bytes([b]) for b in range(256))
    signs = ['{"', '"}', '":', '", "', '": "', "},", "[", "]}", '"],', "': ", "0.", "-1", "\\n"]
    found |= dict.fromkeys(text.encode() for text in [*signs, *map(str, range(1000))])
    while len(found) < size - 1:
        word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9)))
        found[(rng.choice(["", " ", " "]) + rng.choice([word, word.title()])).encode()] = None
    return [*found, None]


def unpacked(mask: np.ndarray, size: int) -> np.ndarray:
    """Return a packed mask as bool [V]."""
    return np.unpackbits(mask.view(np.uint8), bitorder="little")[:size].astype(bool)


def generated(row: Row, tokens: Sequence[bytes | None], positions: int, seed: int) -> bytes | None:
    """Return a text of random logits; None where it does not end in time."""
    rng = np.random.default_rng(seed)
    text = bytearray()
    for position in range(positions):
        allowed = np.flatnonzero(unpacked(row.mask(positions - position), len(tokens)))
        if not len(allowed):
            return None
        token = int(rng.choice(allowed))
        if not row.advance(token):
            return None
        if tokens[token] is None:
            return bytes(text)
        text += tokens[token] or b""
    return bytes(text)


def is_valid(text: bytes | None, schema: Any) -> bool:
    """Return True for JSON that satisfies a schema."""
    validators = require_package("jsonschema", "jsonschema", "the comparison of engines")
    try:
        return text is not None and validators.Draft202012Validator(schema).is_valid(
            json.loads(text.decode())
        )
    except (UnicodeDecodeError, json.JSONDecodeError):
        return False


@dataclass
class Result:
    """Figures of one engine over all schemas; times in seconds."""

    name: str
    compiled: int = 0
    refused: list[str] = field(default_factory=list)
    valid: int = 0
    texts: int = 0
    compile_times: list[float] = field(default_factory=list)
    mask_times: list[float] = field(default_factory=list)

    def row(self, schemas: int) -> str:
        """Return a row of the table."""
        times = [np.percentile(self.compile_times or [np.nan], q) for q in (50, 99)]
        masks = [np.percentile(self.mask_times or [np.nan], q) for q in (50, 99)]
        return (
            f"| {self.name} | {self.compiled} of {schemas} | {self.valid} of {self.texts}"
            f" | {1000 * times[0]:.0f} / {1000 * times[1]:.0f} ms"
            f" | {1000 * masks[0]:.2f} / {1000 * masks[1]:.2f} ms |"
        )


def measure(
    name: str,
    make: Callable[[Sequence[bytes | None]], Engine],
    schemas: dict[str, Any],
    options: argparse.Namespace,
) -> Result:
    """Return the figures of an engine."""
    result = Result(name)
    small, large = byte_tokens(), word_tokens(options.vocabulary)
    engine, timed = make(small), make(large)
    timed({"type": "null"}, POSITIONS)  # reads the vocabulary
    for label, schema in schemas.items():
        try:
            row = engine(schema, options.tokens)
            begin = time.process_time()
            wide = timed(schema, options.tokens)
            wide.mask(options.tokens)
            result.compile_times.append(time.process_time() - begin)
        except (GenError, RuntimeError, ValueError) as error:
            result.refused.append(f"{label}: {str(error).splitlines()[0][:160]}")
            continue
        result.compiled += 1
        for seed in range(options.samples):
            row = engine(schema, options.tokens) if seed else row
            result.texts += 1
            result.valid += is_valid(generated(row, small, options.tokens, seed), schema)
        time_masks(wide, large, options.tokens, result.mask_times)
    return result


def time_masks(
    row: Row, tokens: Sequence[bytes | None], positions: int, times: list[float]
) -> None:
    """Add the time of the mask at each of the first positions of a text."""
    rng = np.random.default_rng(0)
    for position in range(POSITIONS):
        begin = time.process_time()
        mask = row.mask(positions - position)
        times.append(time.process_time() - begin)
        allowed = np.flatnonzero(unpacked(mask, len(tokens)))
        token = int(rng.choice(allowed)) if len(allowed) else len(tokens) - 1
        if tokens[token] is None or not row.advance(token):
            return


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table; see the module."""
    parser = argparse.ArgumentParser(description="Compare the engines of structured output.")
    parser.add_argument("folder", type=Path, help="folder of JSON schemas, *.json")
    parser.add_argument("--samples", type=int, default=2, help="texts of each schema")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a text, at most")
    parser.add_argument("--vocabulary", type=int, default=32768, help="tokens where time is taken")
    parser.add_argument("--engines", nargs="+", help="engines to compare, by default all")
    options = parser.parse_args(arguments)
    schemas = {p.stem: json.loads(p.read_text()) for p in sorted(options.folder.glob("*.json"))}
    if not schemas:
        raise GenError(f"folder {options.folder} has no *.json; expected JSON schemas")
    torch.set_num_threads(1)
    engines: dict[str, Callable[[Sequence[bytes | None]], Engine]] = {
        "automaton": lambda tokens: own_engine("automaton", tokens)
    }
    if find_spec("llguidance"):
        engines["llguidance"] = lambda tokens: own_engine("llguidance", tokens)
    if find_spec("xgrammar"):
        engines["xgrammar"] = xgrammar_engine
    print("| engine | schemas | valid texts | compile p50 / p99 | mask p50 / p99 |")
    print("|---|---|---|---|---|")
    for name in options.engines or ():
        if name not in engines:
            raise bad_value("engines", name, ", ".join(engines))
    results = []
    for name in options.engines or engines:
        results.append(measure(name, engines[name], schemas, options))
        print(results[-1].row(len(schemas)), flush=True)
    for result in results:
        for line in result.refused:
            print(f"{result.name} refuses {line}")


if __name__ == "__main__":
    main()
