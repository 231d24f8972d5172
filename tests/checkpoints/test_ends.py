"""Every id that a checkpoint names as an end ends a row, in every sampler, as in `generate`."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from language_models import (
    ARCHITECTURES,
    BOS,
    CHAT,
    EOS,
    NAMES,
    PAD,
    TURN,
    byte_tokenizer,
    generate,
    reference,
    save,
    states,
)
from same_tokens import SPECS, drafted_by

import gen
from gen.core.registry import registry
from gen.models.load.chat import turn_end

PROMPT, LENGTH = "hello", 40
GREEDY = {"temperature": 0.0, "max_new_tokens": LENGTH, "progress": False}
PLAIN = {"do_sample": False, "max_new_tokens": LENGTH}


def first_new(tokens: list[int], least: int) -> int:
    """Number of the first token from ``least`` on that has not come before."""
    return next(n for n, t in enumerate(tokens) if n >= least and t not in tokens[:n])


def load(folder, **options):
    return gen.load("text", model=folder, device="cpu", **{"chat": False, **options})


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Folder, the tokens of its greedy answer without ends, and the number of one in it."""
    folder = save(tmp_path_factory.mktemp("ends") / "llama", seed=2, template=CHAT)
    free = generate(reference(folder), PROMPT, **PLAIN)
    assert len(free) == LENGTH
    return folder, free, first_new(free, 4)


@pytest.fixture(scope="module")
def ended(llama, tmp_path_factory):
    """Pipeline, and the model of transformers, for which that token is a second end."""
    _, free, n = llama
    folder = shutil.copytree(llama[0], tmp_path_factory.mktemp("ended") / "llama")
    states(folder, eos_token_id=[EOS, free[n]])
    return load(folder), reference(folder)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return str(save(tmp_path_factory.mktemp("ends") / "draft", seed=0))


@pytest.fixture
def copied(llama, tmp_path):
    return shutil.copytree(llama[0], tmp_path / "copy")


# of the id that ends the answer: fields of generation_config.json, of config.json, and of
# tokenizer_config.json
LISTS = {
    "the second of two": lambda end: ({"eos_token_id": [EOS, end]}, {}, {}),
    "the first of two": lambda end: ({"eos_token_id": [end, EOS]}, {}, {}),
    "the only one": lambda end: ({"eos_token_id": end}, {}, {}),
    "a list of one": lambda end: ({"eos_token_id": [end]}, {}, {}),
    "the last of four": lambda end: ({"eos_token_id": [EOS, PAD, BOS, end]}, {}, {}),
    "named twice": lambda end: ({"eos_token_id": [EOS, end, EOS, end]}, {}, {}),
    "of the config": lambda end: ({}, {"eos_token_id": [EOS, end]}, {}),
    "of the config alone": lambda end: ({"eos_token_id": None}, {"eos_token_id": end}, {}),
    "of the tokenizer": lambda end: ({}, {}, {"eos_token": NAMES[end]}),
    "of all three": lambda end: (
        {"eos_token_id": [PAD, end]}, {"eos_token_id": [EOS]}, {"eos_token": NAMES[end]}
    ),
}  # fmt: skip


@pytest.mark.parametrize("source", LISTS)
def test_every_id_of_every_list_ends_a_row(llama, copied, source):
    _, free, n = llama
    generation, config, tokenizer = LISTS[source](free[n])
    states(copied, **generation)
    states(copied, "config.json", **config)
    states(copied, "tokenizer_config.json", **tokenizer)
    pipe = load(copied)
    ends = pipe.bound(str(copied))[1].space.ends
    out = pipe(PROMPT, "autoregressive", **GREEDY)
    assert out.stats[0].nfe == out.stats[0].tokens == n + 1
    assert out.tokens[0].tolist() == free[: n + 1] + [ends[0]] * (LENGTH - n - 1)
    assert generate(reference(copied), PROMPT, **PLAIN, eos_token_id=list(ends)) == free[: n + 1]


def test_a_space_that_knows_its_eos_token_alone_goes_on(llama, copied):
    _, free, n = llama
    pipe = load(states(copied, eos_token_id=[EOS, free[n]]))
    checkpoint, binding, _ = pipe.bound(str(copied))
    checkpoint.binding = replace(binding, space=replace(binding.space, end_token_ids=()))
    pipe._loaded.clear()
    assert pipe(PROMPT, "autoregressive", **GREEDY).stats[0].nfe > n + 1


ALONE = (
    "autoregressive", "speculative_jacobi", "jacobi", "sjd", "sjd_pac", "sjd_vp", "scd_gs",
    "scd_mc", "aggressive", "aded", "prompt_lookup", "suffix", "stand", "token_recycling",
    "layer_skip", "beam",
)  # fmt: skip
DRAFTED = (
    "speculative", "delayed", "drafter_invariant", "dyspec", "mdsd", "pearl", "rsd_c", "rsd_s",
    "sequoia", "specdec_pp", "specinfer", "spectr", "traversal", "vocab_trim",
)  # fmt: skip


