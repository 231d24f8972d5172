"""What a file of somebody else can do beyond being read, as one list.

A job file, the config of a job folder, and the record of a saved pipeline are read by everybody
who has them. ``POWERS`` lists what such a file could have done with its values; each needs the
word of the person who runs it: the same value on the command line, a keyword in Python, or
``--trust-job`` for the whole file. Pickles beyond plain tensors are read for nobody, so no value
stands for them here.
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
        shows: False for a value that the message leaves out, because it may be long.
    """

    name: str
    does: str
    holds: Callable[[Keys, Any], bool]
    shows: bool = True


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


POWERS = (
    Power("engine options", "may run commands", _runs_commands, shows=False),
    Power("import paths", "runs code", _imports),
    Power(
        "code of a model folder",
        "runs code",
        lambda keys, value: _of_model(keys, REMOTE_CODE) and value not in (False, None),
    ),
    Power(
        "kernels of the hub",  # named as a repository, which transformers fetches and runs
        "fetches and runs kernels",
        lambda keys, value: _of_model(keys, KERNELS) and isinstance(value, str) and "/" in value,
    ),
)


def refuse_untrusted(tree: Mapping[str, Any], where: str) -> None:
    """Refuse a file that somebody may have written to have things done (``POWERS``).

    Args:
        tree: values of the file, with the keys of a job file.
        where: origin of the tree, for messages.

    Raises:
        GenError: the first such value.
    """
    for keys, value in _leaves(tree, ()):
        for power in POWERS:
            if power.holds(keys, value):
                key = ".".join(keys[:2] if keys[0] == "engine_options" else keys)
                short = ".".join(k for k in keys if k not in WRAPPERS)
                short = key if keys[0] == "engine_options" else short
                does = f"is {shown(value)}, which {power.does}" if power.shows else power.does
                raise GenError(
                    f"{key} in {where} {does}; expected it on the command line ({short}=...), or"
                    " --trust-job for a file that you trust"
                )


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
