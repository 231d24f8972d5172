"""Measurements and model cards of translations of speech, called by
``recipes/speech/translation.py``.

A recogniser hears the waveforms alone (``modalities/speech/checker.py``). It is measured first, on
targets that the synthesiser speaks from the true scores. Digits are right if all of them are heard
in their order, and an output passes if it is also in one style.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.media.given import GivenMedia
from gen.modalities.speech import synth
from gen.modalities.speech import translation as spoken
from gen.modalities.speech.modality import TRANSLATION, TRANSLATION_TOKENS
from gen.modalities.text import translation as words
from gen.models.adapters.lattice import SpeechDagLM
from gen.models.nets.speech_dag import STRATEGIES, SpeechDagModel
from gen.models.targets.lattice import SpokenLatticeTarget
from gen.pipeline.pipeline import Pipeline, load
from gen.recipes.common.grid_evaluation import CARD_HEAD
from gen.recipes.text.dag_evaluation import causal_logprobs

SEED = 1_000_000  # of held-out sources
DECODERS = ("dag_greedy", "lookahead", "viterbi", "joint_viterbi", "dag_beam", "ancestral")
PLAIN = {"guidance_scale": 1.0, "top_k": 0}  # the modality's defaults are for its other models
BATCHES = (1, 8, 32)
SPEED_REPEATS = 5


def evaluate(work: Path, zoo: Path, held_out: int, log: Callable = print) -> dict[str, Any]:
    """Measure the model in ``zoo`` and the causal net of the work folder; write
    ``evaluation-speech-translation.json`` and the model cards.

    Args:
        work: folder of the causal net.
        zoo: folder of the model.
        held_out: sources to measure with.
        log: receives progress.
    """
    sources = spoken.sources(held_out, SEED, held=True)
    rng = np.random.default_rng(SEED)
    sounds = [(synth.speak(source, rng), synth.RATE) for source in sources]
    pipe = load("speech", zoo / TRANSLATION, device="cpu")
    model, baseline = pipe.bound(str(zoo / TRANSLATION))[0], causal_net(work)
    rows: dict[str, dict[str, float]] = {
        "real target speech": _judged(sources, [_target(s, i) for i, s in enumerate(sources)])
    }
    for name in DECODERS:
        out = pipe([{"audio": sound} for sound in sounds], name, seed=0, **PLAIN)
        rows[name] = _judged(sources, out.media)
        log(f"{name}: {rows[name]}")
    model.config.strategy = next(s for s in STRATEGIES if s != model.config.strategy)
    out = pipe([{"audio": sound} for sound in sounds], "joint_viterbi", seed=0, **PLAIN)
    rows[f"joint_viterbi, {model.config.strategy}ed states"] = _judged(sources, out.media)
    model.config.strategy = next(s for s in STRATEGIES if s != model.config.strategy)
    tokens = [_tokens(pipe, sound) for sound in sounds]
    found = [causal(baseline, *_padded([row])) for row in tokens]
    said = [texts[0] for texts, _ in found]
    result = {
        "sources": held_out,
        "recogniser": rows.pop("real target speech"),
        "quality": rows,
        "causal": {
            "digits": _share(
                spoken.digits_heard(text) == spoken.digits_of(source)
                for text, source in zip(said, sources, strict=True)
            ),
            "one_style": _share(spoken.in_one_style(text) for text in said),
            "passes": median(passes for _, passes in found),
        },
        "passes": 1,
        "seconds": _speed(model, baseline, tokens),
    }
    log(json.dumps({key: result[key] for key in ("recogniser", "causal", "seconds")}))
    (zoo / "evaluation-speech-translation.json").write_text(json.dumps(result, indent=1) + "\n")
    write_cards(zoo, result)
    return result


def causal_net(work: Path) -> SpeechDagModel:
    """Load the causal net of the work folder."""
    return SpeechDagModel.from_pretrained(work / "causal" / "model").eval()


def _target(source: synth.Utterance, number: int) -> np.ndarray:
    """Speak the true score of a source, in the styles by turns."""
    style = tuple(words.STYLES)[number % len(words.STYLES)]
    return spoken.speak_score(spoken.score(source, style))[0]


def _share(values: Any) -> float:
    """Return the share of true values."""
    listed = list(values)
    return sum(map(bool, listed)) / len(listed)


def _judged(sources: Sequence[synth.Utterance], waves: Sequence[np.ndarray]) -> dict[str, float]:
    """Hear waveforms: the shares of outputs with all digits right, in one style, both (passed),
    and of those with the voice and the speed of their source."""
    heard = [spoken.heard(wave) for wave in waves]
    pairs = list(zip(sources, heard, strict=True))
    digits = [spoken.digits_heard(h.words) == spoken.digits_of(s) and h.valid for s, h in pairs]
    style = [spoken.in_one_style(h.words) for h in heard]
    return {
        "passed": _share(a and b for a, b in zip(digits, style, strict=True)),
        "digits": _share(digits),
        "one_style": _share(style),
        "voice": _share(h.voice == s.voice for s, h in pairs),
        "speed": _share(h.speed == s.speed for s, h in pairs),
    }


def _tokens(pipe: Pipeline, sound: tuple[np.ndarray, int]) -> list[int]:
    """Return the codec tokens of a sound."""
    wave, rate = sound
    source = spoken.SpokenSource(GivenMedia("audio", wave[:, None], rate))
    binding = pipe.bound(pipe.model_name("joint_viterbi"))[1]
    return list(binding.prompt(source))


def _padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return token ids, long [B, S], padded with zeros, and their numbers, long [B]."""
    ids = [torch.tensor(row) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return padded, torch.tensor([len(row) for row in ids])


@torch.no_grad()
def causal(
    model: SpeechDagModel, source: Tensor, lengths: Tensor
) -> tuple[list[tuple[str, ...]], int]:
    """Take the best word after those before, until all rows have ended.

    Every pass runs over all words so far; there is no cache.

    Args:
        model: the net.
        source: codec tokens, long [B, S].
        lengths: their numbers, long [B].

    Returns:
        Words of every row, and the passes of the decoder.
    """
    config = model.config
    encoded = model.encode(source, lengths)
    ids = torch.full((len(source), 1), config.bos_id)
    passes = 0
    while passes <= config.max_words and not (ids == config.eos_id).any(1).all():
        word = causal_logprobs(model, ids, encoded)[:, -1].argmax(-1)
        ids, passes = torch.cat([ids, word[:, None]], 1), passes + 1
    said = []
    for row in ids[:, 1:].tolist():
        end = next((i for i, n in enumerate(row) if n >= len(words.WORDS)), len(row))
        said.append(tuple(words.WORDS[n] for n in row[:end]))
    return said, passes


def _speed(
    model: SpeechDagModel, baseline: SpeechDagModel, tokens: list[list[int]]
) -> dict[str, dict[str, float]]:
    """Time batches of the longest sources, variants interleaved.

    Returns:
        By batch, the median CPU seconds of each variant, on one thread: from codec tokens to words,
        and of the graph and the predictor to the tokens of speech.
    """
    longest = sorted(tokens, key=len)[-max(BATCHES) :]
    adapter = SpeechDagLM(model)
    found: dict[str, dict[str, float]] = {}
    for size in BATCHES:
        source, lengths = _padded([longest[i % len(longest)] for i in range(size)])
        slots = model.config.max_words * model.config.slots
        space = TokenSpace.codes((slots, 4), model.config.speech_ids, adapter.vocab_size)

        def decode(source=source, lengths=lengths, size=size, space=space) -> None:
            target = SpokenLatticeTarget(adapter, source, space, SamplingParams(), None, lengths)
            resolve_sampler("joint_viterbi")[0](target, CounterRNG(range(size)))

        @torch.no_grad()
        def graph(source=source, lengths=lengths) -> None:
            model(source, lengths)

        variants: dict[str, Callable[[], object]] = {
            "graph": graph,
            "graph, joint_viterbi and sound": decode,
            "causal": lambda source=source, lengths=lengths: causal(baseline, source, lengths),
        }
        times: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(SPEED_REPEATS + 1):  # the first one warms up
            for name, run in variants.items():
                began = time.process_time()
                run()
                times[name].append(time.process_time() - began)
        found[str(size)] = {name: median(seconds[1:]) for name, seconds in times.items()}
    return found


def write_cards(zoo: Path, result: dict[str, Any]) -> None:
    """Write README.md of the model and of its tokens."""
    keys = ("passed", "digits", "one_style", "voice", "speed")
    measured = {"*real target speech*": result["recogniser"], **result["quality"]}
    rows = "".join(
        f"| {name} | {' | '.join(f'{row[key]:.3f}' for key in keys)} |\n"
        for name, row in measured.items()
    )
    times = "".join(
        f"| {size} | {' | '.join(f'{1000 * s:.1f}' for s in row.values())} |\n"
        for size, row in result["seconds"].items()
    )
    names, ar = list(next(iter(result["seconds"].values()))), result["causal"]
    (zoo / TRANSLATION / "README.md").write_text(
        f"{CARD_HEAD}# {TRANSLATION}\n\nA DA-Transformer over codec tokens with a predictor of"
        " durations and spectra\n(`gen/models/nets/speech_dag.py`, the form of DASpeech, arXiv"
        " 2310.07403): the sound of 2 to 4 English\ndigits to the sound of the same digits in"
        " another language. Trained from scratch on synthetic speech\n"
        "(`modalities/speech/translation.py`), with\n"
        "`python -m gen.recipes.speech.translation all --work DIR`. No other data were used.\n\n"
        f"Measured on {result['sources']} held-out sources by a recogniser that hears the waveform"
        " alone: shares of\noutputs with all digits right and in one style (passed), with all"
        " digits right, in one style, and with\nthe voice and the speed of the source. The first"
        " row is the recogniser's own figure, on speech from\nthe true durations and spectra.\n\n"
        f"| decoder | {' | '.join(key.replace('_', ' ') for key in keys)} |\n"
        f"| --- |{' --- |' * len(keys)}\n{rows}\n"
        "A causal decoder of the same size, trained on the same pairs and not shipped, writes all"
        f" digits\nright in {ar['digits']:.3f} and words of one style in"
        f" {ar['one_style']:.3f}, with {ar['passes']:g} decoder passes"
        " (median)\nwhere the graph has 1.\n\n"
        "Milliseconds of one CPU thread from codec tokens to words, and to the tokens of speech."
        " *Causal* runs\nover all words so far in every pass, without a cache.\n\n"
        f"| rows | {' | '.join(names)} |\n| --- |{' --- |' * len(names)}\n{times}"
    )
    (zoo / TRANSLATION_TOKENS / "README.md").write_text(
        f"{CARD_HEAD}# {TRANSLATION_TOKENS}\n\nThe tokens of spoken translations: sounds,"
        " durations, pulses and scales of the slots of words\n"
        "(`modalities/speech/phones.py`), which a formant synthesiser speaks. There are no"
        " weights.\nWritten by `python -m gen.recipes.speech.translation export --work DIR`.\n"
    )
