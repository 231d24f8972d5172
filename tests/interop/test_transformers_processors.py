"""Logits processors and stop strings of ``generate``: its ids and its distribution, for samplers
that draft as well."""

from __future__ import annotations

import re

import pytest
import torch
from enumeration import distance, enumerate_distribution
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    Qwen3Config,
    StoppingCriteria,
)
from transformers.generation import logits_process as P
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StopStringCriteria,
)

from gen.core.errors import GenError
from gen.core.sampling_params import SamplingParams
from gen.interop import transformers as interop
from gen.interop.transformers import transformers_generate
from tokenizers import Tokenizer, decoders, models

V, NEW = 24, 11
SHAPE = dict(
    vocab_size=V,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=64,
    initializer_range=0.4,
    bos_token_id=1,
    eos_token_id=3,
    pad_token_id=0,
)
CONFIGS = {
    "llama": lambda **more: LlamaConfig(**{**SHAPE, **more}),
    "qwen3": lambda **more: Qwen3Config(num_key_value_heads=1, head_dim=16, **{**SHAPE, **more}),
    "neox": lambda **more: GPTNeoXConfig(**{**SHAPE, **more}),
}
IDS = torch.tensor([[5, 6, 7, 5, 9], [0, 0, 4, 5, 9], [0, 0, 0, 0, 9], [0, 11, 12, 13, 11]])
SAMPLERS = (
    "autoregressive",
    {"name": "speculative_jacobi", "window": 5},
    {"name": "speculative", "drafter": "prompt_lookup"},
    {"name": "speculative", "shape": "best_first", "verifier": "traversal", "nodes": 6},
)


def tiny(name: str, seed: int = 0, **changed):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIGS[name](**changed)).double().eval()


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


@pytest.fixture(scope="module")
def nets(llama):
    return {"llama": llama, "qwen3": tiny("qwen3"), "neox": tiny("neox")}


@pytest.fixture(scope="module")
def draft():
    return tiny("llama", 1)


def own(model, ids=IDS, **settings):
    """What transformers makes of it by itself."""
    settings = {"max_new_tokens": NEW, "do_sample": False, **settings}
    return model.generate(
        ids, attention_mask=settings.pop("attention_mask", (ids != 0).long()), **settings
    )


def ours(model, draft=None, sampler="autoregressive", ids=IDS, **settings):
    name = sampler if isinstance(sampler, str) else sampler["name"]
    drafted = name == "speculative" and "drafter" not in sampler
    return own(
        model,
        ids,
        custom_generate=transformers_generate,
        sampler=sampler,
        draft_model=draft if drafted else None,
        **settings,
    )


def raised(ids, scores):
    """A user's processor: the token after the last one is likelier, more so in longer texts."""
    out = scores.clone()
    row = torch.arange(len(out))
    out[row, (ids[:, -1] * 5 + 1) % out.shape[1]] += 0.2 * ids.shape[1]
    return out


class Odd(LogitsProcessor):
    """A user's processor that reads what rules before it took away."""

    def __call__(self, input_ids, scores):
        gone = scores.isneginf().sum(-1, keepdim=True)
        return scores + torch.cos(torch.arange(scores.shape[1]) * (1.0 + gone))


def neighbours(row, ids):
    """Allowed tokens that follow from the row and the last token."""
    last = int(ids[-1])
    return [(last * k + row + 4) % 20 + 4 for k in (1, 3, 5, 7)] + ([3] if len(ids) > 12 else [])


