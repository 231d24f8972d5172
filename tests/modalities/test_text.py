"""Text through the frontend, the pipeline and the command line: ends, prefixes, edits, files; on
models that the recipe makes in its quick form."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from calls import only

import gen
from gen.__main__ import main
from gen.core.errors import GenError
from gen.modalities.text import tasks as text_tasks
from gen.modalities.text.modality import NOTHING, POSITIONS, TextModality, span
from gen.modalities.text.tasks import WORDS
from gen.recipes.text import recipe as text_recipe
from gen.tokenizers.text.words import END, TextWords
from tokenizers import Tokenizer  # the installed package: the room is gen.tokenizers

PROMPTS = ["sort 3 1 2 =", "close ( [ {", "shuffle 4 0 7 5", "3 + 8 + 5 ="]
JACOBI = {"name": "speculative_jacobi", "window": 8}
MASKGIT = {"name": "maskgit", "steps": 5}
BLOCKS = {"name": "frame_blocks", "steps": 4}
KINDS = [("causal", "autoregressive"), ("causal", JACOBI), ("masked", MASKGIT), ("masked", BLOCKS)]
NAMES = ["autoregressive", "jacobi", "maskgit", "frame_blocks"]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("text")
    for stage in ("tokens", "causal", "masked", "draft", "export", "traces", "filter"):
        text_recipe.main([stage, "--work", str(folder), "--quick"])
    return folder


@pytest.fixture(scope="module")
def pipes(work):
    """Models with random weights of some size, so that rows end early and late and prompts
    matter."""
    out = {
        k: gen.load("text", work / "zoo" / f"text-{k}", dtype="float64")
        for k in ("causal", "masked")
    }
    for pipe in out.values():
        model, generator = pipe.bound(pipe.model)[0], torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(
                    torch.randn(weight.shape, generator=generator, dtype=torch.float32) * 0.25
                )
    return out


@pytest.fixture(scope="module")
def frontend():
    return TextWords.of(WORDS, POSITIONS)


# --- words and ids


def test_texts_come_back_from_their_codes(frontend):
    rng = np.random.default_rng(0)
    texts = [" ".join(text_tasks.draw_answer(t, rng)) for t in text_tasks.tasks(100, 0, held=False)]
    for text in [*texts, " ".join(WORDS[:16]), "0"]:
        codes = frontend.encode(frontend.preprocess(text)[None])
        assert codes.shape == (1, 1, POSITIONS) and codes.dtype == torch.long
        words = text.split()
        assert codes[0, 0].tolist() == [WORDS.index(w) for w in words] + [frontend.eos_token_id] * (
            POSITIONS - len(words)
        )
        assert frontend.postprocess(frontend.decode(codes)[0]) == text
        loose = text.upper().replace(" + ", "+").replace("} ", "}")
        assert torch.equal(frontend.encode(frontend.preprocess(loose)[None]), codes)
    both = frontend.encode(
        torch.nn.utils.rnn.pad_sequence(
            [frontend.preprocess(t) for t in ("3 1 2", "11 + 5 = 16")], batch_first=True
        )
    )
    assert [frontend.postprocess(x) for x in frontend.decode(both)] == ["3 1 2", "11 + 5 = 16"]


def test_nothing_behind_the_first_end_is_read(frontend):
    end = frontend.eos_token_id
    codes = torch.tensor([[[3, 1, end, 7, end]], [[end, 1, 2, 3, 4]], [[3, 1, 2, 3, 4]]])
    assert [frontend.postprocess(x) for x in frontend.decode(codes)] == ["3 1", "", "3 1 2 3 4"]
    assert frontend.config.codebook_sizes == (len(WORDS) + 1,) and end == len(WORDS)


@pytest.mark.parametrize(
    ("media", "words"),
    [
        ("3 x 2", "'x' is outside the vocabulary"),
        (f"3 {END}", f"'{END}' is outside"),
        (7, "is a int; expected a string"),
        ("1 " * 17, "has 17 words; expected at most 16"),
        ("revers 1", "Did you mean 'reverse'"),
    ],
)
def test_other_texts_have_no_codes(frontend, media, words):
    with pytest.raises(GenError, match=words):
        frontend.preprocess(media)
    for bad in (torch.zeros(1, 1, 3), torch.full((1, 1, 3), 99), torch.zeros(1, 2, 3).long()):
        with pytest.raises(GenError, match="expected"):
            frontend.decode(bad.long())
            frontend.encode(bad)


@pytest.mark.parametrize("media", ["a\rb", "a\r\nb", "a\nb", "x\x0by", "é\u2028ü"])
def test_a_text_keeps_its_line_ends_in_a_file(tmp_path, media):
    modality = TextModality()
    modality.save(media, tmp_path / "a.txt", {})
    assert modality.load(tmp_path / "a.txt") == media


def test_the_folder_is_an_ordinary_tokenizer_and_the_vocabulary_counts(frontend, tmp_path):
    frontend.save_pretrained(tmp_path / "a")
    again = TextWords.from_pretrained(tmp_path / "a")
    assert again.words == WORDS and torch.equal(again.fingerprint, frontend.fingerprint)
    plain = Tokenizer.from_file(str(tmp_path / "a" / "tokenizer.json"))
    assert (
        plain.encode("11 + 5=16").ids == frontend.ids("11 + 5 = 16")
        and plain.token_to_id(END) == frontend.eos_token_id
    )
    assert json.loads((tmp_path / "a" / "tokenizer_config.json").read_text())["eos_token"] == END
    for other in (TextWords.of(WORDS[::-1], POSITIONS), TextWords.of(WORDS, 8)):
        assert not torch.equal(other.fingerprint, frontend.fingerprint)
    for words in ([], ["a", "a"], ["A"], ["a b"], [""], [END]):
        with pytest.raises(GenError, match="words is"):
            TextWords.of(words, 4)
    with pytest.raises(GenError, match="positions is 0"):
        TextWords.of(WORDS, 0)
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    with pytest.raises(GenError, match="cannot be read"):
        TextWords.from_pretrained(tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text('{"frontend_class": "action_bins"}')
    with pytest.raises(GenError, match="expected frontend_class 'text_words'"):
        TextWords.from_pretrained(tmp_path / "a")


def test_a_model_of_another_vocabulary_is_refused(work, tmp_path):
    shutil.copytree(work / "zoo" / "text-causal", tmp_path / "text-causal")
    TextWords.of(WORDS[::-1], POSITIONS).save_pretrained(tmp_path / "text-words")
    with pytest.raises(GenError, match="was trained on codebook"):
        gen.load("text", tmp_path / "text-causal")("copy 1 2")
    TextWords.of(WORDS, POSITIONS).save_pretrained(tmp_path / "text-words")
    assert gen.load("text", tmp_path / "text-causal")("copy 1 2").media  # control


# --- the pipeline


@pytest.mark.parametrize(("kind", "sampler"), KINDS, ids=NAMES)
@pytest.mark.thinned(2)
def test_every_sample_is_a_text_and_the_same_alone_as_in_a_batch(pipes, kind, sampler):
    pipe = pipes[kind]
    out = pipe(PROMPTS, sampler, num_samples=3, seed=1, batch_size=12)
    assert out.tokens.shape == (12, POSITIONS) and int(out.tokens.max()) <= len(WORDS)
    for text, tokens in zip(out.media, out.tokens.tolist(), strict=True):
        n = tokens.index(len(WORDS)) if len(WORDS) in tokens else POSITIONS
        assert n and text.split() == [WORDS[t] for t in tokens[:n]]
    for i in (0, 5, 11):
        alone = pipe(PROMPTS[i // 3], sampler, seed=1 + i % 3)
        assert alone.media == [out.media[i]] and torch.equal(alone.tokens[0], out.tokens[i])
    assert len(set(pipe(PROMPTS[0], sampler, num_samples=6).media)) > 1


def test_rows_of_a_causal_model_end_and_cost_as_much(pipes):
    out, jacobi = (
        pipes["causal"](PROMPTS, s, num_samples=20, batch_size=80)
        for s in ("autoregressive", JACOBI)
    )
    assert torch.equal(out.tokens, jacobi.tokens) and sum(s.nfe for s in jacobi.stats) < sum(
        s.nfe for s in out.stats
    )
    ends = out.tokens == len(WORDS)
    assert not bool(ends[:, 0].any()) and bool(
        ends[:, :-1].any()
    )  # place 1 is the first that may end, and some rows do end
    assert bool((ends.long().cummax(1).values == ends.long()).all())  # nothing follows an end
    assert [s.nfe for s in out.stats] == [min(n + 1, POSITIONS) for n in (~ends).sum(1).tolist()]


def test_to_a_masked_model_the_end_is_an_id_like_any_other(pipes):
    pipe = pipes["masked"]
    space = pipe.bound(pipe.model)[1].space
    assert (
        space.eos_token_id == len(WORDS)
        and space.legal[1:, len(WORDS)].all()
        and not space.legal[0, len(WORDS)]
    )
    assert pipes["causal"].bound(pipes["causal"].model)[1].space.eos_token_id == len(WORDS)
    out = pipe(PROMPTS, MASKGIT, num_samples=20, batch_size=80)
    assert {s.nfe for s in out.stats} == {5}  # no call that decides a length
    ends = (out.tokens == len(WORDS)).long()
    assert bool(
        (ends.cummax(1).values > ends).any()
    )  # something stands behind an end, and no text has it
    assert max(len(m.split()) for m in out.media) <= POSITIONS


def test_prompts_stand_at_the_right_of_their_slots_and_matter(pipes):
    modality = TextModality()
    for prompt in PROMPTS:
        task = modality.condition(prompt)
        slots = modality.prompt_words(task)
        n = len(task.words())
        assert (
            slots[: POSITIONS - n] == [NOTHING] * (POSITIONS - n)
            and [WORDS[s - 1] for s in slots[POSITIONS - n :]] == task.words()
        )
        assert max(slots) < modality.words and len(slots) == modality.slots
    with pytest.raises(GenError, match="Did you mean 'sort'"):
        modality.condition("srot 1 2")
    pipe = pipes["causal"]
    model, binding, _ = pipe.bound(pipe.model)
    ids = torch.tensor(
        [
            binding.prompt(modality.condition(p))
            for p in ("sort 3 1 2", "sort 2 1 3", "sort 3 1 2 =")
        ]
    )
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, -1, : len(WORDS)]
    assert float((logits[0] - logits[1]).abs().max()) > 1e-3 and torch.equal(logits[0], logits[2])
    plain, guided = (
        pipe(PROMPTS, "autoregressive", **only(guidance_scale=g)).tokens for g in (1.0, 3.0)
    )
    assert not torch.equal(plain, guided)


def test_the_draft_model_drafts(pipes, work):
    pipe = pipes["causal"]
    draft = {"name": "speculative", "draft_model": str(work / "zoo" / "text-draft")}
    out = pipe(PROMPTS, draft, num_samples=2)
    assert all(s.draft_nfe for s in out.stats) and len(out.media) == 8


# --- starts


@pytest.mark.parametrize(("kind", "sampler"), KINDS, ids=NAMES)
def test_a_text_to_continue_is_kept_word_by_word(pipes, kind, sampler, tmp_path):
    given = "7 5 1 ("
    out = pipes[kind](PROMPTS, sampler, num_samples=2, prefix=given)
    assert all(m.startswith(given) for m in out.media) and len({*out.media}) > 2
    assert not any(
        m.startswith(given) for m in pipes[kind](PROMPTS, sampler, num_samples=2).media
    )  # control
    (tmp_path / "given.txt").write_text(given + "\n")
    for same in (tmp_path / "given.txt", str(tmp_path / "given.txt")):
        assert pipes[kind](PROMPTS, sampler, num_samples=2, prefix=same).media == out.media
    for bad, words in (
        ("1 " * 16, "has 16 words; expected fewer than 16"),
        (" ", "is empty"),
        ("1 x", "'x' is outside"),
        (3, "a int"),
        (tmp_path / "none.txt", "cannot be read"),
    ):
        with pytest.raises(GenError, match=words):
            pipes[kind]("copy 1 2", sampler, prefix=bad)


def test_an_edit_changes_the_words_of_its_span_alone(pipes):
    pipe, source = pipes["masked"], "1 2 3 4 5 6"
    made = pipe(PROMPTS, MASKGIT, num_samples=6, batch_size=24, source=source, span="2:4").media
    for text in made:
        words = text.split()
        assert words[:2] == ["1", "2"] and words[-2:] == ["5", "6"] and len(words) <= 6
    assert any(m.split()[2:4] != ["3", "4"] for m in made)
    assert {
        tuple(m.split()[:4])
        for m in pipe(PROMPTS, MASKGIT, num_samples=6, source=source, span="4:").media
    } == {("1", "2", "3", "4")}
    longer = pipe(PROMPTS, MASKGIT, num_samples=6, source=source, span="6:9").media
    assert (
        all(m.startswith(source) for m in longer) and 6 < max(len(m.split()) for m in longer) <= 9
    )
    with pytest.raises(GenError, match="decodes left to right and cannot edit here"):
        pipes["causal"]("copy 1 2", source=source, span="2:4")
    with pytest.raises(GenError, match="have one length; frames is 5"):
        pipe("copy 1 2", MASKGIT, frames=5)


def test_words_after_a_span_that_ends_early_stay(pipes):
    pipe = pipes["masked"]
    _, binding, frontend = pipe.bound(pipe.model)
    canvas, overlay = pipe.modality.edit("1 2 3 4", "1:3", frontend, binding.space)
    mask, end = binding.space.mask_token_id, frontend.eos_token_id
    assert canvas.tolist() == [1, mask, mask, 4] + [end] * 12
    assert overlay("1 9") == "1 9 4" and overlay("1") == "1 4" and overlay("1 8 9 4") == "1 8 9 4"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no words"),
        ("x", "names no words"),
        ("3", "names no words"),
        ("3:2", "from word 3 to 2"),
        ("2:2", "from word 2 to 2"),
        ("5:6", "begins at 0 to 4"),
        ("0:17", "at most at 16"),
        ("-1:2", "names no words"),
    ],
)
def test_spans_without_sense_are_refused(text, words):
    with pytest.raises(GenError, match=words):
        span(text, 4, 16)
    assert [span(t, 4, 16) for t in ("1:3", ":2", "2:", "4:6", ":")] == [
        (1, 3),
        (0, 2),
        (2, 4),
        (4, 6),
        (0, 4),
    ]


# --- files, commands, the recipe


def test_a_command_writes_texts_a_manifest_and_a_page(work, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = str(work / "zoo" / "text-causal")
    command = [
        "sample",
        "text",
        "sort 3 1 2 =",
        "--num-samples",
        "2",
        "--seed",
        "0",
        "--sampler",
        "autoregressive",
        "--model",
        model,
        "--out",
    ]
    assert [main([*command, out]) for out in ("E", "F")] == [0, 0]
    rows, again = (
        [json.loads(line) for line in Path(f, "manifest.jsonl").read_text().splitlines()]
        for f in "EF"
    )
    assert [r["sha256"] for r in rows] == [r["sha256"] for r in again] and rows[0][
        "sha256"
    ] != rows[1]["sha256"]
    made, modality = (
        gen.load("text", model)("sort 3 1 2 =", "autoregressive", num_samples=2).media,
        TextModality(),
    )
    assert [modality.load(Path("E", r["file"])) for r in rows] == made and all(
        r["file"].endswith(".txt") for r in rows
    )
    page = Path("E/index.html").read_text()
    assert page.count('class="text"') >= 2 and all(m.split()[0] in page for m in made)
    assert main(["check", "E"]) == 0
    Path("given.txt").write_text("1 2\n")
    assert main([*command, "G", "--prefix", "given.txt"]) == 0
    assert all(
        Path("G", json.loads(line)["file"]).read_text().startswith("1 2")
        for line in Path("G/manifest.jsonl").read_text().splitlines()
    )


def test_an_answer_in_a_file_is_checked(tmp_path):
    modality = TextModality()
    for text, right in (("1 2 3", True), ("1 3 2", False)):
        modality.save(text, tmp_path / "a.txt", {})
        assert modality.check(modality.load(tmp_path / "a.txt"), "sort 3 1 2 =").passed == right
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(GenError, match="cannot be read"):
        modality.load(tmp_path / "b.txt")


def test_training_sees_right_answers_of_tasks_that_are_not_held_out(work):
    data, frontend = (
        torch.load(work / "tokens.pt", weights_only=True),
        TextWords.from_pretrained(work / "frontend"),
    )
    texts = [frontend.postprocess(x) for x in frontend.decode(data["codes"].long()[:, None])]
    prompts = [
        " ".join(WORDS[s - 1] for s in row if s != NOTHING) for row in data["slots"].tolist()
    ]
    tasks = [text_tasks.parse(p) for p in prompts]

    def check(media, tasks):
        return np.mean([text_tasks.check(t, m).passed for m, t in zip(media, tasks, strict=True)])

    assert check(texts, tasks) == 1.0 and check(texts, tasks[1:] + tasks[:1]) < 0.05  # control
    assert (
        not any(map(text_tasks.held_out, tasks))
        and len(tasks) == 200
        and {t.op for t in tasks} == set(text_tasks.OPS)
    )
    assert bool((data["codes"][:, -1] == frontend.eos_token_id).all())
    dropped = (
        text_recipe.words(data["slots"].long().repeat(20, 1), torch.Generator().manual_seed(0))
        .eq(NOTHING)
        .all(1)
        .double()
        .mean()
    )
    assert 0.08 < float(dropped) < 0.12


def test_the_recipe_measures_what_it_made(work, monkeypatch):
    ours = {
        "causal": "text-causal",
        "masked": "text-masked",
        "blocks": "text-masked",
        "causal-draft": "text-draft",
    }
    monkeypatch.setattr(TextModality, "models", ours)
    text_recipe.main(["evaluate", "--work", str(work), "--quick"])
    figures = json.loads((work / "zoo" / "evaluation-text.json").read_text())
    world = text_recipe.world(work / "zoo")
    assert set(figures["samplers"]) == {*world.causal, *world.masked, *world.blocks} - set(
        world.quarter
    )  # too few conditions for those
    assert figures["samplers"]["gumbel"]["same_as_autoregressive_float64"] == 1.0
    real = figures["frontend"]
    assert (
        real["checker_on_real"] == real["checker_on_reconstructions"] == 1.0
        and real["checker_on_shuffled_labels"] < 0.3
    )
    assert all((work / "zoo" / name / "README.md").is_file() for name in world.about)
