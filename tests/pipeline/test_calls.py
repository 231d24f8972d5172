"""Calls as users of other libraries write them, and outputs as they expect them."""

from __future__ import annotations

import json
import pickle
import threading
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import gen
from gen.core.errors import GenError, WrongType
from gen.core.registry import registry
from gen.models.load import libraries
from gen.models.load.locate import pick_device, pick_dtype, stored_dtype
from gen.pipeline import arguments, models
from gen.pipeline.pipeline import Pipeline

SORT, TASKS = "sort 3 1 2 =", ["sort 3 1 2 =", "shuffle 4 0 7 5 =", "3 + 8 + 5 ="]


@pytest.fixture(scope="module")
def text() -> Pipeline:
    return gen.load("text", device="cpu")


# --- arguments


def test_other_names_of_arguments_mean_the_same(text):
    usual = text(prompts=TASKS, num_samples=2, seed=3).media
    assert len(usual) == 6
    for same in ({"n": 2}, {"num_images_per_prompt": 2}, {"num_return_sequences": np.int64(2)}):
        assert text(prompt=TASKS, seed=np.uint8(3), **same).media == usual
    assert text(TASKS, n=2, num_samples=2, seed=3).media == usual
    with pytest.raises(GenError, match="num_samples=2 and n=3 are names of the same"):
        text(TASKS, n=3, num_samples=2)
    with pytest.raises(GenError, match="prompt and prompts are both given"):
        text(TASKS, prompt=SORT)
    assert text(SORT, temperature=np.float32(0.5), top_k=np.int64(3)).sampling.top_k == 3


def test_a_call_without_a_seed_draws_one_and_records_it(text, monkeypatch):
    monkeypatch.setattr(arguments, "DRAWN_SEEDS", 2**31)
    first, second = text("shuffle 4 0 7 5 ="), text("shuffle 4 0 7 5 =", seed=None)
    assert first.seeds != second.seeds
    again = text("shuffle 4 0 7 5 =", seed=first.seeds[0])
    assert torch.equal(again.tokens, first.tokens)
    torch.manual_seed(5)
    a = text(SORT).seeds
    torch.manual_seed(5)
    assert text(SORT).seeds == a


@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("speculative_jacobi", {"window": 1}),
        ("speculative_jacobi", {"window": np.int64(1), "temperature": 0.7, "n": 2}),
        ("maskgit", {"num_inference_steps": 3}),  # another name of its parameter
    ],
)
def test_parameters_of_the_sampler_are_keywords_of_a_call(text, name, keywords):
    given = {k: v for k, v in keywords.items() if k in ("window", "num_inference_steps")}
    rest = {k: v for k, v in keywords.items() if k not in given}
    wanted = text(TASKS, {"name": name, **{k: int(v) for k, v in given.items()}}, seed=1, **rest)
    found = text(TASKS, name, seed=1, **keywords)
    assert torch.equal(found.tokens, wanted.tokens) and found.spec == wanted.spec
    assert [s.nfe for s in found.stats] == [s.nfe for s in wanted.stats]
    plain = text(TASKS, name, seed=1, **rest)
    assert [s.nfe for s in found.stats] != [s.nfe for s in plain.stats]  # control
    streamed = list(text.stream(TASKS, name, seed=1, **keywords))
    assert "".join(c.media for c in streamed if c.item.index == 0) == wanted.texts[0]


def test_parameters_without_a_sampler_are_those_of_the_usual_one(text):
    assert text(SORT, window=2).spec == {**text(SORT).spec, "window": 2}


CLASHES = {
    "twice": (
        {"sampler": {"name": "speculative_jacobi", "window": 3}, "window": 2},
        "got window 3, and window is 2 among the keywords",
    ),
    "two names": (
        {"sampler": "maskgit", "steps": 2, "num_inference_steps": 3},
        "names of the same parameter, steps",
    ),
    "count": ({"sampler": "best_of", "n": 2}, "n is 2, and both .* 'best_of' .*num_samples=2"),
    "stop": (
        {"sampler": "masked_iterative", "stop": "filled"},
        "stop is 'filled', and both the call and .*'stop': 'filled'} for the sampler",
    ),
    "object": (
        {"sampler": registry.get("sampler", "speculative_jacobi")(window=4), "window": 2},
        "the sampler is an object with parameters of its own",
    ),
    "typo": ({"sampler": "speculative_jacobi", "windw": 2}, "'windw'. Did you mean 'window'"),
    "of another": ({"sampler": "autoregressive", "window": 2}, "unknown keyword 'window'"),
    "value": ({"sampler": "speculative_jacobi", "window": 0}, "sampler.window is 0; expected"),
}


