"""Freeze what the toolkit puts out, so that a refactor that changes behaviour is found.

    samplers  every spec that the contract tests walk, on models in closed form and on the tiny
              architectures: tokens, costs per row and traces; masked ones from a canvas, too
    families  every family of published checkpoints, on its tiny random instance: tokens, media
    zoo       the embedded models of every modality: tokens, costs, media
    jobs      job files to folders: rows of the manifest, traces, stored tokens, media

All in float64 on a CPU, with fixed seeds. Ids and counts have to be equal; latents and what is
made of them have to be close: random weights are drawn in float32, and processors round. Keys are
spec ids and the neutral names below, none of the code's.

    python tests/support/freeze.py --check [--only samplers ...]
    python tests/support/freeze.py --write [--only samplers ...] [--names bench/halton ...]

Write only where outputs are meant to change, and say why; ``--names`` leaves all other entries.
A spec that got another name keeps its entry: put the new name and the frozen one into ``RENAMED``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
if __name__ == "__main__":  # pytest has both on its path
    sys.path[:0] = [str(TESTS.parent), str(HERE)]

import closed_form as closed
import contract_bench as contract
import latent_bench as latent
import numpy as np
import torch
import transformers
import yaml
from families import WRITERS
from torch import Tensor

import gen
from gen.config.job import load_config
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.jobs.run import run_job
from gen.store.ledger import read_rows
from gen.testing.specs import NAMES, SPECS, sampling_for

FILE = TESTS / "contracts" / "frozen.json"
CLOSE = 1e-4  # another instruction set moves latents by up to 5e-5; other draws by far more
# the name of a spec today -> the one that the file has
RENAMED: dict[str, str] = {"remask-below_threshold": "remask-hierarchy_remask"}
Entry = dict[str, Any]

# --- contact with the code: everything that a change of names there can break. It returns plain
# values under keys that are the file's own

SAMPLING = "sampling"  # the key of a job file for temperature, guidance and filters
PLAIN = {"temperature": 0.9}
STATS = {
    "nfe": "nfe", "made": "tokens", "computed": "tokens_computed", "draft_nfe": "draft_nfe",
    "accepted": "draft_acceptance_rate", "histogram": "acceptance_histogram",
}  # fmt: skip
ROW = {
    "index": "index", "modality": "modality", "prompt": "prompt", "seed": "seed",
    "sampler": "sampler", "model": "model", "file": "file", "status": "status", "error": "error",
    "nfe": "nfe", "made": "tokens", "computed": "tokens_computed",
    "accepted": "draft_acceptance_rate",
}  # fmt: skip
STEP = ("window", "accepted", "committed", "removed")


def on_bench(spec: Mapping, name: str, model: str | None = None, canvas: bool = False) -> Any:
    """Run a spec on the bench of the contract tests, with its usual sampling parameters."""
    sampler, params = resolve_sampler(spec, sampling_for(name))
    bench = contract.bench(sampler.protocol, model or contract.model_for(sampler))
    more = {"canvas": contract.canvas_of(bench.space)} if canvas else {"trace": True}
    return bench(sampler, params, **more)


def on_leaning(spec: Mapping, name: str) -> Any:
    """Run a spec on the larger models in closed form, whose drafts are often right."""
    return closed.of_ids(*resolve_sampler(spec, sampling_for(name)))


def on_latents(spec: Mapping) -> Any:
    """Run a spec on the tiny architectures for latents."""
    return latent.run(resolve_sampler(spec)[0], trace=True)


def on_gaussians(spec: Mapping) -> Any:
    """Run a spec on linear Gaussian models of latents."""
    return closed.of_numbers(*resolve_sampler(spec, PLAIN))


@cache
def zoo(modality: str, model: str | None) -> Any:
    """Load the embedded models of a modality."""
    return gen.load(modality, model=model, dtype="float64")


def sample(pipe: Any, prompts: list[str], spec: Any, **start: Any) -> Any:
    """Call a pipeline with the seed of this file."""
    return pipe(prompts, sampler=spec, seed=5, **start)


def example_prompts(modality: str) -> list[str]:
    """Return a prompt of a modality, or some where they are quick."""
    return zoo(modality, None).modality.example_prompts(COUNT.get(modality, 1), 0)


def load_media(modality: str, path: Path) -> Any:
    """Read a media file."""
    return registry.get("modality", modality)().load(path)


def arrays_of(media: Any) -> list[np.ndarray]:
    """Take a medium apart into arrays: a motion has two."""
    parts = [media.root, media.rotations] if hasattr(media, "rotations") else [media]
    return [np.asarray(part) for part in parts]


def step_of(step: Any) -> list[Any]:
    """Reduce a step of a trace, or its JSON, to positions and committed (position, token)."""
    take = step.get if isinstance(step, Mapping) else partial(getattr, step)
    window, accepted, committed, removed = (take(name) for name in STEP)
    pairs = sorted([int(n), x] for n, x in committed.items())
    where = [pair if isinstance(pair[1], int) else pair[0] for pair in pairs]
    return [list(window), list(accepted), where, list(removed)]


def stored_tokens(path: Path) -> list[int]:
    """Read the ids beside a medium."""
    with np.load(path, allow_pickle=False) as found:
        return found["tokens"].tolist()


# --- plain values


def numbers(values: Any) -> Any:
    """Turn tensors and arrays into lists; floats keep seven significant digits."""
    if isinstance(values, (Tensor, np.ndarray)):
        values = values.tolist()
    if isinstance(values, (list, tuple)):
        return [numbers(x) for x in values]
    if isinstance(values, float):
        return float(f"{values:.7g}") if math.isfinite(values) else str(values)
    return values


def digest(value: Any) -> str:
    """Hash plain values without floats."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def columns(stats: list[Any]) -> Entry:
    """Collect what every row cost, under neutral names."""
    found = {key: [numbers(getattr(s, name)) for s in stats] for key, name in STATS.items()}

    def said(values):
        return any(v not in (None, []) for v in values)

    return {key: values for key, values in found.items() if said(values)}


