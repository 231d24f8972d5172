"""One process of a run with ``tp``: what it draws, and what it refuses, as JSON.

torchrun starts it as ``split_run.py FOLDER``, where the models lie.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gen
from gen.core.errors import GenError

POSITIONS = 20
PROMPTS = ["w1 w2 w3", "w5", "w9 w8 w7 w6 w5 w4 w9 w8 w7", "w3 w3"]
KINDS = ("llama", "qwen3", "gemma3", "phi3", "gpt_neox")  # phi3 has fused layers, gemma3 windows
DRAFT = "draft"  # a model that every process has as a whole


def samplers(folder: Path) -> dict[str, Any]:
    """Samplers by name."""
    return {
        "autoregressive": "autoregressive",
        "speculative_jacobi": {"name": "speculative_jacobi", "window": 6},
        "draft model": {"name": "speculative", "draft_model": str(folder / DRAFT)},
        "trees": {
            "name": "speculative",
            "draft_model": str(folder / DRAFT),
            "shape": "beam",
            "verifier": "follow",
        },
        "prompt_lookup": "prompt_lookup",
        "layer_skip": "layer_skip",
    }


def load(folder: Path, kind: str, **more: Any) -> gen.Pipeline:
    """Load one of the models."""
    keys = {"dtype": "float64", "max_new_tokens": POSITIONS, "device": "cpu"}
    return gen.load("text", model=folder / kind, **keys, **more)


def drawn(folder: Path, kind: str, **more: Any) -> dict[str, list]:
    """Tokens and passes of every sampler, of prompts of several lengths in batches of three."""
    pipe, found = load(folder, kind, **more), {}
    for name, spec in samplers(folder).items():
        out = pipe(PROMPTS, spec, num_samples=2, seed=7, batch_size=3, temperature=0.8)
        found[name] = [out.tokens.tolist(), [s.nfe for s in out.stats]]
    return found


def error_of(call: Callable[[], Any]) -> str:
    """Return the message of the error that a call raises; empty for none."""
    try:
        call()
    except GenError as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    """Draw and refuse; write what came to ``rank-N.json``."""
    rank = int(os.environ["RANK"])
    found: dict[str, Any] = {kind: drawn(folder, kind, tp=2) for kind in KINDS}
    pipe = load(folder, "llama", tp="auto")
    own = ("llama", "other")[rank]
    found["errors"] = {
        "seeds": error_of(lambda: pipe(PROMPTS, seed=rank)),
        "last": error_of(lambda: pipe(["w1"], seed=rank, max_new_tokens=1, temperature=9.0)),
        "temperature": error_of(lambda: pipe(PROMPTS, seed=3, temperature=0.5 + rank)),
        "prompts": error_of(lambda: pipe(PROMPTS[rank], seed=3)),
        "files": error_of(lambda: load(folder, own, tp=True)),
        "count": error_of(lambda: load(folder, "llama", tp=3)),
        "heads": error_of(lambda: load(folder, "one_head", tp=2)),
        "no plan": error_of(lambda: load(folder, "gpt2", tp=2)),
    }
    found["seeds"] = pipe(PROMPTS).seeds
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
