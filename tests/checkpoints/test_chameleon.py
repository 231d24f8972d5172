"""Folders of Chameleon, Anole and Lumina-mGPT, as they are published, through the pipeline: against
transformers' own model and ``generate``."""

from __future__ import annotations

import json
import shutil
from functools import partial

import pytest
import torch
from calls import only
from chameleon_files import (
    CHANNELS,
    CODES,
    diffusers_vq,
    name_of,
    vocabulary,
    vqgan_keys,
    write_chameleon,
    write_tokenizer,
    write_vqgan,
)
from image_text_folders import noise
from published import save_quietly
from safetensors.torch import load_file, save_file

import gen
from gen.contracts.checkpoint import CheckpointFiles, LoadOptions, load_checkpoint
from gen.contracts.condition import Condition
from gen.core.errors import GenError
from gen.modalities.checkpoints.chameleon import FIRST, VARIANTS, code_ids, variant_of
from gen.models.adapters.conditioning import Vocabulary
from gen.models.load.transformers_compat import CACHE_NAME
from gen.models.published.chameleon import PerHead

IDS = vocabulary()
PROMPTS = ["a red dog", "blue cat according to the red dog", "cat", "a blue image of a dog"]
SIDES = dict(height=64, width=32)
GRID = (4, 2)  # of codes
KINDS = ("chameleon", "lumina")


@pytest.fixture(scope="module")
def vq():
    return vqgan_keys(diffusers_vq(False, channels=CHANNELS))


@pytest.fixture(scope="module")
def folders(vq, tmp_path_factory):
    root = tmp_path_factory.mktemp("chameleon")
    return {kind: write_chameleon(root / kind, vq, lumina=kind == "lumina") for kind in KINDS}


@pytest.fixture(scope="module")
def pipes(folders):
    return {
        kind: gen.load("image", model=folders[kind], dtype="float64", **SIDES) for kind in KINDS
    }


@pytest.fixture(scope="module")
def references(folders):
    return {kind: reference(folders[kind]) for kind in KINDS}


def reference(folder):
    """transformers' class, with a forward that masks nothing."""
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration
    from transformers.modeling_outputs import CausalLMOutputWithPast

    class Unmasked(ChameleonForConditionalGeneration):
        def forward(self, *args, logits_to_keep=0, **kwargs):
            out = self.model(*args, **kwargs)
            return CausalLMOutputWithPast(
                logits=self.lm_head(out.last_hidden_state[:, -logits_to_keep:]),
                **{CACHE_NAME: out[CACHE_NAME]},
            )

    model = Unmasked(ChameleonConfig.from_pretrained(folder)).double().eval()
    own = model.state_dict()
    found = {k: v.expand_as(own[k]) for k, v in load_file(folder / "model.safetensors").items()}
    assert not [
        k for k in model.load_state_dict(found, strict=False).missing_keys if "vqmodel" not in k
    ]
    return model


def words_of(kind: str, prompt: str) -> list[int]:
    """The model's ids before the first code, spelled out."""
    if kind == "chameleon":
        return [IDS[w] for w in ("<s>", *prompt.split(), "<reserved08706>", "<racm3:break>")]
    said = f"Generate an image of 32x64 according to the following prompt:\n{prompt}"
    return [
        IDS[w]
        for w in (
            "<s>",
            *said.split(),
            "<reserved08706>",
            "<racm3:break>",
            "<reserved08802>",
            "<reserved08801>",
        )
    ]


def legal_at(kind: str, position: int) -> list[int]:
    if kind == "lumina" and (position + 1) % (GRID[1] + 1) == 0:
        return [IDS["<reserved08799>"]]
    return [IDS[name_of(code)] for code in range(CODES)]


def length_of(kind: str) -> int:
    return GRID[0] * (GRID[1] + (kind == "lumina"))


