"""Distributions under sampling parameters that look back, from their definition: one token after
the other, with lists of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from constrained import SPACES, follow, with_end
from constraint_bench import CONTEXTS, WRONG, models
from enumeration import distance, enumerate_distribution
from tabular import EMPTY, PROMPTS, causal_target
from torch import Tensor

from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace

# ids of the prompts of ``tabular`` that stand for a token of the output
SAID = {12: 0, 13: 1, 15: 0, 19: -1}


def said(space: TokenSpace) -> TokenSpace:
    """The space with a table of what the ids of prompts stand for."""
    table = torch.full((23,), -1)
    for word, token in SAID.items():
        table[word] = token
    return replace(space, prompt_tokens=table)


LENGTH = said(SPACES["length"])
END = said(with_end(4))
SHORT = said(with_end(3))


def favour(input_ids: Tensor, scores: Tensor) -> Tensor:
    """A logits processor that likes the token after the last one, the more the longer the row."""
    out = scores.clone()
    if input_ids.shape[1]:
        row = torch.arange(len(out))
        out[row, (input_ids[:, -1] + 1) % out.shape[1]] += 0.3 * input_ids.shape[1]
    return out


CASES = {
    "repetition": SamplingParams(repetition_penalty=1.7),
    "presence": SamplingParams(presence_penalty=0.9),
    "frequency": SamplingParams(frequency_penalty=0.6, temperature=0.8),
    "ngrams": SamplingParams(no_repeat_ngram_size=2),
    "words": SamplingParams(bad_words=[[0, 1], [1, 0, 0]]),
    "bias": SamplingParams(logit_bias={0: 0.7, 1: -0.4}),
    "processor": SamplingParams(logits_processor=[favour]),
    "all": SamplingParams(
        temperature=0.7,
        top_k=2,
        guidance_scale=2.0,
        repetition_penalty=1.3,
        presence_penalty=0.2,
        frequency_penalty=-0.5,
        bad_words=[[1, 1]],
        logit_bias={0: 0.5},
        logits_processor=[favour],
    ),
}
COUNTED = SamplingParams(
    repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.8, bad_words=[[0, 1]]
)


def looked_back(z: Tensor, prompt: Sequence[int], output: Sequence[int], s: SamplingParams):
    """Logits [V] with everything that the tokens before add, from the definition."""
    z, whole = z.clone(), [*prompt, *output]
    for token, add in (s.logit_bias or {}).items():
        z[token] += add
    for token in set(whole):
        z[token] = (
            z[token] * s.repetition_penalty if z[token] < 0 else (z[token] / s.repetition_penalty)
        )
    for token in set(output):
        z[token] -= s.presence_penalty + s.frequency_penalty * output.count(token)
    n = s.no_repeat_ngram_size
    for token in range(len(z)):
        grams = [whole[i : i + n] for i in range(len(whole) - n + 1)]
        if n and len(whole) >= n - 1 and [*whole[len(whole) - n + 1 :], token] in grams:
            z[token] = -torch.inf
        for word in s.bad_words:
            text = [*whole, token]
            if text[len(text) - len(word) :] == list(word):
                z[token] = -torch.inf
    for processor in s.logits_processor:
        z = processor(torch.tensor([whole], dtype=torch.long), z[None])[0]
    return z


def distribution_of(
    model, space: TokenSpace, s: SamplingParams, context: int
) -> dict[tuple[int, ...], float]:
    """The distribution of the output, token after token."""
    plain = SamplingParams(s.temperature, s.top_k, s.top_p, s.min_p)
    prompt = [SAID[word] for word in PROMPTS[context] if SAID[word] >= 0]

    def extend(before: tuple[int, ...], mass: float, out: dict) -> dict:
        if len(before) == space.length:
            out[before] = mass
            return out
        legal = torch.tensor([x in follow(space, before) for x in range(space.vocab_size)])
        cond = model.after([*PROMPTS[context], *before])
        uncond = model.after([*EMPTY[context], *before]) if s.guided else None
        z = looked_back(s.guide(cond, uncond), prompt, list(before), s)
        if space.eos_token_id in before:
            z = torch.zeros_like(z)
        for token, p in enumerate(plain(z, None, legal).exp().tolist()):
            if p > 0:
                extend((*before, token), mass * p, out)
        return out

    return extend((), 1.0, {})


def found_by(
    sampler, space: TokenSpace, s: SamplingParams, drafted: SamplingParams | None = None
) -> list[dict[tuple[int, ...], float]]:
    """The distribution of a sampler in every context, all contexts in one batch.

    ``drafted``: sampling parameters of the draft model, if they are others."""
    model, small = models(space, s)

    def decode(rng, context):
        draft = None
        if sampler.drafted:
            draft = causal_target(small, space, drafted or s, context)
        return sampler(causal_target(model, space, s, context), rng, draft=draft).tokens

    return enumerate_distribution(decode, CONTEXTS)


def controlled_error(
    sampler,
    space: TokenSpace,
    s: SamplingParams,
    drafted: SamplingParams | None = None,
    expected: Callable[..., dict] = distribution_of,
) -> float:
    """The largest error of a probability, over three contexts that are decoded in one batch."""
    model, _ = models(space, s)
    right = [expected(model, space, s, c) for c in range(CONTEXTS)]
    assert all(len(x) > 1 for x in right), "the distribution is too simple to test anything"
    off = [distribution_of(model, space, SamplingParams(s.temperature), c) for c in range(CONTEXTS)]
    assert max(map(distance, right, off)) > WRONG, "the parameters must change something"
    return max(map(distance, found_by(sampler, space, s, drafted), right))
