"""A condition that is no text reaches a model: its features travel in the batch."""

from __future__ import annotations

import pytest
import torch

from gen.contracts.condition import CONDITION, Condition, ConditionEncoder, Prompt, PromptBatch
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.token_space import TokenSpace
from gen.models.adapters.base import ModelAdapter
from gen.models.adapters.protocols import ModelCache
from gen.models.targets.causal import CausalTarget

V, T = 11, 4


class Brightness(ConditionEncoder):
    """The mean of an image, as one number."""

    def __init__(self):
        self.encoded: list[tuple] = []

    def encode(self, condition: tuple) -> dict[str, torch.Tensor]:
        self.encoded.append(condition)
        return {"states": torch.tensor(condition, dtype=torch.float64).mean()[None]}


class NoCache(ModelCache):
    """A cache of the features that rows have."""

    def __init__(self):
        self.rows = None

    def keep(self, rows):
        self.rows = self.rows[rows]


class Seeing(ModelAdapter):
    """A causal model whose next token is the brightness of its row's image plus the position."""

    vocab_size, device, dtype = V, torch.device("cpu"), torch.float64

    def condition_token(self, number: int) -> int:
        return V + number

    def new_cache(self, slots: int) -> NoCache:
        return NoCache()

    def forward(self, tokens, positions, cache):
        if cache.rows is None:
            seen = [self.features[int(n) - V]["states"] for n in tokens[:, 0]]
            cache.rows = torch.cat(seen).long()
        token = (cache.rows[:, None] + positions) % V
        return torch.nn.functional.one_hot(token, V).double() * 50


def decode(images: list[tuple]) -> tuple[list[list[int]], Brightness]:
    """Decode one row per image."""
    encoder = Brightness()
    prompts = [Prompt([CONDITION], image, encoder) for image in images]
    batch = PromptBatch.of(prompts, (), Seeing().condition_token)
    sampler, sampling = resolve_sampler("autoregressive")
    target = CausalTarget(
        Seeing().conditioned(batch.features),
        batch.tokens,
        TokenSpace.codes((T,), V, V),
        sampling,
        None,
        batch.lengths,
    )
    out = sampler(target, CounterRNG([0] * len(images)))
    return out.tokens.tolist(), encoder


def test_an_image_reaches_the_model_and_is_encoded_once():
    tokens, encoder = decode([(2, 4), (7, 7), (2, 4)])
    assert tokens == [[3, 4, 5, 6], [7, 8, 9, 10], [3, 4, 5, 6]]
    assert encoder.encoded == [(2, 4), (7, 7)]
    other, _ = decode([(5, 5), (7, 7), (2, 4)])  # control: another image, other tokens in its row
    assert other[0] != tokens[0] and other[1:] == tokens[1:]


def test_a_model_of_token_ids_refuses_features():
    class Plain(ModelAdapter):
        pass

    with pytest.raises(GenError, match="takes only token ids"):
        PromptBatch.of([Prompt([CONDITION], (1,), Brightness())], (), Plain().condition_token)
    batch = PromptBatch.of([[1, 2], [3]], [9], Plain().condition_token)  # control
    assert batch.tokens.tolist() == [[1, 2, 9], [3, 9, 9]] and batch.lengths.tolist() == [3, 2]


def test_a_string_is_the_text_of_a_condition_and_other_parts_are_refused_by_name():
    assert Condition.of("a cat").text == "a cat" and Condition.of("a cat").parts == ("text",)
    modality = registry.get("modality", "motion")()
    prompt = modality.example_prompts(1, 0)[0]
    assert str(modality.parse(Condition(text=prompt))) == str(modality.condition(prompt))
    with pytest.raises(GenError, match="'motion' takes text as its condition; got images"):
        modality.parse(Condition(images=("a.png",)))
    with pytest.raises(GenError, match="got nothing"):
        modality.parse(Condition())
    with pytest.raises(GenError, match="expected a text, a Condition or a mapping"):
        Condition.of(7)
    assert "llamagen_t5" in registry.table("condition_encoder")
