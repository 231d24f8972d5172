"""A model of sounds whose condition is the states of the model of captions (VATT, arXiv
2411.05679), not the tiles and words that ``audio-masked`` reads.

    python -m gen.recipes.audio.sounds all --work DIR            train and measure one
    python -m gen.recipes.audio.sounds all --work DIR --quick    a smoke run of the same path

Stages: ``tokens``, ``train``, ``export``, ``evaluate``. The states of a batch are computed when it
is drawn, after ``sound_prompts`` left parts of its conditions out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from gen.contracts.frontend import codebook_digest
from gen.modalities.audio import balls, captions, prompts
from gen.modalities.audio.captions import COLOURS, PITCHES, Ball, Caption
from gen.modalities.audio.states import ROWS, caption_states
from gen.models.load.digest import digest_of
from gen.models.load.locate import ZOO, save_model
from gen.models.nets.grid_states import GridStatesConfig, GridStatesForCausalLM
from gen.models.zoo import load_lm
from gen.recipes.audio.evaluation import SEED, sound_figures
from gen.recipes.audio.recipe import AudioPlan, frontends, make_tokens, sound_prompts
from gen.recipes.common.grid_models import (
    WEIGHTS,
    Run,
    Shape,
    export_lm,
    hidden_positions,
    sizes_of,
    tidy,
    token_batches,
)
from gen.recipes.common.recipe import Recipe
from gen.recipes.common.train import TrainConfig, fit_average
from gen.tokenizers.text.words import TextWords

SOUND = Shape((prompts.STEPS, prompts.STREAMS), ROWS, prompts.CODES, 0)
CAPTIONER = "audio-captions"
Batch = tuple[Tensor, Tensor, Tensor]  # prompt ids [B, P], states [B, P, S], codes [B, T]


def stated(slots: list[int]) -> Caption:
    """Return the caption of four slots, the inverse of ``Caption.slots``."""
    if slots == captions.UNCONDITIONAL:
        return Caption()
    balls = []
    for look, number in (slots[:2], slots[2:]):
        if look != captions.NO_BALL:
            colour, pitch = divmod(look, 1 + len(PITCHES))
            balls.append(
                Ball(
                    COLOURS[colour - 1] if colour else None,
                    number - captions.ANY_BOUNCES or None,
                    PITCHES[pitch - 1] if pitch else None,
                )
            )
    return Caption(tuple(balls))


def prompted(model: torch.nn.Module, words: TextWords, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return prompt ids [B, ROWS] and states [B, ROWS, S] of conditions.

    Args:
        model: the model of captions.
        words: its frontend.
        rows: tiles of a clip, then the slots of a caption, long [B, SOUND_SLOTS].
    """
    said = [stated(row) for row in (rows[:, prompts.CLIP :] - prompts.FIRST_SLOT).tolist()]
    clips = [None if row[0] == prompts.NO_TILE else row for row in rows[:, : prompts.CLIP].tolist()]
    states = caption_states(model, clips, [words.ids(str(caption)) for caption in said])
    none = torch.tensor([c is None and not s.balls for c, s in zip(clips, said, strict=True)])
    marks = torch.where(none, SOUND.mask, SOUND.mask + 1)  # the mask, or a state
    return marks[:, None].expand(-1, ROWS), states


def batches(
    work: Path, captioner: Path, run: Run, leave_out: Callable[[Tensor, torch.Generator], Tensor]
) -> Iterator[Batch]:
    """Draw endless batches from ``work / "tokens.pt"``."""
    model = AutoModelForCausalLM.from_pretrained(captioner).half().float().eval()
    words = TextWords.of(prompts.VOCABULARY, prompts.CAPTION_POSITIONS)
    for rows, codes in token_batches(work / "tokens.pt", run.batch, run.seed, leave_out):
        yield *prompted(model, words, rows), codes


