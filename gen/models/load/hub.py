"""Repositories of the Hugging Face hub: which revision, and which files of it.

A model is read from one commit. ``snapshot_of`` finds it in the local cache, or fetches it, and
says which commit it is; nothing else here opens a connection.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path, PurePosixPath
from typing import Any

from gen.core.errors import GenError, bad_type, bad_value, hint
from gen.models.load.gguf import ENDING as GGUF
from gen.models.load.libraries import huggingface_hub
from gen.models.load.reads import ENDINGS, PICKLES
from gen.models.load.weights import is_variant

MAIN = "main"
PRECISIONS = ("fp16", "bf16", "fp32")  # usual variants, fetched only if one of them is named
SHORT = 12  # characters of a commit hash in a message
LISTED = 8  # revisions that a message lists


class NotCached(GenError):
    """Raised for a repository that is not in the local cache and cannot be fetched, or may not be.

    ``missing``: number of files to fetch; None where the cache does not know it.
    """

    def __init__(self, message: str, missing: int | None = None):
        super().__init__(message)
        self.missing = missing


@dataclass(frozen=True)
class HubOptions:
    """Keywords of ``from_pretrained`` that say where the files of a model are.

    Attributes:
        revision: branch, tag or commit hash; for several repositories, such as that of a draft
            model, a mapping from hub id to one.
        token: access token; True is the stored login, False is no login. It is a secret: it is in
            no repr and no pickle, and no file is ever given it.
        cache_dir: folder of the local cache; None is that of the environment.
        subfolder: folder of the model inside the repository or the local folder.
        variant: name of the files of weights to read, such as ``fp16`` for
            ``model.fp16.safetensors``.
        local_files_only: read the local cache and open no connection.
        gguf_file: file of the repository or folder that holds the whole model in GGUF.
    """

    revision: str | Mapping[str, str] | None = None
    token: str | bool | None = field(default=None, repr=False)
    cache_dir: str | Path | None = None
    subfolder: str | None = None
    variant: str | None = None
    local_files_only: bool = False
    gguf_file: str | None = None

    def __post_init__(self) -> None:
        """Raise ``GenError`` for a value of another type."""
        revisions = self.revision
        if isinstance(revisions, Mapping):
            if not all(isinstance(x, str) and x for pair in revisions.items() for x in pair):
                raise bad_value("revision", revisions, "a revision for every hub id")
        elif revisions is not None and (not isinstance(revisions, str) or not revisions):
            raise bad_type("revision", revisions, "a branch, tag or commit hash")
        if self.token is not None and not isinstance(self.token, (str, bool)):
            raise GenError(
                f"token is a {type(self.token).__name__}; expected a text, true or false"
            )
        if self.cache_dir is not None and not isinstance(self.cache_dir, (str, Path)):
            raise bad_type("cache_dir", self.cache_dir, "a folder")
        if not isinstance(self.local_files_only, bool):
            raise bad_value("local_files_only", self.local_files_only, "true or false")
        if self.variant is not None and (
            not isinstance(self.variant, str) or not self.variant or "/" in self.variant
        ):
            raise bad_value("variant", self.variant, "a name, such as 'fp16'")
        if not _is_inside(self.subfolder):
            raise bad_value(
                "subfolder", self.subfolder, "a folder inside the model's, such as 'model'"
            )
        if not _is_inside(self.gguf_file) or not str(self.gguf_file or GGUF).endswith(GGUF):
            raise bad_value(
                "gguf_file", self.gguf_file, "a file inside the model's folder, such as 'q8_0.gguf'"
            )
        if self.gguf_file is not None and self.variant is not None:
            raise GenError(
                f"gguf_file is {self.gguf_file!r} and variant {self.variant!r}; expected one of"
                " them: a GGUF file is the whole model"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the options without the token: a pickle may be stored."""
        return {**vars(self), "token": None}

    @classmethod
    def among(cls, options: Mapping[str, Any]) -> HubOptions:
        """Read the options that are hub keywords; the others are left out."""
        return cls(**{k: v for k, v in options.items() if k in HUB_KEYWORDS})

    @property
    def said(self) -> dict[str, Any]:
        """Options that were given, as plain data, without the token."""
        found = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name != "token" and getattr(self, f.name) != f.default
        }
        if isinstance(self.revision, Mapping):
            found["revision"] = dict(self.revision)
        return {k: str(v) if isinstance(v, Path) else v for k, v in found.items()}

    def of(self, name: str, main: bool = True) -> HubOptions:
        """Return the options of one model.

        Args:
            name: the model.
            main: False for a model beside the main one, such as a draft model: revision, subfolder,
                variant and file are those of the main model, unless ``revision`` is a mapping.
        """
        named = self.revision if isinstance(self.revision, Mapping) else {}
        if main:
            return replace(self, revision=named.get(name) if named else self.revision)
        return replace(self, revision=named.get(name), subfolder=None, variant=None, gguf_file=None)

    def pinned(self, commits: Mapping[str, str], main: str | None) -> HubOptions:
        """Return the options with the revision of every model that has a known commit.

        Args:
            commits: commit hash by hub id.
            main: the main model.
        """
        if not commits:
            return self
        if set(commits) == {main}:
            return replace(self, revision=commits[main])
        known = self.revision
        if not isinstance(known, Mapping):
            known = {} if known is None or main is None else {main: known}
        return replace(self, revision={**known, **commits})


