"""Record of what loading a checkpoint read: files, and networks with digests of their weights.

Saving a pipeline copies these files, and refuses networks whose weights were changed since.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from weakref import ref

from torch import nn

from gen.models.load.digest import digest_of
from gen.models.load.tensor_parallel import is_split

PICKLES = (".bin", ".pt", ".pth", ".ckpt")
ENDINGS = (".safetensors", *PICKLES)  # of files of weights
TEXTS = (".json", ".jinja", ".model", ".npy", ".npz", ".tiktoken", ".txt", ".yaml", ".yml")


@dataclass
class Reads:
    """Files that were read, and the networks that they filled.

    Attributes:
        files: paths as they were opened.
        networks: references to the filled modules, which do not keep them in memory.
        digests: digest of each module's weights, after loading.
    """

    files: set[Path] = field(default_factory=set)
    networks: list[ref[nn.Module]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)

    def is_unchanged(self) -> bool:
        """Return whether all networks still have the weights that were read.

        A digest reads both ends of every tensor; networks that are gone are not compared.
        """
        pairs = zip(self.networks, self.digests, strict=True)
        return all((n := made()) is None or _digest(n) == digest for made, digest in pairs)


_READS: ContextVar[Reads | None] = ContextVar("reads", default=None)


@contextmanager
def recording() -> Iterator[Reads]:
    """Record what is read inside."""
    reads = Reads()
    token = _READS.set(reads)
    try:
        yield reads
    finally:
        _READS.reset(token)
    found = [(made, network) for made in reads.networks if (network := made()) is not None]
    reads.networks = [made for made, _ in found]
    reads.digests = [_digest(network) for _, network in found]


def note_file(path: Path) -> None:
    """Note that a file is read."""
    reads = _READS.get()
    if reads is not None:
        reads.files.add(path.absolute())


def note_folder(folder: Path, weights: bool = True) -> None:
    """Note that a library reads a folder: its configs and, of its weights, safetensors before
    pickles."""
    if _READS.get() is None or not folder.is_dir():
        return
    entries = [p for p in folder.iterdir() if p.is_file()]
    chosen = [p for p in entries if p.suffix == ".safetensors"]
    chosen = chosen or [p for p in entries if p.suffix in ENDINGS]
    for path in [p for p in entries if p.suffix in TEXTS] + (chosen if weights else []):
        note_file(path)


def note_network(network: nn.Module) -> None:
    """Note that a network holds weights that were read."""
    reads = _READS.get()
    if reads is not None:
        reads.networks.append(ref(network))


def _digest(network: nn.Module) -> str:
    """Digest the weights of a network; offloaded and split ones have no values here, or few."""
    if is_split(network):
        return "split"
    if any(x.is_meta for x in network.state_dict().values()):
        return "offloaded"
    return digest_of(network)
