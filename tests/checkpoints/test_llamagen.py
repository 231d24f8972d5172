"""LlamaGen: what the network computes is written out here a second time, over the published keys
and without a cache."""

from __future__ import annotations

import copy
import json
from functools import cache

import pytest
import torch
from calls import only
from safetensors.torch import save_file
from tiny_llamagen import (
    CODES,
    COLUMNS,
    DIM,
    HEADS_OF,
    LAYERS,
    OPTIONS,
    POSITIONS,
    ROWS,
    WIDTH,
    ar_weights,
    saved,
    saved_with_text,
)
from tiny_llamagen_vq import STRIDE, vq_weights
from torch import Tensor

import gen
from gen.contracts.checkpoint import CheckpointFiles, family_of
from gen.core.errors import GenError
from gen.models.load.weights import fill, without_storage
from gen.models.published.llamagen import DROP, HEADS, LlamaGen, LlamaGenLM, sizes_of

EXACT, WRONG = 1e-10, 1e-3
GREEDY = {"temperature": 0.0, "top_k": 0}


def condition_of(w: dict[str, Tensor], number: int | Tensor | None) -> tuple[Tensor, int]:
    """The embedded condition [P, D] and its padding: of a class, of features [n, width], or of
    none."""
    if "cls_embedding.embedding_table.weight" in w:
        return w["cls_embedding.embedding_table.weight"][[-1 if number is None else number]], 0
    features = w["cls_embedding.uncond_embedding"] if number is None else number
    h = features @ w["cls_embedding.cap_proj.fc1.weight"].T
    h = 0.5 * h * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3)))
    padding = POSITIONS - len(features)
    return (
        torch.cat([torch.zeros(padding, DIM).to(h), h @ w["cls_embedding.cap_proj.fc2.weight"].T]),
        padding,
    )