def _is_inside(path: Any) -> bool:
    """Return True for None, and for a relative path that does not leave its folder."""
    if path is None:
        return True
    if not isinstance(path, str) or not path:
        return False
    parts = PurePosixPath(path)
    return not parts.is_absolute() and ".." not in parts.parts


HUB = HubOptions()  # nothing was given
HUB_KEYWORDS = tuple(f.name for f in fields(HubOptions))


@dataclass(frozen=True)
class Snapshot:
    """Files of one commit. ``path``: their folder. ``commit``: the commit hash."""

    path: Path
    commit: str


def snapshot_of(name: str, hub: HubOptions) -> Snapshot:
    """Return the snapshot of a repository, from the local cache or fetched into it.

    Args:
        name: hub id.
        hub: options of this very model (``HubOptions.of``).

    Raises:
        NotCached: neither the cache nor the hub gives it. Where the cache has other revisions of
            the repository, the message lists them.
    """
    revision = hub.revision if isinstance(hub.revision, str) else None
    how: dict[str, Any] = {
        "revision": revision,
        "token": hub.token,
        "cache_dir": hub.cache_dir,
        "local_files_only": hub.local_files_only,
    }
    how = {k: v for k, v in how.items() if v not in (None, False) or (k, v) == ("token", False)}
    if hub.subfolder:
        how["allow_patterns"] = f"{hub.subfolder.strip('/')}/*"
    inside = f"{hub.subfolder.strip('/')}/" if hub.subfolder else ""
    if hub.gguf_file:
        how["allow_patterns"] = [f"{inside}{x}" for x in (hub.gguf_file, "*.json", "*.jinja")]
    pickles, others = [f"*{p}" for p in PICKLES], [] if hub.gguf_file else [f"*{GGUF}"]
    ignored = [*pickles, *_others(hub), *others]
    snapshot_download = huggingface_hub().snapshot_download
    try:
        path = Path(snapshot_download(name, ignore_patterns=ignored, **how))
        if not hub.gguf_file and next(path.rglob("*.safetensors"), None) is None:
            how["revision"] = path.name
            path = Path(snapshot_download(name, ignore_patterns=others, **how))
    except (OSError, ValueError) as error:  # all errors of the hub are one of these
        raise _not_cached(name, hub, revision, error) from None
    return Snapshot(path, path.name)


