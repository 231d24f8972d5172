"""Settings of the server, and where its API keys come from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from gen.core.errors import GenError, bad_value

KEY_VARIABLE = "GEN_API_KEY"
MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Settings:
    """Settings of ``gen.serve.app.make_app``.

    Attributes:
        api_keys: keys, one of which a request must bring; empty asks for none, and then requests of
            other machines and of pages of other sites are refused.
        max_body: bytes of a request.
        rate: requests per minute of one client; None sets no limit.
        max_open: requests that are open at a time.
        batches: folder of uploaded files and batches; None offers neither.
        deadline: seconds after which a request fails, and the most that a request may ask for.
        body_timeout: seconds in which the body of a request must arrive.
        max_connections: connections that are open at a time, where handles of files allow them.
        cors: origins such as ``http://localhost:3000`` whose pages may ask and read answers.
        kept_videos: finished videos that are kept in memory; the oldest go first. 0 makes none.
        kept_responses: answers of ``/v1/responses`` that are kept in memory; the oldest go first. 0
            keeps none.

    Raises:
        GenError: a value is out of range.
    """

    api_keys: tuple[str, ...] = ()
    max_body: int = 16 * MEGABYTE
    rate: int | None = None
    max_open: int = 2_000
    batches: Path | None = None
    deadline: float = 600.0
    body_timeout: float = 30.0
    max_connections: int = 2_000
    cors: tuple[str, ...] = ()
    kept_videos: int = 32
    kept_responses: int = 1_000

    def __post_init__(self) -> None:
        for name in ("kept_videos", "kept_responses"):
            if getattr(self, name) < 0:
                raise bad_value(name, getattr(self, name), "an integer of at least 0")
        for name in ("max_body", "rate", "max_open", "max_connections"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise bad_value(name, value, "an integer of at least 1")
        for name in ("deadline", "body_timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                raise bad_value(name, getattr(self, name), "seconds above 0")
        for origin in self.cors:
            if origin_of(origin) is None:
                raise bad_value("cors", origin, "an origin such as http://localhost:3000")


def read_keys(file: str | Path | None, environment: Mapping[str, str] = os.environ) -> tuple:
    """Return the API keys of a file, one per line, and that of ``GEN_API_KEY``.

    Args:
        file: the file; None reads none.
        environment: variables of the environment.

    Raises:
        GenError: the file cannot be read, holds no key, or a key cannot be sent in a header.
    """
    lines: list[str] = []
    if file is not None:
        try:
            lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise GenError(f"the API keys {file} cannot be read: {error}") from None
        if not any(line.strip() for line in lines):
            raise GenError(f"{file} is empty; expected an API key per line")
    keys = [line.strip() for line in (*lines, environment.get(KEY_VARIABLE, "")) if line.strip()]
    if any(not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise GenError("an API key holds a space or a letter outside of ASCII; expected neither")
    return tuple(dict.fromkeys(keys))


def origin_of(text: str) -> SplitResult | None:
    """Return the parts of an origin: a scheme, a host and maybe a port, as browsers write them.

    None for any other text, such as ``http://localhost:80@example.org``, whose host is another one.
    """
    try:
        parts = urlsplit(text)
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:
        return None
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    is_origin = parts.scheme in ("http", "https") and text == f"{parts.scheme}://{host}{port}"
    return parts if is_origin and host else None


def is_loopback(host: str) -> bool:
    """Return True for a name or address of this machine alone."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def require_key(host: str, keys: tuple[str, ...]) -> None:
    """Refuse to serve other machines without an API key. Raises ``GenError``."""
    if not keys and not is_loopback(host):
        raise GenError(
            f"--host {host} is open to other machines and there is no API key; expected"
            f" {KEY_VARIABLE} in the environment, --api-key-file, or --host 127.0.0.1"
        )