def to_model(pipe, tokens: torch.Tensor) -> torch.Tensor:
    return pipe.bound(pipe.model)[0].vocabulary.to_model(tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_as_published(kind, pipes):
    checkpoint, binding, _ = pipes[kind].bound(pipes[kind].model)

    def back(ids):
        return [i - checkpoint.vocabulary.size for i in ids]

    for prompt in PROMPTS:
        assert back(binding.prompt(prompt)) == words_of(kind, prompt)
    whole = words_of(kind, PROMPTS[0])
    assert back(binding.unconditional) == (
        whole[-3:] if kind == "lumina" else [whole[0], whole[-1]]
    )
    assert checkpoint.sampling == dict(VARIANTS[kind].sampling)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_are_those_of_the_model_and_its_head(kind, pipes, references):
    checkpoint, binding, _ = pipes[kind].bound(pipes[kind].model)
    adapter, model = checkpoint.adapter("causal"), references[kind]
    some = [legal_at(kind, n)[n % len(legal_at(kind, n))] for n in range(length_of(kind))]
    drawn = checkpoint.vocabulary.of_model(torch.tensor(some))
    tokens = torch.cat([torch.tensor(binding.prompt(PROMPTS[1])), drawn])[None]
    got = adapter.forward(
        tokens, torch.arange(tokens.shape[1])[None], adapter.new_cache(tokens.shape[1])
    )
    ids = checkpoint.vocabulary.to_model(tokens)
    whole = model.lm_head(model.model(input_ids=ids, use_cache=False).last_hidden_state)
    assert torch.allclose(got, whole[..., checkpoint.vocabulary.ids], atol=1e-9)
    masked = (
        type(model).__mro__[1].forward(model, input_ids=ids, use_cache=False).logits
    )  # control: as transformers has it, no code may come
    assert bool(
        (masked[..., checkpoint.vocabulary.ids[:CODES]] == torch.finfo(torch.float64).min).all()
    )


@pytest.mark.parametrize("sampler", ["autoregressive", "speculative_jacobi"])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(3)
def test_greedy_tokens_are_those_of_generate(kind, count, sampler, pipes, references):
    rows = [words_of(kind, p) for p in PROMPTS[:count]]
    width = max(map(len, rows))
    padded = torch.tensor([[IDS["<pad>"]] * (width - len(r)) + r for r in rows])
    seen = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])

    def allowed(row, ids):
        return legal_at(kind, len(ids) - width)

    want = references[kind].generate(
        input_ids=padded,
        attention_mask=seen,
        do_sample=False,
        max_new_tokens=length_of(kind),
        pad_token_id=IDS["<pad>"],
        prefix_allowed_tokens_fn=allowed,
    )[:, width:]
    out = pipes[kind](PROMPTS[:count], sampler=sampler, **only(temperature=0))
    assert torch.equal(to_model(pipes[kind], out.tokens), want)
    other = pipes[kind](list(reversed(PROMPTS))[:count], sampler=sampler, **only(temperature=0))
    assert not torch.equal(other.tokens, out.tokens)  # control: prompts matter


@torch.no_grad()
def guided(kind: str, model, uncond: list[int], scale: float) -> list[int]:
    """Greedy tokens, by two plain forwards for each."""
    said, tokens = words_of(kind, PROMPTS[0]), []

    def last(ids):
        return model.lm_head(
            model.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state
        )[0, -1]

    for position in range(length_of(kind)):
        c, u = last(said + tokens), last(uncond + tokens)
        legal = torch.tensor(legal_at(kind, position))
        tokens.append(int(legal[(u + scale * (c - u))[legal].argmax()]))
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_guidance_compares_with_the_published_unconditional_prompt(kind, pipes, references):
    whole = words_of(kind, PROMPTS[0])
    uncond = whole[-3:] if kind == "lumina" else [whole[0], whole[-1]]
    out = pipes[kind](
        PROMPTS[:1],
        sampler="speculative_jacobi",
        **only(temperature=0, guidance_scale=3.0),
    )
    got = to_model(pipes[kind], out.tokens)[0].tolist()
    assert got == guided(kind, references[kind], uncond, 3.0)
    assert got != guided(
        kind, references[kind], whole[:1] + uncond, 3.0
    )  # control: another unconditional prompt


