"""Captions and texts of one's own: in any words and any script they are encoded, condition the
model that is trained on them, and are taken by every door of its folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import own_media
import pytest
import torch
from PIL import Image
from served import serving
from transformers import AutoModelForCausalLM, AutoTokenizer

import gen
from gen.__main__ import main
from gen.config.job import make_job
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.modalities.own_captions import with_own_captions
from gen.tokenizers.text.trained import FILE, LEAST, TrainedTokenizer
from gen.training.config import make_training
from gen.training.data import load_data
from gen.training.encode import EncodeOptions, encode_folder
from gen.training.prompts import MOST
from gen.training.run import train
from gen.training.sources import SUFFIXES

TINY = {"model": {"width": 32, "layers": 1}, "batch_size": 4, "steps": 2}
WORDS = {"ein roter Kreis, café": "red", "青い四角が二つ 🎈": "blue"}
TEXTS = [
    "ein roter Kreis",
    "naïve Ångström",
    "赤い丸が三つ",
    "🎈👩‍👩‍👧\tx",
    "a\u0301 ﬁ",
    "\u200f\u0000",
]


def images_of(folder: Path, captions: list[str], colours: list[str]) -> Path:
    folder.mkdir(parents=True)
    for i, (caption, colour) in enumerate(zip(captions, colours, strict=True)):
        Image.new("RGB", (64, 64), colour).save(folder / f"{i}.png")
        if caption:
            (folder / f"{i}.txt").write_text(caption, encoding="utf-8")
    return folder


def settings(data: Path, out: Path, **more: object):
    return make_training({**TINY, "data": str(data), "out": str(out), **more}, "here")


def run(data: Path, out: Path, **more: object) -> dict:
    return train(settings(data, out, **more), lambda _: None)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Folder with tokens of red and of blue images, a model with their captions, and one of the
    images alone."""
    root = tmp_path_factory.mktemp("captions")
    images_of(root / "media", [*WORDS] * 4, [*WORDS.values()] * 4)
    images_of(root / "bare", [""] * 8, ["red"] * 8)
    for name, data in (("media", "D"), ("bare", "N")):
        encode_folder("image", root / name, root / data)
        run(root / data, root / f"{data}-run")
    shutil.copytree(root / "D-run" / "model", root / "elsewhere")  # without what it was made from
    return root


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_has_tokens_that_decode_to_it(text):
    made = TrainedTokenizer.of_texts(["der Hund sieht den Ball."] * 3, 300).frontend()
    assert made.text(made.ids(text)) == text
    captions = TrainedTokenizer.of_captions(["der Hund sieht den Ball."] * 3, 300)
    assert captions.ids(text)


def test_captions_are_compared_in_nfc_and_lower_case_with_single_spaces():
    made = TrainedTokenizer.of_captions(["ein café am Ufer"] * 3, 400)
    assert made.ids(" Ein  CAFE\u0301 am\nUfer") == made.ids("ein café am Ufer")
    assert made.ids("ein café am Ufer") != made.ids("ein cafe am Ufer")  # control
    assert len(made.ids("ein café am ufer")) < len(made.ids("xyz qwv jj kkpp"))


def test_the_same_captions_make_the_same_tokenizer_of_the_size_that_was_asked_for():
    texts = [f"caption {i % 7} of {i % 5} things" for i in range(60)]
    made = [TrainedTokenizer.of_captions(texts, 270) for _ in range(2)]
    assert made[0].digest == made[1].digest and made[0].size == 270
    assert TrainedTokenizer.of_captions(texts, LEAST + 20).digest != made[0].digest  # control


@pytest.mark.parametrize(
    ("captions", "asked", "own"),
    [
        (["a red circle", "a blue square"], "auto", False),
        (["a red circle", "a blue square"], "own", True),
        ([*WORDS], "auto", True),
        (["a red circle", "ein roter Kreis", "zwei Kreise"], "auto", True),
    ],
)
def test_captions_get_a_tokenizer_where_the_built_in_language_lacks_most(
    captions, asked, own, tmp_path, capsys
):
    folder = images_of(tmp_path / "media", captions, ["red"] * len(captions))
    asking = ["--tokenizer", asked, "--out", str(tmp_path / "D")]
    assert main(["encode", "image", str(folder), *asking]) == 0
    manifest = json.loads((tmp_path / "D" / "manifest.json").read_text())
    assert ("captions" in manifest) == own == (tmp_path / "D" / FILE).is_file()
    assert ("captions: byte-level tokenizer of" in capsys.readouterr().err) == own
    assert manifest["captioned"] == len(captions)


