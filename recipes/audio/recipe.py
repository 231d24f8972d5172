"""Sounds of bouncing balls from nothing: draw clips, train a model of captions and one of sounds,
measure them.

    python -m gen.recipes.audio all --work DIR            the run that made gen/zoo/audio-*
    python -m gen.recipes.audio all --work DIR --quick    a smoke run of the same path, seconds

Stages: ``frontends``, ``tokens``, ``captions``, ``masked``, ``steered``, ``export``, ``evaluate``;
``all`` runs them in this order. ``steered`` trains the model of ``masked`` further. Training stages
resume from their checkpoints in ``--work``. ``export`` writes half-precision weights to ``--zoo``
(default ``WORK/zoo``), ``evaluate`` measures those.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gen.contracts.frontend import codebook_digest
from gen.modalities.audio import balls, captions, prompts
from gen.modalities.audio.captions import PITCHES, Caption
from gen.modalities.small_language import held_out
from gen.recipes.audio.evaluation import evaluate
from gen.recipes.common.grid_models import Run, Shape, export_lm, tidy, train_lm, unchanged
from gen.recipes.common.recipe import Recipe
from gen.tokenizers.audio.bands import Bands
from gen.tokenizers.text.words import TextWords
from gen.tokenizers.video.tiles import Tiles

SOUND = Shape(
    (prompts.STEPS, prompts.STREAMS), prompts.SOUND_SLOTS, prompts.CODES, prompts.SOUND_WORDS
)
CAPTION = Shape(
    (prompts.CAPTION_POSITIONS,),
    prompts.CAPTION_SLOTS,
    len(prompts.VOCABULARY) + 1,
    prompts.CAPTION_WORDS,
)
RETUNED = 0.4  # share of balls whose stated pitch is drawn, whatever their colour
NOTHING, TEXT_ALONE, CLIP_ALONE = 0.1, 0.15, 0.3  # shares of prompts


@dataclass(frozen=True, kw_only=True)
class AudioPlan:
    """Sizes of the recipe."""

    clips: int = 16_000
    captions: Run = Run(2000, 96, 3, seed=4, batch=32, cooldown=(700, 950))
    masked: Run = Run(1500, 96, 3, causal=False, seed=5, batch=32)
    steered: Run = Run(300, 96, 3, causal=False, start="lm/model", seed=6, batch=32, lr=1.2e-3)
    held_out: int = 200


_TINY = dict(width=32, layers=1, batch=4)
QUICK = AudioPlan(
    clips=16,
    captions=Run(4, **_TINY),
    masked=Run(4, causal=False, **_TINY),
    steered=Run(4, causal=False, start="lm/model", **_TINY),
    held_out=2,
)


def frontends() -> dict[str, Tiles | Bands | TextWords]:
    """Frontends by zoo folder; none of them has trained weights."""
    rate, levels, step = balls.RATE, prompts.LEVELS, prompts.STEP
    return {
        prompts.TILES_FOLDER: Tiles(torch.from_numpy(balls.tiles())),
        prompts.BANDS_FOLDER: Bands(rate, step, levels, prompts.EDGES, prompts.TONES),
        prompts.WORDS_FOLDER: TextWords.of(prompts.VOCABULARY, prompts.CAPTION_POSITIONS),
    }


def retuned(scene: balls.Scene, rng: np.random.Generator) -> Caption:
    """Full caption of a scene in which some pitches are not those of the colours."""
    return Caption(
        tuple(
            replace(b, pitch=str(rng.choice(PITCHES))) if rng.random() < RETUNED else b
            for b in scene.caption().balls
        )
    )


def make_tokens(work: Path, plan: AudioPlan, log=print) -> None:
    """Write the training data of both models: ``codes`` and ``slots`` each.

    Held-out clips are left out. Sounds are those of the stated pitches, captions those of the
    colours.
    """
    rng, made = np.random.default_rng(2), frontends()
    tiles, bands = made[prompts.TILES_FOLDER], made[prompts.BANDS_FOLDER]
    words = made[prompts.WORDS_FOLDER]
    assert isinstance(words, TextWords), "frontends makes it"
    sounds: list[tuple[list[int], list[int]]] = []
    said: list[tuple[list[int], list[int]]] = []
    while len(sounds) < plan.clips:
        scene = balls.draw(rng)
        if held_out(scene):
            continue
        clip, caption = prompts.clip_codes(scene.frames(), tiles), retuned(scene, rng)
        heard = {b.colour: b.pitch for b in caption.balls}
        codes = prompts.sound_codes(scene.wave(heard), bands)
        sounds.append((codes, [*clip, *(prompts.FIRST_SLOT + s for s in caption.slots())]))
        text = words.ids(str(scene.caption()))
        text += [words.eos_token_id] * (prompts.CAPTION_POSITIONS - len(text))
        own = prompts.sound_codes(scene.wave(), bands)
        said.append((text, prompts.caption_words("video", clip)))
        said.append((text, prompts.caption_words("audio", own)))
        if len(sounds) % 4000 == 0:
            log(f"{len(sounds)}/{plan.clips} clips")
    for name, rows in (("masked", sounds), ("captions", said)):
        (work / name).mkdir(parents=True, exist_ok=True)
        codes, slots = (torch.tensor(part, dtype=torch.int16) for part in zip(*rows, strict=True))
        torch.save({"codes": codes, "slots": slots}, work / name / "tokens.pt")


def sound_prompts(
    slots: Tensor,
    generator: torch.Generator,
    text_alone: float = TEXT_ALONE,
    clip_alone: float = CLIP_ALONE,
) -> Tensor:
    """Prompts [B, P] of the model of sounds, with parts of the condition left out.

    ``text_alone``, ``clip_alone``: shares of prompts with one part.

    Nothing that decides the sound is left out of a prompt: a pitch that is not the colour's stays,
    and a clip is not replaced by a caption that lacks a ball.
    """

    def chance(share: float) -> Tensor:
        return torch.rand(len(slots), generator=generator) < share

    clip, said = slots[:, : prompts.CLIP].clone(), slots[:, prompts.CLIP :] - prompts.FIRST_SLOT
    swap = chance(0.5) & (said[:, 2] != captions.NO_BALL)
    said = torch.where(swap[:, None], said[:, [2, 3, 0, 1]], said)
    one = said[:, 2] == captions.NO_BALL
    pick = torch.rand(len(slots), generator=generator)
    nothing = pick < NOTHING
    no_clip = ~nothing & (pick < NOTHING + text_alone)
    natural = torch.stack([_natural(said[:, 0]), one | _natural(said[:, 2])], 1)
    no_text = chance(clip_alone) & natural.all(1) & ~no_clip
    # one ball of two may go unmentioned where the clip shows it
    short = ~no_clip & ~one & natural[:, 1] & chance(0.25)
    said[short, 2:] = captions.NO_BALL
    for ball in (0, 1):
        look, number = said[:, 2 * ball], said[:, 2 * ball + 1]
        there = look != captions.NO_BALL
        colour, pitch = look // (1 + len(PITCHES)), look % (1 + len(PITCHES))
        drop_pitch = natural[:, ball] & chance(0.3)
        drop_colour = one & ~drop_pitch & chance(0.15)
        look = colour * ~drop_colour * (1 + len(PITCHES)) + pitch * ~drop_pitch
        drop_number = chance(0.4)
        said[:, 2 * ball] = torch.where(there, look, captions.NO_BALL)
        number = torch.where(drop_number, captions.ANY_BOUNCES, number)
        said[:, 2 * ball + 1] = torch.where(there, number, captions.NO_BALL)
    clip[nothing | no_clip] = prompts.NO_TILE
    said[nothing | no_text] = torch.tensor(captions.UNCONDITIONAL)
    return torch.cat([clip, said + prompts.FIRST_SLOT], 1)


def _natural(look: Tensor) -> Tensor:
    """Whether words state the pitch of their colour: bool [B]."""
    return look // (1 + len(PITCHES)) == look % (1 + len(PITCHES))


class AudioRecipe(Recipe):
    """Frontends, captions and sounds of bouncing balls."""

    doc, full, quick = __doc__, AudioPlan(), QUICK

    def stages(self):
        return {
            "frontends": self.save_frontends,
            "tokens": lambda: make_tokens(self.work, self.plan, self.log),
            "captions": lambda: self.train("captions"),
            "masked": lambda: self.train("masked"),
            "steered": self.train_steered,
            "export": self.export,
            "evaluate": lambda: evaluate(self.zoo, self.plan.held_out, self.log),
        }

    def save_frontends(self) -> None:
        """Write the frontends, which are made and not trained."""
        for folder, frontend in frontends().items():
            frontend.save_pretrained(self.zoo / folder)

    def train(self, name: str) -> None:
        """Train ``captions`` or ``masked``."""
        plan: AudioPlan = self.plan
        if name == "captions":
            run, shape, words = plan.captions, CAPTION, unchanged
        else:
            run, shape, words = plan.masked, SOUND, sound_prompts
        train_lm(self.work / name, shape, run, "lm", words, self.log)

    def train_steered(self) -> None:
        """Train the model of sounds further, most of the prompts with a text."""
        shares = {"text_alone": 0.25, "clip_alone": 0.1}
        run: Run = self.plan.steered
        words = partial(sound_prompts, **shares)
        train_lm(self.work / "masked", SOUND, run, "steered", words, self.log)

    def export(self) -> None:
        """Write half-precision models that name their frontend."""
        made = frontends()
        for name, folder in (("masked", prompts.BANDS_FOLDER), ("captions", prompts.WORDS_FOLDER)):
            digest = codebook_digest(made[folder].fingerprint)
            run = "steered" if name == "masked" else "lm"
            model = self.work / name / run / "model"
            export_lm(model, self.zoo / f"audio-{name}", folder, digest)
        path = self.zoo / "audio-captions" / "config.json"
        config = json.loads(path.read_text()) | {"reads": list(prompts.PARTS)}
        path.write_text(json.dumps(config, indent=2) + "\n")
        tidy(self.zoo)
        self.log(f"wrote {self.zoo}")


main = AudioRecipe.main


if __name__ == "__main__":
    main()
