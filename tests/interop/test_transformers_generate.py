"""``model.generate(..., custom_generate=gen.transformers_generate)``: the ids, the distribution,
the padding and the streams of transformers itself."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch

from gen.core.errors import GenError
from gen.interop import transformers_request
from gen.interop.transformers import transformers_generate
from gen.models.load.transformers_compat import CACHE_NAME
from gen.samplers.causal.autoregressive import Autoregressive

SHAPE = dict(
    vocab_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=64,
    initializer_range=0.4,
    bos_token_id=1,
    eos_token_id=3,
    pad_token_id=0,
)
IDS = torch.tensor([[5, 6, 7, 8, 9], [0, 0, 4, 5, 9], [0, 0, 0, 0, 9], [0, 11, 12, 13, 14]])
NEW = 12


def tiny(name: str, seed: int = 0, **changed):
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config

    shape = {**SHAPE, **changed}
    config = {
        "llama": lambda: LlamaConfig(hidden_size=32, intermediate_size=64, **shape),
        "qwen3": lambda: Qwen3Config(
            hidden_size=32, intermediate_size=64, num_key_value_heads=1, head_dim=16, **shape
        ),
        "gpt2": lambda: GPT2Config(n_embd=32, n_positions=64, **shape),
    }[name]()
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).double().eval()


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2"])
def model(request):
    return tiny(request.param)


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


def own(model, ids=IDS, **settings):
    """What transformers makes of it by itself."""
    settings = {"max_new_tokens": NEW, "do_sample": False, **settings}
    return model.generate(
        ids, attention_mask=settings.pop("attention_mask", (ids != 0).long()), **settings
    )


def ours(model, ids=IDS, **settings):
    return own(model, ids, custom_generate=transformers_generate, **settings)


def test_parameters_of_the_sampler_are_arguments(llama):
    more = {"return_dict_in_generate": True, "seed": 3, "do_sample": True}
    spec = {"name": "speculative_jacobi", "window": 1, "coupling": "maximal"}
    wanted = ours(llama, sampler=spec, **more)
    found = ours(llama, sampler=spec["name"], window=1, coupling="maximal", **more)
    assert torch.equal(found.sequences, wanted.sequences)
    passes = [s.nfe for s in wanted.stats]
    assert [s.nfe for s in found.stats] == passes
    named = functools.partial(transformers_generate, sampler="speculative_jacobi", window=1)
    partial = own(llama, custom_generate=named, coupling="maximal", **more)
    assert torch.equal(partial.sequences, wanted.sequences)
    plain = ours(llama, sampler=spec["name"], **more)
    assert sum(passes) > sum(s.nfe for s in plain.stats)  # control
    for given, message in (
        ({"sampler": spec, "window": 2}, "got window 1, and window is 2 among the keywords"),
        ({"sampler": "autoregressive", "window": 2}, "unknown keyword 'window'"),
        ({"window": 2}, "unknown keyword 'window'"),  # the default sampler has none either
        ({"sampler": "speculative_jacobi", "num_beams": 2}, "cannot honour num_beams=2"),
    ):
        with pytest.raises(GenError, match=message):
            ours(llama, **given)


# --- the same ids


@pytest.mark.parametrize(
    "sampler",
    [
        "autoregressive",
        "speculative_jacobi",
        {"name": "speculative_jacobi", "window": 5, "coupling": "maximal"},
    ],
)
@pytest.mark.thinned(4)
def test_greedy_ids_are_those_of_generate_alone_and_in_a_padded_batch(model, sampler):
    for rows in (IDS, IDS[:1], IDS[1:2]):
        for ends in (3, None):
            want = own(model, rows, eos_token_id=ends)
            assert torch.equal(ours(model, rows, sampler=sampler, eos_token_id=ends), want)
    taken = ours(model, sampler=sampler, eos_token_id=None, attention_mask=torch.ones_like(IDS))
    assert not torch.equal(
        taken, own(model, eos_token_id=None)
    )  # control: padding that is taken for ids gives others


def test_rows_end_and_are_padded_as_transformers_does_with_one_end_and_with_several(llama):
    whole = own(llama, eos_token_id=None)
    used = whole[:, IDS.shape[1] :].flatten().bincount().argsort(descending=True).tolist()
    short = 0
    for ends in ([used[0]], [used[1]], used[1:3], used[:4], [used[0], 23], [99]):
        want = own(llama, eos_token_id=ends, pad_token_id=0)
        for sampler in ("autoregressive", "speculative_jacobi"):
            assert torch.equal(
                ours(llama, eos_token_id=ends, pad_token_id=0, sampler=sampler), want
            ), ends
        short += want.shape[1] < whole.shape[1] or bool((want[:, -1] == 0).any())
    assert short > 2  # control: ends were met


@pytest.mark.parametrize(
    "rules",
    [
        {"min_new_tokens": 5},
        {"min_length": 9},
        {"suppress_tokens": [4, 7, 8]},
        {"begin_suppress_tokens": [4, 7, 8, 11]},
        {"guidance_scale": 2.5},
        {"guidance_scale": 2.5, "negative_prompt_ids": IDS.flip(1)[:, 1:4]},
        {"renormalize_logits": True},
    ],
)
def test_settings_change_greedy_ids_as_they_do_there(llama, rules):
    ends = (
        own(llama, eos_token_id=None)[:, 5:]
        .flatten()
        .bincount()
        .argsort(descending=True)[:3]
        .tolist()
    )
    common = dict(eos_token_id=ends, pad_token_id=0)
    if "begin_suppress_tokens" in rules or "suppress_tokens" in rules:
        first = own(llama, eos_token_id=None)[:, 5].unique().tolist()
        rules = {k: v + first for k, v in rules.items()}
    want = own(llama, **common, **rules)
    assert torch.equal(ours(llama, sampler="speculative_jacobi", **common, **rules), want)
    if "renormalize_logits" not in rules:
        assert not torch.equal(want, own(llama, **common))  # control: the setting is not idle


# --- the same distribution


@dataclass(frozen=True)
class Watched(Autoregressive):
    """Keeps the distribution of the first place."""

    def __call__(self, target, rng, **kwargs):
        zero = torch.zeros(target.rows, 1, dtype=torch.long)
        self.__dict__["sampling"] = (
            type(target)(*target._init_args(target.sampling)).predict(zero, zero).logprobs[:, 0]
        )
        return super().__call__(target, rng, **kwargs)


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 0},
        {"top_k": 5},
        {"top_k": 0, "top_p": 0.6},
        {"top_k": 0, "min_p": 0.2, "temperature": 1.7},
        {},
        {
            "temperature": 0.6,
            "top_k": 9,
            "top_p": 0.9,
            "min_p": 0.05,
            "guidance_scale": 1.5,
            "suppress_tokens": [9],
        },
    ],
)
def test_the_distribution_is_that_of_generate(llama, settings):
    want = (
        own(
            llama,
            do_sample=True,
            max_new_tokens=1,
            return_dict_in_generate=True,
            output_scores=True,
            **settings,
        )
        .scores[0]
        .double()
        .softmax(-1)
    )
    sampler = Watched()
    ours(llama, do_sample=True, sampler=sampler, **settings)
    assert torch.allclose(sampler.sampling.exp(), want, atol=1e-5)
    other = {**settings, "temperature": 1.3 * settings.get("temperature", 1.0)}
    ours(llama, do_sample=True, sampler=(control := Watched()), **other)
    assert not torch.allclose(control.sampling.exp(), want, atol=1e-3)


def test_what_is_sampled_is_distributed_as_the_model_says():
    model, rows = tiny("llama", vocab_size=6, eos_token_id=None, initializer_range=0.2), 4000
    pairs = torch.cartesian_prod(torch.arange(6), torch.arange(6))
    logp = (
        model(torch.cat([torch.tensor([[1, 4]]).expand(36, -1), pairs], 1))
        .logits.detach()
        .log_softmax(-1)
    )
    want = (logp[:, 1].gather(1, pairs[:, :1]) + logp[:, 2].gather(1, pairs[:, 1:])).exp()[:, 0]

    def far(**settings) -> float:
        got = ours(
            model,
            torch.tensor([[1, 4]]),
            do_sample=True,
            top_k=0,
            max_new_tokens=2,
            num_return_sequences=rows,
            seed=0,
            **settings,
        )[:, 2:]
        return float(
            ((got[:, 0] * 6 + got[:, 1]).bincount(minlength=36) / rows - want).abs().sum() / 2
        )

    noise = float(
        (want * (1 - want) / rows).sqrt().sum() * 0.4
    )  # the total variation of so many honest draws, on average
    for sampler in ("speculative_jacobi", {"name": "speculative_jacobi", "coupling": "maximal"}):
        assert far(sampler=sampler) < 2 * noise
    assert far(temperature=0.7) > 3 * noise  # control


def test_a_seed_means_the_same_ids_alone_and_in_a_batch_and_for_every_sampler_that_says_so(model):
    def draw(ids, **more):
        return ours(model, ids, do_sample=True, top_k=0, eos_token_id=None, **more)

    batch = draw(IDS, seed=7)
    for row, ids in zip(batch, IDS.split(1), strict=True):
        assert torch.equal(draw(ids, seed=7)[0], row) and torch.equal(
            draw(ids[:, ids[0] != 0], seed=7)[0][-NEW:], row[-NEW:]
        )
    assert torch.equal(draw(IDS, seed=7, sampler="autoregressive"), batch)
    assert not torch.equal(draw(IDS, seed=8), batch)  # control
    many = draw(IDS[:2], seed=7, num_return_sequences=3)
    assert torch.equal(many[[0, 3]], batch[:2]) and len(many.unique(dim=0)) == 6
    assert torch.equal(many[4], draw(IDS[1:2], seed=8)[0])  # sequence j has the seed seed + j
    assert torch.equal(
        many[:3], draw(IDS[:1].expand(3, -1), seed=7)
    )  # as a prompt that is given several times


def test_without_a_seed_it_is_the_generator_of_torch_that_decides(llama):
    def draw(seed):
        torch.manual_seed(seed)
        return [ours(llama, IDS[:1], do_sample=True, top_k=0) for _ in range(2)]

    (a, b), (c, _) = draw(3), draw(3)
    assert torch.equal(a, c) and not torch.equal(a, b)


# --- what else comes out


def test_a_draft_model_speeds_up_and_changes_nothing_greedy(llama):
    draft = tiny("llama", seed=1, num_hidden_layers=1)
    for small in (draft, llama):
        got = ours(
            llama,
            sampler="speculative",
            draft_model=small,
            return_dict_in_generate=True,
            eos_token_id=None,
        )
        assert torch.equal(got.sequences, own(llama, eos_token_id=None))
    assert max(s.nfe for s in got.stats) < NEW / 2  # the model itself drafts perfectly


def test_a_dict_carries_the_statistics(llama):
    out = ours(llama, return_dict_in_generate=True, sampler="autoregressive", eos_token_id=None)
    assert torch.equal(out["sequences"], out.sequences) and [s.nfe for s in out.stats] == [NEW] * 4


class Collected:
    def __init__(self):
        self.parts, self.over = [], False

    def put(self, value):
        self.parts.append(value.clone())

    def end(self):
        self.over = True


@pytest.mark.parametrize("rows", [IDS, IDS[:1]], ids=["batch", "alone"])
@pytest.mark.parametrize("ends", [None, [4, 7, 9, 11]])
def test_streamers_get_what_generate_gives_them(llama, rows, ends):
    want, got = Collected(), Collected()
    settings = dict(eos_token_id=ends, pad_token_id=0)
    own(llama, rows, streamer=want, **settings)
    ours(llama, rows, streamer=got, sampler="speculative_jacobi", **settings)
    assert got.over and len(got.parts) == len(want.parts) > 2
    assert all(torch.equal(a, b) for a, b in zip(got.parts, want.parts, strict=True))


def test_a_model_in_training_is_evaluated_and_left_in_training():
    model = tiny("gpt2")
    want = own(model)
    model.train()
    assert torch.equal(ours(model), want) and model.training and model.transformer.drop.training
    assert not torch.equal(own(model), want)  # control: transformers drops out there


# --- one error each, which names what it is about


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"output_scores": True}, "output_scores"),
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"max_time": 9.0}, "MaxTimeCriteria"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"use_cache": False}, "use_cache"),
        ({"position_ids": torch.arange(5)[None].expand(4, -1)}, "position_ids"),
        ({"suppress_tokens": list(range(24))}, "leave nothing"),
        ({"attention_mask": (IDS != 0).long().flip(1)}, "padding on the left"),
        ({"sampler": "maskgit"}, "masked model"),
        ({"sampler": "speculativ_jacobi"}, "Did you mean 'speculative_jacobi'"),
        ({"seed": -1}, "seed is -1"),
        ({"sampler": {"name": "speculative_jacobi", "windw": 3}}, "'window'"),
        ({"sampler": "speculative"}, "draft_model="),
        ({"negative_prompt_ids": IDS[:3], "guidance_scale": 2.0}, "negative_prompt_ids has 3"),
        ({"sampler": "jacobi", "do_sample": True}, "temperature"),
    ],
)
def test_what_cannot_be_honoured_is_named(llama, settings, name):
    with pytest.raises(GenError, match=name):
        ours(llama, **settings)


def test_models_that_come_along_are_named_too(llama):
    other = tiny("llama", vocab_size=30)
    for settings, name in (
        ({"assistant_model": llama}, "assistant_model"),
        ({"draft_model": llama}, "drafts without one"),
        (
            {"draft_model": other, "sampler": "speculative"},
            "draft_model has a vocabulary of 30 tokens; expected 24",
        ),
        ({CACHE_NAME: llama(IDS[:, :2])[CACHE_NAME]}, CACHE_NAME),
    ):
        with pytest.raises(GenError, match=name):
            ours(llama, **settings)
    with pytest.raises(GenError, match="generation_config"):
        transformers_generate(llama, IDS)
    with pytest.raises(ValueError, match="smapler"):  # transformers itself finds what nobody takes
        ours(llama, smapler="sjd")


def test_models_without_masks_are_refused():
    from transformers import BloomConfig, BloomForCausalLM

    bloom = BloomForCausalLM(
        BloomConfig(vocab_size=24, hidden_size=32, n_layer=1, n_head=2)
    ).double()
    with pytest.raises(GenError, match="BloomForCausalLM.*KV cache"):
        ours(bloom)


def test_a_rule_about_ends_that_forgets_some_is_found(llama, monkeypatch):
    """Negative control: with the first of several ends alone, the ids of transformers do not come
    out."""
    used = (
        own(llama, eos_token_id=None)[:, 5:]
        .flatten()
        .bincount()
        .argsort(descending=True)[1:4]
        .tolist()
    )
    settings = dict(eos_token_id=used, pad_token_id=0)
    whole = transformers_request.make_space
    monkeypatch.setattr(
        transformers_request,
        "make_space",
        lambda n, w, v, ends, rules: whole(n, w, v, ends[:1], rules),
    )
    monkeypatch.setattr(
        transformers_request.Ends,
        "lengths",
        lambda self, tokens: torch.full((len(tokens),), tokens.shape[1]),
    )
    assert not torch.equal(ours(llama, **settings), own(llama, **settings))