def in_subfolder(path: Path, name: str, subfolder: str | None) -> Path:
    """Return a folder inside a model's. Raises ``GenError`` if there is none."""
    if not subfolder:
        return path
    found = path / subfolder
    if not found.is_dir():
        inside = sorted(p.name for p in path.iterdir() if p.is_dir()) if path.is_dir() else []
        raise GenError(
            f"model {name} has no subfolder {subfolder!r}; expected"
            f" {'one of ' + ', '.join(inside) if inside else 'none, it has no folders'}"
            f".{hint(subfolder, inside)}"
        )
    return found


def require_variant(path: Path, name: str, variant: str | None) -> None:
    """Raise ``GenError``, with the variants that there are, for a folder without weights of the
    variant."""
    if not variant:
        return
    files = [p for p in path.rglob("*") if p.suffix in ENDINGS]
    if path.is_dir() and any(is_variant(p, variant) for p in files):
        return
    known = sorted({p.stem.split(".", 1)[1].split("-0")[0] for p in files if "." in p.stem})
    raise GenError(
        f"model {name} has no weights of the variant {variant!r}; it has"
        f" {'those of ' + ', '.join(known) if known else 'no variants'}.{hint(variant, known)}"
    )


def _others(hub: HubOptions) -> list[str]:
    """Return patterns of the weights of precisions that nobody asked for."""
    return [
        pattern
        for p in PRECISIONS
        if p != hub.variant
        for pattern in (f"*.{p}.safetensors", f"*.{p}-*.safetensors", f"*.index.{p}.json")
    ]


def _repository(name: str, hub: HubOptions) -> Path:
    """Return the folder of a repository in the local cache, which need not exist."""
    root = Path(hub.cache_dir or huggingface_hub().constants.HF_HUB_CACHE).expanduser()
    return root / f"models--{name.replace('/', '--')}"


def cached_revisions(name: str, hub: HubOptions) -> dict[str, str]:
    """Return the commit hash of every branch and tag of a repository in the local cache, and of
    every snapshot under its own hash. No connection is opened."""
    folder = _repository(name, hub)
    refs = folder / "refs"
    found = {
        p.relative_to(refs).as_posix(): p.read_text().strip()
        for p in sorted(refs.rglob("*"))
        if p.is_file()
    }
    snapshots = sorted((folder / "snapshots").glob("*"))
    return found | {p.name: p.name for p in snapshots if p.name not in found.values()}


def missing_files(name: str, hub: HubOptions) -> int | None:
    """Return the number of files of a repository that the local cache lacks; None where the cache
    has no list of the repository's files."""
    asked = hub.revision if isinstance(hub.revision, str) else MAIN
    commit = cached_revisions(name, hub).get(asked, asked)
    folder = _repository(name, hub)
    try:
        listed = json.loads((folder / "trees" / f"{commit}.json").read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return sum(not (folder / "snapshots" / commit / file).exists() for file in listed)


def _not_cached(name: str, hub: HubOptions, revision: str | None, error: Exception) -> NotCached:
    known = cached_revisions(name, hub)
    reason = " ".join(str(error).split())[:600]
    if isinstance(hub.token, str) and hub.token:
        reason = reason.replace(hub.token, "(token)")
    why = (
        "local_files_only is true"
        if hub.local_files_only
        else f"the hub does not give it: {reason}"
    )
    missing = missing_files(name, hub)
    if revision in known or (revision is None and MAIN in known):
        count = "some" if missing is None else str(missing)
        said = (
            f"the local cache lacks {count} of the files of model {name!r}, revision"
            f" {revision or MAIN}, and {why}"
        )
    elif known:
        pairs = [f"{k} ({v[:SHORT]})" if k != v else v for k, v in known.items()]
        more = f" and {len(pairs) - LISTED} more" if len(pairs) > LISTED else ""
        said = (
            f"model {name!r} has no revision {revision or MAIN!r} in the local cache, and {why};"
            f" the cache has {', '.join(pairs[:LISTED])}{more}.{hint(revision or MAIN, known)}"
        )
    else:
        said = (
            f"model {name!r} is not a local folder, is not in the local cache, and {why}; expected"
            " a folder, a file or the id of a repository"
        )
    return NotCached(said, missing)