def sampled(out: Any) -> Entry:
    """Reduce the output of a sampler: tokens, costs, the first row's trace and all rows' hash."""
    entry = {"tokens": numbers(out.tokens), **columns(out.stats)}
    if out.traces:
        traces = [[step_of(s) for s in trace] for trace in out.traces]
        entry |= {"trace": traces[0], "traces": digest(traces)}
    return entry


def medium(media: Any) -> Any:
    """Reduce a medium: text as it is, else its shape, mean, deviation and mean along a ramp."""
    if isinstance(media, str):
        return media
    arrays = arrays_of(media)
    values = np.concatenate([a.astype(np.float64).ravel() for a in arrays])
    ramp = float((values * np.linspace(0, 1, len(values))).mean())
    shapes = [list(a.shape) for a in arrays]
    return [shapes, *numbers([float(values.mean()), float(values.std()), ramp])]


# --- the sections: name of an entry -> what makes it

Makers = dict[str, Callable[[], Entry]]


def samplers() -> Makers:
    """Collect the specs of ids and of latents, each on the models that the contract tests use."""
    made: dict[str, Callable[[], Any]] = {}
    for name, spec in SPECS.items():
        made[f"bench/{name}"] = partial(on_bench, spec, name)
    for name in contract.MASKED:
        made[f"canvas/{name}"] = partial(on_bench, SPECS[name], name, canvas=True)
    for name in NAMES:
        spec = SPECS[name]
        made[f"architecture/{name}"] = partial(on_bench, spec, name, "llama")
        made[f"leaning/{name}"] = partial(on_leaning, spec | closed.PARAMETERS.get(name, {}), name)
    for name, spec in latent.SPECS.items():
        made[f"latents/{name}"] = partial(on_latents, spec)
    for name, spec in latent.of_latents().items():
        made[f"gaussians/{name}"] = partial(on_gaussians, spec)
    return {key: lambda run=run: sampled(run()) for key, run in made.items()}


def family(name: str) -> Entry:
    """Sample two prompts from the tiny checkpoint of a family with each of its samplers."""
    entry = {}
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
        torch.manual_seed(0)
        case = WRITERS[name](Path(folder))
        said = case.path / "generation_config.json"
        greedy = said.is_file() and json.loads(said.read_text()).get("do_sample") is False
        # transformers writes so of some classes; draws tell more apart than the likeliest tokens
        drawn = {"generation_config": False} if greedy else {}
        pipe = gen.load(case.modality, model=case.path, dtype="float64", **case.options, **drawn)
        for spec in case.samplers:
            out = sample(pipe, list(case.prompts), spec)
            label = spec if isinstance(spec, str) else spec["name"]
            media = {"media": [medium(m) for m in out.media]}
            entry[RENAMED.get(label, label)] = sampled(out) | media
    return entry


def families() -> Makers:
    """Collect the families of checkpoints, and their further layouts."""
    return {name: partial(family, name) for name in WRITERS}


