"""Measurements and model cards of the graph model of translations, called by
``recipes/text/dag.py``.

An output passes if it is one of the right ones of its source, whatever its order and style. The
baselines have the same sources: the position-wise net takes the best word of every position, the
causal one goes word by word.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.modalities.text import translation
from gen.modalities.text.modality import GRAPH_WORDS
from gen.models.adapters.lattice import DagLM
from gen.models.nets.dag import DagModel
from gen.models.targets.lattice import LatticeTarget
from gen.pipeline.pipeline import Pipeline, load
from gen.recipes.common.grid_evaluation import CARD_HEAD

SEED = 1_000_000  # of held-out sources
DECODERS = ("dag_greedy", "lookahead", "viterbi", "joint_viterbi", "dag_beam", "ancestral")
BATCHES = (1, 8, 32)


def evaluate(work: Path, zoo: Path, held_out: int, log: Callable = print) -> dict[str, Any]:
    """Measure ``zoo / "text-dag"`` and the baselines of the work folder; write
    ``evaluation-dag.json`` and the model cards.

    Args:
        work: folder of the baselines.
        zoo: folder of the model.
        held_out: sources to measure with.
        log: receives progress.
    """
    sources = translation.sources(held_out, SEED, held=True)
    pipe = load("text", zoo / "text-dag", device="cpu")
    nets = {
        name: DagModel.from_pretrained(work / name / "model").eval()
        for name in ("positionwise", "causal")
    }
    rows: dict[str, dict[str, float]] = {}
    for name in DECODERS:
        rows[name] = _decoded(pipe, sources, {"name": name})
        if name != "ancestral":
            rows[f"{name}, collapse"] = _decoded(pipe, sources, {"name": name, "collapse": True})
    rows["position-wise"] = _judged(sources, positionwise(nets["positionwise"], sources), [1])
    for name, seed in (("causal, greedy", None), ("causal, sampled", 0)):
        found, passes = causal(nets["causal"], sources, seed)
        rows[name] = _judged(sources, found, passes)
    for name, row in rows.items():
        log(f"{name}: {row}")
    result = {"sources": held_out, "quality": rows, "seconds": _speed(pipe, nets["causal"])}
    log(json.dumps(result["seconds"]))
    (zoo / "evaluation-dag.json").write_text(json.dumps(result, indent=1) + "\n")
    write_cards(zoo, result)
    return result


def _decoded(pipe: Pipeline, sources: list, spec: dict[str, Any]) -> dict[str, float]:
    """Decode the sources with a sampler, and judge them."""
    out = pipe([str(source) for source in sources], spec, seed=0)
    return _judged(sources, [str(text) for text in out.media], [s.nfe for s in out.stats])


def _judged(sources: list, texts: list[str], passes: list[int]) -> dict[str, float]:
    """Return the share of right outputs, of all sources and of those with a repeated neighbour,
    and the median of forward passes."""
    right = [translation.check(s, t).passed for s, t in zip(sources, texts, strict=True)]
    repeats = [any(map(int.__eq__, s.digits, s.digits[1:])) for s in sources]
    chosen = [ok for ok, repeat in zip(right, repeats, strict=True) if repeat]
    return {
        "passed": sum(right) / len(right),
        "passed_with_repeats": sum(chosen) / max(1, len(chosen)),
        "passes": median(passes),
    }


def _padded(sources: list) -> tuple[Tensor, Tensor]:
    """Return the ids of sources, long [B, S], and their numbers, long [B]."""
    ids = [torch.tensor(source.ids()) for source in sources]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return padded, torch.tensor([len(row) for row in ids])


def _text(ids: list[int]) -> str:
    """Return the words of ids up to the first that is none."""
    words = translation.WORDS
    end = next((i for i, n in enumerate(ids) if n >= len(words)), len(ids))
    return " ".join(words[n] for n in ids[:end])


@torch.no_grad()
def positionwise(model: DagModel, sources: list) -> list[str]:
    """Take the best word of every position, given the number of words."""
    source, lengths = _padded(sources)
    best = model(source, lengths).emissions.argmax(-1)
    rows = zip(best.tolist(), lengths.tolist(), strict=True)
    return [_text(row[1 : n - 1]) for row, n in rows]


def causal_logprobs(model: DagModel, ids: Tensor, encoded: tuple[Tensor, Tensor]) -> Tensor:
    """Compute log P [B, L, V] of the words after each of ``ids``, long [B, L], left to right.

    Args:
        model: the net.
        ids: bos and the words before.
        encoded: outcome of ``DagModel.encode``.
    """
    size = ids.shape[1]
    mask = torch.ones(size, size, dtype=torch.bool).tril()[None, None]
    return model.emit(model.decode(ids, mask, encoded))


@torch.no_grad()
def causal(model: DagModel, sources: list, seed: int | None = None) -> tuple[list[str], list[int]]:
    """Decode word by word; every pass runs over all words so far.

    Args:
        model: the net.
        sources: sources.
        seed: seed of the draws; None takes the best word.

    Returns:
        Outputs, and forward passes of each.
    """
    source, lengths = _padded(sources)
    encoded = model.encode(source, lengths)
    generator = torch.Generator().manual_seed(seed or 0)
    ids = torch.full((len(sources), 1), model.config.bos_id)
    while ids.shape[1] < model.config.max_source and not _ended(ids, model).all():
        p = causal_logprobs(model, ids, encoded)[:, -1].exp()
        word = p.argmax(-1) if seed is None else torch.multinomial(p, 1, generator=generator)[:, 0]
        ids = torch.cat([ids, word[:, None]], 1)
    texts = [_text(row[1:]) for row in ids.tolist()]
    return texts, [len(text.split()) + 1 for text in texts]


def _ended(ids: Tensor, model: DagModel) -> Tensor:
    """Find the rows that hold the eos token, bool [B]."""
    return (ids == model.config.eos_id).any(1)


def _speed(pipe: Pipeline, baseline: DagModel, repeats: int = 5) -> dict[str, dict[str, float]]:
    """Time batches of sources of ten words, variants interleaved.

    Returns:
        By batch, the median seconds of each variant, from sources to tokens.
    """
    model, binding, _ = pipe.bound(pipe.model_name("joint_viterbi"))
    drawn = translation.sources(4000, SEED, held=True)
    longest = [s for s in drawn if len(s.digits) == translation.LENGTHS[-1]]
    found: dict[str, dict[str, float]] = {}
    for size in BATCHES:
        sources = longest[:size]
        source, lengths = _padded(sources)

        def decode(name: str, source=source, lengths=lengths, size=size) -> None:
            space, sampling = binding.space, SamplingParams()
            target = LatticeTarget(DagLM(model), source, space, sampling, None, lengths)
            resolve_sampler(name)[0](target, CounterRNG(range(size)))

        variants: dict[str, Callable[[], object]] = {
            **{name: lambda name=name, decode=decode: decode(name) for name in DECODERS},
            "causal": lambda sources=sources: causal(baseline, sources),
        }
        times: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(repeats + 1):  # the first one warms up
            for name, run in variants.items():
                began = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - began)
        found[str(size)] = {name: median(seconds[1:]) for name, seconds in times.items()}
    return found


def write_cards(zoo: Path, result: dict[str, Any]) -> None:
    """Write README.md of the model and of its words."""
    rows = "".join(
        f"| {name} | {row['passed']:.3f} | {row['passed_with_repeats']:.3f} | {row['passes']:g} |\n"
        for name, row in result["quality"].items()
    )
    times = "".join(
        f"| {size} | {' | '.join(f'{1000 * s:.1f}' for s in row.values())} |\n"
        for size, row in result["seconds"].items()
    )
    names = list(next(iter(result["seconds"].values())))
    origin = (
        "Trained from scratch on synthetic pairs (`modalities/text/translation.py`), with\n"
        "`python -m gen.recipes.text.dag all --work DIR`. No other data were used.\n"
    )
    (zoo / "text-dag" / "README.md").write_text(
        f"{CARD_HEAD}# text-dag\n\nA DA-Transformer (`gen/models/nets/dag.py`): digit words to"
        f" words of another language, in one\nforward pass. {origin}\n"
        f"Measured on {result['sources']} held-out sources: share of outputs that are right, of all"
        " and of sources\nwith a repeated neighbour. *Position-wise* and *causal* are the same net"
        " with one vertex per word,\ntrained on the same pairs; they are not here.\n"
        "The causal net had six times the steps of the graph, and has converged.\n\n"
        "| decoder | right | right with repeats | forward passes (median) |\n"
        f"| --- | --- | --- | --- |\n{rows}\n"
        "Milliseconds from sources of ten words to tokens, one CPU thread. *Causal* runs over all"
        " words so far\nin every pass, without a cache.\n\n"
        f"| rows | {' | '.join(names)} |\n| --- |{' --- |' * len(names)}\n{times}"
    )
    (zoo / GRAPH_WORDS / "README.md").write_text(
        f"{CARD_HEAD}# {GRAPH_WORDS}\n\nA word-level tokenizer of {len(translation.WORDS)} words"
        " and the eos token, the words of translations.\nWritten by"
        " `python -m gen.recipes.text.dag export --work DIR`.\n"
    )