SETTINGS = {
    "repetition": {"repetition_penalty": 1.6},
    "ngrams": {"no_repeat_ngram_size": 2},
    "single ngrams": {"no_repeat_ngram_size": 1},
    "bad words": {"bad_words_ids": [[13], [6, 23], [7, 9, 4], [0, 5]]},
    "bias": {"sequence_bias": [[[4], 2.5], [[7], -3.0]]},
    "sequences": {"sequence_bias": [[[4], 1.5], [[9, 11], 8.0], [[0, 9], 9.0]]},
    "prefix": {"prefix_allowed_tokens_fn": neighbours},
    "function": {"logits_processor": [raised]},
    "object": {"logits_processor": [Odd()], "min_new_tokens": 6, "suppress_tokens": [9]},
    "decay": {"exponential_decay_length_penalty": (3, 1.4)},
    "forced": {"forced_eos_token_id": 4, "min_length": 9},
    "ours in another order": {
        "logits_processor": [P.RepetitionPenaltyLogitsProcessor(1.5), raised],
        "bad_words_ids": [[9]],
    },
    "all": {
        "guidance_scale": 1.5,
        "sequence_bias": [[[4], 1.5]],
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[5, 6], [8]],
        "min_new_tokens": 4,
        "begin_suppress_tokens": [7],
        "logits_processor": [raised, Odd()],
        "renormalize_logits": True,
    },
}
FAST = [
    ("llama", "repetition", 1),
    ("neox", "ngrams", 2),
    ("qwen3", "bad words", 1),
    ("neox", "sequences", 0),
    ("llama", "prefix", 3),
    ("qwen3", "object", 2),
    ("neox", "forced", 1),
    ("llama", "ours in another order", 2),
    ("qwen3", "all", 1),
]
EVERY = [(name, case, n) for name in CONFIGS for case in SETTINGS for n in range(len(SAMPLERS))]


# --- the same ids


@pytest.mark.parametrize(("name", "case", "number"), FAST)
@pytest.mark.thinned(3)
def test_greedy_ids_are_those_of_generate_alone_and_in_a_padded_batch(
    nets, draft, name, case, number
):
    for rows, ends in ((IDS, [3, 11]), (IDS[1:2], 3)):
        more = {**SETTINGS[case], "eos_token_id": ends, "max_new_tokens": 8}
        want = own(nets[name], rows, **more)
        assert torch.equal(ours(nets[name], draft, SAMPLERS[number], rows, **more), want)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case", "number"), EVERY)
def test_greedy_ids_are_those_of_generate_for_every_model(nets, draft, name, case, number):
    model, settings, sampler = nets[name], SETTINGS[case], SAMPLERS[number]
    for rows, ends in ((IDS, [3, 11]), (IDS[1:2], 3), (IDS, 3 if case == "decay" else None)):
        more = {**settings, "eos_token_id": ends}
        want = own(model, rows, **more)
        assert torch.equal(ours(model, draft, sampler, rows, **more), want), (ends, len(rows))


@pytest.mark.parametrize("case", list(SETTINGS))
def test_no_setting_is_idle(llama, case):
    """Control: every setting changes the ids of generate."""
    assert not torch.equal(own(llama, **SETTINGS[case]), own(llama))


def test_a_processor_of_the_draft_alone_gives_other_ids(llama, draft, monkeypatch):
    settings = {"repetition_penalty": 1.6, "logits_processor": [raised]}
    made = interop._target

    def target(net, request, sampling):
        alone = sampling if net is draft else SamplingParams(temperature=0.0)
        return made(net, request, alone)

    monkeypatch.setattr(interop, "_target", target)
    want = own(llama, **settings)
    assert not torch.equal(ours(llama, draft, SAMPLERS[3], **settings), want)


def test_settings_that_mean_the_same_become_sampling_parameters(llama):
    """Vectorised: no object is called where nothing needs one."""
    found = {}

    class Watched(interop.CausalTarget):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            found.update(self.sampling.controls())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interop, "CausalTarget", Watched)
        ours(
            llama,
            ids=IDS[:1],
            repetition_penalty=1.2,
            no_repeat_ngram_size=2,
            bad_words_ids=[[5, 6]],
            sequence_bias=[[[4], 1.5]],
        )
    assert found == {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 2,
        "bad_words": ((5, 6),),
        "logit_bias": {4: 1.5},
    }


# --- the same distribution