@pytest.mark.parametrize("case", CLASHES)
def test_a_clash_of_keywords_is_named(text, case):
    given, message = CLASHES[case]
    with pytest.raises(GenError, match=message):
        text(SORT, **given)


def test_an_argument_of_the_call_that_no_sampler_could_mean_stays_one(text):
    assert len(text(SORT, "maskgit", stop=["filled"], seed=0)) == 1  # texts, not the parameter
    assert len(text(SORT, "best_of", num_samples=2, seed=0)) == 2
    assert len(text(SORT, {"name": "best_of", "n": 3}, n=2, seed=0)) == 2
    assert len(text(SORT, registry.get("sampler", "best_of")(n=3), n=2, seed=0)) == 2


class Endless:
    """Data set that knows its length and raises no IndexError behind its end."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> str:
        return TASKS[i % 3]


class Column:
    """Column of a table whose scalars are no strings."""

    def to_pylist(self) -> list[str]:
        return TASKS


def test_prompts_come_in_any_collection(text):
    usual = text(TASKS, seed=0).media
    for prompts in (tuple(TASKS), iter(TASKS), np.array(TASKS), Endless(), Column()):
        assert text(prompts, seed=0).media == usual


WRONG_TYPES = {
    "no prompts": ({}, "prompts is None, a NoneType; expected a text"),
    "a number": ({"prompts": 3}, "prompts is 3, a int"),
    "bytes": ({"prompts": b"sort"}, "a bytes; expected a text"),
    "a mapping": ({"prompts": {"text": 3}}, "text is 3, a int; expected a text"),
    "a number among texts": ({"prompts": [SORT, 3]}, "a prompt is 3, a int"),
    "keyword": ({"prompts": SORT, "temprature": 1}, "Did you mean 'temperature'"),
    "keyword of a count": ({"prompts": SORT, "num_sample": 1}, "Did you mean 'num_samples'"),
    "sampler": ({"prompts": SORT, "sampler": 3}, "sampler is 3, a int; expected a name"),
    "callback": ({"prompts": SORT, "callback": "x"}, "callback is 'x', a str"),
    "progress": ({"prompts": SORT, "progress": "yes"}, "progress is 'yes', a str"),
    "trace": ({"prompts": SORT, "trace": 1}, "trace is 1, a int"),
    "seed": ({"prompts": SORT, "seed": 1.5}, "seed is 1.5, a float"),
    "num_samples": ({"prompts": SORT, "num_samples": "2"}, "num_samples is '2', a str"),
    "batch_size": ({"prompts": SORT, "batch_size": True}, "batch_size is True, a bool"),
}
WRONG_VALUES = {
    "nothing": ({"prompts": []}, "no prompts"),
    "seed": ({"prompts": SORT, "seed": 2**63}, r"below 2\*\*62"),
    "negative seed": ({"prompts": SORT, "seed": -1}, "seed is -1"),
    "items": ({"prompts": SORT, "num_samples": 10**10}, "10,000,000,000 items; expected at most"),
    "guidance": ({"prompts": SORT, "guidance_scale": -5}, "guidance_scale is -5"),
    "temperature": ({"prompts": SORT, "temperature": "hot"}, "temperature is 'hot'"),
}


@pytest.mark.parametrize("case", WRONG_TYPES)
def test_wrong_types_are_type_errors_with_a_sentence(text, case):
    given, message = WRONG_TYPES[case]
    with pytest.raises(WrongType, match=message) as caught:
        text(**given)
    assert isinstance(caught.value, TypeError) and isinstance(caught.value, GenError)


@pytest.mark.parametrize("case", WRONG_VALUES)
def test_wrong_values_are_refused(text, case):
    given, message = WRONG_VALUES[case]
    with pytest.raises(GenError, match=message) as caught:
        text(**given)
    assert not isinstance(caught.value, TypeError)


def test_an_endless_generator_of_prompts_ends(text, monkeypatch):
    monkeypatch.setattr(arguments, "MAX_ITEMS", 50)
    with pytest.raises(GenError, match="at most 50"):
        text(SORT for _ in iter(int, 1))


def test_a_guidance_scale_of_0_warns_that_the_prompt_has_no_effect(text):
    with pytest.warns(UserWarning, match="guidance_scale is 0"):
        text(SORT, guidance_scale=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text(SORT, guidance_scale=1)  # control


# --- loading


def test_dtypes_and_devices_have_their_usual_names():
    for name in ("bf16", "bfloat16", torch.bfloat16):
        assert gen.load("text", device="cpu", dtype=name).dtype == torch.bfloat16
    assert gen.load("text", torch_dtype="fp64").dtype == torch.float64
    assert gen.load("text", dtype="auto").dtype == torch.float32  # the zoo's own
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert stored_dtype({"dtype": "float16"}, torch.device("cpu")) == torch.float32
    assert stored_dtype({"text_config": {"dtype": "float16"}}, torch.device("meta")) == (
        torch.float16
    )
    with pytest.raises(GenError, match="dtype is float32 and torch_dtype bf16"):
        gen.load("text", dtype="float32", torch_dtype="bf16")
    for bad in ("bf17", torch.int8, 3):
        with pytest.raises(GenError, match="dtype"):
            pick_dtype(bad)


@pytest.mark.parametrize("flag", ["avx512_bf16", "amx_tile", None])
def test_auto_is_bfloat16_on_a_cpu_with_its_instructions_alone(monkeypatch, flag):
    for name in ("avx512_bf16", "amx_tile"):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda here=name == flag: here)
    stored = {name: {"torch_dtype": name} for name in ("bfloat16", "float16", "float32")}
    cpu = {name: stored_dtype(config, torch.device("cpu")) for name, config in stored.items()}
    assert cpu["bfloat16"] == (torch.bfloat16 if flag else torch.float32)
    assert cpu["float16"] == cpu["float32"] == torch.float32
    # control: the CPU has no say about another device
    assert stored_dtype(stored["bfloat16"], torch.device("meta")) == torch.bfloat16


@pytest.mark.parametrize(
    "modality, options, message",
    [
        (None, {}, "modality is None, a NoneType"),
        ("text", {"model": 3}, "model is 3, a int"),
        ("text", {"model": "image-causal"}, "image-causal is a model of modality 'image'"),
        ("image", {"model": "speech-causal"}, "speech-causal is a model of modality 'speech'"),
        ("image", {"model": "image-vq"}, "it is the frontend of models"),
        ("image", {"devices": "cpu"}, "Did you mean 'device'"),
        ("image", {"device": 3}, "device is 3, a int"),
    ],
)
def test_a_wrong_load_is_refused_at_once(modality, options, message):
    with pytest.raises(GenError, match=message):
        gen.load(modality, **options)


def test_public_names_are_those_that_users_type():
    assert {"load", "Pipeline", "GenError", "Interrupt", "registry"} <= set(dir(gen))
    assert not {"importlib", "annotations", "Any", "TYPE_CHECKING", "media"} & set(dir(gen))
    assert gen.Pipeline is Pipeline and gen.registry.get("modality", "text")
    with pytest.raises(AttributeError, match="'Pipelin'"):
        gen.Pipelin  # noqa: B018


def test_a_pipeline_says_what_it_is_and_moves(text):
    assert repr(text) == "Pipeline('text', model=None, device='cpu', dtype='float32')"
    config = json.loads(json.dumps(text.config))
    assert (config["model"], config["sampler"]["name"]) == ("text-causal", "speculative_jacobi")
    own = gen.load("text", device="cpu")
    assert isinstance(own.components["model"], torch.nn.Module)
    before = own(SORT, seed=0).tokens
    assert own.to("cpu") is own and own.to(torch.float64, "cpu").dtype == torch.float64
    assert next(own.components["model"].parameters()).dtype == torch.float64
    assert torch.equal(own(SORT, seed=0).tokens, before)
    for bad, message in ((("cpu", "cuda"), "one device and one dtype"), (("cpuu",), "device")):
        with pytest.raises(GenError, match=message):
            own.to(*bad)


def test_a_pipeline_pickles(text):
    text(SORT)
    data = pickle.dumps(text)
    assert len(data) < 10_000  # no weights
    again = pickle.loads(data)
    assert torch.equal(again(TASKS, seed=1).tokens, text(TASKS, seed=1).tokens)


# --- outputs


def test_an_output_is_a_list_of_its_media(text):
    out = text(TASKS, n=2, seed=7)
    assert len(out) == 6 and list(out) == out.media == out.texts and out[0] == out.media[0]
    assert out.seeds == [7, 8] * 3
    part = out[2:4]
    assert part.media == out.media[2:4] and torch.equal(part.tokens, out.tokens[2:4])
    with pytest.raises(AttributeError, match=r"no images; expected \.texts"):
        out.images  # noqa: B018
    assert not hasattr(out, "audios")
    plain = json.loads(json.dumps(out.to_dict()))
    assert plain["items"][3]["seed"] == 8 and plain["items"][3]["tokens"] == out.tokens[3].tolist()
    assert len(repr(out)) < 200 and "6 texts" in repr(out) and "seeds 7...8" in repr(out)
    html = text(SORT)._repr_html_()
    assert "<pre" in html and "sort 3 1 2 =" in html
    for bad in (None, 3, ""):
        with pytest.raises(GenError, match="folder is"):
            out.save(bad)


def test_html_shows_media_and_stays_bounded(monkeypatch):
    from PIL import Image

    from gen.modalities.image.modality import ImageModality
    from gen.pipeline import html

    media = [Image.new("RGB", (8, 8))] * 40
    page = html.as_html("<summary>", media, ["a & b"] * 40, ImageModality())
    assert page.count("<img") == html.MAX_MEDIA and "and 24 more" in page
    assert "&lt;summary&gt;" in page and "a &amp; b" in page
    monkeypatch.setattr(html, "MAX_BYTES", 100)
    assert html.as_html("s", media, ["a"] * 40, ImageModality()).count("<img") == 0


# --- while it decodes


def test_memory_that_runs_out_halves_the_batch_and_changes_nothing(text, monkeypatch):
    usual = text(TASKS, n=4, seed=0, batch_size=8)
    run, sizes = Pipeline.run, []

    def tight(self, prepared):
        sizes.append(prepared.request.max_batch)
        if prepared.request.max_batch > 2:
            raise torch.OutOfMemoryError
        return run(self, prepared)

    monkeypatch.setattr(Pipeline, "run", tight)
    small = text(TASKS, n=4, seed=0, batch_size=8)
    assert torch.equal(small.tokens, usual.tokens) and small.seeds == usual.seeds
    assert sizes[:3] == [8, 4, 2] and max(sizes[3:]) == 2

    def full(self, prepared):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Pipeline, "run", full)
    with pytest.raises(GenError, match="out of memory with one item"):
        text(TASKS)


@pytest.mark.parametrize("sampler", ["autoregressive", "maskgit"])
def test_a_callback_interrupts_a_call_that_returns_what_is_known(text, sampler):
    whole = text(TASKS, sampler, seed=0)

    def stop(info):
        if info["step"] >= 3:
            raise gen.Interrupt

    out = text(TASKS, sampler, seed=0, callback=stop)
    assert out.interrupted and len(out) == 3 and not whole.interrupted
    assert out.stats[0].nfe == 3 < whole.stats[0].nfe
    known = (out.tokens == whole.tokens).sum(1)
    assert (known >= torch.tensor([s.tokens for s in out.stats])).all()
    with pytest.raises(GenError, match="interrupted"):
        out.save("nowhere")
    first = text(TASKS, sampler, seed=0, batch_size=1, callback=stop)
    assert 1 <= len(first) <= 3  # later batches are absent
    with pytest.raises(ZeroDivisionError):  # control: any other exception goes through
        text(SORT, callback=lambda info: 1 / 0)


def test_a_progress_bar_counts_passes(text, capsys):
    out = text(SORT, "autoregressive", progress=True)
    assert f"{out.stats[0].nfe} passes" in capsys.readouterr().err
    text(SORT, "autoregressive")
    assert not capsys.readouterr().err  # no terminal here


def test_texts_stream_in_parts_that_join_to_the_text(text):
    chunks = list(text.stream(TASKS, "autoregressive", seed=2, n=2))
    parts: dict[int, str] = {}
    for chunk in chunks:
        assert not chunk.preview
        parts[chunk.item.index] = parts.get(chunk.item.index, "") + chunk.media
    assert [parts[i] for i in range(6)] == text(TASKS, n=2, seed=2).texts
    assert len(chunks) > 6
    with pytest.raises(GenError):  # before the first part is asked for
        text.stream("banana")


def test_a_character_of_several_bytes_goes_out_as_one():
    from gen.pipeline.streaming import TextStream

    data = "naïve 日本 🙂 end".encode()

    def decode(tokens):
        return bytes(tokens.tolist()).decode("utf-8", "replace")

    def streamed(cls, words=False):
        sent = []
        stream = cls(lambda row, part, preview=False: sent.append(part), 1, decode, words)
        tokens = torch.tensor(list(data))
        for ready in range(1, len(data) + 1):
            stream.step(0, tokens, torch.arange(len(data)) < ready)
        stream.finish([decode(tokens)])
        return sent

    class Hasty(TextStream):  # negative control: it does not wait for whole characters
        def step(self, row, tokens, known):
            self._send(row, self.decode(tokens[: int(known.sum())]))

    for words in (False, True):
        parts = streamed(TextStream, words)
        assert "".join(parts) == data.decode() and not any("\ufffd" in p for p in parts)
    with pytest.raises(GenError, match="tokenizer changed"):
        streamed(Hasty)


def test_images_stream_as_previews_and_then_as_they_are():
    image = gen.load("image", device="cpu")
    chunks = list(image.stream("a red circle at the top left", "maskgit", seed=0, partial_images=2))
    assert [c.preview for c in chunks] == [True, True, False]
    whole = image("a red circle at the top left", "maskgit", seed=0).images[0]
    assert np.array_equal(np.asarray(chunks[-1].media), np.asarray(whole))
    grey = [(np.asarray(c.media) == 128).all(-1).mean() for c in chunks]
    assert grey[0] > grey[1] > grey[2] == 0


# --- threads


def in_threads(work, count: int = 8) -> list:
    results: list = [None] * count
    ready = threading.Barrier(count)

    def run(i):
        ready.wait()
        try:
            results[i] = work(i)
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    return results


def test_threads_that_share_a_new_pipeline_get_the_tokens_of_one(text):
    usual = text(TASKS, "speculative", seed=0).tokens  # a model, a draft model, a frontend
    shared = gen.load("text", device="cpu")
    for found in in_threads(lambda i: shared(TASKS, "speculative", seed=0).tokens):
        assert torch.equal(found, usual)


def test_threads_that_first_load_a_model_get_the_tokens_of_one(text):
    usual = text(TASKS, seed=0).tokens
    for found in in_threads(lambda i: gen.load("text", device="cpu")(TASKS, seed=0).tokens):
        assert torch.equal(found, usual)


@pytest.mark.parametrize("locked", [True, False])  # False: the negative control
def test_one_thread_loads_at_a_time(locked, monkeypatch):
    if not locked:
        monkeypatch.setattr(models, "LOADING", nullcontext())
    else:
        assert models.LOADING is libraries.LOADING
    inside, most = [0], [0]

    def load(self, name):
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        threading.Event().wait(0.05)
        inside[0] -= 1
        return name, None, None

    monkeypatch.setattr(models.ModalityModels, "_load", load)
    shared = gen.load("text", device="cpu")
    in_threads(lambda i: shared.bound("text-causal"))
    assert (most[0] == 1) == locked
