"""OpenVLA-type checkpoints: the published layout, bins at the end of the vocabulary, actions in
physical units."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from published import padded_left, save_quietly, tiny_tokenizer
from tiny_openvla import BINS, STATISTICS, TEXT, VISION, written

import gen
from gen.core.errors import GenError
from gen.modalities.checkpoints.openvla import EMPTY, TEMPLATE, TEMPLATE_V01
from gen.tokenizers.action.base import ActionStatistics
from gen.tokenizers.action.edges import ActionEdges

PROMPTS = ["push the red cup", "pull", "Push the door", "take the red red cup"]
UNITS = {"unnorm_key": "bridge", "dtype": "float64"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written(tmp_path_factory.mktemp("openvla"))


@pytest.fixture(scope="module")
def llama(folder):
    """The language model by itself, from the same tensors."""
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    said = json.loads((folder / "config.json").read_text())["text_config"]
    model = (
        LlamaForCausalLM(LlamaConfig(**{k: v for k, v in said.items() if k != "model_type"}))
        .double()
        .eval()
    )
    own = {
        k.removeprefix("language_model."): v
        for k, v in load_file(folder / "model.safetensors").items()
        if k.startswith("language_model.")
    }
    model.load_state_dict(own)
    return model


@pytest.fixture(scope="module")
def pipe(folder):
    return gen.load("action", model=folder, **UNITS)


def model_ids(checkpoint, prompt: str) -> list[int]:
    return checkpoint.vocabulary.to_model(
        torch.tensor(checkpoint.prompt(checkpoint.condition(prompt)))
    ).tolist()


def test_prompts_are_those_of_the_paper_in_ids(pipe, folder):
    checkpoint = pipe.modality.checkpoint
    words = "In: What action should the robot take to push the red cup?\nOut:"
    empty = checkpoint.tokenizer.get_vocab()[EMPTY]
    assert model_ids(checkpoint, "Push the red CUP") == [
        *checkpoint.tokenizer(words)["input_ids"],
        empty,
    ]
    assert TEMPLATE.format(instruction="push the red cup") == words
    other = gen.load(
        "action", model=folder, template=f"In: {{instruction}} Out: {EMPTY}", **UNITS
    ).modality.checkpoint
    assert model_ids(other, "push")[-1] == empty and model_ids(other, "push")[-2] != empty


def test_checkpoints_of_version_01_are_asked_in_their_chat(folder, tmp_path):
    first = tmp_path / "openvla-v01-7b"
    first.symlink_to(folder)
    assert gen.load("action", model=folder, **UNITS).modality.checkpoint.template == TEMPLATE
    found = gen.load("action", model=first, **UNITS).modality.checkpoint.template
    assert found == TEMPLATE_V01 and found.endswith("take to {instruction}? ASSISTANT:")


def test_logits_are_those_of_the_language_model_over_the_bins_in_order(pipe, llama):
    checkpoint = pipe.modality.checkpoint
    ids = torch.tensor([model_ids(checkpoint, PROMPTS[0])])
    model = checkpoint.adapter("causal")
    assert model.vocab_size == BINS
    ours = model.forward(
        ids + BINS, torch.arange(ids.shape[1])[None], model.new_cache(ids.shape[1])
    )
    whole = llama(ids).logits
    want = torch.stack(
        [whole[..., TEXT + BINS - b] for b in range(1, BINS + 1)], -1
    )  # bin b is the b-th word from the end
    assert torch.allclose(ours, want, atol=1e-10)
    assert not torch.allclose(
        ours, want.flip(-1), atol=1e-3
    )  # control: ids that grow with the value


@pytest.mark.parametrize("sampler", ["autoregressive", "speculative_jacobi"])
def test_greedy_actions_are_those_of_generate_over_the_bins_alone_and_in_a_padded_batch(
    pipe, llama, sampler
):
    checkpoint = pipe.modality.checkpoint
    bins = list(range(TEXT, TEXT + BINS))
    settings = dict(
        do_sample=False, max_new_tokens=3, prefix_allowed_tokens_fn=lambda row, ids: bins
    )
    given = padded_left([model_ids(checkpoint, p) for p in PROMPTS], 0)
    assert len(set(given["attention_mask"].sum(1).tolist())) > 2
    want = llama.generate(**given, **settings)[:, -3:]
    out = pipe(PROMPTS, sampler=sampler)
    assert torch.equal(TEXT + BINS - 1 - out.tokens, want)
    for prompt, tokens in zip(PROMPTS, out.tokens, strict=True):
        assert torch.equal(pipe(prompt, sampler=sampler).tokens[0], tokens)
    given["input_ids"][:, -2] = given["input_ids"][:, -3]
    assert not torch.equal(
        llama.generate(**given, **settings)[:, -3:], want
    )  # control: other prompts


def test_actions_are_centres_of_bins_in_physical_units_where_the_mask_says_so(pipe):
    out = pipe(PROMPTS, temperature=1.5, seed=1)
    edges = np.linspace(-1, 1, BINS)
    centres = (edges[:-1] + edges[1:]) / 2
    stats = STATISTICS["bridge"]["action"]
    low, high, mask = np.array(stats["q01"]), np.array(stats["q99"]), np.array(stats["mask"])
    for tokens, action in zip(out.tokens, out.media, strict=True):
        y = centres[np.clip(tokens.numpy(), 0, BINS - 2)]
        want = np.where(mask, 0.5 * (y + 1) * (high - low) + low, y)
        assert (
            action.shape == (1, 3)
            and action.dtype == np.float32
            and np.allclose(action[0], want, atol=1e-6)
        )
    assert not np.allclose(
        want, 0.5 * (y + 1) * (high - low) + low
    )  # control: a mask that is ignored


def test_all_bins_come_back_and_values_fall_where_numpy_puts_them():
    statistics = ActionStatistics((-1.0,), (1.0,))
    frontend = ActionEdges(256, 256, 1, statistics)
    codes = torch.arange(256).view(1, 1, 256, 1)
    again = frontend.encode(frontend.decode(codes))
    assert (
        torch.equal(again[..., :255, :], codes[..., :255, :]) and int(again[0, 0, 255]) == 254
    )  # two bins share the last centre
    x = torch.linspace(-1, 1, 256, dtype=torch.float64).add(0.001).clamp(-1, 1)
    x[-1] = 1.0
    found = frontend.encode(x.view(1, 256, 1)).flatten()
    assert (
        np.array_equal(found.numpy() + 1, np.digitize(x.numpy(), np.linspace(-1, 1, 256)))
        and int(found[-1]) == 255
    )
    error = (frontend.decode(frontend.encode(x.view(1, 256, 1))).flatten() - x).abs().max()
    assert error <= 1 / 255 + 1e-12
    assert (
        ActionEdges(256, 1, 1, statistics, dtype=torch.bfloat16)
        .decode(torch.zeros(1, 1, 1, 1, dtype=torch.long))
        .dtype
        == torch.float64
    )


def test_three_samplers_write_files_and_a_chunk_has_as_many_steps_as_asked_for(folder, tmp_path):
    pipe = gen.load("action", model=folder, unnorm_key="table", horizon=4)
    for sampler in ("autoregressive", "speculative_jacobi", "scd_mc"):
        out = pipe(PROMPTS[:2], sampler=sampler, temperature=1.0, num_samples=2, seed=3)
        out.save(tmp_path / sampler)
        files = sorted((tmp_path / sampler).glob("*.npz"))
        assert len(files) == 4 and all(pipe.modality.load(f).shape == (4, 2) for f in files)
        assert len(out.tokens.unique(dim=0)) > 1
    assert torch.equal(
        pipe(PROMPTS, seed=2).tokens, pipe(PROMPTS, "autoregressive", seed=5).tokens
    )  # greedy unless something else is said


def test_features_of_an_image_stand_behind_the_first_word(folder, llama, tmp_path):
    from safetensors.torch import load_file

    pipe = gen.load("action", model=folder, **UNITS)
    checkpoint = pipe.modality.checkpoint
    rng = np.random.default_rng(0)
    for name, patches in (("a", 5), ("b", 7)):
        np.save(tmp_path / f"{name}.npy", rng.normal(size=(patches, VISION)))
    w = {
        k.removeprefix("projector."): v
        for k, v in load_file(folder / "model.safetensors").items()
        if k.startswith("projector.")
    }

    def linear(x, n):
        return x @ w[f"fc{n}.weight"].T + w[f"fc{n}.bias"]

    bins = torch.arange(TEXT + BINS - 1, TEXT - 1, -1)

    def want(name: str | None, text: str) -> list[int]:
        x = llama.get_input_embeddings()(torch.tensor([model_ids(checkpoint, text)]))
        if name:
            y = torch.from_numpy(np.load(tmp_path / f"{name}.npy"))
            y = linear(
                torch.nn.functional.gelu(linear(torch.nn.functional.gelu(linear(y, 1)), 2)), 3
            )
            x = torch.cat([x[:, :1], y[None], x[:, 1:]], 1)
        said = []
        for _ in range(3):
            said.append(int(llama(inputs_embeds=x).logits[0, -1, bins].argmax()))
            x = torch.cat([x, llama.get_input_embeddings()(bins[said[-1:]])[None]], 1)
        return said

    asked = [("a", PROMPTS[0]), ("b", PROMPTS[1]), (None, PROMPTS[2]), ("a", PROMPTS[1])]
    prompts = [f"{text} | {tmp_path / name}.npy" if name else text for name, text in asked]
    expected = [want(*a) for a in asked]
    for sampler in ("autoregressive", "speculative_jacobi"):
        assert (
            pipe(prompts, sampler=sampler).tokens.tolist() == expected
        )  # of one batch, with and without images
    assert [want(None, text) for _, text in asked] != expected  # control: what is seen matters
    np.save(tmp_path / "a.npy", rng.normal(size=(5, VISION)))  # the next image under the same name
    assert pipe(prompts[0]).tokens[0].tolist() == want("a", PROMPTS[0])
    for file, message in (
        ("absent.npy", "no existing .npy file"),
        ("a.txt", "no existing .npy file"),
    ):
        with pytest.raises(GenError, match=message):
            pipe(f"push | {tmp_path / file}")
    for array in (
        np.zeros((5, VISION + 1)),
        np.zeros(VISION),
        np.zeros((5, VISION), int),
        np.full((5, VISION), np.nan),
    ):
        np.save(tmp_path / "bad.npy", array)
        with pytest.raises(GenError, match=rf"expected finite floats \[patches, {VISION}\]"):
            pipe(f"push | {tmp_path / 'bad.npy'}")


def test_what_is_missing_or_wrong_is_named(folder, tmp_path):
    def refused(message, **kwargs):
        with pytest.raises(GenError, match=message):
            gen.load("action", model=tmp_path / "f", **kwargs)

    def rewrite(**changed):
        config = json.loads((folder / "config.json").read_text())
        (tmp_path / "f/config.json").write_text(
            json.dumps({k: v for k, v in {**config, **changed}.items() if v is not None})
        )

    shutil.copytree(folder, tmp_path / "f")
    refused("several data sets; expected unnorm_key, one of bridge, table")
    refused("Did you mean 'bridge'", unnorm_key="brigde")
    refused("horizon is 0", unnorm_key="table", horizon=0)
    refused("template is", unnorm_key="table", template="push")
    rewrite(norm_stats={"one": STATISTICS["table"]})
    assert (
        gen.load("action", model=tmp_path / "f").modality.checkpoint.frontend.dimensions == 2
    )  # the only one needs no name
    rewrite(norm_stats=None)
    refused("no statistics of actions")
    (tmp_path / "f/dataset_statistics.json").write_text(json.dumps({"tuned": STATISTICS["bridge"]}))
    assert (
        gen.load("action", model=tmp_path / "f").modality.checkpoint.frontend.dimensions == 3
    )  # those of a fine-tuned one
    (tmp_path / "f/dataset_statistics.json").write_text(
        json.dumps({"tuned": {"action": {"q01": [0.0], "q99": [1.0, 2.0]}}})
    )
    refused("expected q01, q99 and mask")
    (tmp_path / "f/dataset_statistics.json").unlink()
    rewrite(text_config={"model_type": "phi"})
    refused("'phi'; expected 'llama'", unnorm_key="table")
    rewrite()
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "f/model.safetensors")
    save_file(
        {k: v for k, v in tensors.items() if not k.startswith("projector.")},
        tmp_path / "f/model.safetensors",
        {"format": "pt"},
    )
    np.save(tmp_path / "x.npy", np.zeros((2, VISION)))
    blind = gen.load("action", model=tmp_path / "f", unnorm_key="table")
    with pytest.raises(GenError, match="no projector"):
        blind(f"push | {tmp_path / 'x.npy'}")
    for prompt in ("", "| x.npy", "push |"):
        with pytest.raises(GenError, match="has no instruction"):
            blind(prompt)
    save_file(
        {k: v for k, v in tensors.items() if k != "language_model.lm_head.weight"},
        tmp_path / "f/model.safetensors",
        {"format": "pt"},
    )
    refused("1 missing: lm_head.weight", unnorm_key="table")
    save_quietly(tiny_tokenizer(TEXT), tmp_path / "f")
    refused("no piece", unnorm_key="table")
    with pytest.raises(GenError, match="openvla serves action; requested was 'image'"):
        gen.load("image", model=folder)


def test_an_observation_states_the_task_and_features(pipe, tmp_path):
    path, other = tmp_path / "a.npy", tmp_path / "b.npy"
    array = np.random.default_rng(0).normal(size=(3, VISION)).astype(np.float32)
    np.save(path, array)
    np.save(other, array)
    text = pipe(f"pull | {path}", seed=0)
    seen = pipe({"observation": {"task": "pull", "observation.features": path}}, seed=0)
    assert torch.equal(text.tokens, seen.tokens)
    moved = pipe({"observation": {"task": "pull", "observation.features": other}}, seed=0)
    assert str(moved.items[0].condition) == str(seen.items[0].condition)
    np.save(other, array + 1)  # control: another content is another condition
    again = pipe({"observation": {"task": "pull", "observation.features": other}}, seed=0)
    assert str(again.items[0].condition) != str(seen.items[0].condition)
    assert torch.equal(pipe("pull").tokens, pipe({"observation": {"task": "pull"}}).tokens)
    for observation, message in (
        ({"observation.features": path}, "task is None"),
        ({"task": "pull", "observation.features": tmp_path / "no.npy"}, "no existing .npy file"),
    ):
        with pytest.raises(GenError, match=message):
            pipe({"observation": observation})
