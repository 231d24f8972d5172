"""Benchmark ``gen bench jobs``: cost of the job layer in time and memory.

It answers two questions. *Cost per item* without generation: many items through
`gen.jobs.run.run_job` with ready-made images, once per layout, each in a process of its own so that
the memory is that run's. *Cost beside a model*: a job of each embedded modality against a plain
loop over the same microbatches, interleaved. The loop also saves the outputs, without the
durability of a job, because any script has to encode them. Every figure is given as wall time, what
a user waits, and as processor time, which varies less on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image

from gen.bench.jobs.clock import Clock, Marks, resident
from gen.bench.measure import prompts_of
from gen.bench.report import machine
from gen.bench.table import laid_out
from gen.config.job import make_job
from gen.core.errors import GenError, bad_value
from gen.core.files import put_text
from gen.core.memory import MANY, give_back
from gen.core.registry import registry
from gen.core.sampling_params import SamplingParams
from gen.core.stats import Stats
from gen.jobs.defaults import DEFAULT_SAMPLER, SAMPLING_FLAGS
from gen.jobs.run import run_job
from gen.modalities.image import captions as shapes
from gen.pipeline import pipeline
from gen.pipeline.output import PipelineOutput
from gen.pipeline.pipeline import Pipeline

ITEMS, BATCH, PROMPTS, REPEATS = 10_000, 8, 64, 3
QUICK = {"items": 200, "prompts": 16, "repeats": 1}
LAYOUTS = ("files", "shards")
MB = 1e6


def bench_jobs(args: argparse.Namespace) -> int:
    """Carry out the command. Raises ``GenError`` for flags that are about samplers."""
    for key in (
        "samplers",
        "sweep",
        "peers",
        "oracle",
        "json",
        "gallery",
        "model",
        "model_option",
        "device",
        "dtype",
        "compile",
        *SAMPLING_FLAGS,
    ):
        if getattr(args, key, None) not in (None, False, ""):
            raise GenError(
                f"--{key.replace('_', '-')} is given to gen bench jobs, which"
                " measures the job layer; expected it with a modality"
            )
    usual = QUICK if args.quick else {"items": ITEMS, "prompts": PROMPTS, "repeats": REPEATS}
    given = {
        key: getattr(args, key) if getattr(args, key) is not None else usual[key] for key in usual
    }
    for key, least in (("items", 0), ("prompts", 1), ("repeats", 1)):
        if given[key] < least:
            raise bad_value(f"--{key}", given[key], f"an integer of at least {least}")
    known = list(registry.table("modality"))
    names = [
        n.strip() for n in (args.modalities or ",".join(known)).split(",") if n.strip() != "none"
    ]
    for name in names:
        registry.get("modality", name, "--modalities")
    found: dict[str, Any] = {
        "machine": machine(),
        **given,
        "batch_size": BATCH,
        "folder": tempfile.gettempdir(),
        "layouts": {},
        "modalities": {},
    }
    for layout in LAYOUTS if given["items"] else ():
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            found["layouts"][layout] = process.submit(layer, layout, given["items"]).result()
        print(layer_table(layout, found["layouts"][layout], args.markdown) + "\n", flush=True)
    for name in names:
        found["modalities"][name] = beside(name, given["prompts"], given["repeats"], args.seed)
    if names:
        print(beside_table(found["modalities"], args.markdown))
    if args.out:
        put_text(Path(args.out), json.dumps(found, ensure_ascii=False, indent=1) + "\n")
    return 0


# --- items that cost nothing


def layer(layout: str, items: int, pipe: Any = None) -> dict[str, Any]:
    """Measure a job of ``items`` ready-made images: the run itself, the same command again, and a
    run that is stopped halfway and resumed."""
    pipe = pipe or ready()
    with tempfile.TemporaryDirectory(prefix="gen-bench-") as root:
        run_once("files", 8, Path(root, "warm"), pipe)  # imports
        idle = resident()
        whole = run_once(layout, items, Path(root, "whole"), pipe)
        again = run_once(layout, items, Path(root, "whole"), pipe)
        parted = [
            run_once(layout, items, Path(root, "parted"), pipe, until)
            for until in (items // 2, items)
        ]
    return {
        "items": items,
        "idle": idle,
        "whole": whole,
        "again": again,
        "stopped": parted[0],
        "resumed": parted[1],
    }


def run_once(
    layout: str, items: int, folder: Path, pipe: Any, until: int | None = None
) -> dict[str, Any]:
    """Call ``run_job`` once, up to ``until`` items. Seconds are those of the whole call; ``marks``
    are items and bytes of resident memory."""
    captions = pipe.modality.example_prompts(min(items, 256), 0)
    prompts = [captions[i % len(captions)] for i in range(items)]
    tree = {
        "modality": "image",
        "sampler": DEFAULT_SAMPLER,
        "prompts": prompts,
        "batch_size": BATCH,
        "layout": layout,
        "out": str(folder),
    }
    job = make_job(tree, where="gen bench jobs")
    give_back(MANY)  # growth would not show where it went into what earlier work has left
    clock, marks = Clock(), Marks(max(BATCH, items // 10))
    stop = (lambda: marks.made >= until) if until and until < items else (lambda: False)
    with clock.running(pipe.modality):
        wall, cpu = time.perf_counter(), time.process_time()
        summary = run_job(job, progress=marks, load=lambda *_, **__: pipe, stop=stop)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "seconds": wall,
        "cpu": cpu,
        "made": marks.made,
        "there": summary["items"],
        "first": marks.first,
        "parts": {k: asdict(v) for k, v in sorted(clock.parts.items())},
        "marks": marks.marks,
        "growth": marks.growth,
        "end": resident(),
    }


def ready() -> Any:
    """Make an image pipeline with ready-made outputs, so that no model is loaded."""

    class Ready(Pipeline):
        media = [
            Image.fromarray(shapes.draw(c, np.random.default_rng(i)))
            for i, c in enumerate(shapes.captions(16, 0, held=True))
        ]
        tokens = torch.zeros(1, 256, dtype=torch.long)

        def generate(
            self,
            items,
            sampler=DEFAULT_SAMPLER,
            sampling=None,
            *,
            trace=False,
            callback=None,
            start=None,
            on_chunk=None,
            max_batch=None,
        ):
            media = [self.media[i.seed % len(self.media)] for i in items]
            stats = [
                Stats(
                    nfe=40,
                    tokens=256,
                    tokens_computed=512,
                    positions_computed=512,
                    mean_acceptance_length=6.4,
                )
                for _ in items
            ]
            return PipelineOutput(
                media,
                self.tokens.expand(len(items), -1),
                stats,
                None,
                list(items),
                "image",
                "ready",
                dict(sampler),
                "sample",
                SamplingParams(**sampling),
                self.device,
                self.dtype,
                grid=(16, 16),
                served=self.modality,
            )

    return Ready("image")


def layer_table(layout: str, found: dict[str, Any], markdown: bool = False) -> str:
    whole, items = found["whole"], found["items"]

    def per(x):
        return f"{1000 * x / items:.3f}"

    rows = [[f"layout {layout}, {items} items", "ms per item", "processor ms", "calls"]]
    rows += [["the whole run", per(whole["seconds"]), per(whole["cpu"]), "1"]]
    rows += [
        [f"  {name}", per(p["seconds"]), per(p["cpu"]), str(p["calls"])]
        for name, p in whole["parts"].items()
    ]
    half, rest = found["stopped"], found["resumed"]
    rows += [
        [
            "the run again, nothing to do",
            per(found["again"]["seconds"]),
            per(found["again"]["cpu"]),
            "1",
        ]
    ]
    if rest["first"] is not None:
        rows += [
            [
                f"resumed with {half['made']} done, until the first item",
                *[f"{rest['first']:.2f} s in all", "", ""],
            ]
        ]
        both = [half[k] + rest[k] for k in ("seconds", "cpu")]
        rows += [["both halves", per(both[0]), per(both[1]), "2"]]
    told = ", ".join(f"{n}: {size / MB:.0f}" for n, size in whole["marks"])
    grown = (
        ""
        if whole["growth"] is None
        else f"; {whole['growth'] / MB:+.1f} MB from the first mark to the last"
    )
    return (
        f"{laid_out(rows, markdown)}\nMB resident at so many items: {told}{grown}; idle"
        f" {found['idle'] / MB:.0f}, end {whole['end'] / MB:.0f}"
    )


# --- beside a model


def beside(
    name: str, count: int, repeats: int, seed: int = 0, load: Callable[..., Any] | None = None
) -> dict[str, Any]:
    """Compare a job of ``count`` items of a modality, with its default model and sampling
    parameters, with a loop over its microbatches; medians of ``repeats``."""
    pipe = (load or pipeline.load)(name)
    prompts = prompts_of(pipe.modality, name, count, seed)
    with tempfile.TemporaryDirectory(prefix="gen-bench-") as root:
        first = by_job(pipe, name, prompts[: 2 * BATCH], seed, Path(root, "warm"))
        by_loop(pipe, first["batches"][:1], Path(root, "warm-loop"))
        runs, batches = [], None
        for repeat in range(repeats):
            arms: dict[str, dict[str, Any]] = {}
            for arm in ("job", "loop") if repeat % 2 == 0 else ("loop", "job"):
                folder = Path(root, f"{arm}-{repeat}")
                arms[arm] = (
                    by_job(pipe, name, prompts, seed, folder)
                    if arm == "job"
                    else by_loop(pipe, batches, folder)
                )
                batches = batches or arms["job"]["batches"]
            runs.append(arms)
    for arms in runs:
        del arms["job"]["batches"]
    return {"items": count, "runs": runs, **compared(runs)}


def by_job(pipe: Any, name: str, prompts: list[str], seed: int, folder: Path) -> dict[str, Any]:
    """Run one job. ``batches``: the requests that it sent to the pipeline."""
    sampling = pipe.resolve(DEFAULT_SAMPLER, None)[1].to_dict()
    job = make_job(
        {
            "modality": name,
            "sampler": DEFAULT_SAMPLER,
            "sampling": sampling,
            "prompts": prompts,
            "seed": seed,
            "batch_size": BATCH,
            "out": str(folder),
        },
        where="gen bench jobs",
    )
    clock, watched = Clock(), Watched(pipe)
    watched.generate = clock.timed("generate", watched.generate)
    with clock.running(pipe.modality):
        wall, cpu = time.perf_counter(), time.process_time()
        summary = run_job(job, load=lambda *_, **__: watched)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if summary["failed"]:
        raise GenError(f"{name}: {summary['failed'][0]['error']}")
    return {
        "seconds": wall,
        "cpu": cpu,
        "nfe": watched.nfe,
        "parts": {k: asdict(v) for k, v in sorted(clock.parts.items())},
        "batches": watched.batches,
    }


def by_loop(pipe: Any, batches: list[tuple], folder: Path) -> dict[str, Any]:
    """Generate and save as a script would. ``seconds`` and ``cpu`` are those of generating; saving
    is counted separately."""
    folder.mkdir()
    spent = {"seconds": 0.0, "cpu": 0.0, "encode": 0.0, "encode_cpu": 0.0}
    nfe = 0
    for number, (items, sampler, sampling, how) in enumerate(batches):
        at = time.perf_counter(), time.process_time()
        out = pipe.generate(items, sampler, sampling, **{**how, "callback": lambda info: None})
        made = time.perf_counter(), time.process_time()
        for i, (item, media) in enumerate(zip(items, out.media, strict=True)):
            info, stem = {"prompt": item.prompt, "seed": item.seed}, folder / f"{number:03d}-{i}"
            pipe.modality.save(media, stem.with_suffix(f".{pipe.modality.extension}"), info)
            for extension in pipe.modality.also:
                pipe.modality.save_also(media, stem.with_suffix(f".{extension}"), info)
        saved = time.perf_counter(), time.process_time()
        for key, a, b, kind in (
            ("seconds", at, made, 0),
            ("cpu", at, made, 1),
            ("encode", made, saved, 0),
            ("encode_cpu", made, saved, 1),
        ):
            spent[key] += b[kind] - a[kind]
        nfe += sum(s.nfe for s in out.stats)
    return {**spent, "nfe": nfe}


class Watched:
    """Pipeline that records its requests and counts forward passes."""

    def __init__(self, pipe: Any):
        self.pipe, self.batches, self.nfe = pipe, [], 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pipe, name)

    def generate(self, items: Any, sampler: Any, sampling: Any, **how: Any) -> Any:
        self.batches.append((list(items), sampler, sampling, how))
        out = self.pipe.generate(items, sampler, sampling, **how)
        self.nfe += sum(s.nfe for s in out.stats)
        return out


def compared(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians of shares of generation time.

    ``overhead`` is the time of a job beyond generating, ``encode`` that of saving the outputs
    plainly, ``own`` the first without the second, and ``parts`` the processor seconds of the job
    layer's parts, by a clock around each.
    """

    def mid(of):
        return median(of(r) for r in runs)

    share: dict[str, Any] = {}
    for kind, encode in (("seconds", "encode"), ("cpu", "encode_cpu")):
        total = mid(lambda r: r["job"][kind] / r["loop"][kind] - 1)
        saving = mid(lambda r: r["loop"][encode] / r["loop"][kind])
        share[kind] = {
            "overhead": total,
            "encode": saving,
            "own": mid(lambda r: (r["job"][kind] - r["loop"][encode]) / r["loop"][kind] - 1),
        }
    names = sorted({n for r in runs for n in r["job"]["parts"]} - {"generate"})
    zero = {"seconds": 0.0, "cpu": 0.0}
    parts = {
        n: {k: mid(lambda r: r["job"]["parts"].get(n, zero)[k] / r["loop"][k]) for k in zero}
        for n in names
    }

    def part(r, n):
        return r["job"]["parts"].get(n, zero)["cpu"]

    layer = mid(
        lambda r: (
            (sum(part(r, n) for n in ("plan", "commit", "tar", "publish")) - part(r, "encode"))
            / r["loop"]["cpu"]
        )
    )
    return {
        "generate": mid(lambda r: r["loop"]["seconds"]),
        "job": mid(lambda r: r["job"]["seconds"]),
        "share": share,
        "parts": parts,
        "layer": layer,
    }


def beside_table(found: dict[str, dict[str, Any]], markdown: bool = False) -> str:
    rows = [
        [
            "modality",
            "items",
            "generating s",
            "job s",
            "beyond generating",
            "encoding",
            "the rest",
            "of the processor",
            "plan, ledger, writing",
            "gallery",
        ]
    ]
    for name, r in found.items():
        wall, cpu = r["share"]["seconds"], r["share"]["cpu"]
        gallery = r["parts"].get("gallery", {"cpu": 0.0})["cpu"]
        rows.append(
            [
                name,
                str(r["items"]),
                f"{r['generate']:.2f}",
                f"{r['job']:.2f}",
                *(
                    f"{100 * x:.1f} %"
                    for x in (
                        wall["overhead"],
                        wall["encode"],
                        wall["own"],
                        cpu["own"],
                        r["layer"],
                        gallery,
                    )
                ),
            ]
        )
    return laid_out(rows, markdown)