def test_control_a_misspelt_caption_among_built_in_ones_is_named(tmp_path):
    folder = images_of(tmp_path / "media", ["a red circle", "a rad circle"], ["red"] * 2)
    with pytest.raises(GenError, match=r"1 of 2 sources cannot be read: 1.png .*--tokenizer own"):
        encode_folder("image", folder, tmp_path / "D")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "own", "vocab_size": 10}, "vocab_size is 10; expected"),
        ({"tokenizer": "nowhere"}, "the tokenizer of nowhere cannot be read"),
        ({"tokenizer": "built-in"}, "2 of 2 sources cannot be read"),
    ],
)
def test_what_is_no_tokenizer_is_refused(options, message, tmp_path):
    folder = images_of(tmp_path / "media", [*WORDS], ["red"] * 2)
    with pytest.raises(GenError, match=message):
        encode_folder("image", folder, tmp_path / "D", EncodeOptions(**options))


def test_tokenizers_of_what_has_no_captions_are_refused(tmp_path):
    bare = images_of(tmp_path / "media", [""], ["red"])
    with pytest.raises(GenError, match="tokenizer is 'own', and no medium has a caption"):
        encode_folder("image", bare, tmp_path / "D", EncodeOptions(tokenizer="own"))
    actions = own_media.action(tmp_path / "actions", 2)
    with pytest.raises(GenError, match="expected 'built-in' for modality 'action'"):
        encode_folder("action", actions, tmp_path / "D", EncodeOptions(tokenizer="own"))


def test_a_caption_that_no_prompt_holds_is_named(tmp_path):
    captions = ["ein roter Kreis", "".join(chr(0x4E00 + i) for i in range(MOST))]
    folder = images_of(tmp_path / "media", captions, ["red"] * 2)
    with pytest.raises(GenError, match=r"1.png \(the caption '一.*tokens; expected at most"):
        encode_folder("image", folder, tmp_path / "D", EncodeOptions(tokenizer="own"))


def test_an_interrupted_encoding_keeps_its_tokenizer(root, tmp_path):
    moved = shutil.copytree(root / "D", tmp_path / "D")
    before = (moved / FILE).read_bytes()
    (moved / "manifest.json").unlink()
    encode_folder("image", root / "media", moved)
    assert (moved / FILE).read_bytes() == before
    other = TrainedTokenizer.of_captions(["etwas anderes"] * 3, 300)
    other.save(moved)
    with pytest.raises(GenError, match=r"has the digest \w+; expected \w+, that of the tokenizer"):
        load_data(moved)


def as_stated(model: str, sampler: str) -> int:
    """Count images of the colour of their caption, of four of each caption."""
    pipe = gen.load("image", model)
    made = pipe([*WORDS], sampler, num_samples=4, seed=0, guidance_scale=2.0).images
    red = [image.getchannel("R").resize((1, 1)).getpixel((0, 0)) for image in made]
    blue = [image.getchannel("B").resize((1, 1)).getpixel((0, 0)) for image in made]
    return sum((r > b) == (n < 4) for n, (r, b) in enumerate(zip(red, blue, strict=True)))


@pytest.mark.parametrize(
    ("objective", "sampler"),
    [("causal", "autoregressive"), pytest.param("masked", "maskgit", marks=pytest.mark.slow)],
)
def test_what_is_generated_is_what_the_caption_says_unless_all_are_dropped(
    objective, sampler, root, tmp_path
):
    keys = {"objective": objective, "steps": 100, "lr": 0.01, "validation": 0.0}
    assert as_stated(run(root / "D", tmp_path / "E", **keys)["model"], sampler) >= 7
    keys["drop"] = 1.0  # control
    assert as_stated(run(root / "D", tmp_path / "F", **keys)["model"], sampler) <= 6


@pytest.mark.parametrize("name", sorted(set(SUFFIXES) - {"action", "text", "image"}))
@pytest.mark.thinned(2)
def test_every_modality_with_captions_takes_free_ones(name, tmp_path):
    folder = own_media.FOLDERS[name](tmp_path / "media", 6)
    for i, path in enumerate(sorted(folder.glob("*.txt"))):
        path.write_text(f"Aufnahme {i % 3}: läuft, 走る 🎈", encoding="utf-8")
    encode_folder(name, folder, tmp_path / "D")
    done = run(tmp_path / "D", tmp_path / "E")
    pipe = gen.load(name, done["model"])
    assert type(pipe.modality) is with_own_captions(registry.get("modality", name))
    assert done["use"].startswith(f"gen sample {name}")
    words = [pipe.bound(done["model"])[1].prompt(t) for t in ("läuft 🎈", "走る", "", "läuft 🎈")]
    assert words[0] == words[3] and words[0] != words[1] != words[2]
    assert len(pipe("Eine ungesehene: 飛ぶ", seed=1, guidance_scale=2.0).media) == 1