ZOO: dict[str, list[Any]] = {
    "action": ["autoregressive", "speculative_jacobi", "speculative", "maskgit", "halton"],
    "image": ["speculative_jacobi", "maskgit", "cspd", "mar"],
    "motion": ["speculative_jacobi", "speculative", "maskgit", "halton"],
    "speech": ["speculative_jacobi", "maskgit"],
    "text": [
        "speculative_jacobi",
        "speculative",
        "sjd",
        "maskgit",
        "fast_dllm",
        "llada2",
        "flexdraft",
    ],
    "video": ["speculative_jacobi", "maskgit"],
    "world": ["next_frame", "joint_frames"],
}
COUNT = {"text": 4, "action": 3}
MODELS = {"mar": "image-mar"}  # where it is not the modality's own
LEFT = np.tile(np.arange(64) < 24, (64, 1))  # of an image
STARTS: dict[str, tuple[str, str, Callable[[Any], dict]]] = {
    "motion/maskgit from a source": ("motion", "maskgit", lambda m: {"source": m, "span": "10:30"}),
    "motion/sjd from a prefix": ("motion", "sjd", lambda m: {"prefix": m.cut(0, 39)}),
    "image/halton from a source": ("image", "halton", lambda m: {"source": m, "mask": LEFT}),
}


def of_zoo(modality: str, spec: Any, start: Callable[[Any], dict] | None = None) -> Entry:
    """Sample one prompt from the embedded models; ``start``: what to begin with, given a medium."""
    pipe, prompts = zoo(modality, MODELS.get(spec)), example_prompts(modality)
    begun = {} if start is None else start(sample(pipe, prompts, "autoregressive").media[0])
    out = sample(pipe, prompts, spec, **begun)
    return sampled(out) | {"media": [medium(m) for m in out.media]}


def zoo_models() -> Makers:
    """Collect the embedded models of every modality, and a few that start from a medium."""
    made = {f"{m}/{spec}": partial(of_zoo, m, spec) for m, specs in ZOO.items() for spec in specs}
    return made | {name: partial(of_zoo, *how) for name, how in STARTS.items()}


WORDS = ["shuffle 4 0 7 5 =", "close ( [ {"]
IMAGE = ["a small blue ring in the centre"]
JOBS: dict[str, dict[str, Any]] = {
    "text": {
        "modality": "text", "prompts": WORDS, "num_samples": 2, "seed": 3, "trace": 2,
        "tokens": True, "batch_size": 3, SAMPLING: {"temperature": 1.0},
        "jobs": [
            {"sampler": {"name": "speculative_jacobi", "window": 4}},
            {"sampler": "autoregressive"}, {"sampler": "fast_dllm"},
            {"sampler": {"name": "maskgit", "steps": 4}, "seed": 8},
        ],
    },
    "image": {
        "modality": "image", "prompts": IMAGE, "tokens": True,
        SAMPLING: {"guidance_scale": 2.0, "top_k": 100},
        "jobs": [{"sampler": "scd_mc"}, {"sampler": {"name": "halton", "steps": 6}}],
    },
    "shards": {
        "modality": "action", "prompts": ["push the block", "avoid the wall"], "num_samples": 2,
        "layout": "shards", "shard_items": 2, SAMPLING: {"temperature": 0.2},
        "jobs": [{"sampler": "sjd"}, {"sampler": {"name": "maskgit", "steps": 4}}],
    },
}  # fmt: skip


def job(name: str) -> Entry:
    """Run a job file into a folder, and read what lies there."""
    with tempfile.TemporaryDirectory() as position:
        folder, config = Path(position) / "out", Path(position) / "job.yaml"
        tree = JOBS[name] | {"dtype": "float64", "out": str(folder)}
        config.write_text(yaml.safe_dump(tree))
        summary = run_job(load_config(config))
        rows, files = read_rows(folder), [p for p in folder.rglob("*") if p.is_file()]
        index = {row["id"]: str(row["index"]) for row in rows}
        entry = {
            "rows": [{key: numbers(row.get(k)) for key, k in ROW.items()} for row in rows],
            "counts": [summary["items"], summary["pending"], len(summary["failed"])],
            "again": run_job(load_config(config))["skipped"],
        }
        traces = {index[p.stem]: json.loads(p.read_text()) for p in files if p.stem in index}
        entry["traces"] = {n: [step_of(s) for s in traces[n]] for n in sorted(traces)}
        named = {row["file"]: row["modality"] for row in rows if "member" not in row}
        entry["media"] = {f: medium(load_media(m, folder / f)) for f, m in named.items()}
        stored = sorted(p for p in files if p.suffix == ".npz" and p.name not in named)
        entry["stored"] = {str(p.relative_to(folder)): stored_tokens(p) for p in stored}
    return entry


def jobs() -> Makers:
    """Collect the job files."""
    return {name: partial(job, name) for name in JOBS}


SECTIONS: dict[str, Callable[[], Makers]] = {
    "samplers": samplers, "families": families, "zoo": zoo_models, "jobs": jobs,
}  # fmt: skip


def makers(section: str) -> Makers:
    """Return what makes the entries of a section, under their names in the file."""
    found = SECTIONS[section]()

    def frozen(key):
        return "/".join(RENAMED.get(part, part) for part in key.split("/"))

    return {frozen(key): make for key, make in found.items()}


