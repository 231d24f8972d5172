"""Captions that a text encoder of transformers reads: their states condition the trained model at
every door, and an encoder that is missing or another one is named."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from served import serving
from transformers import (
    AutoModel,
    CLIPTextConfig,
    CLIPTextModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
)

import gen
from gen.__main__ import main
from gen.core.errors import GenError
from gen.modalities.text_encoder import BESIDE, STATED, TextEncoder
from gen.recipes.common.grid_models import WEIGHTS
from gen.recipes.common.train import cast_weights
from gen.recipes.drafters.data import Conditions, Teacher
from gen.recipes.drafters.kind_ar import Autoregressive, ModelOptions
from gen.recipes.drafters.kind_flexdraft import FlexKind
from gen.recipes.drafters.kind_parallel import Masked, Prompt
from gen.tokenizers.text.trained import TrainedTokenizer
from gen.training.config import make_training
from gen.training.data import load_data
from gen.training.encode import EncodeOptions, encode_folder
from gen.training.held_out import held_out_loss
from gen.training.prompts import STATES
from gen.training.run import train
from gen.training.tasks import make_task

CAPTIONS = ["ein roter Kreis, café", "青い四角が二つ 🎈", "ein großer roter Kreis", ""]
T5 = {"vocab_size": 400, "d_model": 32, "d_ff": 32, "d_kv": 16, "num_layers": 1, "num_heads": 2}
SMALL = {
    "vocab_size": 400,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def networks() -> dict:
    torch.manual_seed(0)
    return {
        "t5": T5EncoderModel(T5Config(**T5)),
        "t5-whole": T5ForConditionalGeneration(T5Config(**T5)),
        "clip": CLIPTextModel(CLIPTextConfig(**SMALL, max_position_embeddings=40)),
        "language": LlamaForCausalLM(LlamaConfig(**SMALL)),
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Folder with encoders, captioned images, and a causal and a masked model of a language
    model's states."""
    root = tmp_path_factory.mktemp("encoders")
    tokenizer = TrainedTokenizer.of_texts(CAPTIONS * 3, 390).frontend().tokenizer
    for name, network in networks().items():
        network.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    (root / "media").mkdir()
    for i, caption in enumerate(CAPTIONS * 2):
        Image.new("RGB", (64, 64), "red" if i % 2 else "blue").save(root / "media" / f"{i}.png")
        if caption:
            (root / "media" / f"{i}.txt").write_text(caption, encoding="utf-8")
    asked = ["--text-encoder", str(root / "language"), "--out", str(root / "D")]
    assert main(["encode", "image", str(root / "media"), *asked]) == 0
    for objective in ("causal", "masked"):
        run(root / "D", root / objective, objective=objective)
    return root


def settings(data: Path, out: Path, **more: object):
    tiny = {"model": {"width": 32, "layers": 1}, "batch_size": 4, "steps": 3, "lr": 0.01}
    return make_training({**tiny, "data": str(data), "out": str(out), **more}, "here")


def run(data: Path, out: Path, **more: object) -> dict:
    return train(settings(data, out, **more), lambda _: None)


@pytest.mark.parametrize(
    ("name", "width"), [("t5", 32), ("t5-whole", 32), ("clip", 48), ("language", 48)]
)
def test_states_are_those_of_transformers_at_unit_size(name, width, root):
    encoder = TextEncoder(root / name)
    ids = torch.tensor([encoder.ids(CAPTIONS[0])])
    cls = {"t5": T5EncoderModel, "t5-whole": T5EncoderModel, "clip": CLIPTextModel}
    network = cls.get(name, AutoModel).from_pretrained(root / name).eval()
    expected = network(input_ids=ids).last_hidden_state[0].detach()
    states = encoder.states(CAPTIONS[0])
    assert states.shape == (ids.shape[1], width)
    assert torch.allclose(states.square().mean(-1), torch.ones(len(states)), atol=1e-3)
    cosines = torch.cosine_similarity(states, expected, dim=-1)
    assert torch.allclose(cosines, torch.ones(len(states)), atol=1e-5)


