"""Sounds given the hidden states of the model of captions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import gen
from gen.contracts.condition import CONDITION, Condition, Prompt
from gen.contracts.frontend import codebook_digest
from gen.core.errors import GenError
from gen.modalities.audio import balls, captions, prompts
from gen.modalities.audio.captions import Caption
from gen.modalities.audio.modality import AudioModality
from gen.modalities.audio.states import ROWS, SoundStates, caption_states, sound_states
from gen.models.adapters.feature_prompts import POSITIONS, VECTORS
from gen.models.load.digest import digest_of
from gen.models.load.locate import read_config
from gen.models.nets.grid_states import GridStatesConfig, GridStatesForCausalLM
from gen.recipes.audio.sounds import SOUND, main, prompted, stated
from gen.recipes.common.grid_models import Run, sizes_of

CAPTIONER = "audio-captions"
SCENES = balls.scenes(3, 21, held=True)
TEXT = "a red ball bounces, low"


@pytest.fixture(scope="module")
def states() -> SoundStates:
    return SoundStates(CAPTIONER)


@pytest.fixture(scope="module")
def folder(states, tmp_path_factory):
    """A tiny random model of sounds that reads states."""
    torch.manual_seed(0)
    frontend = AudioModality().frontend()
    config = GridStatesConfig(
        state_size=states.model.config.hidden_size,
        states_of=CAPTIONER,
        states_digest=digest_of(states.model),
        frontend=prompts.BANDS_FOLDER,
        codebook_digest=codebook_digest(frontend.fingerprint),
        **sizes_of(SOUND, Run(1, 32, 1, causal=False)),
    )
    model = GridStatesForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8)  # so that conditions tell
    out = tmp_path_factory.mktemp("sounds") / "own"
    model.save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def pipe(folder):
    return gen.load("audio", str(folder), device="cpu")


def parse(**parts):
    return AudioModality().parse(Condition.of(parts))


def encoded(states: SoundStates, **parts) -> Tensor:
    return states.encode(parse(**parts))[VECTORS]


def test_states_are_the_last_ones_of_the_captioner(states):
    condition = parse(text=TEXT, video=SCENES[0].frames())
    words = len(prompts.VOCABULARY) + 1
    said = states.word_ids(condition.caption)
    asked = prompts.caption_words("video", list(condition.tiles))
    ids = torch.tensor([[words + w for w in asked] + said])
    with torch.no_grad():
        hidden = states.model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
    found = states.encode(condition)
    assert found[POSITIONS].tolist() == list(range(ROWS)) and found[VECTORS].shape[0] == ROWS
    clip, caption = found[VECTORS].split([prompts.CLIP, prompts.CAPTION_POSITIONS])
    assert torch.allclose(clip, hidden[1 : 1 + prompts.CLIP], atol=1e-5)  # one row per tile
    assert torch.allclose(caption[: len(said)], hidden[prompts.CAPTION_SLOTS :], atol=1e-5)


def test_rows_of_what_is_not_given_are_zeros(states):
    frames, split = SCENES[0].frames(), prompts.CLIP
    both = encoded(states, text=TEXT, video=frames)
    clip, text = encoded(states, video=frames), encoded(states, text=TEXT)
    assert torch.allclose(both[:split], clip[:split], atol=1e-6)  # no row sees later words
    assert not clip[split:].any() and not text[:split].any()
    count = len(states.word_ids(captions.parse(TEXT)))
    assert text[split : split + count].any(1).all() and not text[split + count :].any()
    assert not torch.allclose(both[split:], text[split:], atol=1e-2)  # words see the clip


def test_padding_changes_nothing(states):
    short, long = (states.word_ids(s.caption()) for s in sorted(SCENES, key=_words)[::2])
    assert len(short) < len(long)
    tiles = prompts.clip_codes(SCENES[0].frames())
    alone = caption_states(states.model, [tiles], [short])
    padded = caption_states(states.model, [tiles, None], [short, long])
    assert torch.allclose(padded[:1], alone, atol=1e-5)


def _words(scene: balls.Scene) -> int:
    return len(str(scene.caption()))


def test_a_prompt_is_a_state_per_row_and_nothing_is_the_mask(pipe):
    binding = pipe.bound(pipe.model)[1]
    mask = pipe.bound(pipe.model)[0].config.mask_token_id
    prompt = binding.prompt(parse(text=TEXT))
    assert isinstance(prompt, Prompt) and prompt.tokens == [CONDITION] * ROWS
    assert binding.unconditional == [mask] * ROWS
    assert binding.prompt(AudioModality().parse(Condition(text="a ball bounces"))) != [mask] * ROWS


def logprobs(pipe, asked: list, scale: float) -> Tensor:
    """Log-probabilities [B, T, V] of empty canvases."""
    sampler, sampling = pipe.resolve("maskgit", explicit={"guidance_scale": scale})
    target = pipe.target(sampler, sampling, pipe.plan(asked))
    canvas = torch.full((len(asked), target.length), target.space.mask_token_id)
    return target.predict(canvas).logprobs


def test_conditions_of_a_batch_equal_each_alone(pipe):
    frames = [scene.frames() for scene in SCENES]
    asked = [{"video": frames[0]}, TEXT, {"text": TEXT, "video": frames[1]}, {"video": frames[2]}]
    together = logprobs(pipe, asked, 1.5)
    for row, one in enumerate(asked):
        alone = logprobs(pipe, [one], 1.5)[0]
        seen = alone.isfinite()
        assert torch.equal(seen, together[row].isfinite())
        assert torch.allclose(together[row][seen], alone[seen], atol=1e-4)


def test_a_negative_prompt_has_states_of_its_own(pipe):
    asked = [{"video": SCENES[0].frames()}, TEXT]
    other = copy.copy(pipe)
    other.negative_condition = parse(text="a blue ball bounces, high")
    plain, led = logprobs(pipe, asked, 3.0), logprobs(other, asked, 3.0)
    seen = plain.isfinite()
    assert not torch.allclose(plain[seen], led[seen], atol=1e-3)
    assert torch.allclose(logprobs(other, asked, 1.0)[seen], logprobs(pipe, asked, 1.0)[seen])


def test_a_captioner_of_other_weights_is_refused(folder):
    config = read_config(folder)
    assert sound_states(config["states_of"], config["states_digest"]).model is not None
    with pytest.raises(GenError, match=r"are of weights .* expected those of 0000"):
        _ = SoundStates(CAPTIONER, "0000").model


def test_states_of_another_size_are_refused(folder):
    modality = AudioModality()
    config = type("Config", (), dict(read_config(folder)))
    config.state_size = 7
    with pytest.raises(GenError, match="takes states of 7 entries"):
        modality.bind(config, modality.frontend(), str(folder))


def test_training_reads_the_states_that_the_modality_makes(states):
    frames = SCENES[0].frames()
    tiles, said = prompts.clip_codes(frames), captions.parse(TEXT)
    rows = [
        prompts.sound_words(tuple(tiles), said),
        prompts.sound_words(tuple(tiles), Caption()),
        prompts.sound_words(None, said),
        prompts.UNCONDITIONAL,
    ]
    marks, found = prompted(states.model, states.words, torch.tensor(rows))
    assert marks[:3].eq(SOUND.mask + 1).all() and marks[3].eq(SOUND.mask).all()
    for row, parts in enumerate(
        ({"text": TEXT, "video": frames}, {"video": frames}, {"text": TEXT})
    ):
        assert torch.allclose(found[row], encoded(states, **parts), atol=1e-5)


def test_slots_and_captions_are_inverse():
    for scene in balls.scenes(30, 2, held=True):
        assert stated(scene.caption().slots()) == scene.caption()
    for text in (TEXT, "a ball bounces 2 times", "a blue ball bounces and a ball bounces, mid"):
        assert stated(captions.parse(text).slots()) == captions.parse(text)
    assert stated(captions.UNCONDITIONAL) == Caption()


@pytest.mark.slow
def test_the_quick_recipe_runs_from_clips_to_figures(tmp_path):
    main(["all", "--quick", "--work", str(tmp_path)])
    assert (tmp_path / "zoo" / "evaluation-audio.json").is_file()
