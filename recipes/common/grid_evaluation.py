"""Measurements and model cards of the embedded models over a grid of codes.

All figures are for held-out conditions and media judged by the modality's checker.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gen.contracts.frontend import StreamingFrontend
from gen.core.registry import registry
from gen.pipeline.pipeline import Pipeline

CARD_HEAD = "---\nlicense: apache-2.0\ntags: [gen]\n---\n\n"  # of a model card


@dataclass(frozen=True)
class World:
    """Synthetic dataset of a modality, and the samplers to measure.

    Attributes:
        name: the modality.
        held: (n, seed) -> held-out conditions.
        make: (condition, generator) -> one media item.
        check_many: (media, conditions) -> verdicts.
        causal: samplers by their name in tables, for the causal model.
        masked: samplers for the masked model.
        about: model folder -> its description.
        frontend: model folder of the frontend.
        blocks: samplers of blocks for the masked model.
        quarter: samplers that are measured on a quarter of the conditions, and not at all where
            those are fewer than four, as in quick runs.
        asked: description of the conditions.
    """

    name: str
    held: Callable[[int, int], list[Any]]
    make: Callable[[Any, np.random.Generator], Any]
    check_many: Callable[[list[Any], list[Any]], list[Any]]
    causal: dict[str, Any]
    masked: dict[str, Any]
    about: dict[str, str]
    frontend: str
    blocks: dict[str, Any] | None = None
    quarter: tuple[str, ...] = ()
    asked: str = "held-out conditions"

    def samplers(self, protocol: str) -> dict[str, Any]:
        """Samplers of one of ``PROTOCOLS``."""
        return {"causal": self.causal, "masked": self.masked, "blocks": self.blocks or {}}[protocol]


PROTOCOLS = ("causal", "masked", "blocks")
IDENTICAL = ("gumbel", "autoregressive")
MINOR = ("maximal", "fresh", "speculative", "typical", "lantern_pp")
CAUSAL = {
    "autoregressive": "autoregressive",
    **{c: {"name": "speculative_jacobi", "coupling": c} for c in ("gumbel", "maximal", "fresh")},
    **{name: name for name in ("speculative", "typical", "lantern_pp")},
}


def evaluate(world: World, zoo: Path, held_out: int, log=print) -> dict:
    """Measure the models in ``zoo``, and write ``evaluation-NAME.json`` there and a model card into
    each folder.
    """
    began, conditions = time.time(), world.held(held_out, 123)
    rows = {}
    for protocol in PROTOCOLS:
        samplers = world.samplers(protocol)
        if samplers:
            rows |= sampler_figures(world, zoo, protocol, conditions, samplers, log)
    rows["gumbel"].update(identity_figures(world, zoo, few(conditions), log))
    result = {
        "held_out": held_out,
        "sampling": dict(pipe(world, zoo, "causal").modality.default_sampling),
        "frontend": frontend_figures(world, zoo, max(held_out, 8)),
        "samplers": rows,
        "streaming": streaming_figures(world, zoo, conditions[: min(4, held_out)], log),
        "minutes": round((time.time() - began) / 60, 1),
    }
    write_figures(world, zoo, result)
    return result


def few(conditions: list) -> list:
    """First quarter of the conditions, at least one."""
    return conditions[: max(1, len(conditions) // 4)]


def write_figures(world: World, zoo: Path, result: dict) -> None:
    """Write the figures and the model cards."""
    (zoo / f"evaluation-{world.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    write_cards(world, zoo, result)


def folder_of(world: World, protocol: str) -> str:
    """Model of a protocol: the modality's default, or NAME-PROTOCOL. The masked model also serves
    blocks.
    """
    models = registry.get("modality", world.name).models
    return models.get(protocol, f"{world.name}-{'masked' if protocol == 'blocks' else protocol}")


def pipe(world: World, zoo: Path, protocol: str, dtype: str = "float32") -> Pipeline:
    """Pipeline of the model of a protocol."""
    return Pipeline(world.name, str(zoo / folder_of(world, protocol)), dtype=dtype)


def sampler_figures(
    world: World,
    zoo: Path,
    protocol: str,
    conditions: list,
    samplers: dict,
    log=print,
    batch: int = 20,
) -> dict:
    """Per sampler: share of passed conditions, forward passes, computed positions and seconds per
    item; for causal samplers also the share of items with the tokens of autoregression.
    """
    made, rows, reference = pipe(world, zoo, protocol), {}, None
    for name, sampler in samplers.items():
        if name in world.quarter and len(conditions) < 4:
            continue
        asked = few(conditions) if name in world.quarter else conditions
        out = made([str(c) for c in asked], sampler, seed=0, batch_size=batch)
        verdicts = world.check_many(out.media, asked)
        nfe = [s.nfe for s in out.stats]
        rows[name] = {
            "items": len(asked),
            "passed": statistics.mean(v.passed for v in verdicts),
            "valid": statistics.mean(v.valid for v in verdicts),
            "nfe_median": statistics.median(nfe),
            "nfe_mean": statistics.mean(nfe),
            "nfe_max": max(nfe),
            "computed_mean": statistics.mean(s.tokens_computed for s in out.stats),
            "seconds": statistics.mean(s.seconds for s in out.stats),
        }
        if any(s.draft_nfe for s in out.stats):
            rows[name]["draft_nfe_mean"] = statistics.mean(s.draft_nfe for s in out.stats)
        reference = out.tokens if name == "autoregressive" else reference
        if protocol == "causal" and reference is not None:
            same = (out.tokens == reference[: len(asked)]).all(1)
            rows[name]["same_as_autoregressive_float32"] = same.double().mean().item()
        log(f"{name}: {json.dumps(rows[name])}")
    return rows


def identity_figures(world: World, zoo: Path, conditions: list, log=print, batch: int = 20) -> dict:
    """Share of items, in float64, for which the ``gumbel`` coupling gave the tokens of
    autoregression, and its forward passes.
    """
    double, prompts = pipe(world, zoo, "causal", "float64"), [str(c) for c in conditions]
    jacobi, reference = (
        double(prompts, world.causal[s], seed=0, batch_size=batch) for s in IDENTICAL
    )
    nfe = [s.nfe for s in jacobi.stats]
    figures = {
        "same_as_autoregressive_float64": (
            (reference.tokens == jacobi.tokens).all(1).double().mean().item()
        ),
        "nfe_mean_float64": statistics.mean(nfe),
        "nfe_max_float64": max(nfe),
    }
    log(f"gumbel in float64: {json.dumps(figures)}")
    return figures


def frontend_figures(world: World, zoo: Path, count: int) -> dict:
    """Checker on real media, on reconstructions, and on real media with shuffled conditions."""
    made, conditions = pipe(world, zoo, "causal"), world.held(count, 77)
    rng = np.random.default_rng(5)
    real = [world.make(c, rng) for c in conditions]
    frontend = made.frontend()
    again = []
    for item in real:
        codes = frontend.encode(frontend.preprocess(item)[None])
        again.append(made.modality.trim(frontend.postprocess(frontend.decode(codes)[0])))

    def share(media, asked):
        return statistics.mean(v.passed for v in world.check_many(media, asked))

    return {
        "checker_on_real": share(real, conditions),
        "checker_on_reconstructions": share(again, conditions),
        "checker_on_shuffled_labels": share(real, conditions[1:] + conditions[:1]),
        "codebook_sizes": list(frontend.config.codebook_sizes),
    }


def streaming_figures(world: World, zoo: Path, conditions: list, log=print) -> dict:
    """Streaming one item at a time: time of the first chunk as a share of the whole time, and share
    of items whose chunks equal the media of a plain call.
    """
    figures = {}
    for protocol, name in (
        ("causal", "autoregressive"),
        ("causal", "gumbel"),
        ("blocks", "frame_blocks"),
    ):
        samplers = world.samplers(protocol)
        if name not in samplers:
            continue
        made = pipe(world, zoo, protocol)
        if not isinstance(made.frontend(), StreamingFrontend):
            continue
        made(str(conditions[0]), samplers[name])  # loads and warms up
        shares, same = [], []
        for condition in conditions:
            began, parts, times = time.perf_counter(), [], []
            for chunk in made.stream(str(condition), samplers[name], seed=0):
                parts.append(chunk.media)
                times.append(time.perf_counter() - began)
            shares.append(times[0] / (time.perf_counter() - began))
            same.append(
                np.array_equal(
                    np.concatenate(parts), made(str(condition), samplers[name], seed=0).media[0]
                )
            )
        figures[name] = {
            "first_chunk_at_share_of_time": statistics.median(shares),
            "streamed_is_offline": statistics.mean(same),
        }
    log(f"streaming: {json.dumps(figures)}")
    return figures


def write_cards(world: World, zoo: Path, result: dict) -> None:
    """Write a README.md into each model's folder."""
    f, rows = result["frontend"], result["samplers"]
    made = (
        "Trained from scratch on synthetic media, with\n`python -m"
        f" gen.recipes.{world.name} all --work DIR`. No other data were used.\n"
    )
    table = (
        "| sampler | condition passed | of | forward passes (median) |\n| --- | --- | --- | --- |\n"
    )

    def line(n):
        row = rows[n]
        return f"| {n} | {row['passed']:.3f} | {row['items']} | {row['nfe_median']:g} |\n"

    about = (
        f"Measured on {world.asked}, one sample each, with the modality's default sampling"
        " parameters.\n\n"
    )
    for folder, text in ((f, t) for f, t in world.about.items() if (zoo / f).is_dir()):
        body = f"{CARD_HEAD}# {folder}\n\n{text}\n{made}"
        names = [
            n
            for p in PROTOCOLS
            if folder_of(world, p) == folder
            for n in world.samplers(p)
            if n in rows
        ]
        if folder == world.frontend:
            body += (
                f"\nThe checker passes the condition in {f['checker_on_real']:.3f} of real"
                f" media ({world.asked}), in {f['checker_on_reconstructions']:.3f} of"
                f" their\nreconstructions, and in {f['checker_on_shuffled_labels']:.3f} with"
                " shuffled conditions.\n"
            )
        elif names:
            body += f"\n{about}{table}{''.join(map(line, names))}"
        (zoo / folder / "README.md").write_text(body)
