"""The slot cache gives the logits of plain recomputation, whatever rows, drafts and rejections
do."""

import pytest
import torch
from torch import Tensor
from transformers import (
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    Emu3ForCausalLM,
    Emu3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutput

from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.language_models import CausalLM
from gen.models.adapters.slot_cache import SlotCache, SlotLayer
from gen.models.nets.grid import GridLlamaConfig, GridLlamaForCausalLM
from gen.models.targets.causal import CausalTarget

V = 48
SMALL = dict(
    vocab_size=V,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.3,
)  # large, so that what is attended to matters
EXACT, WRONG = 1e-9, 1e-6


class AllIds(ChameleonForConditionalGeneration):
    """Chameleon without its rule that no id of an image may come."""

    def forward(self, **inputs):
        return CausalLMOutput(logits=self.lm_head(self.model(**inputs).last_hidden_state))


def chameleon(**kwargs) -> torch.nn.Module:
    codes = {"IMGIMG" + "".join(chr(65 + int(c)) for c in str(i)) + "Z": 10 + i for i in range(16)}
    image = dict(
        embed_dim=8,
        num_embeddings=16,
        latent_channels=8,
        resolution=16,
        base_channels=32,
        channel_multiplier=[1],
        num_res_blocks=1,
    )
    config = ChameleonConfig(
        **SMALL, vocabulary_map={"<image>": 4, **codes}, vq_config=image, **kwargs
    )
    return AllIds(config)


MODELS = {
    "llama": lambda **k: LlamaForCausalLM(LlamaConfig(**SMALL, **k)),
    "qwen3": lambda **k: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16, **k)),
    "emu3": lambda **k: Emu3ForCausalLM(Emu3TextConfig(**SMALL, **k)),
    "chameleon": chameleon,
    "grid": lambda **k: GridLlamaForCausalLM(
        GridLlamaConfig(
            **SMALL, grid=(4, 5), prefix_length=3, codebook_size=40, tie_word_embeddings=False, **k
        )
    ),
}


class AppendingLayer(SlotLayer):
    """A control: slots are taken in order of arrival, as an ordinary cache does."""

    def write(self, keys, values):
        if not self.is_initialized:
            self._allocate(keys, values)
            self.arrived = 0
        n = keys.shape[1]
        at = (torch.arange(n) + self.arrived).clamp(max=self.owner.slots - 1)
        self.arrived += n
        self.keys[:, at], self.values[:, at] = keys, values
        used = self.owner.used
        return self.keys[:, :used], self.values[:, :used]


class KeepingLayer(SlotLayer):
    """A control: a slot keeps what was written first, so a rejected draft stays."""

    def write(self, keys, values):
        if self.is_initialized:
            positions = self.owner.positions
            rows = torch.arange(len(positions))[:, None]
            old = self.keys[rows, positions]
            written = (old != 0).flatten(2).any(-1)[..., None, None]
            keys, values = (
                torch.where(written, old, keys),
                torch.where(written, self.values[rows, positions], values),
            )
        return super().write(keys, values)


class WithLayer(CausalLM):
    """A causal model whose cache has layers of the given class."""

    layer = SlotLayer

    def new_cache(self, slots: int) -> SlotCache:
        cache = SlotCache(self.config.num_hidden_layers, slots)
        cache.layers = [self.layer(cache) for _ in cache.layers]
        return cache


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(name: str, seed: int = 0, **kwargs) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = MODELS[name](**kwargs).eval().double()
    for p in model.parameters():
        if p.dim() == 1:  # norms: not all ones
            p.data.mul_(1 + 0.3 * torch.randn_like(p))
    return model


