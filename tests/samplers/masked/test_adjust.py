"""ADJUST: tokens of one forward pass from a joint distribution, against enumeration on a toy whose
joint law is a table, and the seam between the masked target and a layer on its hidden states."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from enumeration import distance, enumerate_distribution
from tabular import TabularMasked, masked_target, space_of
from torch import nn

from gen.core.errors import GenError
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.modalities.text.tasks import check, tasks
from gen.models.adapters.base import ModelAdapter
from gen.models.targets.masked import MaskedTarget
from gen.pipeline.pipeline import Pipeline
from gen.recipes.text.adjust import reveal
from gen.samplers.masked.adjust_layer import AdjustLayer
from gen.samplers.masked.loop import decode_masked
from gen.samplers.masked.methods.adjust import Adjusted

IDS, MASK, PREFIX = 2, 2, 1
SYMBOLS = IDS + 2  # tokens, the mask, and the prompt
LENGTH = 4
SPACE = space_of((LENGTH,), IDS, masked=True)
PROMPTS = ["shuffle 4 0 7 5 =", "shuffle 8 2 5 =", "sort 3 1 2 =", "copy 4 5 6 ="]


class TableModel(ModelAdapter):
    """Masked model of a joint law over short sequences of two tokens: its logits are those of the
    law's own conditionals. Hidden states are [logits, one-hot position]."""

    device, dtype, ragged, shift, digest = torch.device("cpu"), torch.float64, False, 0, "table"
    vocab_size = IDS + 1

    def __init__(self, seed: int = 0, length: int = LENGTH, sharpness: float = 2.0):
        generator = torch.Generator().manual_seed(seed)
        self.length = length
        self.states = torch.tensor(list(product(range(IDS), repeat=length)))
        noise = torch.randn(len(self.states), generator=generator, dtype=torch.float64)
        self.law = (sharpness * noise).softmax(0)
        self.width = 16

    def conditionals(self, canvas: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [B, T, 2] of every position given the known ones, itself excluded."""
        agree = (canvas[:, None] == self.states) | (canvas[:, None] == MASK)  # [B, N, T]
        others = torch.stack(
            [agree[..., torch.arange(self.length) != i].all(-1) for i in range(self.length)], -1
        )
        weights = others * self.law[:, None]  # [B, N, T]
        ones = torch.stack([(self.states == v).double() for v in range(IDS)], -1)
        return torch.einsum("bnt,ntv->btv", weights, ones).log().log_softmax(-1)

    def forward(self, ids: torch.Tensor, canvas_length: int) -> torch.Tensor:
        return self.forward_with_states(ids, canvas_length)[0]

    def forward_with_states(self, ids, canvas_length, left_padding=None):
        logits = self.conditionals(ids[:, PREFIX:])
        padded = nn.functional.pad(logits, (0, 0, PREFIX, 0))
        where = torch.eye(PREFIX + self.length, self.width - IDS, dtype=self.dtype)
        where = where.expand(len(ids), -1, -1)
        hidden = torch.cat([padded, where], -1)
        return self.logits_of(hidden[:, PREFIX:]), hidden

    def embedded(self, ids, positions):
        tokens = nn.functional.one_hot(ids.clamp_max(SYMBOLS - 1), self.width)
        return tokens.to(self.dtype)

    def logits_of(self, hidden):
        return nn.functional.pad(hidden[..., :IDS], (0, 1), value=-1e9)


class TableLayer(nn.Module):
    """Layer that knows the law: it reads the canvas from the embedded tokens."""

    target = ""

    def __init__(self, model: TableModel):
        super().__init__()
        self.model, self.canvases = model, []

    def forward(self, embedded, hidden, positions, seen=None):
        canvas = embedded[:, PREFIX:, :SYMBOLS].argmax(-1)
        self.canvases.append(canvas)
        return self.model.forward_with_states(
            nn.functional.pad(canvas, (PREFIX, 0)), canvas.shape[1]
        )[1]


class NoLayer(nn.Module):
    """Layer that adds nothing."""

    target = ""

    def forward(self, embedded, hidden, positions, seen=None):
        return hidden


def target_of(model: TableModel, rows: int) -> MaskedTarget:
    prompt = torch.full((rows, PREFIX), SYMBOLS - 1)
    return MaskedTarget(
        model, prompt, space_of((model.length,), IDS, masked=True), SamplingParams()
    )


def sampler_of(commits: int, **params):
    spec = {"name": "adjust", "adjust_commits": commits, "proposer": "categorical", **params}
    return resolve_sampler({"adjust_layer": "", **spec})[0]


def law_of(model: TableModel, layer: nn.Module, commits: int, order: str = "entropy") -> dict:
    """The exact distribution of the sampler."""
    sampler = sampler_of(commits, order=order)
    proposer = Adjusted(sampler, layer=layer)

    def decode(rng, context):
        target = target_of(model, len(context))
        return decode_masked(target, rng, sampler, overrides={"proposer": proposer}).tokens

    return enumerate_distribution(decode, 1)[0]


def exact(model: TableModel) -> dict:
    return {tuple(s): p for s, p in zip(model.states.tolist(), model.law.tolist(), strict=True)}


def divergence(of: dict, from_: dict) -> float:
    """KL(of || from_), in nats."""
    return sum(p * (torch.tensor(p / from_[s]).log().item()) for s, p in of.items() if p > 0)


# --- the joint law


@pytest.mark.parametrize("order", ["entropy", "raster", "random"])
@pytest.mark.parametrize("commits", [2, 3, 4])
def test_a_layer_that_knows_the_law_gives_it_at_any_number_of_commits(commits, order):
    model = TableModel()
    assert distance(law_of(model, TableLayer(model), commits, order), exact(model)) < 1e-12


def test_one_commit_per_pass_needs_no_layer():
    model = TableModel()
    assert distance(law_of(model, NoLayer(), 1), exact(model)) < 1e-12


@pytest.mark.parametrize("commits", [2, 4])
def test_control_without_a_layer_the_law_is_another(commits):
    model = TableModel()
    assert distance(law_of(model, NoLayer(), commits), exact(model)) > 1e-3


def test_the_layer_sees_committed_tokens_alone():
    """Number of known tokens in every canvas that the layer gets: those of the canvas, and one more
    per application, whatever was drawn for the others."""
    model = TableModel()
    layer, sampler = TableLayer(model), sampler_of(3)
    rows, proposer = 5, Adjusted(sampler, layer=layer)
    target = target_of(model, rows)
    decode_masked(target, CounterRNG(range(rows)), sampler, overrides={"proposer": proposer})
    known = [(canvas != MASK).sum(1).unique().tolist() for canvas in layer.canvases]
    assert known[:2] == [[1], [2]] and all(len(counts) == 1 for counts in known)


# --- a trained layer


def trained(model: TableModel, steps: int = 400) -> AdjustLayer:
    """A layer of the production architecture, trained on all partly known canvases."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    layer = AdjustLayer(model.width, 2, 32).double()
    optimizer = torch.optim.Adam(layer.parameters(), 5e-3)
    everything = torch.tensor(list(product(range(IDS + 1), repeat=model.length)))
    at = torch.arange(PREFIX + model.length)[None]
    for _ in range(steps):
        canvas, total = everything, torch.zeros((), dtype=torch.float64)
        logprobs, hidden = model.conditionals(canvas), with_states(model, canvas)
        for _ in range(2):
            masked = canvas == MASK
            canvas, masked = reveal(logprobs, canvas, masked, generator)
            logprobs = model.conditionals(canvas)
            hidden = layer(model.embedded(prompted(canvas), at), hidden, at)
            found = model.logits_of(hidden[:, PREFIX:])[..., :IDS].log_softmax(-1)
            nats = (logprobs.exp() * (logprobs - found)).sum(-1)
            total = total + nats[masked].mean()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    return layer.requires_grad_(False)


def prompted(canvas: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(canvas, (PREFIX, 0), value=SYMBOLS - 1)


def with_states(model: TableModel, canvas: torch.Tensor) -> torch.Tensor:
    return model.forward_with_states(prompted(canvas), model.length)[1]


@pytest.mark.slow
def test_a_trained_layer_is_closer_to_the_joint_law_than_the_product_of_marginals():
    model = TableModel()
    layer = trained(model)
    for commits in (2, 3):
        product_of_marginals = divergence(exact(model), law_of(model, NoLayer(), commits))
        assert product_of_marginals > 0.02  # there is something to gain
        assert divergence(exact(model), law_of(model, layer, commits)) < product_of_marginals / 2


# --- the built-in model


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return Pipeline("text")


def written(folder, scale: float, target: str = "") -> str:
    """Folder of an untrained layer whose output has that scale."""
    torch.manual_seed(0)
    layer = AdjustLayer(96, 3, 64, target)
    nn.init.constant_(layer.result_norm.weight, scale)
    layer.save_pretrained(folder)
    return str(folder)


def decoded(pipe: Pipeline, commits: int, layer: str = "", **params):
    proposer = "adjusted" if layer else "categorical"
    spec = {"adjust_commits": commits, "adjust_layer": layer, "proposer": proposer, **params}
    return pipe(PROMPTS, {"name": "adjust", **spec}, seed=3)


@pytest.mark.parametrize("guidance", [1.0, 1.5])
def test_a_layer_that_returns_zero_leaves_the_logits_of_the_model(pipe, tmp_path, guidance):
    layer = AdjustLayer.from_pretrained(written(tmp_path / "zero", 0.0))
    sampler, sampling = pipe.resolve("adjust", {"guidance_scale": guidance})
    target = pipe.target(sampler, sampling, pipe.plan(PROMPTS))
    plain = target.predict(target.blank())
    assert plain.states is None
    target.require_states("", "a test")
    canvas = target.blank()
    output = target.predict(canvas)
    logprobs, raw = output.states.adjusted(layer, canvas).logprobs(canvas)
    assert torch.equal(output.logprobs, plain.logprobs)
    assert torch.equal(logprobs, plain.logprobs) and torch.equal(raw(), plain.raw())
    other = AdjustLayer.from_pretrained(written(tmp_path / "other", 1.0))
    assert not torch.equal(output.states.adjusted(other, canvas).logprobs(canvas)[0], logprobs)


def test_one_commit_per_pass_gives_the_tokens_of_the_sampler_without_a_layer(pipe, tmp_path):
    layer = written(tmp_path / "layer", 1.0)
    one, plain = decoded(pipe, 1, layer), decoded(pipe, 1)
    assert torch.equal(one.tokens, plain.tokens) and [s.nfe for s in one.stats] == [16] * 4
    assert not torch.equal(decoded(pipe, 4, layer).tokens, decoded(pipe, 4).tokens)


@pytest.mark.parametrize(("commits", "passes"), [(1, 16), (2, 8), (3, 6), (5, 4), (16, 1)])
def test_every_pass_commits_as_many_positions(pipe, tmp_path, commits, passes):
    out = decoded(pipe, commits, written(tmp_path / "layer", 0.1))
    assert [s.nfe for s in out.stats] == [passes] * len(PROMPTS)


def test_results_do_not_depend_on_the_batch(pipe, tmp_path):
    layer = written(tmp_path / "layer", 1.0)
    spec = {"name": "adjust", "adjust_commits": 3, "adjust_layer": layer}
    together = pipe(PROMPTS, spec, seed=3).media
    assert pipe(PROMPTS, spec, seed=3, batch_size=2).media == together


def test_files_of_a_layer_survive_a_round_trip(tmp_path):
    folder = written(tmp_path / "layer", 0.5, "abc")
    layer = AdjustLayer.from_pretrained(folder)
    again = AdjustLayer(layer.width, layer.heads, layer.intermediate, layer.target)
    again.load_state_dict(layer.state_dict())
    x, at = torch.randn(2, 5, 96), torch.arange(5)[None]
    assert layer.target == "abc" and torch.equal(layer(x, x, at), again(x, x, at))


@pytest.mark.slow
def test_the_embedded_layer_makes_fewer_errors_than_the_product_of_marginals(pipe):
    asked = tasks(200, 123, held=True)

    def right(**params) -> int:
        spec = {"name": "adjust", "adjust_commits": 2, **params}
        out = pipe([str(t) for t in asked], spec, seed=0, batch_size=100)
        return sum(check(t, m).passed for t, m in zip(asked, out.media, strict=True))

    assert right() > right(proposer="categorical", adjust_layer="")


# --- refusals


def test_a_layer_of_other_weights_is_refused(pipe, tmp_path):
    with pytest.raises(GenError, match="trained for a model with weights 0123"):
        decoded(pipe, 2, written(tmp_path / "layer", 1.0, "0123"))


def test_a_missing_layer_is_refused(pipe, tmp_path):
    with pytest.raises(GenError, match="adjust_layer is ''"):
        decoded(pipe, 2, proposer="adjusted")
    with pytest.raises(GenError, match="unknown layer"):
        decoded(pipe, 2, str(tmp_path / "nothing"))


def test_a_damaged_config_is_refused(pipe, tmp_path):
    folder = tmp_path / "layer"
    written(folder, 1.0)
    (folder / "config.json").write_text('{"model_type": "gen_adjust", "width": 0}')
    with pytest.raises(GenError, match="expected model_type 'gen_adjust'"):
        decoded(pipe, 2, str(folder))


def test_a_cache_and_an_order_of_drawn_tokens_are_refused(pipe, tmp_path):
    layer = written(tmp_path / "layer", 1.0)
    with pytest.raises(GenError, match="no cache"):
        decoded(pipe, 2, layer, cache="dual", blocks="fixed", block_length=8)
    with pytest.raises(GenError, match="order"):
        decoded(pipe, 2, layer, order="streams")


def test_a_model_without_hidden_states_is_refused(tmp_path):
    sampler = sampler_of(2, proposer="adjusted", adjust_layer=written(tmp_path / "layer", 1.0))
    target = masked_target(TabularMasked(IDS + 1), SPACE, SamplingParams(), [0])
    with pytest.raises(GenError, match="gives logits alone"):
        decode_masked(target, CounterRNG([1]), sampler)
