"""Rank of this process among those that a launcher started with the same command, and its device.

``torchrun`` and ``accelerate launch`` (with ``--multi_gpu`` or several machines), ``mpirun`` and
``srun`` set it in the environment. Nothing else is read: items never communicate, so no process
group is needed, and a process that joins or dies disturbs no other.

``accelerate launch --cpu --num_processes 2`` without MPI starts one process, whatever the
number; two on a machine without GPUs are ``accelerate launch --multi_gpu --num_processes 2``, or
``workers=2`` without a launcher.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from gen.core.errors import GenError, bad_value
from gen.core.plain import is_digits

# Who sets them: rank, number of processes, rank on this machine. The first family that is there
# counts; a launcher that
# srun or mpirun started has said its own ranks over theirs.
FAMILIES = (
    ("torchrun", "RANK", ("WORLD_SIZE",), "LOCAL_RANK"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpirun", "MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",), "MV2_COMM_WORLD_LOCAL_RANK"),
    ("mpirun", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID"),
    ("srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_LOCALID"),
)
VARIABLES = tuple(
    sorted(
        {v for by, rank, sizes, local in FAMILIES if by != "srun" for v in (rank, *sizes, local)}
    )
)


@dataclass(frozen=True)
class ProcessRank:
    """Process ``rank`` of ``world``, the ``local_rank``-th on its machine, started ``by`` this
    launcher (empty: by none)."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    by: str = ""

    @property
    def launched(self) -> bool:
        """True if other processes run the same command."""
        return self.world > 1

    @property
    def leader(self) -> bool:
        """True for the process that shows progress and writes the gallery."""
        return self.rank == 0


def process_rank(environ: Mapping[str, str] | None = None) -> ProcessRank:
    """Read the rank of this process. Raises ``GenError`` if the environment contradicts itself."""
    environ = os.environ if environ is None else environ
    for by, rank_name, size_names, local_name in FAMILIES:
        size_name = next((n for n in size_names if environ.get(n)), size_names[0])
        if by == "srun" and not (
            environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEP_NUM_TASKS")
        ):
            continue  # a batch script is told the number of tasks as well, and is one process
        rank, world = _number(environ, rank_name), _number(environ, size_name)
        if (rank is None and world is None) or (by == "srun" and None in (rank, world)):
            continue
        if rank is None or world is None:
            there, gone = (size_name, rank_name) if rank is None else (rank_name, size_name)
            raise GenError(
                f"{there} is set in the environment and {gone} is not; expected both, as {by} sets"
                " them, or neither"
            )
        if rank >= world:
            raise bad_value(
                rank_name, rank, f"less than {size_name}, which is {world}", "the environment"
            )
        return ProcessRank(rank, world, _number(environ, local_name) or 0, by)
    return ProcessRank()


def single_by_accelerate(environ: Mapping[str, str] | None = None) -> bool:
    """Return True if ``accelerate launch`` was asked for several processes and started this one
    only, as it does with ``--cpu``."""
    environ = os.environ if environ is None else environ
    return (
        "ACCELERATE_MIXED_PRECISION" in environ
        and "MASTER_ADDR" in environ
        and process_rank(environ) == ProcessRank()
    )


def own_device(name: str, number: int, count: int | None = None) -> str:
    """Return the device of the ``number``-th process of a machine: ``cuda`` becomes ``cuda:1``,
    dealt round robin over the ``count`` visible ones (counted here by default). Any other device
    is left as it is."""
    if name != "cuda":
        return name
    if count is None:
        count = torch.cuda.device_count()
    return f"cuda:{number % count}" if count else name  # without any, the loader reports it


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not is_digits(text):
        raise bad_value(name, text, "an integer of at least 0", "the environment")
    return int(text)