@torch.no_grad()
def plain(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """Logits [L, V] of one row, by one call without any cache."""
    return model(input_ids=ids[None], use_cache=False).logits[0]


def worst_error(
    model: torch.nn.Module, layer: type[SlotLayer] = SlotLayer, seed: int = 0, length: int = 20
) -> float:
    """The largest difference from recomputation while rows draft, reject, advance and leave at
    random."""
    g = torch.Generator().manual_seed(seed)

    def rand(n, low=0):
        return int(torch.randint(low, n, (), generator=g))

    causal = WithLayer(model)
    causal.layer = layer
    cache = causal.new_cache(length)
    rows = [
        torch.randint(0, V, (n,), generator=g).tolist() for n in (2, 5, 3, 4)
    ]  # committed tokens; the last is not in yet
    start = [0] * len(rows)  # first position not yet in the cache
    worst, calls, rejected, dropped = 0.0, 0, 0, 0
    while rows:
        drafts = torch.randint(0, V, (len(rows), rand(5)), generator=g).tolist()
        full = [(row + d)[:length] for row, d in zip(rows, drafts, strict=True)]
        width = max(len(f) - s for f, s in zip(full, start, strict=True))
        at = [
            [min(s + i, len(f) - 1) for i in range(width)] for f, s in zip(full, start, strict=True)
        ]
        tokens = torch.tensor([[f[i] for i in a] for f, a in zip(full, at, strict=True)])
        logits = causal.forward(tokens, torch.tensor(at), cache)
        calls += 1
        for f, a, got in zip(full, at, logits, strict=True):
            worst = max(worst, float((got - plain(model, torch.tensor(f))[a]).abs().max()))
        for i, (row, f) in enumerate(zip(rows, full, strict=True)):
            accepted = rand(len(f) - len(row) + 1)
            rejected += len(f) - len(row) - accepted
            start[i] = len(row) + accepted
            rows[i] = f[: start[i]] + [rand(V)]  # a fresh token after the accepted drafts
        staying = torch.tensor([s < length for s in start])
        if not staying.all():
            dropped += int((~staying).sum())
            cache.keep(staying)
            rows = [r for r, k in zip(rows, staying, strict=True) if k]
            start = [s for s, k in zip(start, staying, strict=True) if k]
    assert calls > 5 and rejected > 10 and dropped == 4
    return worst


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.thinned(3)
def test_equals_recomputation(name, seed):
    assert worst_error(build(name, seed), seed=seed) <= EXACT


def test_equals_recomputation_with_plain_attention():
    """Its softmax is in float32 whatever the model's dtype, so sums over more slots round
    differently."""
    model = build("llama", attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    assert worst_error(model) <= 2e-5


@pytest.mark.parametrize("layer", [AppendingLayer, KeepingLayer])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.thinned(3)
def test_other_caches_do_not(name, layer):
    assert worst_error(build(name), layer) > 1e3 * WRONG


def test_beyond_the_cache():
    causal = CausalLM(build("llama"))
    cache = causal.new_cache(4)
    causal.forward(torch.tensor([[5, 6, 7, 8]]), torch.arange(4)[None], cache)
    with pytest.raises(ValueError, match="position 4 is beyond the cache of 4 slots"):
        causal.forward(torch.tensor([[9]]), torch.tensor([[4]]), cache)


PROMPTS = [[3, 9, 4, 7, 1], [8, 1], [5, 6, 1], [1]]
UNCOND = [[2, 1], [2, 2, 2, 1], [2, 1], [2, 2, 1]]


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Padded on the right with an id that occurs nowhere else."""
    n = torch.tensor([len(r) for r in rows])
    return torch.tensor([r + [V - 1] * (int(n.max()) - len(r)) for r in rows]), n


def expected(
    model, sampling: SamplingParams, row: list[int], uncond: list[int], tokens: list[int]
) -> Tensor:
    """The distribution [L, V] of grid positions 0, 1, ... of one row alone; ``tokens`` stand from
    position 0 on."""
    cond = plain(model, torch.tensor(row + tokens))[len(row) - 1 :]
    return sampling(
        cond,
        plain(model, torch.tensor(uncond + tokens))[len(uncond) - 1 :] if sampling.guided else None,
    )


@pytest.mark.parametrize("last", [1, 2], ids=["same last token", "other last token"])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_ragged_prompts(scale, last):
    """Every row of a batch has the distribution that it has alone, also where the halves of
    guidance differ in length."""
    model, sampling = build("llama"), SamplingParams(temperature=0.8, guidance_scale=scale)
    uncond = [[*u[:-1], last] for u in UNCOND]
    (prompt, n), (un, m) = padded(PROMPTS), padded(uncond)
    space = TokenSpace.codes((8,), V, V)
    target = CausalTarget(CausalLM(model), prompt, space, sampling, un, n, m)
    g = torch.Generator().manual_seed(0)
    grid = torch.randint(0, V, (4, 8), generator=g)
    alive, done = list(range(4)), [0, 0, 0, 0]
    for call, width in enumerate((3, 2, 4, 1, 3)):
        wrong = torch.randint(0, V, (4, 8), generator=g)  # rejected drafts
        step = [
            min(s, width) for s in (1, 2, 0, 3)
        ]  # how far each row gets: accepted drafts and then one fresh token
        right = [done[b] + max(step[b] - 1, 0) for b in range(4)]
        drafted = torch.stack(
            [torch.cat([grid[b, : right[b]], wrong[b, right[b] :]]) for b in alive]
        )
        positions = torch.tensor([[min(done[b] + i, 7) for i in range(width)] for b in alive])
        before = torch.cat(
            [torch.zeros(len(drafted), 1).long(), drafted], 1
        )  # the target knows what stands before 0
        logp = target.predict(before.gather(1, positions), positions).logprobs
        for i, b in enumerate(alive):
            want = expected(model, sampling, PROMPTS[b], uncond[b], drafted[i].tolist())[
                positions[i]
            ]
            assert float((logp[i] - want).abs().max()) <= EXACT, (call, b)
        done = [min(d + s, 7) for d, s in zip(done, step, strict=True)]
        if call in (1, 3):  # rows 1 and then 3 leave
            left = alive.copy()
            alive.remove(1 if call == 1 else 3)
            target.keep(torch.tensor([b in alive for b in left]))
            assert target.rows == len(alive)


def test_padding_matters():
    """The control of ragged prompts: without their lengths the padding is taken for words."""
    model, sampling = build("llama"), SamplingParams()
    prompt, _n = padded(PROMPTS)
    logp = (
        CausalTarget(CausalLM(model), prompt, TokenSpace.codes((8,), V, V), sampling)
        .predict(prompt[:, -1:], torch.zeros(4, 1).long())
        .logprobs
    )
    want = torch.stack([expected(model, sampling, row, [], [])[:1] for row in PROMPTS])
    error = (logp - want).abs().flatten(1).amax(1)
    assert error[0] <= EXACT and (error[1:] > 1e3 * WRONG).all()


# --- notes, and layers that calls leave out


def noting(rows: int, slots: int = 6) -> tuple[SlotCache, Tensor]:
    """A cache of two layers whose first call, of positions 0 and 1, wrote the first one and a
    note."""
    cache, values = SlotCache(2, slots), torch.arange(rows * 2 * 3.0).view(rows, 2, 3)
    cache.at(torch.arange(2).expand(rows, -1), torch.float32)
    cache.write(0, values[:, :, None], values[:, :, None])
    assert torch.equal(cache.note("x", values), values)
    return cache, values


def test_notes_follow_their_rows():
    cache, values = noting(3)
    cache.copy_rows(torch.tensor([2]), torch.tensor([0]))
    cache.keep(torch.tensor([0, 1]))
    assert torch.equal(cache.noted("x"), values[[2, 1]])
    other = cache.of_rows(torch.tensor([1, 1, 0]))
    assert torch.equal(other.noted("x")[:, :2], values[[1, 1, 2]])
    cache.select(torch.tensor([1]))
    cache.at(torch.tensor([[1]]), torch.float32)
    cache.note("x", torch.full((1, 1, 3), -1.0))
    cache.select(None)
    cache.at(torch.tensor([[2], [2]]), torch.float32)
    wanted = values[[2, 1]].clone()
    wanted[1, 1] = -1
    assert torch.equal(cache.noted("x")[:, :2], wanted)
    assert not torch.equal(wanted, values[[2, 1]])


def test_a_layer_may_first_run_in_a_call_about_some_rows():
    cache, values = noting(3)
    cache.select(torch.tensor([2]))
    cache.at(torch.tensor([[0, 1]]), torch.float32)
    cache.write(1, values[2:, :, None], values[2:, :, None])
    cache.select(None)
    assert [layer.keys.shape[0] for layer in cache.layers] == [3, 3, 3] and not cache.is_empty
    cache.at(torch.tensor([[2]] * 3), torch.float32)
    keys, _ = cache.write(1, values[:, :1, None], values[:, :1, None])
    assert torch.equal(keys[2, :2, 0], values[2]) and not keys[:2, :2].any()


def test_a_cache_whose_first_layer_is_left_out_is_not_empty():
    cache, values = SlotCache(2, 4), torch.ones(2, 1, 1, 3)
    assert cache.is_empty and cache.num_rows == 0
    cache.at(torch.zeros(2, 1).long(), torch.float32)
    cache.write(1, values, values)
    assert not cache.is_empty and cache.num_rows == 2
    cache.copy_rows(torch.tensor([0]), torch.tensor([1]))
    cache.keep(torch.tensor([1]))
    assert cache.num_rows == 1