def test_sampling_has_the_distribution_of_generate(monkeypatch):
    net = tiny("llama", vocab_size=3, eos_token_id=None, initializer_range=0.2)
    settings = {
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 2,
        "repetition_penalty": 1.4,
        "bad_words_ids": [[1, 2, 0]],
        "logits_processor": [raised],
        "max_new_tokens": 2,
        "eos_token_id": None,
    }
    processors = LogitsProcessorList(
        [
            P.RepetitionPenaltyLogitsProcessor(1.4),
            P.NoBadWordsLogitsProcessor([[1, 2, 0]]),
            raised,
            P.TemperatureLogitsWarper(0.8),
            P.TopKLogitsWarper(2),
        ]
    )
    prompt = torch.tensor([[1, 2]])

    def chances(text):
        with torch.no_grad():
            return processors(text, net(text).logits[:, -1]).softmax(-1)[0].tolist()

    want = {}
    for a, p in enumerate(chances(prompt)):
        for b, q in enumerate(chances(torch.cat([prompt, torch.tensor([[a]])], 1))):
            if p * q:
                want[a, b] = p * q

    def found(sampler, settings):
        def decode(rng, contexts):
            monkeypatch.setattr(interop, "CounterRNG", lambda keys, device: rng)
            rows = prompt.expand(len(contexts), -1)
            return ours(net, None, sampler, rows, attention_mask=torch.ones_like(rows), **settings)[
                :, 2:
            ]

        return enumerate_distribution(decode, 1)[0]

    for sampler in (*SAMPLERS[:2], {"name": "speculative_jacobi", "coupling": "maximal"}):
        assert distance(found(sampler, settings), want) < 1e-12
    idle = {**settings, "logits_processor": []}
    assert distance(found("autoregressive", idle), want) > 0.01  # control


@pytest.mark.parametrize(
    "settings",
    [
        {"typical_p": 0.5},
        {"epsilon_cutoff": 0.03, "temperature": 0.7},
        {"eta_cutoff": 0.02, "top_k": 9, "repetition_penalty": 1.2},
        {"top_h": 0.4},
    ],
)
def test_other_filters_are_those_of_generate(llama, settings):
    settings = {"do_sample": True, "max_new_tokens": 1, "top_k": 0, **settings}
    more = {"return_dict_in_generate": True, "output_scores": True}
    want = own(llama, **settings, **more).scores[0].double().softmax(-1)
    got = []

    class Watched(interop.CausalTarget):
        def predict(self, *args):
            out = super().predict(*args)
            got.append(out.logprobs[:, 0].exp())
            return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interop, "CausalTarget", Watched)
        ours(llama, **settings)
    assert torch.allclose(got[0], want, atol=1e-5)


# --- ends


@pytest.fixture(scope="module")
def tokenizer():
    letters = ["<pad>", "<s>", "<unk>", "</s>", *"abcdefghijklmnop", "ab", "hi", "lo", "mn"]
    merges = [("a", "b"), ("h", "i"), ("l", "o"), ("m", "n")]
    vocab = {x: i for i, x in enumerate(letters)}
    bpe = models.BPE(vocab, merges, unk_token="<unk>")
    inner = Tokenizer(bpe)
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="<pad>")


@pytest.mark.thinned(2)
@pytest.mark.parametrize("sampler", [SAMPLERS[1], SAMPLERS[0], SAMPLERS[2]])
@pytest.mark.parametrize("ends", [3, None])
def test_stop_strings_end_rows_as_in_generate(llama, tokenizer, sampler, ends):
    made = own(llama, eos_token_id=None)[:, IDS.shape[1] :]
    texts = ["".join(tokenizer.convert_ids_to_tokens(row)) for row in made.clamp(max=23).tolist()]
    stops = [texts[0][4:6], texts[1][6:9], texts[3][1:2]]
    common = {"eos_token_id": ends, "pad_token_id": 0}
    for stop in (stops, stops[0]):
        for rows in (IDS, IDS[:1]):
            more = {**common, "stopping_criteria": [StopStringCriteria(tokenizer, stop)]}
            want = own(llama, rows, **more)
            assert torch.equal(ours(llama, None, sampler, rows, **more), want), stop
            more |= {"repetition_penalty": 1.1, "min_new_tokens": 4}
            want = own(llama, rows, **more)
            assert torch.equal(ours(llama, None, sampler, rows, **more), want), stop
    want = own(llama, stopping_criteria=[StopStringCriteria(tokenizer, stops)], **common)
    assert not torch.equal(want, own(llama, eos_token_id=ends, pad_token_id=0))  # control