def test_a_model_folder_stands_alone_and_means_the_same_anywhere(root, tmp_path):
    asked = {"prompts": "zwei blaue 四角", "seed": 3, "top_k": 0}
    here = gen.load("image", str(root / "D-run" / "model"))
    want = here(**asked).tokens
    assert torch.equal(gen.load("image", str(root / "elsewhere"))(**asked).tokens, want)
    here.save_pretrained(tmp_path / "saved")
    assert torch.equal(gen.load(str(tmp_path / "saved"))(**asked).tokens, want)
    assert not torch.equal(here(**{**asked, "prompts": "drei"}).tokens, want)  # control
    (root / "elsewhere" / "captions.txt").unlink()
    assert here.modality.example_prompts(3, 0)[0] in WORDS


def test_jobs_and_servers_take_free_captions(root, tmp_path):
    prompt, model = "ein 四角, café", str(root / "D-run" / "model")
    out = tmp_path / "job"
    assert main(["sample", "image", prompt, "--model", model, "--out", str(out), "-n", "2"]) == 0
    assert len(list(out.glob("*.png"))) == 2
    with serving(models={"mine": gen.load("image", model)}) as server:
        body = {"model": "mine", "prompt": prompt, "response_format": "b64_json"}
        status, answer, _ = server.ask("/v1/images/generations", body)
        assert status == 200 and answer["data"][0]["b64_json"]
        status, answer, _ = server.ask("/v1/images/generations", {**body, "prompt": "ŝ" * 500})
        assert status == 400 and "tokens; expected at most" in answer["error"]["message"]


def test_a_model_without_conditions_says_so_and_needs_no_prompt(root, tmp_path, capsys):
    model = str(root / "N-run" / "model")
    pipe = gen.load("image", model)
    assert "guidance_scale" not in pipe.config["sampling"]
    captioned = gen.load("image", str(root / "D-run" / "model"))
    assert "guidance_scale" not in captioned.config["sampling"]
    assert "guidance_scale" in gen.load("image").config["sampling"]  # control
    assert len(pipe(num_samples=2, seed=0).images) == 2
    with pytest.raises(GenError, match=r"'a dog', and model .* was trained without conditions"):
        pipe("a dog")
    asked = ["sample", "image", "-n", "2", "--model", model, "--out", str(tmp_path / "S")]
    assert main(asked) == 0 and len(list((tmp_path / "S").glob("*.png"))) == 2
    assert main([*asked[:2], "a dog", *asked[2:-1], str(tmp_path / "T")]) != 0
    assert "was trained without conditions" in capsys.readouterr().err
    assert main(["sample", "image", "--out", str(tmp_path / "U")]) != 0  # control: a built-in one
    assert "prompts.0 is ''" in capsys.readouterr().err


def test_checkers_know_nothing_of_media_of_ones_own(root):
    pipe = gen.load("image", str(root / "D-run" / "model"))
    with pytest.raises(GenError, match="no checker knows what they show"):
        pipe.modality.check(Image.new("RGB", (64, 64)), "a red circle")
    assert gen.load("image").modality.check(Image.new("RGB", (64, 64)), "a red circle")  # control