# --- the file


@cache
def held() -> dict[str, Any]:
    """Read the file."""
    return json.loads(FILE.read_text())


def differences(now: Any, then: Any, at: str = "") -> list[str]:
    """List where plain values differ: ids and texts have to be equal, floats close."""
    if isinstance(then, dict) and isinstance(now, dict):
        odd = [f"{at}.{k}: only in one of them" for k in sorted(now.keys() ^ then.keys())]
        shared = [k for k in then if k in now]
        return odd + [d for k in shared for d in differences(now[k], then[k], f"{at}.{k}")]
    if isinstance(then, list) and isinstance(now, list):
        if len(now) != len(then):
            return [f"{at}: {len(now)} values, frozen {len(then)}"]
        pairs = enumerate(zip(now, then, strict=True))
        return [d for n, (a, b) in pairs for d in differences(a, b, f"{at}[{n}]")]
    if isinstance(now, float) or isinstance(then, float):
        number = isinstance(now, (int, float)) and isinstance(then, (int, float))
        same = number and math.isclose(now, then, rel_tol=CLOSE, abs_tol=CLOSE)
    else:
        same = type(now) is type(then) and now == then
    return [] if same else [f"{at}: {now!r}, frozen {then!r}"]


def verdict(section: str, name: str, now: Entry) -> str:
    """Say what is wrong with an entry; empty where nothing is."""
    said = held()
    if name not in said["entries"][section]:
        return f"{section}: {name} is not in {FILE.name}"
    found = differences(json.loads(json.dumps(now)), said["entries"][section][name])
    if not found:
        return ""
    other = {k: (v, said["versions"][k]) for k, v in versions().items() if v != said["versions"][k]}
    about = f"; versions now and then: {other}" if other else ""
    about = f"differs from {said['commit']} in {len(found)} values{about}"
    return "\n  ".join([f"{section}: {name} {about}", *found[:8]])


def versions() -> dict[str, str]:
    """Return the versions of libraries that decide about random weights and rounding."""
    return {m.__name__: m.__version__.partition("+")[0] for m in (torch, transformers, np)}


def commit() -> str:
    """Name the last commit that changed more than tests."""
    call = ["git", "log", "-1", "--format=%h", "--", ".", ":!tests"]
    done = subprocess.run(call, cwd=HERE.parents[1], text=True, capture_output=True, check=True)
    return done.stdout.strip()


def write(sections: list[str], names: list[str]) -> None:
    """Renew some sections of the file, or the entries with some names, one line per entry."""
    entries = held()["entries"] if FILE.exists() else {}
    for section in sections:
        began, made = time.perf_counter(), makers(section)
        renewed = {name: make() for name, make in made.items() if not names or name in names}
        kept = {name: entry for name, entry in entries.get(section, {}).items() if name in made}
        known = {**kept, **renewed}
        # a spec that is new and was not named has no entry yet
        entries[section] = {name: known[name] for name in made if name in known}
        seconds = time.perf_counter() - began
        print(f"{section}: {len(renewed)} entries in {seconds:.1f} s", flush=True)
    plain = partial(json.dumps, ensure_ascii=False, separators=(",", ":"))
    lines = {
        s: ",\n".join(f"    {plain(n)}: {plain(e)}" for n, e in entries[s].items())
        for s in SECTIONS if s in entries
    }  # fmt: skip
    body = ",\n".join(f'  "{s}": {{\n{text}\n  }}' for s, text in lines.items())
    origin = held()["commit"] if names else commit()
    head = f'"commit": {plain(origin)},\n"versions": {plain(versions())},\n'
    FILE.write_text(f'{{\n{head}"entries": {{\n{body}\n}}\n}}\n')


def check(sections: list[str]) -> int:
    """Compare some sections with the file; returns how many entries differ."""
    wrong = 0
    for section in sections:
        began, made = time.perf_counter(), makers(section)
        gone = [f"{section}: {n} is gone" for n in held()["entries"][section] if n not in made]
        said = [verdict(section, name, make()) for name, make in made.items()]
        found = [*gone, *filter(None, said)]
        wrong += len(found)
        seconds = time.perf_counter() - began
        text = f"{section}: {len(made)} entries, {len(found)} differ, {seconds:.1f} s"
        print("\n".join([*found, text]), flush=True)
    return wrong


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--write", action="store_true")
    group.add_argument("--check", action="store_true")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--names", nargs="+", default=[])
    asked = parser.parse_args()
    if not asked.write:
        return min(check(asked.only), 1)
    write(asked.only, asked.names)
    return 0


if __name__ == "__main__":
    sys.exit(main())