def test_a_prompt_that_ends_in_a_stop_string_is_continued(llama, tokenizer):
    more = {"stopping_criteria": [StopStringCriteria(tokenizer, "f")], "eos_token_id": 3}
    assert torch.equal(ours(llama, None, SAMPLERS[1], **more), own(llama, **more))


def test_rows_cost_no_passes_behind_a_stop_string(llama, tokenizer):
    whole = own(llama, IDS[:1], eos_token_id=None)[0, IDS.shape[1] :].tolist()
    letter = tokenizer.convert_ids_to_tokens(whole[4])
    stop = StopStringCriteria(tokenizer, letter)
    more = {"stopping_criteria": [stop], "return_dict_in_generate": True}
    out = ours(llama, ids=IDS[:1], eos_token_id=3, pad_token_id=0, **more)
    tokens = out.sequences.shape[1] - IDS.shape[1]
    assert tokens < NEW and out.stats[0].nfe == tokens + 1  # the eos token behind it


class Streamer:
    def __init__(self):
        self.parts = []

    def put(self, value):
        self.parts.append(value)

    def end(self):
        pass


@pytest.mark.parametrize("ends", [3, None])
def test_streamers_get_texts_up_to_the_stop_string(llama, tokenizer, ends):
    texts = own(llama, IDS[:1], eos_token_id=None)[0, IDS.shape[1] :].tolist()
    stop = tokenizer.convert_ids_to_tokens(texts[5])
    more = {"stopping_criteria": [StopStringCriteria(tokenizer, stop)], "eos_token_id": ends}
    more["pad_token_id"] = 0
    want, got = Streamer(), Streamer()
    own(llama, IDS[:1], streamer=want, **more)
    ours(llama, None, SAMPLERS[1], IDS[:1], streamer=got, **more)
    assert [p.tolist() for p in got.parts] == [p.tolist() for p in want.parts]


def test_criteria_of_the_user_take_the_place_of_those_of_generate(llama):
    """Before, the length and the ends of the settings counted."""
    base = own(llama, eos_token_id=None)
    used = int(base[0, 8])
    for criteria in ([MaxLengthCriteria(9)], [EosTokenCriteria(used)]):
        more = {"stopping_criteria": criteria, "eos_token_id": 3, "pad_token_id": 0}
        want = own(llama, **more)
        assert torch.equal(ours(llama, None, SAMPLERS[1], **more), want)
        assert not torch.equal(want, base)


# --- what cannot be honoured


class Counting(LogitsProcessor):
    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores


class ByRow(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores + torch.arange(len(scores))[:, None] * torch.eye(scores.shape[1])[4]


class Never(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


def drawing(ids, scores):
    return scores + torch.rand_like(scores)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"logits_processor": [Counting()]}, "Counting.*state across calls"),
        ({"logits_processor": [drawing]}, "drawing.*random numbers"),
        ({"logits_processor": [ByRow()]}, "ByRow.*other rows"),
        ({"logits_processor": [lambda ids, scores, more: scores]}, "other arguments"),
        ({"encoder_repetition_penalty": 1.2}, "EncoderRepetition"),
        ({"encoder_no_repeat_ngram_size": 2}, "EncoderNoRepeatNGram"),
        ({"stopping_criteria": [Never()]}, "stopping criterion Never"),
        ({"max_time": 5.0}, "MaxTimeCriteria"),
        ({"force_words_ids": [[4]]}, "force_words_ids"),
        ({"repetition_penalty": 1.2, "sampler": "beam"}, "repetition_penalty"),
        ({"logits_processor": [raised], "sampler": "beam"}, "function"),
        ({"logprobs": 2}, "return_dict_in_generate"),
    ],
)
def test_what_cannot_be_honoured_is_named(llama, settings, name):
    with pytest.raises(GenError, match=name):
        ours(llama, **settings)


