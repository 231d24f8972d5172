"""Training data of sounds: what a prompt leaves out never decides the sound."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gen.modalities.audio import balls, captions, prompts
from gen.modalities.audio.captions import PITCHES, Ball, Caption
from gen.modalities.small_language import held_out
from gen.recipes.audio.evaluation import other_pitches, rotated, scores
from gen.recipes.audio.recipe import AudioPlan, AudioRecipe, make_tokens, retuned, sound_prompts

ROWS = 400


@pytest.fixture(scope="module")
def cases():
    """Scenes with the pitches that are stated about them, and their slots."""
    rng = np.random.default_rng(0)
    scenes = [balls.draw(rng) for _ in range(ROWS)]
    said = [retuned(scene, rng) for scene in scenes]
    clips = [prompts.clip_codes(scene.frames()) for scene in scenes]
    rows = [prompts.sound_words(tuple(c), s) for c, s in zip(clips, said, strict=True)]
    return said, torch.tensor(rows)


def ball(look: int, number: int) -> Ball | None:
    """Ball that two slots state; None where there is none."""
    if look == captions.NO_BALL:
        return None
    colour, pitch = divmod(look, 1 + len(PITCHES))
    bounces = number - captions.ANY_BOUNCES
    return Ball(
        captions.COLOURS[colour - 1] if colour else None,
        bounces or None,
        PITCHES[pitch - 1] if pitch else None,
    )


def stated(row: list[int]) -> tuple[bool, Caption]:
    """Whether a prompt has a clip, and its caption."""
    slots = [word - prompts.FIRST_SLOT for word in row[prompts.CLIP :]]
    has_clip = row[0] != prompts.NO_TILE
    if slots == captions.UNCONDITIONAL:
        return has_clip, Caption()
    said = (ball(*slots[:2]), ball(*slots[2:]))
    return has_clip, Caption(tuple(b for b in said if b))


def heard(said: Caption) -> list[str]:
    """Pitches that a caption states, by colour or outright."""
    return sorted(str(b.sounds) for b in said.balls)


def test_a_prompt_leaves_nothing_out_that_decides_the_sound(cases):
    full, rows = cases
    natural = [all(b.pitch == captions.natural(str(b.colour)) for b in c.balls) for c in full]
    assert 0.3 < np.mean(natural) < 0.9  # both kinds occur
    seen = dict.fromkeys(("nothing", "clip", "text", "both", "short"), 0)
    made = sound_prompts(rows, torch.Generator().manual_seed(1)).tolist()
    for said, own, row, before in zip(full, natural, made, rows.tolist(), strict=True):
        has_clip, caption = stated(row)
        assert not has_clip or row[: prompts.CLIP] == before[: prompts.CLIP]
        if not caption.balls:
            seen["clip" if has_clip else "nothing"] += 1
            assert own or not has_clip
            continue
        seen["both" if has_clip else "text"] += 1
        if not has_clip:
            assert heard(caption) == heard(said)
            continue
        seen["short"] += len(caption.balls) < len(said.balls)
        for b in said.balls:  # what a colour does not tell is stated
            told = {c.colour: c.sounds for c in caption.balls}
            known = told.get(b.colour, told.get(None, captions.natural(str(b.colour))))
            assert known == b.pitch
    assert min(seen.values()) > 3, seen


def test_prompts_keep_their_clips_and_words_in_range(cases):
    _, rows = cases
    made = sound_prompts(rows, torch.Generator().manual_seed(2))
    assert (
        made.shape == rows.shape and 0 <= int(made.min()) <= int(made.max()) < prompts.SOUND_WORDS
    )
    assert torch.equal(made, sound_prompts(rows, torch.Generator().manual_seed(2)))
    assert not torch.equal(made, sound_prompts(rows, torch.Generator().manual_seed(3)))


def test_tokens_are_those_of_clips_that_are_not_held_out(tmp_path):
    make_tokens(tmp_path, AudioPlan(clips=12))
    sounds, said = (torch.load(tmp_path / n / "tokens.pt") for n in ("masked", "captions"))
    assert sounds["codes"].shape == (12, prompts.STEPS * prompts.STREAMS)
    assert said["slots"].shape == (24, prompts.CAPTION_SLOTS)
    assert torch.equal(said["codes"][::2], said["codes"][1::2])  # a clip and its own sound
    kept = {tuple(row[: prompts.CLIP]) for row in sounds["slots"].tolist()}
    held = [s for s in balls.scenes(40, 1, held=True) if held_out(s)]
    assert len(held) == 40
    assert not kept & {tuple(prompts.clip_codes(s.frames())) for s in held}


def test_scores_are_one_for_real_sounds_and_fall_for_those_of_other_clips():
    scenes = balls.scenes(30, 4, held=True)
    real = [scene.wave() for scene in scenes]
    assert set(scores(real, scenes).values()) == {1.0}
    wrong = scores(real, rotated(scenes))
    assert wrong["exact_f1"] < 0.3 and wrong["event_f1"] < 0.3 and wrong["count"] < 0.6
    turned = [other_pitches(scene) for scene in scenes]
    assert scores(real, scenes, turned)["pitch"] == 0
    waves = [
        s.wave({str(b.colour): str(b.pitch) for b in c.balls})
        for s, c in zip(scenes, turned, strict=True)
    ]
    assert scores(waves, scenes, turned)["pitch"] == 1.0


@pytest.mark.slow
def test_the_quick_recipe_runs_from_nothing_to_cards(tmp_path):
    AudioRecipe.main(["all", "--quick", "--work", str(tmp_path)])
    zoo = tmp_path / "zoo"
    assert (zoo / "evaluation-audio.json").is_file()
    assert len(list(zoo.glob("*/README.md"))) == 5
