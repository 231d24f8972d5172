"""Pairs of media of one's own: an image, a sound or a clip in the condition, with a caption or
without, from files of one name or rows of a table, and the same at every door of the model."""

from __future__ import annotations

import csv
import json
import shutil
from base64 import b64decode, b64encode
from pathlib import Path

import numpy as np
import own_media
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from served import serving
from transformers import LlamaConfig, LlamaForCausalLM

import gen
from gen.__main__ import main
from gen.core.errors import GenError
from gen.media.audio import write_wav
from gen.modalities.condition_medium import STATED
from gen.models.load.locate import ZOO
from gen.tokenizers.text.trained import TrainedTokenizer
from gen.training.config import make_training
from gen.training.data import load_data
from gen.training.encode import EncodeOptions, encode_folder
from gen.training.held_out import held_out_loss
from gen.training.run import train
from gen.training.shards import read_folder
from gen.training.sources import SUFFIXES, find_sources

SIDE = 16
TURNED = {"red": "blue", "blue": "lime", "lime": "red"}  # what an image becomes
TEXTS = {"turn it": TURNED, "bleib so, café": {c: c for c in TURNED}}
SMALL = EncodeOptions(size="16x16")


def paint(path: Path, colour: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (SIDE, SIDE), colour).save(path)
    return path