@cache
def turns(total: int, first: int, wrong: str) -> Tensor:
    """What turns a head at every place: [S, d, d]."""
    d = DIM // HEADS_OF
    turn = torch.zeros(
        total, d, d, dtype=torch.float64
    )  # zeros: a place of the condition has neither cosine nor sine
    for position in range(total):
        row, column = divmod(position - first, COLUMNS)
        row, column = (column, row) if wrong == "halves swapped" else (row, column)
        for pair in range(d // 2):
            half, j = divmod(pair, d // 4)
            angle = torch.tensor(
                (column if half else row) * 10000.0 ** (-4 * j / d), dtype=torch.float64
            )
            if position < first:
                if wrong != "condition rotated":
                    continue
                angle = angle * 0
            a, b = (
                (pair, pair + d // 2) if wrong == "halves for pairs" else (2 * pair, 2 * pair + 1)
            )
            turn[position, a, a] = turn[position, b, b] = angle.cos()
            turn[position, a, b], turn[position, b, a] = -angle.sin(), angle.sin()
    return turn


def plain(
    w: dict[str, Tensor], condition: Tensor, padding: int, codes: list[int], wrong: str = ""
) -> Tensor:
    """Logits [1 + n, V] of the places from the first code on, given n codes. Broken on purpose by
    ``wrong``."""
    w = {k: v.double() for k, v in w.items()}
    x = torch.cat(
        [condition.double(), w["tok_embeddings.weight"][torch.tensor(codes, dtype=torch.long)]]
    )
    total, first, d = len(x), len(condition), DIM // HEADS_OF

    def norm(x, key):
        return x / ((x * x).mean(-1, keepdim=True) + 1e-5).sqrt() * w[key]

    turn = turns(total, first, wrong)
    seen = torch.ones(total, total).tril().bool()
    if wrong != "padding seen":
        seen[:, :padding] = False
    seen = seen | torch.eye(total).bool()
    for n in range(LAYERS):
        key = f"layers.{n}."
        qkv = (norm(x, key + "attention_norm.weight") @ w[key + "attention.wqkv.weight"].T).view(
            total, -1, d
        )
        kv = (qkv.shape[1] - HEADS_OF) // 2
        q, k, v = qkv.split([HEADS_OF, kv, kv], 1)
        q, k = (torch.einsum("sij,shj->hsi", turn, t) for t in (q, k))
        heads = []
        for h in range(HEADS_OF):
            own = h * kv // HEADS_OF  # neighbouring heads share keys and values
            scores = (q[h] @ k[own].T / d**0.5).masked_fill(~seen, float("-inf"))
            heads.append(scores.softmax(-1) @ v[:, own])
        x = x + torch.cat(heads, -1) @ w[key + "attention.wo.weight"].T
        y = norm(x, key + "ffn_norm.weight")
        gate = y @ w[key + "feed_forward.w1.weight"].T
        x = (
            x
            + (gate * gate.sigmoid() * (y @ w[key + "feed_forward.w3.weight"].T))
            @ w[key + "feed_forward.w2.weight"].T
        )
    return (norm(x, "norm.weight") @ w["output.weight"].T)[first - 1 :]


def greedy(w, number, scale: float = 1.0, wrong: str = "") -> list[int]:
    """Codes one after the other, each the likeliest by a whole forward; the unconditional half
    hides what the condition hides."""
    condition, padding = condition_of(w, number)
    nothing, _ = condition_of(w, None)
    codes: list[int] = []
    for _ in range(ROWS * COLUMNS):
        logits = plain(w, condition, padding, codes, wrong)[-1]
        if scale != 1.0:
            without = plain(
                w, nothing, 0 if wrong == "all of nothing seen" else padding, codes, wrong
            )[-1]
            logits = without + scale * (logits - without)
        codes.append(int(logits.argmax()))
    return codes


@cache
def greedy_class(number: int, scale: float, wrong: str = "") -> list[int]:
    return greedy(ar_weights(), number, scale, wrong)


def adapter(w, dtype=torch.float64) -> LlamaGenLM:
    sizes = sizes_of({k: tuple(v.shape) for k, v in w.items()}, HEADS_OF)
    model = fill(without_storage(lambda: LlamaGen(sizes, COLUMNS)), w, drop=DROP, dtype=dtype)
    return LlamaGenLM(model)


def logits_in_parts(lm: LlamaGenLM, prompts: list[list[int]], codes: Tensor, cuts=(1, 4)) -> Tensor:
    """[B, 1 + n, V] against a cache: the prompt with some codes, then the others in parts, some of
    them sent wrong first."""
    tokens = torch.cat([torch.tensor(prompts), codes], 1)
    first, (rows, total) = len(prompts[0]), tokens.shape
    cache, out, begin = lm.new_cache(total), [], 0
    for end in (*(first + c for c in cuts), total):
        at = torch.arange(begin, end).expand(rows, -1)
        if begin:
            lm.forward((tokens[:, begin:end] + 1) % CODES, at, cache)  # drafts that were rejected
        out.append(lm.forward(tokens[:, begin:end], at, cache))
        begin = end
    return torch.cat(out, 1)[:, first - 1 :]


KINDS = {"classes": dict(), "captions": dict(text=True), "grouped": dict(kv=2)}
CAPTIONS = [
    torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    for n in (3, POSITIONS, 1)
]
SAMPLE = torch.randint(CODES, (3, ROWS * COLUMNS), generator=torch.Generator().manual_seed(0))


def both(kind: str, dtype=torch.float64, wrong: str = "") -> tuple[Tensor, Tensor]:
    """Logits of three rows through the adapter, and plainly."""
    w, text = ar_weights(**KINDS[kind]), kind == "captions"
    lm = adapter(w, dtype).conditioned([{"features": features} for features in CAPTIONS])
    numbers = list(range(3)) if text else [3, 0, 9]
    prompts = [
        [lm.condition_token(n)] * lm.sizes.prompt if text else lm.class_prompt(n) for n in numbers
    ]
    ours = logits_in_parts(lm, prompts, SAMPLE)
    conditions = [condition_of(w, CAPTIONS[n] if text else n) for n in numbers]
    return ours, torch.stack(
        [plain(w, *c, s.tolist(), wrong) for c, s in zip(conditions, SAMPLE, strict=True)]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_a_plain_forward(kind):
    ours, want = both(kind)
    assert (ours - want).abs().max() < EXACT
    assert (ours - want.roll(1, 0)).abs().max() > WRONG  # control: another row's


@pytest.mark.parametrize("kind", KINDS)
def test_logits_in_single_precision_are_close(kind):
    ours, want = both(kind, torch.float32)
    assert ours.dtype == torch.float32 and (ours - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("classes", "condition rotated"),
        ("classes", "halves swapped"),
        ("classes", "halves for pairs"),
        ("captions", "padding seen"),
    ],
)
def test_a_broken_forward_is_another_one(kind, wrong):
    ours, want = both(kind, wrong=wrong)
    assert (ours - want).abs().max() > WRONG


def test_sizes_of_the_published_models_follow_from_their_shapes():
    for (dim, heads), layers, caption in zip(
        HEADS.items(), (12, 24, 36, 48, 22, 48, 24, 32), (0, 0, 2048, 0, 0, 0, 0, 0), strict=True
    ):
        hidden = -(-int(8 * dim / 3) // 256) * 256
        shapes = {
            "tok_embeddings.weight": (16384, dim),
            f"layers.{layers - 1}.attention.wqkv.weight": (3 * dim, dim),
            "layers.0.feed_forward.w1.weight": (hidden, dim),
        }
        shapes |= (
            {"cls_embedding.uncond_embedding": (120, caption)}
            if caption
            else {"cls_embedding.embedding_table.weight": (1001, dim)}
        )
        s = sizes_of(shapes)
        assert (s.vocab_size, s.dim, s.layers, s.heads, s.kv_heads, s.hidden) == (
            16384,
            dim,
            layers,
            heads,
            heads,
            hidden,
        )
        assert (s.prompt, s.classes, s.caption) == ((120, 0, caption) if caption else (1, 1000, 0))


# --- folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("c2i"), ar_weights())


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    return saved_with_text(tmp_path_factory.mktemp("t2i"))


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("sampler", ["autoregressive", "speculative_jacobi"])
@pytest.mark.thinned(2)
def test_greedy_images_are_those_of_a_plain_loop_alone_and_in_a_batch(folder, sampler, scale):
    pipe = gen.load("image", model=folder, **OPTIONS)
    prompts = {"3": 3, "class 7": 7, "0": 0, "Class 9": 9}
    out = pipe(list(prompts), sampler=sampler, **only(**GREEDY, guidance_scale=scale))
    want = [greedy_class(n, scale) for n in prompts.values()]
    assert out.tokens.tolist() == want and len({tuple(t) for t in want}) == 4
    assert (
        pipe(["class 7"], sampler=sampler, **only(**GREEDY, guidance_scale=scale)).tokens.tolist()
        == want[1:2]
    )
    assert [m.size for m in out.media] == [(COLUMNS * STRIDE, ROWS * STRIDE)] * 4
    assert greedy_class(7, scale, "condition rotated") != want[1]  # control


def features_as_published(path, caption: str) -> Tensor:
    """T5 over a caption padded to all places, with its mask; what is no padding."""
    from transformers import AutoTokenizer, T5EncoderModel

    tokenizer, encoder = (
        AutoTokenizer.from_pretrained(path),
        T5EncoderModel.from_pretrained(path, dtype=torch.float64).eval(),
    )
    given = tokenizer(
        caption, max_length=POSITIONS, padding="max_length", truncation=True, return_tensors="pt"
    )
    with torch.no_grad():
        states = encoder(
            input_ids=given["input_ids"], attention_mask=given["attention_mask"]
        ).last_hidden_state[0]
    return states[: int(given["attention_mask"].sum())]


def test_greedy_images_of_captions_are_those_of_a_plain_loop(text_folder):
    pipe, w = gen.load("image", model=text_folder, **OPTIONS), ar_weights(text=True)
    prompts = ["W1 [w2]  w3", "w40", "w9 w8 w7 w6 w5 w4 w3 w2 w1"]
    features = [
        features_as_published(text_folder / "flan-t5-xl", p)
        for p in ("w1 w2 w3", "w40", prompts[2])
    ]
    assert [len(f) for f in features] == [4, 2, POSITIONS]
    for scale, sampler in (
        (1.0, "autoregressive"),
        (3.0, "autoregressive"),
        (3.0, "speculative_jacobi"),
    ):
        sampling = {**GREEDY, "guidance_scale": scale}
        want = [greedy(w, f, scale) for f in features]
        assert pipe(prompts, sampler=sampler, **only(**sampling)).tokens.tolist() == want
        assert pipe(prompts[1:2], sampler=sampler, **only(**sampling)).tokens.tolist() == want[1:2]
    assert [greedy(w, f, 3.0, "all of nothing seen") for f in features] != want  # control
    assert [greedy(w, f, 3.0, "padding seen") for f in features] != want  # control


def test_guided_distributions_of_captions_equal_the_plain_ones(text_folder):
    """Rows leave the batch, and what they hide leaves with them."""
    pipe, w = gen.load("image", model=text_folder, **OPTIONS), ar_weights(text=True)
    prompts = ["w1 w2 w3", "w40", "w9 w8 w7 w6 w5 w4 w3 w2 w1"]
    sampler, sampling = pipe.resolve("autoregressive", {"guidance_scale": 3.0})
    target = pipe.target(sampler, sampling, pipe.plan(prompts))
    at = torch.zeros(3, 1, dtype=torch.long)
    target.predict(at, at)
    target.keep(torch.tensor([False, True, True]))
    ours = target.predict(torch.tensor([[5], [6]]), at[:2] + 1).logprobs
    for row, (prompt, code) in enumerate(((prompts[1], 5), (prompts[2], 6))):
        condition, padding = condition_of(
            w, features_as_published(text_folder / "flan-t5-xl", prompt)
        )

        def sampling_of(hidden):
            return torch.lerp(
                plain(w, condition_of(w, None)[0], hidden, [code])[-1],
                plain(w, condition, padding, [code])[-1],
                3.0,
            ).log_softmax(-1)

        assert (ours[row, 0] - sampling_of(padding)).abs().max() < EXACT
    condition, padding = condition_of(
        w, features_as_published(text_folder / "flan-t5-xl", prompts[1])
    )
    other = torch.lerp(
        plain(w, condition_of(w, None)[0], 0, [5])[-1], plain(w, condition, padding, [5])[-1], 3.0
    ).log_softmax(-1)
    assert (ours[0, 0] - other).abs().max() > WRONG  # control: all of nothing seen


@pytest.mark.parametrize(
    "sampler", ["autoregressive", "speculative_jacobi", "sjd", "scd_mc", "lantern", "gsd"]
)
@pytest.mark.thinned(3)
def test_samplers_make_images_of_the_size_asked_for(folder, sampler):
    pipe = gen.load("image", model=folder, **OPTIONS)
    out = pipe(["1", "2"], sampler=sampler, seed=3)
    assert [m.size for m in out.media] == [
        (COLUMNS * STRIDE, ROWS * STRIDE)
    ] * 2 and out.tokens.shape == (2, ROWS * COLUMNS)
    assert (out.sampling.guidance_scale, out.sampling.top_k) == (4.0, 2000)
    same = torch.equal(out.tokens, pipe(["1", "2"], sampler="autoregressive", seed=3).tokens)
    assert same or out.guarantee != "same_tokens"


@pytest.mark.parametrize("wrapper", ["model", "module", "state_dict", None, "safetensors", "hub"])
def test_every_wrapper_is_read(folder, tmp_path, wrapper):
    w, options = ar_weights(), dict(OPTIONS)
    if (
        wrapper == "hub"
    ):  # as huggingface_hub's mixin saves it; its config knows the heads and the grid
        save_file(w, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": "c2i", "n_head": HEADS_OF, "block_size": 16, "dim": DIM})
        )
        options = {"dtype": "float64"}
    elif wrapper == "safetensors":
        save_file(w, tmp_path / "any.safetensors")
    else:
        saved(
            tmp_path,
            w | {"freqs_cis": torch.zeros(1 + 16, DIM // HEADS_OF // 2, 2)},
            wrapper=wrapper,
        )
        options = {"dtype": "float64"}  # the table knows the heads and the grid
    if wrapper in ("hub", "safetensors"):
        options["vq"] = str(folder / "vq_ds16_c2i.pt")
    pipe = gen.load("image", model=tmp_path, **options)
    lm, space = pipe.modality.checkpoint.adapter("causal"), pipe.modality.checkpoint.binding.space
    assert (
        space.grid == ((ROWS, COLUMNS) if wrapper == "safetensors" else (4, 4))
        and lm.sizes.heads == HEADS_OF
    )
    assert torch.equal(space.codebook, pipe.modality.checkpoint.frontend.codebooks[0])
    ours = logits_in_parts(lm, [[CODES + 3]], SAMPLE[:1])
    assert (ours[0] - plain(w, *condition_of(w, 3), SAMPLE[0].tolist())).abs().max() < EXACT


def test_names_say_the_size_and_paths_of_files_are_models_too(tmp_path):
    saved(saved(tmp_path, ar_weights(), "c2i_B_256.pt"), ar_weights(seed=6), "c2i_L_384.pt")
    torch.save(ar_weights(), tmp_path / "0005000.pt")

    def grid(name, **more):
        return gen.load(
            "image", model=name, heads=HEADS_OF, **more
        ).modality.checkpoint.binding.space.grid

    assert grid(tmp_path / "c2i_B_256.pt") == (64, 64) and grid(tmp_path, ar="c2i_L_384.pt") == (
        96,
        96,
    )
    assert grid(tmp_path / "0005000.pt", height=20) == (5, 5) and grid(
        tmp_path / "0005000.pt", width=8, height=12
    ) == (3, 2)
    for words, name, more in (
        ("c2i_B_256.pt, c2i_L_384.pt; expected .* option ar", "", {}),
        ("ar is 'c2i_M.pt'", "", {"ar": "c2i_M.pt"}),
        ("no config states the size", "0005000.pt", {}),
        ("multiple of 4", "0005000.pt", {"height": 18}),
        ("one file", "0005000.pt", {"ar": "x.pt"}),
        ("not known; expected the option heads", "c2i_B_256.pt", {"heads": None}),
        ("heads is 5", "c2i_B_256.pt", {"heads": 5}),
        ("vq is 'no.pt'", "c2i_B_256.pt", {"vq": "no.pt"}),
    ):
        with pytest.raises(GenError, match=words):
            gen.load("image", model=tmp_path / name, **{"heads": HEADS_OF, **more})


def test_broken_files_are_one_clear_error(tmp_path):
    good = ar_weights()
    wrong = "layers.1.attention.wo.weight"
    for w, words in (
        ({k: v for k, v in good.items() if k != wrong}, f"1 missing: {wrong}"),
        (
            good | {"layers.0.attention.wq.weight": torch.zeros(2)},
            "1 extra: layers.0.attention.wq.weight",
        ),
        (
            good | {wrong: torch.zeros(3, 3)},
            rf"1 mis-shaped: {wrong} is \(3, 3\), expected \(48, 48\)",
        ),
        (
            {k: v for k, v in good.items() if "cls_" not in k},
            "not LlamaGen's: no matrix cls_embedding",
        ),
        (ar_weights(codes=CODES - 4), "a vocabulary of 20 ids and its VQ 24 codes"),
    ):
        with pytest.raises(GenError, match=words):
            gen.load("image", model=saved(tmp_path, w), **OPTIONS)
    saved(tmp_path, good)
    whole = (tmp_path / "c2i_B.pt").read_bytes()
    (tmp_path / "c2i_B.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(GenError, match="c2i_B.pt cannot be read"):
        gen.load("image", model=tmp_path, **OPTIONS)
    (tmp_path / "c2i_B.pt").write_bytes(whole)
    torch.save({}, tmp_path / "vq_ds8_c2i.pt")
    with pytest.raises(GenError, match="vq_ds16_c2i.pt and vq_ds8_c2i.pt .* option vq"):
        gen.load("image", model=tmp_path, **OPTIONS)
    for name in ("vq_ds8_c2i.pt", "vq_ds16_c2i.pt"):
        (tmp_path / name).unlink()
    torch.save({}, tmp_path / "vq_ds16_t2i.pt")  # of the other kind
    with pytest.raises(GenError, match="no vq_ds16_c2i.pt beside it"):
        gen.load("image", model=tmp_path, **OPTIONS)


def test_prompts_that_are_none(folder, text_folder, tmp_path):
    classes = gen.load("image", model=folder, **OPTIONS)
    assert classes.modality.condition(" CLASS 4 ") == 4
    for prompt in ("10", "-1", "cat", "", "1.5"):
        with pytest.raises(GenError, match="number of a class"):
            classes([prompt])
    with pytest.raises(GenError, match="the prompt is empty"):
        gen.load("image", model=text_folder, **OPTIONS)([" "])
    for words, t5 in (
        ("exists neither in .* expected a folder", "nowhere"),
        ("cannot be read", str(tmp_path)),
    ):
        with pytest.raises(GenError, match=words):
            gen.load("image", model=text_folder, t5=t5, **OPTIONS)
    with pytest.raises(GenError, match="expected the option t5"):
        gen.load("image", model=saved(tmp_path, ar_weights(text=True), "t2i_B.pt"), **OPTIONS)


def test_only_its_own_files_are_recognised(folder, tmp_path):
    def name(path):
        return family_of(CheckpointFiles.find(path), "image").__name__

    assert name(folder) == name(folder / "c2i_B.pt") == "LlamaGenImages"
    torch.save(copy.deepcopy(vq_weights()), tmp_path / "other.pt")
    for path in (tmp_path / "other.pt", tmp_path):
        with pytest.raises(GenError):
            name(path)
