"""Measure how long a GGUF file takes to load: in gen, in transformers and in llama.cpp.

    python -m gen.recipes.text.loading smollm2

Each row is a process of its own, which loads the model twice: the first time imports what a model
needs, the second shows the loading alone. Rows take turns ``--repeats`` times, and the table has
medians: seconds on the clock, seconds of all cores, and the most memory of the first load.
``folder`` is gen on the same weights as float32 safetensors. llama.cpp comes from the package
xllamacpp, and is left out with a note where that is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gen.contracts.checkpoint import CheckpointFiles
from gen.core.errors import GenError
from gen.core.tables import columns
from gen.models.load.gguf import GgufFile
from gen.models.load.libraries import transformers
from gen.pipeline.pipeline import load

LLAMA, MEMORY = "llama.cpp", "MiB"
TRIES, LONGEST = 3, 300  # runs of a process, seconds of one


def file_of(model: str) -> GgufFile:
    """Return the GGUF file of a model. Raises ``GenError`` for a model in another format."""
    gguf = CheckpointFiles.find(model).gguf
    if gguf is None:
        raise GenError(f"model {model} is no GGUF file")
    return gguf


def in_gen(model: str) -> Any:
    return load("text", model=model, device="cpu", dtype="float32")


def in_transformers(model: str) -> Any:
    gguf = file_of(model)
    how = {key: value for key, value in gguf.keywords.items() if key != "config"}
    folder, file = gguf.path.parent, gguf.path.name
    library = transformers()
    network = library.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    return network, library.AutoTokenizer.from_pretrained(folder, gguf_file=file)


def in_llama_cpp(model: str) -> Any:
    path = file_of(model).path
    library = import_module("xllamacpp")
    params = library.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.verbosity = str(path), 2048, 1, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
    return library.Server(params)


ROWS: dict[str, Callable[[str], Any]] = {
    "gen": in_gen, "folder": in_gen, "transformers": in_transformers, LLAMA: in_llama_cpp,
}  # fmt: skip


def most_resident() -> float:
    """Return the most memory that this process had, in MiB. The maximum of ``getrusage`` is no
    less than the memory of the parent process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) / 1024 for x in lines if x.startswith("VmHWM"))


def measure(row: str, model: str) -> dict[str, float]:
    """Load a model twice in this process; return seconds, and mebibytes at most."""
    found: dict[str, float] = {}
    kept = []  # a server of llama.cpp may wait for ever when it is deleted
    for name in ("first", "again"):
        clock, cores = time.perf_counter(), time.process_time()
        kept.append(ROWS[row](model))
        found[f"{name}, clock"] = time.perf_counter() - clock
        found[f"{name}, cores"] = time.process_time() - cores
        found.setdefault(MEMORY, most_resident())
    return found


def in_process(row: str, model: str) -> dict[str, float]:
    """Measure a row in a process of its own. A server of llama.cpp that does not come up is started
    again. Raises ``GenError`` for a model that does not load."""
    command = [sys.executable, "-m", "gen.recipes.text.loading", model, "--row", row]
    for _ in range(TRIES):
        with suppress(subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST)
            if done.returncode:
                raise GenError(f"{row} does not load {model}: {done.stderr[-500:]}")
            return json.loads(done.stdout.splitlines()[-1])
    raise GenError(f"{row} does not load {model} within {LONGEST} s, tried {TRIES} times")


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Return the medians of measurements, a line for each row."""
    keys = list(next(iter(found.values()))[0])
    lines = [["", *keys]]
    for row, measured in found.items():
        values = {key: median(x[key] for x in measured) for key in keys}
        lines.append([row, *(f"{v:.0f}" if k == MEMORY else f"{v:.2f}" for k, v in values.items())])
    return columns(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how long a GGUF file takes to load.")
    parser.add_argument("model", help="a GGUF file, or smollm2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--row", choices=ROWS, help="measure one row here, and print JSON")
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measure(args.row, args.model)), flush=True)
        os._exit(0)  # without deleting what was loaded
    rows = dict(ROWS)
    if find_spec("xllamacpp") is None:
        print("llama.cpp is left out: its package is missing (pip install xllamacpp)")
        del rows[LLAMA]
    found: dict[str, list[dict[str, float]]] = {row: [] for row in rows}
    with tempfile.TemporaryDirectory() as parent:
        folder = in_gen(args.model).save_pretrained(Path(parent) / "folder")
        for _ in range(args.repeats):
            for row in rows:
                model = str(folder) if row == "folder" else args.model
                found[row].append(in_process(row, model))
    print(table(found))


if __name__ == "__main__":
    main()