def pairs(root: Path, count: int = 12, captions: bool = True) -> Path:
    """Draw ``before/N.png`` and ``after/N.png`` with an instruction."""
    for i in range(count):
        colour = [*TURNED][i % 3]
        text, to = [*TEXTS.items()][(i // 3) % 2] if captions else ("", TURNED)
        paint(root / "before" / f"{i}.png", colour)
        paint(root / "after" / f"{i}.png", to[colour])
        if text:
            (root / "after" / f"{i}.txt").write_text(text, encoding="utf-8")
    return root


def options(root: Path, **more: object) -> EncodeOptions:
    return EncodeOptions(**{"size": "16x16", "given": str(root / "before"), **more})


def settings(data: Path, out: Path, **more: object):
    tiny = {"model": {"width": 32, "layers": 2}, "batch_size": 6, "steps": 3, "lr": 0.01}
    keys = {**tiny, "data": str(data), "out": str(out), "validation": 0.0, **more}
    return make_training(keys, "here")


def run(data: Path, out: Path, **more: object) -> dict:
    return train(settings(data, out, **more), lambda _: None)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Folder with pairs of images, their tokens, and a causal model that learned what becomes of
    them."""
    root = pairs(tmp_path_factory.mktemp("pairs"))
    encode_folder("image", root / "after", root / "D", options(root))
    run(root / "D", root / "causal", steps=120)
    return root


@pytest.fixture(scope="module")
def masked(root) -> Path:
    """The same with a masked model, too."""
    run(root / "D", root / "masked", steps=150, objective="masked")
    return root


def prompts(root: Path) -> list[dict]:
    """Return every instruction beside an image of every colour."""
    images = [str(root / "before" / f"{i}.png") for i in range(3)]
    return [{"text": text, "image": image} for text in TEXTS for image in images]


def wanted(texts: list[str] | None = None) -> list[str]:
    return [to for text in texts or TEXTS for to in TEXTS[text].values()]


def shown(image: Image.Image) -> str:
    """Return the colour of an image."""
    mean = np.asarray(image, float).reshape(-1, 3).mean(0)
    return ("red", "lime", "blue")[int(mean.argmax())]


# --- files


def test_media_of_one_name_are_read_alone_by_their_own_frontend(root):
    data = load_data(root / "D")
    assert data.medium is not None and data.medium.part == "images"
    assert (data.medium.slots, data.medium.codes) == (16, 128) and len(data.given) == 12
    frontend = data.encoder.frontend
    for parts, given in zip(data.conditions, data.given, strict=True):
        assert parts is not None and {*parts} == {"text", "images"}
        signal = frontend.preprocess(Image.open(parts["images"][0]))
        assert frontend.encode(signal[None]).flatten().tolist() == given.tolist()
    assert data.given[0].tolist() != data.given[1].tolist()  # control: another image


@pytest.mark.parametrize("table", ["jsonl", "csv", "parquet"])
def test_rows_of_a_table_state_the_same_pairs(root, table, tmp_path):
    for part in ("before", "after"):
        shutil.copytree(root / part, tmp_path / part)
    rows = [
        {"file_name": f"after/{p.stem}.png", "image": f"before/{p.stem}.png", "text": p.read_text()}
        for p in sorted((tmp_path / "after").glob("*.txt"))
    ]
    path = tmp_path / f"metadata.{table}"
    if table == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif table == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0]])
            writer.writeheader()
            writer.writerows(rows)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    manifest = encode_folder("image", tmp_path, tmp_path / "D", SMALL)
    assert manifest["samples"] == 12  # images that are conditions are no samples
    made, by_name = load_data(tmp_path / "D"), load_data(root / "D")
    assert [t.tolist() for t in made.given] == [t.tolist() for t in by_name.given]
    assert [t.tolist() for t in made.tokens] == [t.tolist() for t in by_name.tokens]


def test_sounds_have_images_beside_them_without_captions(tmp_path, capsys):
    folder = tmp_path / "media"
    for i, colour in enumerate(["red", "blue"] * 2):
        paint(folder / f"{i}.png", colour)
        write_wav(folder / f"{i}.wav", np.full(1280, 0.1 * (i % 2), np.float32), 16_000)
    asked = ["--given", str(folder), "--given-size", "16x16", "--size", "1280"]
    assert main(["encode", "speech", str(folder), *asked, "--out", str(tmp_path / "D")]) == 0
    said = capsys.readouterr().err
    assert "gen: 4 pairs, an image in the condition of each\n" in said
    assert "gen: in the conditions: 4 images: 16x16\n" in said and "left out" not in said
    done = run(tmp_path / "D", tmp_path / "E", batch_size=4)
    pipe = gen.load("speech", done["model"])
    assert pipe.modality.accepts == {"text", "images"}
    assert len(pipe({"image": str(folder / "0.png")}, seed=0).media[0]) == 1280
    with pytest.raises(GenError, match="takes an image as its condition; got nothing"):
        pipe("")
    with pytest.raises(GenError, match="the prompt is 'a dog', and model .* without captions"):
        pipe({"text": "a dog", "image": str(folder / "0.png")})
    assert done["use"].split()[2:5] == ["speech", "--image", str(folder / "0.png")]
    with serving(models={"mine": pipe}) as server:
        image = b64encode((folder / "0.png").read_bytes()).decode()
        status, sound, _ = server.ask("/v1/audio/speech", {"model": "mine", "image": image})
        assert status == 200 and sound[:4] == b"RIFF"
        status, answer, _ = server.ask("/v1/audio/speech", {"model": "mine"})
    assert status == 400 and "condition; got nothing" in answer["error"]["message"]


PROBLEMS = {
    "none": ("without a partner", r"2.png \(it has no partner: expected an image, a sound or a"),
    "several": ("with several partners", r"2.png \(it has 2 partners, '2.jpg' and '2.png'; exp"),
    "other": (
        "with a partner of another kind",
        r"2.png \(its partner '2.wav' is a sound; expected an image, as most partners are\)",
    ),
    "broken": ("", r"2.png \(image .*2.png cannot be read"),
    "size": ("", r"2.png \(the image of the condition has 8x8; expected 16x16"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_what_is_no_pair_is_counted_first_and_named(case, tmp_path, capsys):
    root = pairs(tmp_path, 6)
    partner = root / "before" / "2.png"
    if case == "several":
        paint(partner.with_suffix(".jpg"), "red")
    elif case == "broken":
        partner.write_bytes(b"none")
    elif case == "size":
        Image.new("RGB", (8, 8)).save(partner)
    else:
        partner.unlink()
    if case == "other":
        write_wav(partner.with_suffix(".wav"), np.zeros(100, np.float32), 16_000)
    asked = ["encode", "image", str(root / "after"), "--given", str(root / "before")]
    asked += ["--size", "16x16", "--out", str(root / "D")]
    assert main(asked) == 2
    plan, sentence = PROBLEMS[case]
    said = capsys.readouterr().err
    assert f"gen: 1 {plan}: 2.png\n" in said or not plan
    with pytest.raises(GenError, match=rf"1 of 6 sources cannot be read: {sentence}"):
        encode_folder("image", root / "after", root / "D", options(root))
    assert main([*asked, "--skip-unreadable"]) == 0
    assert load_data(root / "D").manifest["samples"] == 5


def test_partners_in_rows_that_are_no_files_or_none_are_named(tmp_path):
    root = pairs(tmp_path, 4)
    rows = [{"file_name": f"after/{i}.png", "image": f"before/{i}.png"} for i in range(4)]
    rows[0]["image"], rows[1]["image"] = "lost.png", ["before/0.png", "before/1.png"]
    del rows[2]["image"]
    (root / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = find_sources(root, "image")
    problems = [s.problem for s in found.sources]
    assert problems[0] == f"its partner is not a file: '{root / 'lost.png'}'"
    assert problems[1] == "it has 2 partners, '0.png' and '1.png'; expected one"
    assert problems[2].startswith("it has no partner: expected image, audio or video in its row")
    assert found.sources[3].condition == {"images": [str(root / "before" / "3.png")]}
    names = [s.name for s in found.sources]
    assert names == [f"after/{i}.png" for i in range(4)] + ["before/2.png"]  # of no row


@pytest.mark.parametrize(
    ("modality", "more", "message"),
    [
        ("image", {"given": "nowhere"}, "given is 'nowhere', which is no folder"),
        ("image", {"given": "empty"}, "none of 3 files has one partner: expected an image"),
        ("image", {"copies": 2}, "copies is 2; expected 1 beside media in the conditions"),
        ("image", {"tokenizer": "built-in"}, "tokenizer is 'built-in'; expected 'own'"),
        ("image", {"given": None, "given_size": "8x8"}, "given_size is '8x8'; expected media in"),
        ("image", {"given_size": "9x9"}, "size is '9x9'; expected multiples of 4x4"),
        ("image", {"given_frontend": "none"}, "unknown frontend .none. in the zoo"),
        ("text", {"size": None}, "given is .*; expected none for modality 'text'"),
    ],
)
def test_options_that_do_not_go_with_pairs_are_refused(modality, more, message, tmp_path):
    root = pairs(tmp_path, 3)
    (root / "empty").mkdir()
    if more.get("given"):
        more = {**more, "given": str(root / more["given"])}
        message = message.replace("'nowhere'", f"'{root / 'nowhere'}'")
    with pytest.raises(GenError, match=message):
        encode_folder(modality, root / "after", root / "D", options(root, **more))


def test_rows_and_a_folder_of_conditions_are_not_both_taken(tmp_path):
    root = pairs(tmp_path, 2)
    row = {"file_name": "0.png", "image": "../before/1.png"}
    (root / "after" / "metadata.jsonl").write_text(json.dumps(row))
    with pytest.raises(GenError, match="state conditions, too; expected one of both"):
        encode_folder("image", root / "after", root / "D", options(root))


def test_an_answer_of_several_windows_is_refused_with_the_size_that_makes_room(tmp_path):
    for i in range(2):
        paint(tmp_path / "media" / f"{i}.png", "red")
        write_wav(tmp_path / "media" / f"{i}.wav", np.zeros(1280 * (1 + i), np.float32), 16_000)
    asked = EncodeOptions(size="1280", resize="crop", given=str(tmp_path / "media"))
    with pytest.raises(GenError, match=r"1.wav lasts 0.16 s, and its condition .* \(--size 2560"):
        encode_folder("speech", tmp_path / "media", tmp_path / "D", asked)


def test_a_changed_condition_is_another_encoding(tmp_path):
    root = pairs(tmp_path, 3)
    encode_folder("image", root / "after", root / "D", options(root))
    encode_folder("image", root / "after", root / "D", options(root))  # control: the same
    paint(root / "before" / "1.png", "white")
    with pytest.raises(GenError, match="another encoding, which differs in files"):
        encode_folder("image", root / "after", root / "D", options(root))


# --- models


@pytest.mark.parametrize("objective", ["causal", pytest.param("masked", marks=pytest.mark.slow)])
def test_a_model_obeys_the_image_and_the_instruction(objective, root, request):
    if objective == "masked":
        request.getfixturevalue("masked")
    pipe = gen.load("image", str(root / objective / "model"))
    made = pipe(prompts(root), seed=0, temperature=0.1)
    assert [shown(image) for image in made.media] == wanted()
    turned = [{**p, "image": prompts(root)[i - 1]["image"]} for i, p in enumerate(prompts(root))]
    others = [shown(image) for image in pipe(turned, seed=0, temperature=0.1).media]
    assert sum(a == b for a, b in zip(others, wanted(), strict=True)) <= 2  # control: other images


@pytest.mark.parametrize(
    "sampler",
    ["autoregressive", "speculative_jacobi", pytest.param("maskgit", marks=pytest.mark.slow)],
)
def test_a_row_alone_is_the_row_in_a_batch(sampler, root, request):
    objective = "causal"
    if sampler == "maskgit":
        objective, _ = "masked", request.getfixturevalue("masked")
    pipe = gen.load("image", str(root / objective / "model"))
    items = pipe.plan(prompts(root), num_samples=2, seed=3)
    whole = pipe.generate(items, sampler, {"guidance_scale": 2.0})
    for i in (0, 5, 10):
        alone = pipe.generate(items[i : i + 1], sampler, {"guidance_scale": 2.0})
        assert torch.equal(whole.tokens[i], alone.tokens[0])
    pixels = np.asarray(Image.open(prompts(root)[5]["image"]))
    same = pipe({"text": [*TEXTS][1], "image": pixels}, sampler, seed=items[10].seed)
    assert torch.equal(same.tokens, pipe(prompts(root)[5], sampler, seed=items[10].seed).tokens)
    other = pipe(prompts(root)[4], sampler, seed=items[10].seed)
    assert not torch.equal(same.tokens, other.tokens)  # control: another image


def test_every_door_takes_the_image(root, tmp_path, capsys):
    model, asked = str(root / "causal" / "model"), prompts(root)[0]
    pipe = gen.load("image", model)
    expected = pipe(asked, seed=7).media[0]
    cold = ["--seed", "7", "-o", str(tmp_path / "a.png"), "--model", model]
    assert main(["sample", "image", asked["text"], "--image", asked["image"], *cold]) == 0
    job = {"modality": "image", "model": model, "prompts": [asked | {"seed": 7}]}
    job["prompts"][0]["prompt"] = job["prompts"][0].pop("text")
    (tmp_path / "job.yaml").write_text(json.dumps({**job, "out": str(tmp_path / "J")}))
    assert main(["run", str(tmp_path / "job.yaml")]) == 0
    pipe.save_pretrained(tmp_path / "saved")
    again = gen.load(tmp_path / "saved")(asked, seed=7).media[0]
    found = [
        Image.open(tmp_path / "a.png"),
        Image.open(next((tmp_path / "J").glob("*.png"))),
        again,
    ]
    with serving(models={"mine": pipe}) as server:
        image = b64encode(Path(asked["image"]).read_bytes()).decode()
        body = {"model": "mine", "prompt": asked["text"], "image": image, "seed": 7}
        status, answer, _ = server.ask("/v1/images/edits", body)
        assert status == 200
        (tmp_path / "b.png").write_bytes(b64decode(answer["data"][0]["b64_json"]))
        body = {"model": "mine", "prompt": "turn it"}
        status, answer, _ = server.ask("/v1/images/generations", body)
    assert status == 400 and "got the text 'turn it' alone" in answer["error"]["message"]
    found.append(Image.open(tmp_path / "b.png"))
    assert all(np.array_equal(np.asarray(f), np.asarray(expected)) for f in found)


def test_a_model_names_what_its_condition_misses_or_has_too_much(root, tmp_path):
    pipe, asked = gen.load("image", str(root / "causal" / "model")), prompts(root)[0]
    for prompt, message in (
        ("turn it", "takes an image as its condition, with a caption or without; got the text"),
        ("", "takes an image as its condition, with a caption or without; got nothing"),
        ({"text": "turn it", "audio": "a.wav"}, "takes images and text as its condition; got audi"),
        ({"image": [asked["image"]] * 2}, "takes at most 1 images; got 2"),
        ({"image": np.zeros((8, 16, 3), np.uint8)}, "the image of the condition has 8x16; expect"),
        (asked | {"text": "ab" * 99}, r"has \d+ tokens; expected at most 32"),
    ):
        with pytest.raises(GenError, match=message):
            pipe(prompt)
    assert pipe({"image": asked["image"]}).media  # control: without a caption
    with pytest.raises(GenError, match="takes an image as its condition, and has none to measure"):
        pipe.modality.example_prompts(1, 0)
    assert not (root / "causal" / "model" / "captions.txt").exists()


def test_control_a_model_without_media_refuses_an_image(root, tmp_path):
    encode_folder("image", root / "after", tmp_path / "D", SMALL)
    pipe = gen.load("image", run(tmp_path / "D", tmp_path / "E")["model"])
    with pytest.raises(GenError, match="takes text as its condition; got images"):
        pipe(prompts(root)[0])


def test_media_of_other_sizes_are_fitted_where_training_did(root, tmp_path):
    paint(tmp_path / "a.png", "red")
    wide = Image.new("RGB", (48, 32), "red")
    encode_folder("image", root / "after", tmp_path / "D", options(root, resize="crop"))
    pipe = gen.load("image", run(tmp_path / "D", tmp_path / "E")["model"])
    made = [
        pipe({"text": "turn it", "image": image}, temperature=0)
        for image in (wide, prompts(root)[0]["image"])
    ]
    assert torch.equal(*[m.tokens for m in made])


def test_a_model_may_start_from_one_of_the_same_or_of_other_conditions(root, tmp_path):
    keys = {"lr": 1e-5, "average": False, "validation": 0.2}
    fresh = run(root / "D", tmp_path / "fresh", **keys)
    same = run(root / "D", tmp_path / "same", model=str(root / "causal" / "model"), **keys)
    encode_folder("image", root / "after", tmp_path / "N", SMALL)
    captioned = run(tmp_path / "N", tmp_path / "captioned", steps=30)["model"]
    other = run(root / "D", tmp_path / "other", model=captioned, **keys)
    assert same["loss"][0] < fresh["loss"][0] - 1 and other["loss"][0] < fresh["loss"][0] - 1
    assert gen.load("image", other["model"]).modality.medium is not None
    with pytest.raises(
        GenError, match="reads images of .16, 16. in its conditions, and .*has none"
    ):
        run(tmp_path / "N", tmp_path / "x", model=str(root / "causal" / "model"))
    figures = held_out_loss(str(root / "causal" / "model"), root / "D")
    assert figures["nats_per_token"] < 1


@pytest.mark.slow
def test_states_of_a_text_encoder_stand_before_the_image(root, tmp_path):
    size = {"vocab_size": 400, "hidden_size": 48, "intermediate_size": 48}
    torch.manual_seed(0)
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**size, **heads)).save_pretrained(tmp_path / "text")
    tokenizer = TrainedTokenizer.of_texts([*TEXTS] * 3, 390).frontend().tokenizer
    tokenizer.save_pretrained(tmp_path / "text")
    asked = options(root, text_encoder=str(tmp_path / "text"))
    encode_folder("image", root / "after", tmp_path / "D", asked)
    done = run(tmp_path / "D", tmp_path / "E", steps=150)
    pipe = gen.load("image", done["model"])
    made = pipe(prompts(root), seed=0, temperature=0.1)
    assert [shown(image) for image in made.media] == wanted()
    alone = pipe(prompts(root)[0], seed=made.items[0].seed, temperature=0.1)
    assert torch.equal(alone.tokens[0], made.tokens[0])


def test_a_frontend_of_ones_own_goes_along_and_is_the_same(root, tmp_path):
    shutil.copytree(ZOO / "image-vq", tmp_path / "V")
    (tmp_path / "S").mkdir()
    for i in range(3):
        write_wav(tmp_path / "S" / f"{i}.wav", np.zeros(1280, np.float32), 16_000)
    asked = options(root, size="1280", given_size="16x16", given_frontend=str(tmp_path / "V"))
    encode_folder("speech", tmp_path / "S", tmp_path / "D", asked)
    done = run(tmp_path / "D", tmp_path / "E", batch_size=3)
    shutil.rmtree(tmp_path / "V")
    shutil.rmtree(tmp_path / "D")
    pipe = gen.load("speech", done["model"])
    assert pipe.modality.medium.frontend_name == "condition_frontend"
    made = pipe({"image": prompts(root)[0]["image"]}, seed=0)
    pipe.save_pretrained(tmp_path / "saved")
    shutil.rmtree(tmp_path / "E" / "condition_frontend")
    again = gen.load(tmp_path / "saved")({"image": prompts(root)[0]["image"]}, seed=0)
    assert torch.equal(made.tokens, again.tokens)
    with pytest.raises(GenError, match="the frontend of an image is not there"):
        gen.load("speech", done["model"])({"image": prompts(root)[0]["image"]})
    config = tmp_path / "saved" / "model" / "config.json"
    told = json.loads(config.read_text())
    told[STATED]["digest"] = "0" * 16
    config.write_text(json.dumps(told))
    with pytest.raises(GenError, match="has the weights .*; expected 0000"):
        gen.load(tmp_path / "saved")({"image": prompts(root)[0]["image"]})


def test_samples_of_a_run_may_be_rows(root, tmp_path):
    row = {"prompt": "turn it", "image": prompts(root)[0]["image"]}
    run(root / "D", tmp_path / "E", samples=[row])
    assert len([*(tmp_path / "E" / "samples").glob("*.png")]) == 1


def test_shards_without_media_have_no_tokens_of_them(root, tmp_path):
    encode_folder("image", root / "after", tmp_path / "N", SMALL)
    assert not any(shard.given for shard in read_folder(tmp_path / "N")[1])
    assert all(len(s.given) == len(s.tokens) for s in read_folder(root / "D")[1])  # control


KINDS = {"images": "image", "audio": "speech", "video": "video"}  # folders of media by part


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modality", "part"),
    [
        ("speech", "images"),
        ("audio", "images"),
        ("video", "images"),
        ("motion", "images"),
        ("image", "audio"),
        ("image", "video"),
        ("speech", "audio"),
    ],
)
def test_media_of_every_kind_are_made_of_media_of_every_kind(modality, part, tmp_path):
    out = own_media.FOLDERS[modality](tmp_path / "out", 4)
    given = own_media.FOLDERS[KINDS[part]](tmp_path / "given", 4)
    made, media = (
        sorted(p for p in folder.iterdir() if p.suffix != ".txt" and p.is_file())
        for folder in (out, given)
    )
    made = [p for p in made if p.suffix.removeprefix(".") in SUFFIXES[modality]]
    names = [[p.relative_to(tmp_path).as_posix() for p in paths] for paths in (made, media)]
    rows = [{"file_name": a, part: b} for a, b in zip(*names, strict=True)]
    table = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metadata.jsonl").write_text(table)
    encode_folder(modality, tmp_path, tmp_path / "D")
    done = run(tmp_path / "D", tmp_path / "E", batch_size=4, model={"width": 32, "layers": 1})
    pipe = gen.load(modality, done["model"])
    asked = [{part: str(path)} for path in media]
    items = pipe.plan(asked, num_samples=1, seed=0)
    whole = pipe.generate(items, "autoregressive", {})
    alone = pipe.generate(items[2:3], "autoregressive", {})
    assert torch.equal(whole.tokens[2], alone.tokens[0])
    assert not torch.equal(whole.tokens[2], whole.tokens[3])


@pytest.mark.slow
def test_a_drafter_learns_on_conditions_with_media(root, tmp_path):
    keys = {"objective": "drafter", "drafter": {"quick": True}, "validation": 0.2}
    made = run(root / "D", tmp_path / "W", model=str(root / "causal" / "model"), **keys)
    pipe = gen.load("image", str(root / "causal" / "model"), draft_model=made["model"])
    made = [shown(image) for image in pipe(prompts(root), seed=0).media]
    assert sum(a == b for a, b in zip(made, wanted(), strict=True)) >= 5


@pytest.mark.slow
def test_blocks_are_filled_behind_an_image(root, tmp_path):
    keys = {"objective": "block", "block": 4, "steps": 150}
    pipe = gen.load("image", run(root / "D", tmp_path / "E", **keys)["model"])
    made = pipe(prompts(root), seed=0, temperature=0.1)
    assert [shown(image) for image in made.media] == wanted()
