"""OpenVLA's vision backbone: two transformers of timm's layout and the projector, against a forward
pass written out, from the pixels of a camera to greedy actions."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_openvla import BINS, BLOCKS, HEADS, NAMES, PATCH, PROCESSOR, SIDE, TEXT, VISION, written
from torch.nn.functional import conv2d, gelu, layer_norm

import gen
from gen.core.errors import GenError
from gen.media.given import read_media

UNITS = {"unnorm_key": "bridge", "dtype": "float64"}
CASES = [("push the red cup", 0), ("pull", 1), ("push the door", None), ("pull", 0)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written(tmp_path_factory.mktemp("openvla"))


@pytest.fixture(scope="module")
def tensors(folder):
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def pipe(folder):
    return gen.load("action", model=folder, **UNITS)


@pytest.fixture(scope="module")
def llama(folder, tensors):
    from transformers import LlamaConfig, LlamaForCausalLM

    said = json.loads((folder / "config.json").read_text())["text_config"]
    said.pop("model_type")
    model = LlamaForCausalLM(LlamaConfig(**said)).double().eval()
    start = "language_model."
    model.load_state_dict(
        {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}
    )
    return model


@pytest.fixture(scope="module")
def images():
    """Photographs of two sizes, neither that of a transformer."""
    rng = np.random.default_rng(0)
    shapes = ((20, 33, 3), (9, 7, 3))
    return [Image.fromarray(rng.integers(0, 256, s, dtype=np.uint8)) for s in shapes]


def plain_tower(tensors, index: int, image, blocks: int = BLOCKS - 1) -> torch.Tensor:
    """Features [P, D] of an image by one transformer, written out."""
    start = f"vision_backbone.{('featurizer', 'fused_featurizer')[index]}."
    w = {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}
    resized = image.resize((SIDE[index],) * 2, Image.Resampling.BICUBIC)
    pixels = torch.tensor(np.array(resized)).double() / 255
    mean, std = (torch.tensor(PROCESSOR[k][index]).float().double() for k in ("means", "stds"))
    pixels = ((pixels - mean) / std).permute(2, 0, 1)[None]
    x = conv2d(
        pixels, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=PATCH[index]
    )
    x = x[0].flatten(1).T + w["pos_embed"][0]
    patches, width = x.shape
    if "cls_token" in w:
        x = torch.cat([w["cls_token"][0], w["reg_token"][0], x])

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x, name):
        return layer_norm(x, (width,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)

    for i in range(blocks):
        b, size = f"blocks.{i}.", width // HEADS[index]
        q, k, v = linear(norm(x, b + "norm1"), b + "attn.qkv").split(width, -1)
        heads = []
        for h in range(HEADS[index]):
            own = slice(h * size, (h + 1) * size)
            heads.append((q[:, own] @ k[:, own].T / size**0.5).softmax(-1) @ v[:, own])
        y = linear(torch.cat(heads, -1), b + "attn.proj")
        x = x + w.get(b + "ls1.scale_factor", 1) * y
        y = linear(gelu(linear(norm(x, b + "norm2"), b + "mlp.fc1")), b + "mlp.fc2")
        x = x + w.get(b + "ls2.scale_factor", 1) * y
    return x[-patches:]


def plain_features(tensors, image) -> torch.Tensor:
    """Features [P, width] of an image by both transformers."""
    return torch.cat([plain_tower(tensors, i, image) for i in range(2)], -1)


def projected(tensors, x: torch.Tensor) -> torch.Tensor:
    for n in (1, 2, 3):
        x = x @ tensors[f"projector.fc{n}.weight"].T + tensors[f"projector.fc{n}.bias"]
        x = gelu(x) if n < 3 else x
    return x


def plain_actions(checkpoint, llama, tensors, text: str, image) -> list[int]:
    """Greedy bins of an instruction and an image, by a loop without a cache."""
    prompt = checkpoint.prompt(checkpoint.condition(text))
    ids = checkpoint.vocabulary.to_model(torch.tensor(prompt))
    embed, found = llama.get_input_embeddings(), []
    bins = torch.arange(TEXT + BINS - 1, TEXT - 1, -1)
    x = embed(ids)[None]
    if image is not None:
        seen = projected(tensors, plain_features(tensors, image))
        x = torch.cat([x[:, :1], seen[None], x[:, 1:]], 1)
    for _ in range(3):
        found.append(int(llama(inputs_embeds=x).logits[0, -1, bins].argmax()))
        x = torch.cat([x, embed(bins[found[-1:]])[None]], 1)
    return found


def test_features_of_both_transformers_are_those_of_a_plain_forward(pipe, tensors, images):
    vision = pipe.modality.checkpoint.vision
    for image in images:
        want = plain_features(tensors, image)
        got = vision.features(read_media(image, "image").array)
        assert got.shape == want.shape == (16, VISION)
        assert float((got - want).abs().max()) < 1e-5 and float(want.std()) > 0.1
    last = torch.cat([plain_tower(tensors, i, image, BLOCKS) for i in range(2)], -1)
    assert float((got - last).abs().max()) > 1e-2  # control: the last block is one too many
    flipped = torch.cat([plain_tower(tensors, i, image) for i in (1, 0)], -1)
    assert float((got - flipped).abs().max()) > 1e-2  # control: the other order


@pytest.mark.parametrize("sampler", ["autoregressive", "speculative_jacobi"])
def test_greedy_actions_of_what_a_camera_sees_are_those_of_a_plain_loop(
    sampler, pipe, llama, tensors, images
):
    checkpoint = pipe.modality.checkpoint
    prompts = [
        text if i is None else {"text": text, "image": images[i]} for text, i in CASES
    ]  # one batch, with and without images
    want = [
        plain_actions(checkpoint, llama, tensors, text, None if i is None else images[i])
        for text, i in CASES
    ]
    out = pipe(prompts, sampler=sampler)
    assert out.tokens.tolist() == want
    assert [pipe(p, sampler=sampler).tokens[0].tolist() for p in prompts] == want
    swapped = [{"text": text, "image": images[1 - (i or 0)]} for text, i in CASES]
    assert pipe(swapped, sampler=sampler).tokens.tolist() != want  # control: other images


def test_an_observation_with_a_camera_is_a_text_with_an_image(pipe, images, tmp_path):
    path = tmp_path / "front.png"
    images[0].save(path)
    said = pipe({"text": "pull", "image": images[0]})
    for camera in ("observation.images.front", "observation.image"):
        seen = pipe({"observation": {"task": "pull", camera: path}})
        assert torch.equal(seen.tokens, said.tokens)
        assert str(seen.items[0].condition) == str(said.items[0].condition)
    other = pipe({"observation": {"task": "pull", camera: images[1]}})
    assert str(other.items[0].condition) != str(said.items[0].condition)  # control


def test_one_transformer_is_enough_and_may_embed_its_class_token(folder, tensors, tmp_path, images):
    """The layout of checkpoints with a single transformer, positions for all of its tokens."""
    copied = tmp_path / "one"
    shutil.copytree(folder, copied)
    kept = {k: v for k, v in tensors.items() if not k.startswith("vision_backbone.fused")}
    start, width = "vision_backbone.featurizer.", 6
    del kept[f"{start}reg_token"]
    position = torch.randn(1, 1, width, dtype=torch.float64)
    kept[f"{start}pos_embed"] = torch.cat([position, kept[f"{start}pos_embed"]], 1)
    kept["projector.fc1.weight"] = kept["projector.fc1.weight"][:, :width].contiguous()
    save_file(kept, copied / "model.safetensors", {"format": "pt"})
    _edit(
        copied / "config.json",
        timm_model_ids=["vit_tiny_patch4_dinov2"],
        timm_override_act_layers=[None],
    )
    rows = {k: PROCESSOR[k][:1] for k in ("input_sizes", "interpolations", "means", "stds")}
    _edit(copied / "preprocessor_config.json", **rows)
    vision = gen.load("action", model=copied, **UNITS).modality.checkpoint.vision
    plain = dict(kept)
    plain[f"{start}pos_embed"] = kept[f"{start}pos_embed"][:, 1:]
    plain[f"{start}cls_token"] = kept[f"{start}cls_token"] + position
    plain[f"{start}reg_token"] = torch.zeros(1, 0, width, dtype=torch.float64)
    got = vision.features(np.asarray(images[0]))
    assert float((got - plain_tower(plain, 0, images[0])).abs().max()) < 1e-5
    unembedded = {**plain, f"{start}cls_token": kept[f"{start}cls_token"]}  # control
    assert float((got - plain_tower(unembedded, 0, images[0])).abs().max()) > 1e-3


def _edit(file, **changed) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def test_images_that_cannot_be_seen_are_refused(pipe, images, tmp_path):
    sound, unreadable = tmp_path / "a.wav", tmp_path / "b.png"
    sound.write_bytes(b"x")
    unreadable.write_bytes(b"x" * 64)
    np.save(tmp_path / "a.npy", np.zeros((2, VISION)))
    front = {"task": "pull", "observation.images.front": images[0]}
    for given, message in (
        ({"text": "pull", "image": sound}, "a.wav', a sound; expected an image"),
        ({"text": "pull", "image": unreadable}, "b.png cannot be read"),
        ({"text": "pull", "images": images}, "at most 1 images; got 2"),
        ({"text": "pull", "audio": (np.zeros(9, np.float32), 8000)}, "got audio"),
        ({"image": images[0]}, "has no instruction"),
        ({"text": f"pull | {tmp_path / 'a.npy'}", "image": images[0]}, "expected one of them"),
        ({"observation": {**front, "observation.images.wrist": images[1]}}, "takes one camera"),
        ({"observation": {**front, "observation.features": tmp_path / "a.npy"}}, "one of them"),
        ({"observation": front, "image": images[0]}, "got images"),
        ({"observation": {"observation.images.front": images[0]}}, "task is None"),
    ):
        with pytest.raises(GenError, match=message):
            pipe(given)


def test_backbones_that_do_not_fit_are_refused(folder, tensors, tmp_path, images):
    copied = tmp_path / "f"
    shutil.copytree(folder, copied)

    def refused(message: str, file: str, change) -> None:
        before = (copied / file).read_bytes()
        change()
        with pytest.raises(GenError, match=message):
            gen.load("action", model=copied, **UNITS)
        (copied / file).write_bytes(before)

    def config(**changed):
        return "config.json", lambda: _edit(copied / "config.json", **changed)

    def processor(**changed):
        name = "preprocessor_config.json"
        return name, lambda: _edit(copied / name, **changed)

    def weights(change):
        def write():
            changed = dict(tensors)
            change(changed)
            save_file(changed, copied / "model.safetensors", {"format": "pt"})

        return "model.safetensors", write

    start = "vision_backbone.featurizer."
    refused("2 vision transformers and timm_model_ids names 1", *config(timm_model_ids=NAMES[:1]))
    refused("timm_model_ids of .* is 'resnet'", *config(timm_model_ids=["resnet", NAMES[1]]))
    large = "vit_large_patch14_reg4_dinov2"
    clip = "vit_large_patch14_clip_224.openai"
    refused("expected a DINOv2 or SigLIP", *config(timm_model_ids=[NAMES[0], clip]))
    refused("6 channels; expected a multiple of 16", *config(timm_model_ids=[large, NAMES[1]]))
    refused("is 'quick_gelu'; expected null", *config(timm_override_act_layers=["quick_gelu"]))
    refused("'letterbox'; expected resize-naive", *processor(image_resize_strategy="letterbox"))
    refused("2 input_sizes, interpolations, means", *processor(means=PROCESSOR["means"][:1]))
    refused("Did you mean 'bicubic'", *processor(interpolations=["bicubi", "bicubic"]))
    refused("reads 12 pixels in patches of 4", *processor(input_sizes=[[3, 12, 12], [3, 8, 8]]))
    refused("lacks pos_embed", *weights(lambda w: w.pop(f"{start}pos_embed")))
    refused("1 missing: featurizer.cls_token", *weights(lambda w: w.pop(f"{start}cls_token")))
    extra = {f"{start}blocks.0.extra.weight": torch.zeros(3)}
    refused("1 extra: .*blocks.0.extra", *weights(lambda w: w.update(extra)))
    narrow = {"projector.fc1.weight": tensors["projector.fc1.weight"][:, :5].contiguous()}
    refused("make 18 features of a patch; expected 5", *weights(lambda w: w.update(narrow)))
    blind = {k: v for k, v in tensors.items() if not k.startswith("vision_backbone.")}
    save_file(blind, copied / "model.safetensors", {"format": "pt"})
    pipe = gen.load("action", model=copied, **UNITS)
    with pytest.raises(GenError, match="no vision_backbone; expected observation.features"):
        pipe({"text": "pull", "image": images[0]})
