"""What a file of somebody else can do beyond being read, as one list.

A job file, the config of a job folder, and the record of a saved pipeline are read by everybody
who has them. ``POWERS`` lists what such a file could have done with its values; each needs the
word of the person who runs it: the same value on the command line, a keyword in Python, or
``--trust-job`` for the whole file. For pickles no word is enough: weights are read as plain tensors
alone (``gen.models.load.weights``), arrays without objects (``gen.media.bounds``).

A name of the Hub, of a model or a data set, needs no word: its files are read, and none of them
runs. ``local_files_only`` keeps models from the network, and ``--dry-run`` everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gen.core.errors import GenError, shown
from gen.core.import_paths import is_import_path

Keys = tuple[str, ...]
REMOTE_CODE = "trust_remote_code"
KERNELS = "attn_implementation"
DATA_SET = "prompts_dataset"
PICKLED = "pandas"  # builder of ``datasets`` that reads pickles, up to its version 4
# Engine options that only ask for machines. Any other one may run commands (``local_setup`` of
# slurm, ``runtime_env`` of ray) or send the job elsewhere (``address`` of ray).
SLURM = "partition account qos constraint array_parallelism time mem exclude gres max_num_timeout"
HARMLESS = (
    *("cluster", "wait", "name", "timeout_min", "mem_gb", "nodes", "cpus_per_task"),
    *("gpus_per_node", "tasks_per_node", "stderr_to_stdout"),
    *(f"slurm_{name}" for name in SLURM.split()),
    *("num_cpus", "num_gpus", "memory", "resources", "accelerator_type", "scheduling_strategy"),
)
WRAPPERS = ("sweep", "jobs")  # keys of a job file that hold keys of entries


@dataclass(frozen=True)
class Power:
    """Something that a value of a foreign file could do.

    Attributes:
        name: what it is.
        does: what the value does, for the message.
        holds: returns True for keys and a value that do it. Keys of sweeps and entries stand
            behind ``sweep`` and ``jobs``, dots in them taken apart.
        acts: module that acts on the value.
        shows: False for a value that the message leaves out, because it may be long.
        depth: how many keys name the value on the command line; None for all.
        word: True if a word of the person who runs the file allows it; False if none does.
    """

    name: str
    does: str
    holds: Callable[[Keys, Any], bool]
    acts: str
    shows: bool = True
    depth: int | None = None
    word: bool = True


def _runs_commands(keys: Keys, value: Any) -> bool:
    if keys[0] != "engine_options" or len(keys) < 2:
        return False
    is_plain = isinstance(value, (int, float)) or (isinstance(value, str) and value.isprintable())
    known = keys[1] in HARMLESS and (len(keys) == 2 or keys[1] == "resources")
    return not (known and is_plain and len(keys) <= 3)


def _imports(keys: Keys, value: Any) -> bool:
    return "sampler" in keys and isinstance(value, str) and is_import_path(value)


def _of_model(keys: Keys, name: str) -> bool:
    return "model_options" in keys and keys[-1] == name


def _unpickles(keys: Keys, value: Any) -> bool:
    return value == PICKLED and DATA_SET in keys and keys[-1] in (DATA_SET, "path")


def _connects(keys: Keys, value: Any) -> bool:
    return DATA_SET in keys and isinstance(value, str) and "://" in value


POWERS = (
    Power("engine options", "may run commands", _runs_commands, "gen.jobs.engines", False, 2),
    Power("import paths", "runs code", _imports, "gen.core.import_paths"),
    Power(
        "code of a model folder",
        "runs code",
        lambda keys, value: _of_model(keys, REMOTE_CODE) and value not in (False, None),
        "gen.models.load.pretrained",
    ),
    Power(
        "kernels of the hub",  # named as a repository, which transformers fetches and runs
        "fetches and runs kernels",
        lambda keys, value: _of_model(keys, KERNELS) and isinstance(value, str) and "/" in value,
        "gen.models.load.pretrained",
    ),
    Power("addresses", "opens a connection", _connects, "gen.config.data_sets", depth=1),
    Power("pickles", "reads pickles", _unpickles, "gen.config.data_sets", word=False),
)


def refuse_untrusted(tree: Mapping[str, Any], where: str, trusted: bool = False) -> None:
    """Refuse a file that somebody may have written to have things done (``POWERS``).

    Args:
        tree: values of the file, with the keys of a job file.
        where: origin of the tree, for messages.
        trusted: whether the person who runs the file has given their word.

    Raises:
        GenError: the first such value.
    """
    powers = [power for power in POWERS if not (trusted and power.word)]
    for keys, value in _leaves(tree, ()):
        for power in powers:
            if power.holds(keys, value):
                raise _refusal(power, keys, value, where)


def _refusal(power: Power, keys: Keys, value: Any, where: str) -> GenError:
    key = ".".join(keys[:2] if keys[0] == "engine_options" else keys)
    short = ".".join([k for k in keys if k not in WRAPPERS][: power.depth])
    does = f"is {shown(value)}, which {power.does}" if power.shows else power.does
    expected = (
        f"it on the command line ({short}=...), or --trust-job for a file that you trust"
        if power.word
        else "a value that does not"
    )
    return GenError(f"{key} in {where} {does}; expected {expected}")


def _leaves(node: Any, keys: Keys) -> Iterator[tuple[Keys, Any]]:
    """Yield keys and value of every leaf; lists have the keys of what holds them."""
    if isinstance(node, Mapping) and node:
        for name, value in node.items():
            yield from _leaves(value, (*keys, *str(name).split(".")))
    elif isinstance(node, (list, tuple)) and keys[:1] != ("engine_options",):
        for value in node:
            yield from _leaves(value, keys)
    elif keys:
        yield keys, node
