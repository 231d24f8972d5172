"""Chat templates and tokenizers of model folders, within bounds of time and memory.

Both are programs that somebody else wrote. Templates, and tokenizers whose rules are not known to
be harmless (``gen.models.load.text_rules``), run in a process that is ended at its bounds
(``gen.core.worker``). It stays alive between prompts.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import pickle
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from gen.core.errors import GenError, bad_value
from gen.core.worker import Call, Connection, Exceeded, Worker
from gen.models.load.text_rules import parts_of, risk_of

CALLS = "gen.models.load.text_worker"  # module of the functions that run there
SECONDS, MEGABYTES = 2.0, 256.0  # of one prompt
# of reading the rules of a tokenizer, per million bytes of its file
READING_SECONDS, READING_MEGABYTES = 1.0, 40.0
KEPT_CHARACTERS, KEPT_TEMPLATES = 4_000_000, 8


class OverBudget(GenError):
    """Template or tokenizer that takes more time or memory than it may."""


class BoundedCalls:
    """Calls of ``gen.models.load.text_worker`` in a process that stays alive between them.

    Args:
        what: what runs, for messages.
        rules: JSON of the tokenizer that calls use; None for none.
    """

    def __init__(self, what: str, rules: bytes | None = None):
        self.what, self.rules = what, rules
        self._connection: Connection | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return BoundedCalls, (self.what, self.rules)

    def __call__(self, function: str, data: bytes) -> Any:
        """Run a function of ``CALLS`` by its name.

        Raises:
            OverBudget: it takes more time or memory than it may.
            GenError: it fails.
        """
        with self._lock:
            if self._connection is None or not self._connection.is_open:
                self._connection = _worker().connect()
                if self.rules is not None:
                    size = len(self.rules) / 1e6
                    seconds = SECONDS + READING_SECONDS * size
                    self._run("load", self.rules, seconds, MEGABYTES + READING_MEGABYTES * size)
            return self._run(function, data, SECONDS, MEGABYTES)

    def _run(self, function: str, data: bytes, seconds: float, megabytes: float) -> Any:
        assert self._connection is not None, "it was made above"
        name = f"{CALLS}:{function}"
        try:
            return self._connection.call(Call(name, data, seconds, megabytes))
        except Exceeded as error:
            most = f"{seconds:.1f} seconds"
            if error.limit == "megabytes":
                most = f"{megabytes:.0f} MB of memory"
            raise OverBudget(
                f"{self.what} takes more than {most}; expected one that is done with a prompt by"
                " then"
            ) from None
        except RuntimeError as error:
            raise GenError(f"{self.what} cannot be run: {str(error)[-200:]}") from None


@cache
def _worker() -> Worker:
    """Return the process of all templates and tokenizers of this one."""
    made = Worker(f"{CALLS}:prepare")
    atexit.register(made.close)
    return made


def start() -> None:
    """Start the process, which takes about as long as reading the weights of a small model."""
    _worker().start()


class Rendered:
    """Texts of conversations by their template, so that one is made once per prompt."""

    def __init__(self) -> None:
        self._calls: OrderedDict[str, BoundedCalls] = OrderedDict()
        self._kept: OrderedDict[bytes, str | GenError] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def of(self, template: str, given: Mapping[str, Any]) -> str:
        """Return the text of a conversation.

        Args:
            template: the template.
            given: arguments of ``render_jinja_template``, plain data.

        Raises:
            GenError: the template raises an error, or takes too much time or memory.
        """
        data = json.dumps({**given, "chat_template": template}).encode()
        minute = str(time.time() // 60) if "strftime_now" in template else ""
        key = hashlib.sha256(data + minute.encode()).digest()
        with self._lock:
            found = self._kept.get(key)
            calls = self._calls.setdefault(template, BoundedCalls("the chat template of the model"))
            self._calls.move_to_end(template)
            if len(self._calls) > KEPT_TEMPLATES:
                self._calls.popitem(last=False)
        if found is None:
            try:
                found = calls("render", data)
            except GenError as error:
                found = error
            self._keep(key, found)
        if isinstance(found, GenError):
            raise type(found)(str(found))
        return found

    def _keep(self, key: bytes, found: str | GenError) -> None:
        with self._lock:
            if key not in self._kept:
                self._size += len(str(found))
            self._kept[key] = found
            while self._size > KEPT_CHARACTERS:
                self._size -= len(str(self._kept.popitem(last=False)[1]))


@cache
def rendered() -> Rendered:
    """Return the texts of this process."""
    return Rendered()


class BoundedTokenizer:
    """Tokenizer of the library tokenizers whose rules run in a process that can be ended.

    What reads its settings or vocabulary does so here.
    """

    def __init__(self, inner: Any, what: str):
        rules = inner.to_str().encode()
        vars(self).update(_inner=inner, _what=what, _calls=BoundedCalls(what, rules))

    def __reduce__(self) -> Any:
        return BoundedTokenizer, (self._inner, self._what)

    def __len__(self) -> int:
        return self._inner.get_vocab_size(True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def encode(self, *args: Any, **keywords: Any) -> Any:
        return self._apply("encode", args, keywords)

    def encode_batch(self, *args: Any, **keywords: Any) -> Any:
        return self._apply("encode_batch", args, keywords)

    def encode_batch_fast(self, *args: Any, **keywords: Any) -> Any:
        return self._apply("encode_batch_fast", args, keywords)

    def decode(self, *args: Any, **keywords: Any) -> Any:
        return self._apply("decode", args, keywords)

    def decode_batch(self, *args: Any, **keywords: Any) -> Any:
        return self._apply("decode_batch", args, keywords)

    def add_tokens(self, *args: Any, **keywords: Any) -> Any:
        return self._change("add_tokens", args, keywords)

    def add_special_tokens(self, *args: Any, **keywords: Any) -> Any:
        return self._change("add_special_tokens", args, keywords)

    def _change(self, name: str, args: Any, keywords: Any) -> Any:
        found = getattr(self._inner, name)(*args, **keywords)
        vars(self)["_calls"] = BoundedCalls(self._what, self._inner.to_str().encode())
        return found

    def _apply(self, name: str, args: Any, keywords: Any) -> Any:
        inner = self._inner
        settings = inner.truncation, inner.padding, inner.encode_special_tokens
        try:
            return self._calls("apply", pickle.dumps((name, args, keywords, settings)))
        except OverBudget:
            raise
        except GenError as error:
            raise GenError(
                f"{self._what} fails: {error}; expected one that takes any text"
            ) from None


def bounded_tokenizer(tokenizer: Any, name: str) -> Any:
    """Return a tokenizer of transformers whose rules run within bounds.

    Args:
        tokenizer: the tokenizer; it is changed where its rules are not known to be harmless.
        name: name of the model, for messages.

    Raises:
        GenError: its tokens are drawn at random.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # none in Python
        tokenizer._tokenizer = bounded_rules(backend, name)
    return tokenizer


