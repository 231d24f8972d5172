"""Momentum decoding, adaptive look-ahead and superposed decoding against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from constrained import exact_length
from searches import decode
from small_llama import small_llama
from tabular import PROMPTS, TabularCausal, causal_target, space_of
from torch import Tensor

import gen
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.models.adapters.language_models import CausalLM
from gen.models.targets.causal import CausalTarget
from gen.samplers.causal.beam import adaptive_lookahead, momentum
from gen.samplers.causal.beam.superposed import NGRAM_WEIGHTS, ngram_probabilities


def after(model, context, text) -> Tensor:
    return model.after([*PROMPTS[context], *text]).log_softmax(-1)


# --- momentum


def repetition(text: list[int], token: int) -> int:
    """The longest end of the text and the token that stands in the text."""
    whole = [*text, token]
    for length in range(len(text), 0, -1):
        end = whole[-length:]
        if any(text[i : i + length] == end for i in range(len(text) - length + 1)):
            return length
    return 0


def momentum_text(model, positions, context, resistance, candidates) -> list[int]:
    text: list[int] = []
    for _ in range(positions):
        p = after(model, context, text).exp()
        best = sorted(range(len(p)), key=lambda v: -p[v])[:candidates]
        lengths = [repetition([*PROMPTS[context], *text], v) for v in best]
        scores = [
            float(p[v]) - resistance * (r if r < 6 else math.inf)
            for v, r in zip(best, lengths, strict=True)
        ]
        text.append(best[max(range(len(best)), key=lambda i: (scores[i], -i))])
    return text


@pytest.mark.parametrize(("resistance", "candidates"), [(0.2, 5), (0.05, 3), (2.0, 2)])
def test_repetitions_meet_the_resistance_of_their_length(resistance, candidates):
    space = space_of((20,), 6)
    model = TabularCausal(6, low=0.0)
    spec = {"name": "momentum", "resistance": resistance, "candidates": candidates}
    found = decode(spec, space).tokens.tolist()
    for context in range(3):
        wanted = momentum_text(model, 20, context, resistance, candidates)
        assert found[context] == wanted


def test_control_a_rule_that_forgets_the_prompt_is_found(monkeypatch):
    spec, space = {"name": "momentum", "resistance": 2.0}, space_of((20,), 20)
    right, joined = decode(spec, space).tokens, momentum.joined

    def without(prompt, length, tokens):
        return joined(torch.full_like(prompt, -1), length, tokens)

    monkeypatch.setattr(momentum, "joined", without)
    assert not decode(spec, space).tokens.equal(right)


class Echo(TabularCausal):
    """Nearly sure that 0, 1, 2, 0, 1, 2 ... goes on, and 3 is next."""

    def forward(self, tokens, positions, cache):
        super().forward(tokens, positions, cache)
        logits = torch.zeros(*tokens.shape, 4, dtype=torch.float64)
        following = (tokens + 1) % 3
        logits[..., 3] = 3.0
        return logits.scatter(-1, following[..., None], 9.0)


def test_a_loop_is_left_and_greedy_decoding_does_not_leave_it(monkeypatch):
    def run(resistance):
        target = causal_target(Echo(4), space_of((24,), 4), SamplingParams(), [0])
        sampler = resolve_sampler({"name": "momentum", "resistance": resistance})[0]
        return sampler(target, CounterRNG([0])).tokens[0].tolist()

    assert 3 not in run(0.0) and 3 in run(0.2)
    monkeypatch.setattr(momentum, "LONGEST", 40)  # no resistance is infinite: p 0.99 - 0.0002 r
    assert 3 not in run(0.0002)


# --- look-ahead


def lookahead_text(model, positions, context, threshold, candidates, length):
    """Every look-ahead is computed from the beginning; also counts the undecided positions."""
    text: list[int] = []
    undecided = 0
    while len(text) < positions:
        logp = after(model, context, text)
        entropy = float(torch.special.entr(logp.exp()).sum())
        if entropy < threshold or len(text) == positions - 1:
            text.append(int(logp.argmax()))
            continue
        undecided += 1
        best = sorted(range(len(logp)), key=lambda v: -logp[v])[:candidates]
        scores = []
        for v in best:
            tried, score = [*text, v], float(logp[v])
            while len(tried) < min(positions, len(text) + 1 + length):
                further = after(model, context, tried)
                score += float(further.max())
                tried.append(int(further.argmax()))
            scores.append(score / (len(tried) - len(text)))
        text.append(best[max(range(len(best)), key=lambda i: (scores[i], -i))])
    return text, undecided


@pytest.mark.parametrize("threshold", [0.0, 0.8, 1.1])
def test_undecided_positions_are_settled_by_a_look_ahead(threshold):
    space, model, changed = space_of((9,), 5), TabularCausal(5, low=0.0), 0
    for length in (1, 3, 5):
        spec = {"name": "adadec", "entropy_threshold": threshold, "lookahead_length": length}
        out = decode(spec, space)
        greedy = decode("adadec", space).tokens
        for context in range(3):
            text, undecided = lookahead_text(model, 9, context, threshold, 3, length)
            assert out.tokens[context].tolist() == text
            # each undecided position takes at most its look-ahead more
            assert 9 <= out.stats[context].nfe <= 9 + undecided * length
        changed += int((out.tokens != greedy).sum())
    assert changed


def test_what_the_winner_looked_at_is_not_computed_again():
    out = decode(
        {"name": "adadec", "entropy_threshold": 0.9, "lookahead_length": 3}, space_of((12,), 5)
    )
    model = TabularCausal(5, low=0.0)
    saved = 0
    for context in range(3):
        _, undecided = lookahead_text(model, 12, context, 0.9, 3, 3)
        saved += 12 + 3 * undecided - out.stats[context].nfe
    assert saved > 0


def test_control_a_look_ahead_that_goes_on_from_a_loser_is_found(monkeypatch):
    space, spec = space_of((9,), 5), {"name": "adadec", "entropy_threshold": 0.0}
    right = decode(spec, space).tokens
    follow = adaptive_lookahead.Lookahead._follow
    monkeypatch.setattr(
        adaptive_lookahead.Lookahead,
        "_follow",
        lambda self, path, row: follow(self, path, 0),
    )
    assert not decode(spec, space).tokens.equal(right)


# --- superposed


class Bigram(TabularCausal):
    """The distribution behind a mixture is the mixture of the distributions behind its tokens."""

    def forward(self, tokens, positions, cache):
        return self.table()[tokens].log()

    def forward_superposed(self, tokens, weights, positions, cache):
        return (self.table()[tokens] * weights[..., None]).sum(-2).log()

    def table(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return (3 * torch.rand(24, 6, generator=generator, dtype=torch.float64)).softmax(-1)


def superposed_texts(table, positions, first, count) -> list[tuple[int, ...]]:
    drafts: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(positions):
        if drafts[0][0]:
            w = torch.tensor([s for _, s in drafts], dtype=torch.float64).softmax(-1)
            p = sum(x * table[text[-1]] for x, (text, _) in zip(w, drafts, strict=True))
        else:
            p = table[first]
        extended = [((*text, v), s + math.log(p[v])) for text, s in drafts for v in range(len(p))]
        drafts = sorted(extended, key=lambda d: -d[1])[:count]
    return [text for text, _ in drafts]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_drafts_are_fed_as_a_mixture_and_extended_by_its_distribution(count):
    model, space = Bigram(6, 3), space_of((7,), 6)
    wanted = superposed_texts(model.table(), 7, PROMPTS[0][-1], count)
    for rank, text in enumerate(wanted):
        target = causal_target(model, space, SamplingParams(), [0])
        sampler = resolve_sampler({"name": "superposed", "num_drafts": count, "rank": rank})[0]
        out = sampler(target, CounterRNG([0]))
        assert tuple(out.tokens[0].tolist()) == text
        # k texts for the forward passes and the tokens of one
        assert (out.stats[0].nfe, out.stats[0].tokens_computed) == (7, 7)


def test_control_a_mixture_in_equal_parts_is_found(monkeypatch):
    model, mixed = Bigram(6, 3), Bigram.forward_superposed

    def equal_parts(self, tokens, weights, *rest):
        return mixed(self, tokens, torch.full_like(weights, 1 / weights.shape[-1]), *rest)

    monkeypatch.setattr(Bigram, "forward_superposed", equal_parts)
    found = []
    for rank in range(4):
        target = causal_target(model, space_of((7,), 6), SamplingParams(), [0])
        sampler = resolve_sampler({"name": "superposed", "num_drafts": 4, "rank": rank})[0]
        found.append(tuple(sampler(target, CounterRNG([0])).tokens[0].tolist()))
    assert found != superposed_texts(model.table(), 7, PROMPTS[0][-1], 4)


@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_a_network_is_fed_the_sum_of_embeddings_in_every_branch(scale):
    net, sampling = small_llama(12), SamplingParams(guidance_scale=scale)
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])

    def target(rows):
        uncond = prompt[rows].flip(1) if scale != 1 else None
        return CausalTarget(CausalLM(net), prompt[rows], space_of((5,), 12), sampling, uncond)

    tokens = torch.tensor([[[7, 8]], [[9, 2]]])
    weights = torch.tensor([[[0.3, 0.7]], [[1.0, 0.0]]], dtype=torch.float64)
    at = torch.zeros(2, 1, dtype=torch.long)
    ours = target([0, 1])
    first = ours.predict_superposed(tokens, weights, at)  # the prompt, whatever is passed
    assert first.logprobs.allclose(target([0, 1]).predict(at, at).logprobs, atol=1e-12)
    mixed = ours.predict_superposed(tokens, weights, at + 1).logprobs
    embed = net.get_input_embeddings()
    logits = []
    for before in [prompt, prompt.flip(1)][: ours.branches]:
        last = (embed(tokens) * weights[..., None]).sum(2)
        inputs = torch.cat([embed(before), last], 1)
        logits.append(net(inputs_embeds=inputs).logits[:, -1:])
    assert mixed.allclose(sampling(*logits), atol=1e-12)
    certain = target([1])
    certain.predict(at[:1], at[:1])
    alone = certain.predict(tokens[1:, :, 0], at[:1] + 1)
    assert mixed[1:].allclose(alone.logprobs, atol=1e-12)


def test_ngrams_of_prompt_and_draft_are_mixed_in():
    text = [1, 2, 3, 1, 2, 4, 1, 2]
    found = ngram_probabilities(text, [3, 4, 5])
    one, two = NGRAM_WEIGHTS[:2]
    # 2 and 1 2 were followed by 3 once and by 4 once; 4 1 2 never came before
    assert found == pytest.approx([(one + two) / 2, (one + two) / 2, 0.0])
    assert ngram_probabilities([7, 8, 9], [7, 8]) == [0.0, 0.0]
    space = space_of((12,), 6)
    plain, mixed = (
        decode({"name": "superposed", "ngram_weight": share}, space).tokens for share in (0.0, 0.9)
    )
    assert not plain.equal(mixed)


def test_models_without_embeddings_and_constraints_are_refused():
    class Ids(TabularCausal):
        superposes = False

    sampler = resolve_sampler("superposed")[0]
    target = causal_target(Ids(4), space_of((3,), 4), SamplingParams(), [0])
    with pytest.raises(GenError, match="weighted sums of embeddings, and Ids takes"):
        sampler(target, CounterRNG([0]))
    space = exact_length(4, 4)
    target = causal_target(TabularCausal(space.vocab_size), space, SamplingParams(), [0])
    with pytest.raises(GenError, match="came with a constraint"):
        sampler(target, CounterRNG([0]))


@pytest.mark.parametrize("name", ["beam", "diverse_beam", "momentum", "adadec", "superposed"])
def test_generate_takes_the_rules_and_their_limits_are_its_greedy_tokens(name):
    model = small_llama(12)
    model.generation_config.eos_token_id = 3
    ids = torch.tensor([[1, 2, 7], [4, 5, 6]])
    more = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 11}
    limit = dict(registry.get("preset", name).limit.params)
    if name == "diverse_beam":  # its limit is beam search
        limit["num_beams"] = 1
    found, at_limit = (
        model.generate(
            ids, custom_generate=gen.transformers_generate, sampler={"name": name, **spec}, **more
        )
        for spec in ({}, limit)
    )
    assert at_limit.equal(model.generate(ids, **more)) and found.shape[0] == 2


def adapters(cls=CausalLM):
    """All adapters of causal language models."""
    yield cls
    for derived in cls.__subclasses__():
        yield from adapters(derived)


def test_an_adapter_with_a_forward_of_its_own_has_a_mixture_of_its_own_or_none():
    registry.table("checkpoint")  # imports them
    own = [c for c in adapters() if c.__module__.startswith("gen.") and "forward" in vars(c)]
    assert len(own) >= 5
    for cls in own:
        assert "forward_superposed" in vars(cls) or not cls.superposes, cls.__name__