def test_the_encoding_and_the_model_say_which_encoder_it_is(root):
    manifest = json.loads((root / "D" / "manifest.json").read_text())
    about = manifest["captions"][STATED]
    assert about == TextEncoder(root / "language").to_dict()
    assert manifest["captioned"] == 6 and manifest["samples"] == 8
    data = load_data(root / "D")
    assert data.captions is not None and set(data.captions.states) == set(CAPTIONS[:3])
    for objective in ("causal", "masked"):
        config = json.loads((root / objective / "model" / "config.json").read_text())
        assert (config["conditions"], config[STATED]) == ("text_encoder", about)


@pytest.mark.parametrize("objective", ["causal", "masked", "block"])
def test_a_loss_depends_on_the_caption_until_it_is_dropped(objective, root):
    more = {"block": 16} if objective == "block" else {}
    config = settings(root / "D", root / "X", objective=objective, **more)
    task = make_task(config, load_data(root / "D"))
    rows, forward = torch.arange(4), cast_weights(task.model, WEIGHTS)
    losses = {}
    for name, factor in (("given", 1.0), ("other", -1.0)):
        task.states = factor * task.states
        losses[name] = [task.loss(forward, rows, 3, drop).item() for drop in (0.0, 1.0)]
    assert losses["given"][0] != losses["other"][0]
    assert losses["given"][1] == losses["other"][1]  # dropped captions are not seen


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_every_prompt_conditions_the_model(objective, root):
    pipe = gen.load("image", root / objective / "model")
    made = [pipe(text, seed=0, guidance_scale=1.5).tokens for text in (*CAPTIONS[:3], "ein Ball")]
    assert all(not torch.equal(torch.as_tensor(made[0]), torch.as_tensor(t)) for t in made[1:])
    again = pipe([CAPTIONS[0], "ein Ball", ""], seed=0, guidance_scale=1.5).tokens
    assert torch.equal(torch.as_tensor(again[0]), torch.as_tensor(made[0])[0])
    with pytest.raises(GenError, match=r"has \d+ tokens; expected at most 32"):
        pipe("青い" * 80)


def test_a_causal_model_drafts_the_tokens_that_it_decodes_one_by_one(root):
    pipe = gen.load("image", root / "causal" / "model")
    made = [
        pipe(CAPTIONS[:2], seed=1, sampler=s, guidance_scale=2.0).tokens
        for s in ("autoregressive", "speculative_jacobi")
    ]
    assert torch.equal(torch.as_tensor(made[0]), torch.as_tensor(made[1]))


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_held_out_loss_reads_the_captions(objective, root, tmp_path):
    found = held_out_loss(root / objective / "model", root / "D")
    assert found["samples"] == 8
    data = tmp_path / "D"
    shutil.copytree(root / "D", data)
    (data / STATES).unlink()
    with pytest.raises(GenError, match="the same gen encode makes it again"):
        held_out_loss(root / objective / "model", data)


def test_a_job_and_a_saved_pipeline_take_prompts_without_the_folder_of_training(root, tmp_path):
    pipe = gen.load("image", root / "masked" / "model")
    folder = pipe.save_pretrained(tmp_path / "saved")
    model = tmp_path / "alone"
    shutil.copytree(root / "masked", model)
    config = json.loads((model / "model" / "config.json").read_text())
    config[STATED]["folder"] = "/nowhere/encoder"
    (model / "model" / "config.json").write_text(json.dumps(config))
    message = f"text encoder /nowhere/encoder .*not there; expected it there, or in .*{BESIDE}"
    with pytest.raises(GenError, match=message):
        gen.load("image", model / "model")
    shutil.copytree(root / "language", model / "model" / BESIDE)
    asked = {"seed": 3, "guidance_scale": 1.5}
    expected = pipe(CAPTIONS[0], **asked).tokens
    for where in (folder, model / "model"):
        found = gen.load("image", where)
        assert Path(found.modality.text_encoder.folder).is_relative_to(where)
        assert torch.equal(
            torch.as_tensor(found(CAPTIONS[0], **asked).tokens), torch.as_tensor(expected)
        )
    job = ["sample", "image", CAPTIONS[1], "--model", str(folder), "--out", str(tmp_path / "out")]
    assert main(job) == 0
    assert len(list((tmp_path / "out").glob("*.png"))) == 1


