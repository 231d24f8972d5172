"""Which process this is: read from what launchers really set, and refused where that contradicts
itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from toyjob import run

from gen.core.errors import GenError
from gen.jobs import run as jobs
from gen.jobs.rank import ProcessRank, own_device, process_rank, single_by_accelerate

ACCELERATE = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
}


@pytest.mark.parametrize(
    "environ, want",
    [
        ({}, ProcessRank()),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, ProcessRank(3, 4, 1, "torchrun")),
        (
            {**ACCELERATE, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
            ProcessRank(1, 2, 1, "torchrun"),
        ),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ProcessRank(1, 2, 0, "torchrun")),
        (
            {
                "OMPI_COMM_WORLD_RANK": "2",
                "OMPI_COMM_WORLD_SIZE": "3",
                "OMPI_COMM_WORLD_LOCAL_RANK": "2",
            },
            ProcessRank(2, 3, 2, "mpirun"),
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"},
            ProcessRank(1, 2, 1, "mpirun"),
        ),
        (SRUN, ProcessRank(5, 8, 1, "srun")),
        (
            {**SRUN, "SLURM_STEP_NUM_TASKS": "6"},
            ProcessRank(5, 6, 1, "srun"),
        ),  # srun -n 6 in a job of 8 tasks
        (
            {**SRUN, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            ProcessRank(0, 2, 0, "torchrun"),
        ),  # srun started torchrun
        (
            {**SRUN, "SLURM_STEP_ID": "", "SLURM_PROCID": "0"},
            ProcessRank(),
        ),  # a batch script: one process, told of 8 tasks
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, ProcessRank()),  # salloc
        (ACCELERATE, ProcessRank()),
    ],
)
def test_the_place_is_what_the_launcher_set(environ, want):
    assert process_rank(environ) == want
    assert (want.launched, want.leader) == (want.world > 1, want.rank == 0)


@pytest.mark.parametrize(
    "environ, text",
    [
        ({"RANK": "1"}, "RANK is set in the environment and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set in the environment and RANK is not"),
        (
            {"RANK": "two", "WORLD_SIZE": "3"},
            "RANK is 'two' in the environment; expected an integer",
        ),
        (
            {"RANK": "2", "WORLD_SIZE": "2"},
            "RANK is 2 in the environment; expected less than WORLD_SIZE, which is 2",
        ),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "expected an integer of at least 0"),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(environ, text):
    with pytest.raises(GenError, match=text):
        process_rank(environ)


def test_accelerate_that_started_one_process_of_several_is_noticed():
    assert single_by_accelerate({**ACCELERATE, "ACCELERATE_USE_CPU": "True"})
    assert not single_by_accelerate(
        {**ACCELERATE, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    )
    assert not single_by_accelerate(
        {k: v for k, v in ACCELERATE.items() if k != "MASTER_ADDR"}
    )  # one was asked for
    assert not single_by_accelerate({"MASTER_ADDR": "10.0.0.1"})


def test_plain_cuda_is_dealt_round_robin_and_everything_else_is_left_alone():
    assert [own_device("cuda", i, 2) for i in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert own_device("cuda", 3, 1) == "cuda:0"  # a cluster that shows every process its own GPU
    assert own_device("cuda", 1, 0) == "cuda"
    assert [own_device(name, 1, 4) for name in ("cpu", "cuda:2", "mps")] == ["cpu", "cuda:2", "mps"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, want",
    [
        (["--multi_gpu", "--num_processes", "2"], {("0", "2"), ("1", "2")}),
        (["--cpu", "--num_processes", "2"], {("single",)}),
    ],
)
def test_accelerate_launch_sets_what_is_read_here(tmp_path, options, want):
    (tmp_path / "say.py").write_text(
        "from gen.jobs.rank import process_rank, single_by_accelerate\np = process_rank()\n"
        "print('single' if single_by_accelerate() else f'{p.rank} {p.world}', flush=True)\n"
    )
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        *options,
        "--main_process_port",
        "0",
        str(tmp_path / "say.py"),
    ]
    clean = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("ACCELERATE_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_"))
    }
    done = subprocess.run(
        command, env={**clean, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert {tuple(line.split()) for line in done.stdout.splitlines() if line.strip()} == want


@pytest.mark.usefixtures("toy")
def test_of_several_processes_of_one_launcher_only_the_first_overwrites(tmp_path, monkeypatch):
    run(tmp_path)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(jobs, "PATIENCE", 0.1)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    with pytest.raises(GenError, match="has not overwritten"):
        run(tmp_path, seed=7, overwrite=True)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before
    monkeypatch.setenv("RANK", "0")
    assert run(tmp_path, seed=7, overwrite=True)[0]["skipped"] == 0
    monkeypatch.setenv("RANK", "1")
    assert (
        run(tmp_path, seed=7, overwrite=True)[0]["skipped"] == 3
    )  # it finds what the first one has planned