QUICK = ("autoregressive", "speculative_jacobi", "sjd", "prompt_lookup", "suffix", "speculative")
ALL = [s if s in QUICK else pytest.param(s, marks=pytest.mark.slow) for s in (*ALONE, *DRAFTED)]


@pytest.mark.parametrize("sampler", ALL)
def test_rows_end_at_the_second_id_in_every_sampler(llama, ended, draft, sampler):
    (_, free, n), (pipe, model) = llama, ended
    spec = {"name": sampler}
    if sampler in DRAFTED:
        spec["draft_model"] = draft
    if sampler == "beam":
        spec["num_beams"] = 1
    expected = free[: n + 1] + [EOS] * (LENGTH - n - 1)
    out = pipe([PROMPT, "x y", PROMPT], spec, **GREEDY)
    assert out.tokens[0].tolist() == out.tokens[2].tolist() == expected
    assert out.stats[0].tokens == n + 1
    other = generate(model, "x y", **PLAIN)
    assert out.tokens[1, : len(other)].tolist() == other
    preset = registry.table("preset").get(sampler)
    hot = {} if preset is not None and "temperature" in preset.sampling else {"temperature": 2.0}
    drawn = pipe(PROMPT, spec, seed=3, max_new_tokens=LENGTH, **hot).tokens[0].tolist()
    at = [i for i, token in enumerate(drawn) if token in (EOS, free[n])]
    assert not at or set(drawn[at[0] + 1 :]) <= {EOS}


@pytest.mark.parametrize("sampler", ["autoregressive", "speculative_jacobi", "prompt_lookup"])
@pytest.mark.parametrize("least", [0, 1, 4, 5, 6, 20, LENGTH])
def test_no_id_ends_a_row_before_the_least_number_of_tokens(ended, sampler, least):
    pipe, model = ended
    out = pipe(PROMPT, sampler, **GREEDY, min_new_tokens=least)
    expected = generate(model, PROMPT, **PLAIN, min_new_tokens=least)
    assert out.tokens[0].tolist()[: len(expected)] == expected
    assert out.stats[0].tokens == len(expected)


@pytest.mark.parametrize("sampler", ["autoregressive", "speculative_jacobi"])
def test_stop_texts_and_stop_ids_may_end_a_row_at_the_same_token(llama, sampler):
    folder, free, _ = llama
    pipe = load(folder)
    text_of = pipe.bound(str(folder))[2].token_text
    texts = [text_of(token)[0] for token in free]
    n = next(n for n, t in enumerate(texts) if len(t) == 1 and n >= 2 and t not in texts[:n])
    for least in range(n + 2):
        how = {**GREEDY, "min_new_tokens": least}
        by_id = pipe(PROMPT, sampler, **how, stop_token_ids=[free[n]])
        by_text = pipe(PROMPT, sampler, **how, stop=texts[n])
        assert by_id.tokens.tolist() == by_text.tokens.tolist() and by_id.texts == by_text.texts
        (length,) = {out.stats[0].tokens for out in (by_id, by_text)}
        assert length == n + 1 if least <= n else length > n + 1


def test_a_stop_text_of_several_tokens_ends_a_row_no_earlier_either(llama):
    folder, free, _ = llama
    pipe = load(folder)
    text_of = pipe.bound(str(folder))[2].token_text
    texts = [text_of(token)[0] for token in free]
    n = next(n for n in range(2, LENGTH) if len(texts[n - 1]) == len(texts[n]) == 1)
    stop = texts[n - 1] + texts[n]
    for least in (0, n - 1, n, n + 1):
        out = pipe(PROMPT, "autoregressive", **GREEDY, min_new_tokens=least, stop=stop)
        assert (out.stats[0].tokens == n + 1) == (least <= n)
        assert out.stats[0].tokens > least


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.7},
        {"no_repeat_ngram_size": 2},
        {"repetition_penalty": 1.3, "min_new_tokens": 9},
        {"no_repeat_ngram_size": 1, "min_new_tokens": 3},
    ],
)
def test_rows_end_as_in_generate_under_penalties(copied, settings):
    how = {**PLAIN, **settings}
    free = generate(reference(copied), PROMPT, **how)
    n = first_new(free, 3)
    states(copied, eos_token_id=[EOS, free[n]])
    expected, pipe = generate(reference(copied), PROMPT, **how), load(copied)
    for sampler in ("autoregressive", "speculative_jacobi", "prompt_lookup"):
        out = pipe([PROMPT, "a much longer prompt"], sampler, **GREEDY, **settings)
        assert out.stats[0].tokens == len(expected)
        row = out.tokens[0].tolist()
        assert row == expected + [EOS] * (LENGTH - len(expected))