def bounded_rules(backend: Any, name: str) -> Any:
    """Return a tokenizer of the library tokenizers whose rules run within bounds; arguments and
    errors as of ``bounded_tokenizer``."""
    if isinstance(backend, BoundedTokenizer):
        return backend
    dropout = getattr(backend.model, "dropout", None)  # of BPE alone
    if dropout:
        raise bad_value(
            f"model.dropout in tokenizer.json of model {name}",
            dropout,
            "none: tokens of a prompt are not drawn",
        )
    if risk_of(parts_of(backend)) is None:
        return backend
    return BoundedTokenizer(backend, f"the tokenizer of model {name}")


def require_readable_rules(path: Path, name: str) -> None:
    """Read the rules of a tokenizer within bounds, before they are read in this process, where they
    are not known to be harmless.

    Args:
        path: a ``tokenizer.json``, which need not exist.
        name: name of the model, for messages.

    Raises:
        GenError: they cannot be read, or take too long.
    """
    if not path.is_file():
        return
    text = path.read_bytes()
    said = json.loads(text)
    if not isinstance(said, Mapping):
        raise bad_value(f"{path.name} of model {name}", said, "an object")
    if risk_of(said) is None:
        return
    try:
        BoundedCalls(f"{path.name} of model {name}", text)("load", text)
    except OverBudget:
        raise
    except GenError as error:
        raise GenError(f"{path.name} of model {name} cannot be read: {error}") from None