def test_logprobs_come_with_the_ids(llama, tokenizer):
    stop = tokenizer.convert_ids_to_tokens(int(own(llama, eos_token_id=None)[0, 9]))
    more = {"stopping_criteria": [StopStringCriteria(tokenizer, stop)], "eos_token_id": 3}
    out = ours(llama, None, SAMPLERS[1], logprobs=2, return_dict_in_generate=True, **more)
    for ids, row, prompt in zip(out.sequences, out.logprobs, IDS, strict=True):
        tokens = [token.token_id for token in row]
        assert ids[IDS.shape[1] :][: len(tokens)].tolist() == tokens
        text = torch.cat([prompt[prompt != 0], torch.tensor(tokens)])[None]
        with torch.no_grad():
            logp = llama(text).logits[0, -len(tokens) - 1 : -1].log_softmax(-1)
        want = logp.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        assert [token.logprob for token in row] == pytest.approx(want, abs=1e-9)
    assert out.sequences.shape[1] < IDS.shape[1] + NEW


# --- keywords of gen


def test_keywords_of_gen_are_taken(llama, tokenizer):
    base = own(llama, eos_token_id=None)
    for sampler in SAMPLERS[:3]:
        biased = ours(llama, None, sampler, logit_bias={4: 2.5, 7: -3.0}, eos_token_id=None)
        assert torch.equal(biased, own(llama, **SETTINGS["bias"], eos_token_id=None))
        letter = tokenizer.convert_ids_to_tokens(int(base[0, 9]))
        more = {"eos_token_id": 3, "pad_token_id": 0}
        stopped = ours(llama, None, sampler, stop=letter, processing_class=tokenizer, **more)
        criteria = [StopStringCriteria(tokenizer, letter)]
        assert torch.equal(stopped, own(llama, stopping_criteria=criteria, **more))

    def penalised(ids, scores):
        counts = torch.zeros_like(scores).scatter_add_(
            1, ids[:, IDS.shape[1] :], torch.ones_like(ids[:, IDS.shape[1] :], dtype=scores.dtype)
        )
        return scores - 0.9 * counts - 0.4 * (counts > 0).to(scores.dtype)

    want = own(llama, logits_processor=[penalised], eos_token_id=None)
    got = ours(
        llama,
        None,
        SAMPLERS[1],
        frequency_penalty=0.9,
        presence_penalty=0.4,
        eos_token_id=None,
    )
    assert torch.equal(got, want) and not torch.equal(want, base)


@pytest.mark.parametrize("sampler", SAMPLERS[:2])
def test_structured_output_obeys_its_rule(llama, tokenizer, sampler):
    rule = {"regex": "(ab|hi)(lo|c){2,4}"}
    more = {"structured": rule, "processing_class": tokenizer, "pad_token_id": 0}
    for ends in (3, [3, 11]):
        out = ours(llama, None, sampler, eos_token_id=ends, **more)[:, IDS.shape[1] :]
        for row in out.tolist():
            text = row[: next((n for n, i in enumerate(row) if i in (0, 3)), len(row))]
            written = "".join(tokenizer.convert_ids_to_tokens(text))
            assert re.fullmatch(rule["regex"], written.removesuffix("h" if 11 in text else ""))
    with pytest.raises(GenError, match="processing_class"):
        ours(llama, structured=rule)
    with pytest.raises(GenError, match="structured and stop"):
        ours(llama, stop="h", **more)
    with pytest.raises(GenError, match="logit_bias and sequence_bias"):
        ours(llama, logit_bias={4: 1.0}, sequence_bias=[[[4], 2.0]])