def test_another_encoder_is_refused(root, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(root / "causal" / "model", model)
    shutil.copytree(root / "clip", model / BESIDE)
    with pytest.raises(GenError, match=r"has the weights \w+; expected \w+, with which"):
        gen.load("image", model)(CAPTIONS[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_encoder": "/nowhere"}, "text encoder is '/nowhere'; expected the folder"),
        ({"text_encoder": "clip", "tokenizer": "own"}, "expected none beside a text encoder"),
        ({"text_encoder": "media"}, "config.json"),
    ],
)
def test_what_is_no_encoder_is_refused(options, message, root, tmp_path):
    named = options["text_encoder"]
    options = {**options, "text_encoder": str(root / named) if named[0] != "/" else named}
    with pytest.raises(GenError, match=message):
        encode_folder("image", root / "media", tmp_path / "D", EncodeOptions(**options))


def test_a_model_of_other_prompts_is_no_start(root):
    config = settings(root / "D", root / "X", model="image-causal")
    with pytest.raises(GenError, match="reads prompts with no text encoder, and the captions of"):
        make_task(config, load_data(root / "D"))
    again = settings(root / "D", root / "X", model=str(root / "causal" / "model"))
    assert make_task(again, load_data(root / "D")).states is not None  # control


def teacher_of(root: Path) -> Teacher:
    given = Conditions([*CAPTIONS[:2], CAPTIONS[0]], CAPTIONS[:1])
    return Teacher.of_model(str(root / "causal" / "model"), "image", 3, False, given)


def test_the_network_of_a_drafter_reads_the_captions(root):
    teacher = teacher_of(root)
    kind = Autoregressive(teacher, ModelOptions(depth=1))
    tokens = torch.zeros(3, 256, dtype=torch.long)
    with torch.no_grad():
        logq = kind.logq(kind.network(), teacher.batch(torch.arange(3), tokens))
    assert torch.equal(logq[0], logq[2]) and not torch.allclose(logq[0], logq[1], atol=1e-3)


@pytest.mark.parametrize("kind", [Masked, Prompt, FlexKind])
def test_drafters_whose_masks_have_the_ids_of_states_are_refused(kind, root):
    with pytest.raises(GenError, match=f"masks of a drafter of kind {kind.name}; expected another"):
        kind(teacher_of(root), kind.options_type())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ar", "exit"])
def test_a_drafter_saves_passes_at_every_door(kind, root, tmp_path):
    model = str(tmp_path / "E" / "model")
    run(root / "D", tmp_path / "E", model={"width": 32, "layers": 2}, steps=20)
    tree = {"objective": "drafter", "model": model, "data": str(root / "D")}
    tree |= {"out": str(tmp_path / "W"), "drafter": {"kind": kind, "quick": True}}
    done = train(make_training(tree, "here"), lambda _: None)
    assert main([*shlex.split(done["use"])[1:], "--out", str(tmp_path / "S"), "--quiet"]) == 0
    pipe = gen.load("image", model, draft_model=done["model"])
    made = pipe(CAPTIONS[:2], seed=1)
    plain = pipe(CAPTIONS[:2], seed=1, sampler="autoregressive")  # control
    assert made.spec["name"] == "speculative" and made.stats[0].draft_nfe > 0
    assert made.stats[0].nfe < plain.stats[0].nfe == 256
    pipe.save_pretrained(tmp_path / "saved")
    shutil.move(tmp_path / "saved", tmp_path / "moved")
    again = gen.load(tmp_path / "moved")(CAPTIONS[:2], seed=1)
    assert torch.equal(torch.as_tensor(again.tokens), torch.as_tensor(made.tokens))
    assert again.stats[0].nfe == made.stats[0].nfe
    with serving(models={"mine": pipe}) as server:
        body = {"model": "mine", "prompt": CAPTIONS[0], "response_format": "b64_json"}
        status, answer, _ = server.ask("/v1/images/generations", body)
        assert status == 200, answer
        said = answer["data"][0]["gen"]
        assert said["sampler"] == "speculative" and said["nfe"] < 256


def test_the_server_takes_prompts(root):
    model = root / "masked" / "model"
    with serving(models={"mine": gen.load("image", model)}) as server:
        body = {"model": "mine", "prompt": CAPTIONS[0], "response_format": "b64_json"}
        status, answer, _ = server.ask("/v1/images/generations", body)
        assert status == 200 and answer["data"][0]["b64_json"]