@pytest.mark.parametrize("sampler", ["autoregressive", "speculative_jacobi", "scd_mc"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(3)
def test_samplers_make_images_of_the_size_that_was_asked_for(kind, sampler, pipes):
    pipe = pipes[kind]
    out = pipe(PROMPTS[:2], sampler=sampler, num_samples=2, seed=3)
    assert [m.size for m in out.media] == [
        (32, 64)
    ] * 4 and out.sampling.guidance_scale == VARIANTS[kind].sampling["guidance_scale"]
    checkpoint, binding, frontend = pipe.bound(pipe.model)
    codes = checkpoint.to_codes(out.tokens, binding.space)
    assert codes.shape == (4, 1, *GRID) and int(codes.max()) < CODES
    assert (
        out.tokens.shape == (4, length_of(kind))
        and len({tuple(t.tolist()) for t in out.tokens}) > 1
    )
    assert frontend.postprocess(frontend.decode(codes[2:3])[0]).tobytes() == out.media[2].tobytes()


def test_shards_a_device_map_and_another_type_give_the_same_model(vq, folders, pipes, tmp_path):
    sharded = write_chameleon(tmp_path / "sharded", vq, shard="40KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 1
    run = partial(gen.load, "image", model=sharded, **SIDES)
    want = pipes["chameleon"](PROMPTS[:2], sampler="autoregressive").tokens
    assert torch.equal(
        run(dtype="float64", device_map={"": "cpu"})(PROMPTS[:2], sampler="autoregressive").tokens,
        want,
    )
    half = run(dtype="bfloat16")
    checkpoint = half.bound(half.model)[0]
    assert (checkpoint.lm.dtype, checkpoint.frontend.model.dtype) == (torch.bfloat16, torch.float32)
    assert half(PROMPTS[:1], sampler="speculative_jacobi").media[0].size == (32, 64)


def test_the_autoencoder_may_lie_elsewhere(vq, folders, pipes, tmp_path):
    bare = shutil.copytree(folders["lumina"], tmp_path / "bare")
    shutil.move(bare / "tokenizer" / "vqgan.ckpt", tmp_path / "elsewhere.ckpt")
    want = pipes["lumina"](PROMPTS[:1], seed=5)

    def load(**options):
        return (
            gen.load("image", model=bare, dtype="float64", **SIDES, **options)(PROMPTS[:1], seed=5)
            .media[0]
            .tobytes()
        )

    assert load(vq=str(tmp_path / "elsewhere.ckpt")) == want.media[0].tobytes()
    diffusers_vq(False, channels=CHANNELS).save_pretrained(tmp_path / "diffusers")
    assert load(vq=tmp_path / "diffusers") == want.media[0].tobytes()
    weights = load_file(bare / "model.safetensors")  # as a conversion that kept the decoder has it
    save_file(
        weights | {f"model.vqmodel.{k}": v.contiguous() for k, v in vq.items()},
        bare / "model.safetensors",
        {"format": "pt"},
    )
    assert load() == want.media[0].tobytes()


def test_the_second_lumina_has_other_ids_and_another_autoencoder(tmp_path):
    movq = diffusers_vq(True, channels=(32,) * 4)
    ids = vocabulary()
    folder = write_chameleon(tmp_path / "two", ids=ids, lumina=True)
    torch.save(vqgan_keys(movq), folder / "movqgan_270M.ckpt")
    said = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(said | {"bos_token": None, "eos_token": "</s>"})
    )
    pipe = gen.load("image", model=folder, release="lumina2", height=32, width=64, dtype="float64")
    checkpoint, binding, frontend = pipe.bound(pipe.model)
    out = pipe(PROMPTS[:2], sampler="speculative_jacobi")
    assert (
        out.tokens.shape == (2, 4 * (8 + 1))
        and [m.size for m in out.media] == [(64, 32)] * 2
        and out.sampling.top_k == 4096
    )
    prompt = [i - checkpoint.vocabulary.size for i in binding.prompt("a dog")]
    assert prompt[0] == ids["</s>"] and prompt[-2:] == [
        ids["<reserved08801>"],
        ids["<reserved08802>"],
    ]
    codes = checkpoint.to_codes(out.tokens, binding.space)
    vectors = movq.quantize.embedding.weight[codes[:, 0]].permute(0, 3, 1, 2)
    assert torch.allclose(
        frontend.decode(codes), movq.decode(vectors, force_not_quantize=True).sample, atol=1e-9
    )


def test_every_published_code_has_its_id():
    named = {name_of(code): 4 + code for code in range(8192)} | {
        "<racm3:break>": 8197,
        "<eoss>": 8196,
        "<reserved08799>": 8803,
    }
    second = {name_of(code): FIRST + code for code in range(16384)}
    for ids, size in (
        (code_ids(named, {}, 8192, "lumina", "x"), 65536),
        (code_ids({}, named, 8192, "chameleon", "x"), 65536),
        (code_ids({}, {}, 16384, "lumina2", "x"), 171440),
        (code_ids(named, {}, 16384, "lumina2", "x"), 171440),
        (code_ids(second, {}, 16384, "lumina2", "x"), 171440),
    ):
        table, codes = Vocabulary(ids, size), torch.arange(len(ids))
        assert torch.equal(table.of_model(table.to_model(codes)), codes)
        assert table.to_model(codes).tolist() == list(range(ids[0], ids[0] + len(ids))) and ids[
            0
        ] == (4 if len(ids) == 8192 else 155000)
        assert bool((table.of_model(torch.tensor([3, ids[-1] + 1])) == -1).all())
    shuffled = dict(
        zip(named, [*torch.randperm(8192).add(4).tolist(), 8197, 8196, 8803], strict=True)
    )
    assert code_ids(shuffled, {}, 8192, "chameleon", "x") == [
        shuffled[name_of(code)] for code in range(8192)
    ]  # names, and no offset


def test_transformers_reads_the_names_of_codes_as_here():
    from transformers.models.chameleon.modeling_chameleon import ChameleonImageVocabularyMapping

    theirs = ChameleonImageVocabularyMapping(IDS).img2bpe
    assert code_ids(IDS, {}, CODES, "chameleon", "x") == [theirs[code] for code in range(CODES)]


def test_variants_are_told_by_their_configs():
    plain = {"architectures": ["ChameleonForConditionalGeneration"], "vocab_size": 65536}
    trained = plain | {"architectures": ["ChameleonXLLMXForConditionalGeneration"]}
    assert variant_of(plain) == variant_of({}) == "chameleon"
    assert (
        variant_of(trained)
        == variant_of(plain | {"z_loss_weight": 1e-5})
        == variant_of(plain | {"mask_image_logits": False})
        == "lumina"
    )
    assert variant_of(trained | {"vocab_size": 171440}) == "lumina2"


def test_norms_of_shards_stand_for_neighbouring_heads(tmp_path):
    rows = torch.arange(6.0).view(2, 3)
    weights = {f"model.layers.0.self_attn.{n}_norm.weight": rows.clone() for n in "qk"} | {
        "lm_head.weight": torch.ones(2, 3)
    }
    save_file(weights, tmp_path / "model.safetensors")
    from gen.models.load.weights import Weights

    got = PerHead(Weights(tmp_path), {"q": 4, "k": 2})
    assert torch.equal(got["model.layers.0.self_attn.q_norm.weight"], rows[[0, 0, 1, 1]])
    assert torch.equal(got["model.layers.0.self_attn.k_norm.weight"], rows) and torch.equal(
        got["lm_head.weight"], weights["lm_head.weight"]
    )
    assert got.shapes["model.layers.0.self_attn.q_norm.weight"] == (4, 3)


def refused(folder, message: str, **options) -> None:
    with pytest.raises(GenError, match=message):
        load_checkpoint(
            CheckpointFiles.find(folder),
            "image",
            LoadOptions(torch.device("cpu"), torch.float32),
            {**SIDES, **options},
        )


def test_what_is_missing_or_does_not_fit_is_one_clear_error(vq, folders, tmp_path):
    folder = shutil.copytree(folders["chameleon"], tmp_path / "broken")
    refused(folder, "release 'luminas'.* Did you mean 'lumina'", release="luminas")
    refused(folder, "height is 60; expected a multiple of 16", height=60)
    refused(folder, "height is 48; expected a multiple of 32", height=48, release="lumina")
    refused(folder, "has no <reserved08864>", height=2048, release="lumina")
    refused(folder, "vq is 'nowhere'.* expected the file", vq="nowhere")
    write_tokenizer(folder, {k: v for k, v in IDS.items() if k != "<racm3:break>"})
    refused(folder, "tokenizer of .* has no <racm3:break>")
    (folder / "tokenizer.json").unlink()
    refused(folder, "has no tokenizer.json")
    write_tokenizer(folder, IDS)
    larger = vqgan_keys(diffusers_vq(False, channels=CHANNELS, codes=CODES + 6))
    larger = write_vqgan(tmp_path / "larger.ckpt", larger)
    refused(folder, "codebook of .*larger.ckpt is not the model's own", vq=larger)
    refused(folders["lumina"], "names 64 codes and lacks code 64; .* all 70 codes", vq=larger)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {k: v for k, v in weights.items() if k != "model.norm.weight"},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    refused(folder, "1 missing: model.norm.weight")
    save_file(
        weights | {"action_head.weight": torch.ones(2)},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    refused(folder, "1 extra: action_head.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    load_checkpoint(
        CheckpointFiles.find(folder),
        "image",
        LoadOptions(torch.device("cpu"), torch.float32),
        SIDES,
    )  # control: nothing else was wrong
    (folder / "vqgan.ckpt").unlink()
    refused(folder, "no image decoder .* expected vqgan.ckpt")
    meta = tmp_path / "meta"
    for file in ("models/7b/consolidated.pth", "tokenizer/vqgan.ckpt"):
        (meta / file).parent.mkdir(parents=True)
        (meta / file).touch()
    refused(meta, "the layout of Meta's own code")


def test_prompts_that_hold_parts_of_images_or_are_too_long_are_refused(pipes):
    _, binding, _ = pipes["chameleon"].bound(pipes["chameleon"].model)
    for text, message in (
        ("a <racm3:break> dog", "a token of images"),
        (name_of(3), "a token of images"),
        ("dog " * 600, "expected at most 512"),
    ):
        with pytest.raises(GenError, match=message):
            binding.prompt(text)
    with pytest.raises(GenError, match="empty"):
        pipes["chameleon"](" ")


# --- images in prompts


@pytest.fixture(scope="module")
def seeing(vq, tmp_path_factory):
    """A folder with an image processor and a processor of texts."""
    from transformers import AutoTokenizer, ChameleonImageProcessorPil, ChameleonProcessor

    folder = write_chameleon(tmp_path_factory.mktemp("seeing"), vq)
    side = {"height": 32, "width": 32}
    pixels = ChameleonImageProcessorPil(size={"shortest_edge": 32}, crop_size=side)
    words = AutoTokenizer.from_pretrained(folder)
    words.add_special_tokens({"sep_token": "<reserved08706>"})
    save_quietly(ChameleonProcessor(pixels, words, image_seq_length=4), folder)
    write_tokenizer(folder, IDS)  # as published, with ids of its own
    return folder


def test_images_of_a_prompt_are_the_codes_that_transformers_makes(seeing):
    from transformers import ChameleonForConditionalGeneration, ChameleonProcessor

    pipe = gen.load("image", model=seeing, dtype="float64", **SIDES)
    checkpoint = pipe.bound(pipe.model)[0]
    processor = ChameleonProcessor.from_pretrained(seeing)
    model = ChameleonForConditionalGeneration.from_pretrained(seeing, dtype=torch.float64)
    images = [noise(1, 40, 50), noise(2, 60, 33)]
    boi, eoi = IDS["<racm3:break>"], IDS["<eoss>"]
    pixels = processor.image_processor(images, return_tensors="pt")["pixel_values"].double()
    first, second = ([boi, *row, eoi] for row in model.model.get_image_tokens(pixels).tolist())
    assert first != second
    a, red, dog = (IDS[w] for w in ("a", "red", "dog"))
    end = [IDS["<reserved08706>"], boi]
    for text, ids in {
        "a red dog": [*first, *second, a, red, dog],
        "a <image> red <image> dog": [a, *first, red, *second, dog],
    }.items():
        given = Condition.of({"text": text, "images": images})
        made = checkpoint.binding.prompt(checkpoint.parse(given))
        assert made == checkpoint.vocabulary.prompt([IDS["<s>"], *ids, *end])


def test_images_of_prompts_decide_about_images_each_of_its_own_row(seeing):
    pipe = gen.load("image", model=seeing, dtype="float64", **SIDES)
    a, b = ({"text": "a red dog", "image": noise(n, 40, 40)} for n in (1, 2))
    how = {"sampler": "autoregressive", "temperature": 0.0, "top_p": 1.0}
    prompts = [a, b, "a red dog"]
    whole = pipe(prompts, **how).tokens
    for prompt, row in zip(prompts, whole, strict=True):
        assert torch.equal(pipe(prompt, **how).tokens[0], row)
    assert torch.equal(pipe([b, a], **how).tokens, whole[[1, 0]])
    assert len({tuple(row) for row in whole.tolist()}) == 3  # control
    fast = pipe(prompts, **{**how, "sampler": "speculative_jacobi"}).tokens
    assert torch.equal(fast, whole)


def test_images_that_a_prompt_cannot_have_are_one_sentence(seeing, pipes):
    pipe = gen.load("image", model=seeing, dtype="float64", **SIDES)
    image = noise(1)
    for refused, given, message in (
        (pipe, {"text": "<image> dog", "images": [image] * 2}, "1 positions of images .* 2 images"),
        (pipe, {"text": "a dog", "image": "no.png"}, "image no.png does not exist"),
        (pipes["chameleon"], {"text": "a dog", "image": image}, "image processor .* cannot be re"),
        (pipes["lumina"], {"text": "a dog", "image": image}, "takes text as its .* got images"),
    ):
        with pytest.raises(GenError, match=message) as caught:
            refused(given)
        assert "\n" not in str(caught.value)