def loss(model, batch: Batch, generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
    """Loss of the masked positions, whose logits stand one position before."""
    marks, states, codes = batch
    hidden = hidden_positions(tuple(codes.shape), generator)
    ids = torch.cat([marks, codes.masked_fill(hidden, SOUND.mask)], 1)
    full = torch.zeros(1, 1, ids.shape[1], ids.shape[1], dtype=WEIGHTS)
    out = model(
        input_ids=ids,
        states=states.to(WEIGHTS),
        attention_mask=full,
        logits_to_keep=SOUND.length + 1,
        use_cache=False,
    )
    return F.cross_entropy(out.logits[:, : SOUND.length][hidden].float(), codes[hidden]), {}


def train_sounds(
    work: Path,
    captioner: Path,
    run: Run,
    name: str,
    leave_out: Callable[[Tensor, torch.Generator], Tensor],
    log=print,
) -> None:
    """Train the model of sounds and save its average weights to ``work / name / "model"``.

    Args:
        work: folder of ``tokens.pt``.
        captioner: the trained model of captions.
        run: sizes; ``start`` is a folder in ``work``.
        name: folder to write.
        leave_out: leaves parts of conditions [B, SOUND_SLOTS] out.
        log: receives progress.
    """
    torch.manual_seed(0)
    size = AutoModelForCausalLM.from_pretrained(captioner).config.hidden_size
    config = GridStatesConfig(state_size=size, states_of=CAPTIONER, **sizes_of(SOUND, run))
    model = GridStatesForCausalLM(config)
    if run.start:
        started = GridStatesForCausalLM.from_pretrained(work / run.start)
        model.load_state_dict(started.state_dict())
    generator = torch.Generator().manual_seed(3)
    fit_average(
        model,
        batches(work, captioner, run, leave_out),
        lambda m, batch: loss(m, batch, generator),
        TrainConfig(
            steps=run.steps,
            lr=run.lr,
            muon=(".layers.", 3 * run.lr),
            weight_decay=0.05,
            bfloat16_weights=True,
            save_every=250,
        ),
        out=work / name,
        log=log,
    )
    save_model(model, work / name / "model")


@dataclass(frozen=True, kw_only=True)
class SoundsPlan:
    """Sizes of the recipe."""

    clips: int = 16_000
    sounds: Run = Run(1600, 96, 3, causal=False, seed=5, batch=32)
    held_out: int = 200


QUICK = SoundsPlan(clips=16, sounds=Run(4, 32, 1, causal=False, batch=4), held_out=2)


class SoundsRecipe(Recipe):
    """Sounds given the states of the embedded model of captions."""

    doc, full, quick = __doc__, SoundsPlan(), QUICK

    def stages(self):
        return {
            "tokens": lambda: make_tokens(self.work, AudioPlan(clips=self.plan.clips), self.log),
            "train": self.train,
            "export": self.export,
            "evaluate": self.evaluate,
        }

    def train(self) -> None:
        """Train the model of sounds."""
        masked = self.work / "masked"
        train_sounds(masked, ZOO / CAPTIONER, self.plan.sounds, "states", sound_prompts, self.log)

    def export(self) -> None:
        """Write the half-precision model, which names the weights whose states it reads."""
        folder, cpu = prompts.BANDS_FOLDER, torch.device("cpu")
        digest = codebook_digest(frontends()[folder].fingerprint)
        out = self.zoo / "audio-masked"
        export_lm(self.work / "masked" / "states" / "model", out, folder, digest)
        path = out / "config.json"
        of = {"states_digest": digest_of(load_lm(CAPTIONER, cpu, torch.float32))}
        path.write_text(json.dumps(json.loads(path.read_text()) | of, indent=2) + "\n")
        tidy(self.zoo)

    def evaluate(self) -> None:
        """Measure sounds by what they are made for."""
        found = sound_figures(self.zoo, balls.scenes(self.plan.held_out, SEED, held=True), self.log)
        (self.zoo / "evaluation-audio.json").write_text(json.dumps(found, indent=1) + "\n")


main = SoundsRecipe.main


if __name__ == "__main__":
    main()