@pytest.mark.parametrize("width", [2, 3, 5])
def test_beams_end_at_every_id(llama, copied, width):
    _, free, n = llama
    states(copied, eos_token_id=[EOS, free[n], free[n + 2]])
    out = load(copied)(
        PROMPT, {"name": "beam", "num_beams": width}, max_new_tokens=12, progress=False
    )
    how = {"do_sample": False, "max_new_tokens": 12, "num_beams": width}
    expected = generate(reference(copied), PROMPT, **how)
    while expected[-1] == PAD:  # behind the end
        expected.pop()
    assert out.tokens[0].tolist()[: len(expected)] == expected
    assert out.stats[0].tokens == len(expected)


def test_a_stream_ends_with_its_row_and_holds_no_end(llama, ended):
    (_, free, n), (pipe, _) = llama, ended
    parts = [c.media for c in pipe.stream(PROMPT, "autoregressive", temperature=0.0)]
    text = pipe(PROMPT, "autoregressive", **GREEDY).texts[0]
    assert "".join(parts) == text == byte_tokenizer().decode(free[:n])


def test_no_prefix_holds_an_end(copied):
    end = next(i for i in range(4, len(NAMES)) if NAMES[i] == "Q")
    pipe = load(states(copied, eos_token_id=[EOS, end]))
    with pytest.raises(gen.GenError, match=f"prefix ends at position 1, with token {end}"):
        pipe(PROMPT, "autoregressive", prefix="aQa")


# --- the end of a turn

TEMPLATES = {
    CHAT: TURN,
    "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}": EOS,
    "{% for m in messages %}{{ m['role'] }}{{ m['content'] | trim }}<turn>\n{% endfor %}": TURN,
    "{% for m in messages %}<turn>{{ m['content'] }}{% endfor %}": None,
    "{% for m in messages %}{{ m['content'] }} <turn>{% endfor %}": None,
    "{% for m in messages %}{{ m['content'] }}END<turn>{% endfor %}": None,
    "{% for m in messages %}{{ m['content'] }}{% endfor %}": None,
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}</s>{% else %}"
    "{{ m['content'] }}<turn>{% endif %}{% endfor %}": TURN,
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}<turn>{% else %}"
    "{{ m['content'] }}{% endif %}{% endfor %}": None,
    "{{ messages[0]['content'] }}<turn>": None,
    "{{ raise_exception('no') }}": None,
    "{% for m in messages %}{% for c in m['content'] %}{{ c['text'] }}{% endfor %}<turn>"
    "{% endfor %}": TURN,
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_end_of_a_turn_is_the_special_token_right_behind_an_answer(template):
    tokenizer = byte_tokenizer(template)
    assert turn_end(tokenizer, tokenizer) == TEMPLATES[template]


def test_the_end_of_a_turn_ends_answers_in_chats_alone(copied):
    for chat, ends in ((True, (EOS, TURN)), (False, (EOS,)), (None, (EOS, TURN))):
        assert load(copied, chat=chat).bound(str(copied))[1].space.ends == ends


# --- the server


def test_the_server_says_that_a_text_stopped_at_any_end(llama, ended):
    from served import serving

    (_, free, n), (pipe, _) = llama, ended
    body = {"model": "m", "prompt": PROMPT, "temperature": 0, "sampler": "autoregressive"}

    def ends(server, **how):
        status, answer, _ = server.ask("/v1/completions", {**body, **how})
        assert status == 200, answer
        return answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]

    with serving(models={"m": pipe}) as server:
        assert ends(server, max_tokens=LENGTH) == ("stop", n + 1)
        assert ends(server, max_tokens=n) == ("length", n)
        assert ends(server, max_tokens=LENGTH, stop_token_ids=[free[1]]) == ("stop", 2)
        assert ends(server, max_tokens=n + 3, min_new_tokens=n + 3)[0] == "length"


# --- other architectures


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_end_rows_as_generate_does(name, tmp_path):
    folder = save(tmp_path / name, name, seed=1)
    model, prompts = reference(folder), ["hello", "what is", "1 2 3 4", "x"]
    long = {"do_sample": False, "max_new_tokens": 30}
    free = [generate(model, p, **long) for p in prompts]
    ends = [EOS, *(row[len(row) // 2] for row in free)]
    states(folder, eos_token_id=ends)
    model, pipe = reference(folder), load(folder)
    draft = str(save(tmp_path / "draft", name, seed=2))
    for least in (0, 12):
        expected = [generate(model, p, **long, min_new_tokens=least) for p in prompts]
        for label, spec in SPECS.items():
            out = pipe(
                prompts, drafted_by(spec, draft), temperature=0.0, max_new_tokens=30,
                min_new_tokens=least, progress=False,
            )  # fmt: skip
            lengths = [s.tokens for s in out.stats]
            rows = [r[:k] for r, k in zip(out.tokens.tolist(), lengths, strict=True)]
            assert rows == expected, label
    assert min(map(len, expected)) < 30