def test_a_model_may_start_from_one_with_other_captions(root, tmp_path):
    keys = {"lr": 1e-5, "average": False}
    fresh = run(root / "D", tmp_path / "fresh", **keys)
    tuned = run(root / "D", tmp_path / "tuned", model="image-draft", **keys)
    assert tuned["loss"][0] < fresh["loss"][0] - 0.5
    model = tuned["model"]
    encode_folder("image", root / "media", tmp_path / "D", EncodeOptions(tokenizer=model))
    again = run(tmp_path / "D", tmp_path / "again", model=model, **keys)
    assert (tmp_path / "D" / FILE).read_bytes() == Path(model, FILE).read_bytes()
    assert again["loss"][0] < fresh["loss"][0] - 0.5


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Tokens of a corpus whose lines begin with one of two words."""
    root = tmp_path_factory.mktemp("corpus")
    (root / "texts").mkdir()
    lines = ["Der Hund läuft.", "まる 🎈 まる"] * 20
    (root / "texts" / "a.txt").write_text("\n".join(lines), encoding="utf-8")
    encode_folder("text", root / "texts", root / "D")
    return root


@pytest.mark.parametrize("objective", ["causal", pytest.param("masked", marks=pytest.mark.slow)])
def test_a_corpus_trains_a_text_model_of_its_own_tokenizer(objective, corpus, tmp_path):
    assert json.loads((corpus / "D" / "manifest.json").read_text())["samples"] == 40
    steps = {"causal": 60, "masked": 300}[objective]
    keys = {"objective": objective, "steps": steps, "lr": 0.01, "batch_size": 8}
    done = run(corpus / "D", tmp_path / "E", **keys)
    pipe = gen.load("text", done["model"])
    assert pipe.config["protocols"] == [objective]
    made = pipe(num_samples=6, seed=0).media
    assert sum(text in ("Der Hund läuft.", "まる 🎈 まる") for text in made) >= 4
    if objective == "causal":
        assert pipe("Der", seed=0, temperature=0).media[0] == " Hund läuft."
        network = AutoModelForCausalLM.from_pretrained(done["model"])
        ids = AutoTokenizer.from_pretrained(done["model"])("Der", return_tensors="pt").input_ids
        found = network.generate(ids, max_new_tokens=8, do_sample=False)
        assert pipe.bound(done["model"])[2].text(found[0, 1:].tolist()) == "Der Hund läuft."


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_prompts_before_a_tab_condition_texts(objective, tmp_path):
    (tmp_path / "texts").mkdir()
    lines = ["übersetze Hund\tdog", "übersetze Käse\tcheese"] * 20
    (tmp_path / "texts" / "a.txt").write_text("\n".join(lines), encoding="utf-8")
    encode_folder("text", tmp_path / "texts", tmp_path / "D")
    keys = {"objective": objective, "steps": 60, "lr": 0.02, "batch_size": 8}
    pipe = gen.load("text", run(tmp_path / "D", tmp_path / "E", **keys)["model"])
    made = pipe(["übersetze Hund", "übersetze Käse"], num_samples=3, seed=0).media
    assert made == ["dog"] * 3 + ["cheese"] * 3


def test_control_texts_of_the_built_in_language_keep_its_words(tmp_path):
    manifest = encode_folder("text", own_media.text(tmp_path / "media", 4), tmp_path / "D")
    assert manifest["frontend"]["name"] == "text-words" and not (tmp_path / "D" / FILE).exists()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"objective": "block", "block": 2}, "objective is 'block'; expected causal or masked"),
        ({"lora": {"rank": 2}}, "lora is .* expected none: the model is new"),
    ],
)
def test_what_new_text_models_are_not_trained_with(keys, message, corpus, tmp_path):
    with pytest.raises(GenError, match=message):
        run(corpus / "D", tmp_path / "E", **keys)


def test_defaults_that_training_states_are_those_of_every_door(root, tmp_path):
    model = root / "D-run" / "model"
    asked = ["objective=causal", f"data={root / 'D'}", f"out={root / 'D-run'}", "batch_size=4"]
    asked += ["model={width: 32, layers: 1}", "steps=2"]
    before = (model / "model.safetensors").read_bytes()
    for stated in ({}, {"temperature": 0.5, "top_k": 7}):
        more = [f"sampling.{k}={v}" for k, v in stated.items()]
        assert main(["train", "train/image-quick", *asked, *more]) == 0  # a finished run
        pipe = gen.load("image", str(model))
        job = {"modality": "image", "model": str(model), "prompts": ["café"], "out": "x"}
        for found in (
            pipe.request("café", None, None, 0, {}).sampling.to_dict(),
            make_job(job, where="here").entries[0].sampling,
        ):
            expected = {"temperature": 1.0, "top_k": 100, "guidance_scale": 1.0, **stated}
            assert {k: found[k] for k in expected} == expected
    assert (model / "model.safetensors").read_bytes() == before
    pipe.save_pretrained(tmp_path / "saved")
    again = gen.load(tmp_path / "saved")
    again = again.request("café", None, None, 0, {"temperature": 0.3}).sampling
    assert (again.temperature, again.top_k) == (0.3, 7)
    with pytest.raises(GenError, match="a drafter is trained for the defaults of its model"):
        settings(root / "D", root / "V", objective="drafter", model=str(model), sampling=stated)
