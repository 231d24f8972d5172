"""Families that answer questions about images: greedy token ids are those of transformers' classes
with their processors, alone and in padded batches; images decide, each its own row."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from chat_templates import turn
from image_text_folders import WRITERS, noise

import gen
from gen.__main__ import main
from gen.contracts.condition import CONDITION, Condition
from gen.core.errors import GenError

NEW = 7
FAMILIES = tuple(WRITERS)
SAMPLERS = ("autoregressive", "speculative_jacobi")
# a question, and the seeds and sizes (h, w) of its images
ASKED = [
    ("What is this?", [(0, 10, 12)]),
    ("<image>Which of <image>both is nearer to the left?", [(1, 16, 9), (2, 12, 40)]),
    ("And?", [(3, 30, 30)]),
    ("Say it.", []),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: write(tmp_path_factory.mktemp(name.replace(":", "-")))
        for name, write in WRITERS.items()
    }


@pytest.fixture(scope="module")
def pipes(folders):
    return {
        name: gen.load("text", model=folder, dtype="float64", max_new_tokens=NEW)
        for name, folder in folders.items()
    }


def given(text: str, sizes) -> dict:
    return {"text": text, "images": [noise(*size) for size in sizes]}


def asked_text(checkpoint, text: str, images: int) -> str:
    """The text that a user of the processor would write."""
    text = text if "<image>" in text else "<image>" * images + text
    if not checkpoint.chat:
        return text
    parts, words = [], text.split("<image>")
    for n, word in enumerate(words):
        parts += [{"type": "image"}] * (n > 0) + [{"type": "text", "text": word}] * bool(word)
    return checkpoint.processor.apply_chat_template(
        [turn("user", parts)], add_generation_prompt=True
    )


def generated(checkpoint, asked) -> list[list[int]]:
    """Greedy answers of transformers for questions as one padded batch, cut at the eos token."""
    processor = checkpoint.processor
    texts = [asked_text(checkpoint, text, len(sizes)) for text, sizes in asked]
    images = [noise(*size) for _, sizes in asked for size in sizes]
    inputs = processor(
        text=texts, images=images or None, padding=True, padding_side="left", return_tensors="pt"
    )
    out = checkpoint.model.generate(
        **inputs.to(torch.float64), do_sample=False, max_new_tokens=NEW, pad_token_id=0
    )
    return [until_end(row) for row in out[:, inputs["input_ids"].shape[1] :].tolist()]


def until_end(row: list[int]) -> list[int]:
    return row[: row.index(2)] if 2 in row else row


def answers(pipe, prompts, sampler: str = "autoregressive", **more) -> list[list[int]]:
    out = pipe(prompts, sampler=sampler, **{"temperature": 0.0, **more})
    return [until_end(row.tolist()) for row in out.tokens]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.thinned(6)
def test_greedy_answers_are_those_of_generate_alone_and_in_a_padded_batch(pipes, family, sampler):
    pipe = pipes[family]
    checkpoint = pipe.modality.checkpoint
    alone = [generated(checkpoint, [asked])[0] for asked in ASKED]
    prompts = [given(*asked) for asked in ASKED]
    assert answers(pipe, prompts, sampler) == alone
    assert [answers(pipe, [prompt], sampler)[0] for prompt in prompts] == alone
    assert len({str(answer) for answer in alone}) == len(ASKED)
    # where images keep their sizes, transformers pads smaller ones, which changes their codes
    pads = family == "emu3"
    assert (generated(checkpoint, ASKED) == alone) != pads
    alike = [(text, [(n, 16, 24) for n, *_ in sizes]) for text, sizes in ASKED]
    wanted = generated(checkpoint, alike)
    assert answers(pipe, [given(*asked) for asked in alike], sampler) == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_swapped_images_and_a_missing_image_change_the_answer(pipes, family):
    """Negative control: the equality with generate would notice them."""
    pipe, a, b = pipes[family], [(0, 10, 12)], [(3, 30, 30)]
    first, second = answers(pipe, [given("Who?", a), given("Who?", b)])
    assert answers(pipe, [given("Who?", b), given("Who?", a)]) == [second, first]
    assert first != second
    assert answers(pipe, ["Who?"])[0] not in (first, second)
    turned = [given("Who?", [*a, *b]), given("Who?", [*b, *a])]
    assert len({str(row) for row in answers(pipe, turned)}) == 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.thinned(3)
def test_drawn_answers_do_not_depend_on_the_batch_or_the_sampler(pipes, family):
    pipe, prompts = pipes[family], [given(*asked) for asked in ASKED]
    settings = {"temperature": 1.0, "guidance_scale": 1.5, "repetition_penalty": 1.2}
    plain = answers(pipe, prompts, seed=5, **settings)
    assert answers(pipe, prompts, "speculative_jacobi", seed=5, **settings) == plain
    assert [answers(pipe, [p], seed=5, **settings)[0] for p in prompts] == plain
    assert answers(pipe, prompts, seed=6, **settings) != plain  # control: another seed


@pytest.mark.parametrize("family", FAMILIES)
def test_the_images_of_a_condition_are_encoded_once(pipes, family, monkeypatch):
    pipe = pipes[family]
    inner, calls = pipe.modality.checkpoint.model.model, []
    name = "get_image_tokens" if family in ("chameleon", "emu3") else "get_image_features"
    encode = getattr(inner, name)
    monkeypatch.setattr(inner, name, lambda *a, **k: calls.append(1) or encode(*a, **k))
    prompts = [given("Who sits here?", [(8, 9, 9)])] * 2 + [given("Who else?", [(9, 9, 9)])]
    prompts += [given("And now?", [(8, 9, 9)])]
    pipe(prompts, num_samples=2, sampler="autoregressive", seed=0)
    assert len(calls) == 2


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "chameleon"])
def test_images_stand_where_a_conversation_has_them(pipes, family):
    pipe = pipes[family]
    checkpoint = pipe.modality.checkpoint
    words = [{"type": "text", "text": "Look: "}, {"type": "image"}, {"type": "text", "text": "!"}]
    turns = [turn("user", words), turn("assistant", "Yes."), turn("user", "Who?")]
    text = checkpoint.processor.apply_chat_template(turns, add_generation_prompt=True)
    images = [noise(4)]
    ids = checkpoint.processor(text=text, images=images, return_tensors="pt")["input_ids"][0]
    condition = Condition.of({"messages": turns, "images": images})
    made = checkpoint.binding.prompt(checkpoint.parse(condition))
    tokens = made if isinstance(made, list) else made.tokens
    token = checkpoint.image_token_id
    assert len(tokens) == len(ids) and (ids == token).any()
    for own, theirs in zip(tokens, ids.tolist(), strict=True):
        assert own == theirs or (theirs == token and own not in (theirs, None))
        assert (own == CONDITION) == (theirs == token and family != "emu3")
    # without positions of its own the first user turn begins with them
    bare = [turn("system", "Be brief."), turn("user", "Who?")]
    placed = [bare[0], turn("user", [{"type": "image"}, {"type": "text", "text": "Who?"}])]
    first, second = (
        checkpoint.parse(Condition.of({"messages": t, "images": images})) for t in (bare, placed)
    )
    assert checkpoint.text_of(first) == checkpoint.text_of(second)
    assert first != second  # control: they are two conditions


def test_a_template_of_texts_alone_gets_the_image_token(folders, tmp_path):
    folder = shutil.copytree(folders["llava"], tmp_path / "model")
    old = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }} {% endfor %}answer:"
    (folder / "chat_template.jinja").write_text(old)
    pipe = gen.load("text", model=folder, max_new_tokens=NEW)
    checkpoint = pipe.modality.checkpoint
    question = checkpoint.parse(Condition.of(given("Who?", [(0, 10, 12)])))
    assert checkpoint.text_of(question) == "user: <image>Who? answer:"


@pytest.mark.parametrize("family", ["llava", "llava:next", "janus"])
def test_a_prompt_may_end_with_an_image(folders, family):
    """The vector of the last position goes through the first step of decoding, not the prefill."""
    pipe = gen.load("text", model=folders[family], dtype="float64", max_new_tokens=NEW, chat=False)
    asked = ("Describe <image>", [(0, 10, 12)])
    wanted = generated(pipe.modality.checkpoint, [asked])
    tree = {"name": "speculative", "draft_model": str(folders[family])}
    tree |= {"shape": "branching", "verifier": "recursive"}
    for sampler in (*SAMPLERS, "prompt_lookup", tree):
        assert answers(pipe, [given(*asked)], sampler) == wanted


@pytest.mark.slow
def test_a_job_answers_about_the_image_of_its_flag(folders, tmp_path, capsys):
    file = tmp_path / "F.png"
    noise(0, 10, 12).save(file)
    folder, out = folders["llava"], tmp_path / "out"
    flags = ["--model", str(folder), "--image", str(file), "--out", str(out), "--seed", "0"]
    settings = [f"model_options.max_new_tokens={NEW}", "sampling.temperature=0.0"]
    assert main(["sample", "text", "describe", *flags, *settings]) == 0
    capsys.readouterr()
    pipe = gen.load("text", model=folder, max_new_tokens=NEW)
    said = pipe({"text": "describe", "image": file}, temperature=0.0).media[0]
    assert [p.read_text().strip() for p in out.rglob("*.txt")] == [said.strip()]
    assert said != pipe("describe", temperature=0.0).media[0]  # control: without the image


WRONG = {
    "more images than positions": (
        {"text": "<image>?", "images": [noise(0), noise(1)]},
        r"1 positions of images \('<image>'\), and the condition has 2 images",
    ),
    "fewer images than positions": (
        {"text": "<image><image>?", "images": [noise(0)]},
        "2 positions of images .* has 1 images; expected one image for each position",
    ),
    "positions without images": ({"text": "<image>?"}, "1 positions of images .* has 0 images"),
    "positions of a conversation": (
        {
            "messages": [turn("user", [{"type": "image"}])],
            "images": [noise(0), noise(1)],
        },
        "1 positions of images .* has 2 images",
    ),
    "text and messages": (
        {"text": "a", "messages": [turn("user", "b")], "images": [noise(0)]},
        "either text or messages; got both",
    ),
    "an empty prompt": ({"text": " "}, "the prompt is empty; expected a text"),
    "beside token ids": ({"tokens": [5], "images": [noise(0)]}, "takes tokens alone"),
    "no image file": ({"text": "a", "image": "no.png"}, "image no.png does not exist"),
    "unreadable file": ({"text": "a", "image": b"x" * 40}, "image bytes cannot be read"),
    "a sound": ({"text": "a", "audio": "a.wav"}, "as its condition; got audio"),
    "nothing to place it in": (
        {"messages": [turn("system", "a")], "images": [noise(0)]},
        "0 positions of images .* has 1 images",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_question_is_one_sentence(pipes, case):
    condition, message = WRONG[case]
    with pytest.raises(GenError, match=message) as caught:
        pipes["llava"](condition)
    assert "\n" not in str(caught.value)


def test_a_family_of_images_and_a_language_model_refuse_images(folders, tmp_path):
    from families import WRITERS as ALL

    for name, modality in (("causal_lm", "text"), ("janus", "image")):
        case = ALL[name](tmp_path / name)
        pipe = gen.load(modality, model=case.path, **case.options)
        with pytest.raises(GenError, match="takes .* as its condition; got images"):
            pipe(given("w1", [(0, 10, 12)]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_without_an_image_processor_is_refused(folders, tmp_path, family):
    folder = shutil.copytree(folders[family], tmp_path / "model")
    (folder / "processor_config.json").unlink()
    with pytest.raises(GenError, match="image processor.*expected processor_config.json") as caught:
        gen.load("text", model=folder)
    assert "\n" not in str(caught.value)


def test_a_processor_of_another_model_is_refused(folders, tmp_path):
    folder = shutil.copytree(folders["llava"], tmp_path / "model")
    file = folder / "processor_config.json"
    stated = json.loads(file.read_text())
    file.write_text(json.dumps(stated | {"patch_size": 4}))
    pipe = gen.load("text", model=folder, max_new_tokens=NEW)
    with pytest.raises(GenError, match="images take 16 positions, and the processor .* gives them"):
        pipe(given("a", [(0, 10, 12)]))


def test_chameleon_says_no_codes_and_lumina_no_texts(pipes, tmp_path):
    from families import WRITERS as ALL

    checkpoint = pipes["chameleon"].modality.checkpoint
    codes = checkpoint.model.model.vocabulary_mapping.image_tokens
    legal = checkpoint.binding.space.legal
    assert not legal[:, codes].any() and legal.sum() == legal.numel() - NEW * len(codes)
    case = ALL["chameleon:lumina"](tmp_path / "lumina")
    with pytest.raises(GenError, match="is a lumina, which has no image encoder"):
        gen.load("text", model=case.path)
