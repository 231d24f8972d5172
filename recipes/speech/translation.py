"""Speech to speech: a graph of words and the predictor of their sound, and two baselines.

    python -m gen.recipes.speech.translation all --work DIR     the run that made its zoo folder
    python -m gen.recipes.speech.translation all --work DIR --quick    a smoke run of the same path

Stages: ``pairs``, ``dag``, ``causal``, ``export``, ``evaluate``; ``all`` runs them in this order.
Training stages resume from their checkpoints in ``--work``. Sources are spoken digits, coded by
``speech-codec``; the style of a target is drawn at random (``modalities/speech/translation.py``).
``causal`` trains the same net to write the words left to right. ``export`` writes half-precision
weights of ``dag`` and the description of its tokens to ``--zoo`` (default ``WORK/zoo``);
``evaluate`` measures both.

The loss is that of the graph plus five times that of the predictor, which reads the expected states
of the target's words. ``--released-posterior`` takes them from the posterior of the released code,
which counts emissions twice; ``--strategy argmax`` reads the vertices of the best path instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gen.contracts.frontend import codebook_digest
from gen.core.graphs import Graph
from gen.modalities.speech import synth
from gen.modalities.speech import translation as spoken
from gen.modalities.speech.modality import CODEC, TRANSLATION, TRANSLATION_TOKENS
from gen.modalities.speech.phones import SpokenPhones
from gen.modalities.text import translation as words
from gen.models.load.locate import ZOO, save_model
from gen.models.nets.lattice import best_alignment, glance, lattice_loss, matches
from gen.models.nets.speech_dag import STRATEGIES, SpeechDagConfig, SpeechDagModel
from gen.recipes.common.grid_models import tidy
from gen.recipes.common.recipe import Recipe
from gen.recipes.common.train import TrainConfig, fit_average
from gen.recipes.speech.translation_evaluation import causal_logprobs, evaluate
from gen.tokenizers.audio.mimi import Mimi

STYLES = tuple(words.STYLES)
CODED = 16  # waves that are coded together
POOL = 8  # batches whose sources are sorted by length
REACH = 20  # vertices that a fixed transition goes ahead at most
GLANCES = (0.5, 0.1)  # share of wrong words that are revealed, at the first and the last step
SOUND_WEIGHT = 5.0  # of the predictor's loss


@dataclass(frozen=True, kw_only=True)
class SpeechDagPlan:
    """Sizes of the recipe.

    Attributes:
        pairs: sources, each with a target of either style.
        steps: steps of the schedule of the graph and its predictor.
        cooldown: (first, end) of an early linear cooldown of these.
        fixed_steps: first steps, with fixed transitions (``band_links``).
        causal_steps: steps of the causal net.
        held_out: sources to measure with.
        strategy, released_posterior: those of ``SpeechDagConfig``, in training.
    """

    pairs: int = 5000
    steps: int = 2500
    cooldown: tuple[int, int] | None = (1900, 2100)
    fixed_steps: int = 500
    causal_steps: int = 1000
    batch: int = 32
    lr: float = 2e-3
    width: int = 56
    layers: tuple[int, int] = (2, 2)
    heads: int = 4
    speaker_layers: int = 2
    held_out: int = 200
    strategy: str = "expect"
    released_posterior: bool = False


QUICK = SpeechDagPlan(
    pairs=16,
    steps=4,
    cooldown=None,
    fixed_steps=2,
    causal_steps=3,
    batch=4,
    width=16,
    layers=(1, 1),
    heads=2,
    speaker_layers=1,
    held_out=2,
)


class Batch(NamedTuple):
    """Sources with targets.

    Attributes:
        source: codec tokens, long [B, S].
        lengths: their numbers, long [B].
        target: words with bos and eos, long [B, M], padded on the right.
        counts: their numbers, long [B].
        notes: how the words are spoken, float [B, 4, 8, 4] (``spoken.score``).
        step: number of the step.
    """

    source: Tensor
    lengths: Tensor
    target: Tensor
    counts: Tensor
    notes: Tensor
    step: int


def make_pairs(work: Path, plan: SpeechDagPlan, log: Callable = print) -> None:
    """Synthesise sources that are not held out, and save their codec tokens, int16 [N, 240], padded
    on the right, the numbers of these, long [N], and what they say, uint8 [N, 6]
    (``Utterance.slots``)."""
    codec = Mimi.from_pretrained(ZOO / CODEC)
    drawn, rng = spoken.sources(plan.pairs, seed=1), np.random.default_rng(2)
    waves = [spoken.trimmed(synth.speak(source, rng)) for source in drawn]
    order = sorted(range(len(waves)), key=lambda i: len(waves[i]))
    longest = synth.SAMPLES // synth.FRAME * len(codec.config.codebook_sizes)
    tokens = torch.zeros(len(drawn), longest, dtype=torch.int16)
    lengths = torch.zeros(len(drawn), dtype=torch.long)
    for first in range(0, len(order), CODED):
        group = order[first : first + CODED]
        rows = spoken.source_tokens(codec, [waves[i] for i in group])
        for i, row in zip(group, rows, strict=True):
            tokens[i, : len(row)], lengths[i] = torch.tensor(row), len(row)
        if first % (50 * CODED) == 0:
            log(f"{first} of {len(drawn)} sources")
    slots = torch.tensor([source.slots() for source in drawn], dtype=torch.uint8)
    torch.save({"source": tokens, "lengths": lengths, "slots": slots}, work / "pairs.pt")


def said(slots: list[int]) -> synth.Utterance:
    """Return the utterance of ``Utterance.slots``."""
    names = [synth.TABLE[value] for value in slots]
    digits = tuple(name for name in names[: synth.MAX_WORDS] if name in synth.DIGITS)
    return synth.Utterance(digits, names[-2], names[-1])


def batches(path: Path, size: int, seed: int) -> Iterator[Batch]:
    """Endless batches of pairs of similar lengths, in a new order every epoch; styles are drawn
    anew, and every twentieth code of a source becomes another one of its codebook."""
    data, first = torch.load(path, weights_only=True), SpeechDagConfig()
    sources = [said(row) for row in data["slots"].tolist()]
    notes = torch.from_numpy(
        np.stack([[spoken.score(source, style) for style in STYLES] for source in sources])
    )
    marks = notes[:, :, :, 0, 0].long() - len(spoken.PHONE_NAMES)
    counts = torch.tensor([len(source.words) for source in sources])
    generator, step = torch.Generator().manual_seed(seed), 0
    while True:
        for pool in torch.randperm(len(sources), generator=generator).split(POOL * size):
            groups = pool[data["lengths"][pool].argsort(stable=True)].split(size)
            for group in torch.randperm(len(groups), generator=generator).tolist():
                rows = groups[group]
                style = torch.randint(len(STYLES), (len(rows),), generator=generator)
                target = torch.full((len(rows), synth.MAX_WORDS + 2), first.eos_id)
                target[:, 0] = first.bos_id
                known = torch.arange(synth.MAX_WORDS) < counts[rows, None]
                target[:, 1:-1] = torch.where(known, marks[rows, style], first.eos_id)
                lengths = data["lengths"][rows]
                source = disturbed(data["source"][rows, : int(lengths.max())].long(), generator)
                yield Batch(source, lengths, target, counts[rows] + 2, notes[rows, style], step)
                step += 1


def disturbed(source: Tensor, generator: torch.Generator, share: float = 0.05) -> Tensor:
    """Replace a share of codec tokens, long [B, S], by random ones of the same codebook."""
    first = SpeechDagConfig()
    size = first.source_words // first.streams
    drawn = torch.randint(size, source.shape, generator=generator)
    column = torch.arange(source.shape[1])
    chosen = torch.rand(source.shape, generator=generator) < share
    return torch.where(chosen, drawn + size * (column % first.streams), source)


def new_model(plan: SpeechDagPlan, first: int = 0) -> SpeechDagModel:
    """Create a net whose vertex 0 starts at a state of the source (``SpeechDagModel.start``)."""
    model = SpeechDagModel(
        SpeechDagConfig(
            hidden_size=plan.width,
            encoder_layers=plan.layers[0],
            decoder_layers=plan.layers[1],
            num_attention_heads=plan.heads,
            speaker_layers=plan.speaker_layers,
            strategy=plan.strategy,
            released_posterior=plan.released_posterior,
        )
    )
    model.start(first)
    model.spectra.copy_(torch.from_numpy(spoken.phone_spectra()))
    return model


def band_links(graph: Graph) -> Tensor:
    """Make fixed log E [B, L, L]: alike to the next ``REACH`` vertices and to the last one."""
    column = torch.arange(graph.transitions.shape[1])
    ahead = column - column[:, None]
    is_last = (column == graph.lengths[:, None] - 1)[:, None]
    allowed = (ahead > 0) & (column < graph.lengths[:, None, None])
    allowed = allowed & ((ahead <= REACH) | is_last)
    scores = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    return scores.log_softmax(-1).masked_fill(~allowed, -torch.inf)


def sound_loss(model: SpeechDagModel, graph: Graph, batch: Batch) -> tuple[Tensor, dict]:
    """Loss of the predictor, from the states of the target's words.

    The sum of the L1 distance of spectra and the squared distances of log durations, pulses and
    scales, the last two over three pulses and a tenth of a scale.
    """
    inner = batch.counts - 2
    states = model.word_states(graph, batch.target[:, 1:-1], inner, model.config.strategy)
    manner, notes = model.speaker(states, inner), batch.notes
    word = torch.arange(notes.shape[1]) < inner[:, None]
    steps = (notes[..., 1] / spoken.STEP).round()
    sound = word[..., None] & (steps > 0)
    sound[..., 0] = False
    aimed = model.spectra[notes[..., 0].long().clamp(max=len(model.spectra) - 1)]
    spectrum = (manner.spectra - aimed).abs()[sound].mean()
    duration = (manner.durations - steps.log1p()).square()[word].mean()
    pitch = ((manner.pulses - notes[..., 0, 2]) / 3).square()[word].mean()
    scale = ((manner.scales - notes[..., 0, 3]) / 0.1).square()[word].mean()
    figures = {"spectrum": spectrum.item(), "duration": duration.item(), "pitch": pitch.item()}
    return spectrum + duration + pitch + scale, figures


def dag_loss(plan: SpeechDagPlan) -> Callable:
    """Loss of the graph, the exact sum over its paths after a glance at some words, and of the
    predictor."""
    generator = torch.Generator().manual_seed(3)

    def loss(model: SpeechDagModel, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        source, lengths, target, counts, _, step = batch
        fixed = step < plan.fixed_steps
        inputs = model.blank(model.sizes(lengths))
        encoded = model.encode(source, lengths)
        with torch.no_grad():
            first = model.graph(encoded, lengths, inputs)
            links = band_links(first) if fixed else first.transitions
            m = matches(first.emissions, target)
            path = best_alignment(links, m, first.lengths, counts)
            ratio = GLANCES[0] + (GLANCES[1] - GLANCES[0]) * min(1.0, step / plan.steps)
            shown = glance(first.emissions, path, target, counts, inputs, ratio, generator)
        graph = model.graph(encoded, lengths, shown)
        if fixed:
            graph = graph._replace(transitions=links)
        m = matches(graph.emissions, target)
        value = lattice_loss(graph.transitions, m, graph.lengths, counts)
        sound, figures = sound_loss(model, graph, batch)
        return value + SOUND_WEIGHT * sound, {"graph": value.item(), **figures}

    return loss


def causal_loss(model: SpeechDagModel, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """Cross entropy of every word given those before."""
    encoded = model.encode(batch.source, batch.lengths)
    logprobs = causal_logprobs(model, batch.target[:, :-1], encoded)
    known = torch.arange(1, batch.target.shape[1]) < batch.counts[:, None]
    return F.nll_loss(logprobs[known], batch.target[:, 1:][known]), {}


def train(work: Path, plan: SpeechDagPlan, name: str, log: Callable = print) -> None:
    """Train ``dag`` or ``causal``."""
    torch.manual_seed(0)
    graph = name == "dag"
    model = new_model(plan)
    fit_average(
        model,
        batches(work / "pairs.pt", plan.batch, seed=5),
        dag_loss(plan) if graph else causal_loss,
        TrainConfig(
            steps=plan.steps if graph else plan.causal_steps,
            lr=plan.lr,
            cooldown=plan.cooldown if graph else None,
            muon=("er.", 2 * plan.lr),
            betas=(0.9, 0.98),
            log_every=50,
            save_every=100,
        ),
        out=work / name,
        log=log,
    )
    save_model(model, work / name / "model")


class SpeechTranslationRecipe(Recipe):
    """Graph model of translations of speech, and its causal baseline."""

    doc, full, quick = __doc__, SpeechDagPlan(), QUICK

    def stages(self):
        return {
            "pairs": lambda: make_pairs(self.work, self.plan, self.log),
            **{
                name: lambda name=name: train(self.work, self.plan, name, self.log)
                for name in ("dag", "causal")
            },
            "export": self.export,
            "evaluate": lambda: evaluate(self.work, self.zoo, self.plan.held_out, self.log),
        }

    def export(self) -> None:
        """Write the description of the tokens, and half-precision weights of the graph model.

        The model reads states of best paths when it speaks (``argmax``).
        """
        phones = SpokenPhones()
        phones.save_pretrained(self.zoo / TRANSLATION_TOKENS)
        model = SpeechDagModel.from_pretrained(self.work / "dag" / "model").half()
        model.config.strategy = "argmax"
        model.config.frontend = TRANSLATION_TOKENS
        model.config.codebook_digest = codebook_digest(phones.fingerprint)
        codec = Mimi.from_pretrained(ZOO / CODEC)
        model.config.source_digest = codebook_digest(codec.fingerprint)
        save_model(model, self.zoo / TRANSLATION)
        tidy(self.zoo)
        self.log(f"wrote {self.zoo}")


def main(argv: list[str] | None = None) -> None:
    """Run stages as ``Recipe.main`` does, with the states that the predictor is trained on.

    Args:
        argv: command line; None for the process's own.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--strategy", choices=STRATEGIES, default=SpeechDagPlan.strategy)
    parser.add_argument("--released-posterior", action="store_true")
    flags, rest = parser.parse_known_args(argv)

    class Flagged(SpeechTranslationRecipe):
        full, quick = (replace(plan, **vars(flags)) for plan in (SpeechDagPlan(), QUICK))

    Flagged.main(rest)


if __name__ == "__main__":
    main()
