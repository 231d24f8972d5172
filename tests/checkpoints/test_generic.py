"""Models described by a file gen.json, with tiny random weights: a masked one as MaskGIT is, a
causal one, and a causal one of clips."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from calls import only
from PIL import Image
from tiny_generic import CODES, IMAGE, VIDEO, network, written

import gen
from gen.contracts.checkpoint import CheckpointFiles, family_of
from gen.core.errors import GenError

CAUSAL = IMAGE | {
    "protocol": "causal",
    "mask_token_id": None,
    "codes": {"start": 9, "size": CODES},
    "begin": [1, 2],
}
MASKED_CLIPS = VIDEO | {"protocol": "masked", "mask_token_id": 33}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    kinds = {"masked": IMAGE, "causal": CAUSAL, "clips": VIDEO, "masked-clips": MASKED_CLIPS}
    return {name: written(tmp_path_factory.mktemp(name), said) for name, said in kinds.items()}


def load(folder: Path, modality: str = "image"):
    return gen.load(modality, model=folder, dtype="float64")


@torch.no_grad()
def test_masked_logits_are_the_models_own(folders):
    pipe = load(folders["masked"])
    checkpoint, binding, _ = pipe.bound(str(folders["masked"]))
    canvas = torch.tensor([[3, 32, 0, 31, 32, 32, 7, 7, 1, 32, 9, 12]])
    ids = torch.cat([torch.tensor([binding.prompt(2)]), canvas], 1)
    got = checkpoint.adapter("masked").forward(ids, 12)

    def own(codes):
        return [8 if c == 32 else 40 - c for c in codes]

    model = network("masked").double()

    def plain(row):
        return model(input_ids=torch.tensor([row])).logits[0, -12:]

    wanted = plain([43, *own(canvas[0].tolist())])[:, [*range(40, 8, -1), 8]]
    assert torch.allclose(got[0], wanted, atol=1e-9)
    for row in (
        [42, *own(canvas[0].tolist())],
        [43, *canvas[0].tolist()],
    ):  # controls: another class; ids that are not mapped
        assert not torch.allclose(got[0], plain(row)[:, [*range(40, 8, -1), 8]], atol=1e-3)


@torch.no_grad()
def test_causal_logits_are_the_models_own(folders):
    pipe = load(folders["causal"])
    checkpoint, binding, _ = pipe.bound(str(folders["causal"]))
    lm, codes = checkpoint.adapter("causal"), [3, 0, 31, 5]
    ids = torch.tensor([[*binding.prompt(4), *codes]])
    got = lm.forward(ids, torch.arange(7)[None], lm.new_cache(7))
    model = network("causal").double()

    def plain(row):
        return model(input_ids=torch.tensor([row])).logits[..., 9 : 9 + CODES]

    assert torch.allclose(got, plain([45, 1, 2, *(9 + c for c in codes)]), atol=1e-5)
    assert not torch.allclose(
        got, plain([45, 2, 1, *(9 + c for c in codes)]), atol=1e-3
    )  # control: another beginning


@pytest.mark.parametrize(
    ("name", "sampler"),
    [
        ("masked", "maskgit"),
        ("masked", "halton"),
        ("masked", "maskgit_remask"),
        ("masked", "freedave"),
        ("causal", "autoregressive"),
        ("causal", "speculative_jacobi"),
    ],
)
@pytest.mark.thinned(3)
def test_samplers_make_images_and_an_item_does_not_depend_on_its_batch(folders, name, sampler):
    pipe = load(folders[name])
    out = pipe(["3", "class 0", "2"], sampler=sampler, seed=3)
    assert (
        out.tokens.shape == (3, 12)
        and int(out.tokens.max()) < CODES
        and out.sampling.guidance_scale == 1.5
    )
    assert [m.size for m in out.media] == [(8, 6)] * 3
    alone = pipe("0", sampler=sampler, seed=3)
    assert torch.equal(alone.tokens[0], out.tokens[1]) and not torch.equal(
        out.tokens[0], out.tokens[1]
    )


def test_causal_tokens_are_those_of_generating_one_by_one(folders):
    pipe, model = load(folders["causal"]), network("causal").double()
    out = pipe("4", sampler="autoregressive", **only(temperature=0.0))
    row = [45, 1, 2]
    for _ in range(12):
        row.append(
            9 + int(model(input_ids=torch.tensor([row])).logits[0, -1, 9 : 9 + CODES].argmax())
        )
    assert out.tokens[0].tolist() == [i - 9 for i in row[3:]]


@pytest.mark.parametrize(
    ("name", "sampler"), [("clips", "autoregressive"), ("masked-clips", "maskgit")]
)
def test_clips_without_a_condition(folders, name, sampler):
    pipe = load(folders[name], "video")
    out = pipe("", sampler=sampler)
    assert out.media[0].shape == (8, 4, 4, 3) and out.media[0].dtype == np.uint8
    assert torch.equal(out.tokens, pipe("unconditional", sampler=sampler).tokens)
    with pytest.raises(GenError, match="takes no condition"):
        pipe("a cat", sampler=sampler)
    with pytest.raises(
        GenError, match="no id that stands for no condition; expected sampling.guidance_scale 1"
    ):
        pipe("", sampler=sampler, **only(guidance_scale=2.0))
    if name == "clips":
        chunks = list(pipe.stream("", sampler=sampler))
        assert len(chunks) == 2 and np.array_equal(
            np.concatenate([c.media for c in chunks]), out.media[0]
        )


def test_an_image_is_edited(folders):
    pipe = load(folders["masked"])
    source = Image.fromarray(np.random.default_rng(1).integers(0, 256, (6, 8, 3), dtype=np.uint8))
    marks = np.zeros((6, 8), bool)
    marks[:, :4] = True
    media = pipe("1", sampler="maskgit", source=source, mask=marks).media[0]
    assert np.array_equal(
        np.asarray(media)[~marks], np.asarray(source)[~marks]
    ) and not np.array_equal(media, source)


# --- what is refused


def refused(folder: Path, tmp_path: Path, said: dict, match: str, modality: str = "image") -> None:
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    (copy / "gen.json").write_text(json.dumps(said))
    with pytest.raises(GenError, match=match):
        load(copy, modality)


def test_the_family_is_recognised_by_its_file(folders, tmp_path):
    assert family_of(CheckpointFiles.find(folders["causal"]), "image").__name__ == "Described"
    shutil.copytree(folders["masked"], tmp_path / "bare")
    (tmp_path / "bare" / "gen.json").unlink()
    with pytest.raises(GenError, match="is a 'bert'"):
        load(tmp_path / "bare")


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"protocol": "maskd"}, "unknown protocol 'maskd'.*Did you mean 'masked'"),
        ({"modality": "imgae"}, "Did you mean 'image'"),
        ({"grids": [3, 4]}, "unknown key 'grids'.*Did you mean 'grid'"),
        ({"grid": [3, 0]}, "grid is .*rows and columns"),
        ({"grid": [2, 3, 4]}, "expected 2 integers"),
        ({"mask_token_id": None}, "mask_token_id is None"),
        ({"mask_token_id": 20}, "an id that is not a code"),
        ({"mask_token_id": 99}, "ids below 48"),
        ({"codes": {"start": 9, "sise": 32}}, "Did you mean 'size'"),
        ({"codes": {"start": 9, "size": 31}}, "has 31 codes and its frontend 32"),
        ({"codes": [9] * 32}, "stands for two codes"),
        ({"codes": {"start": 30, "size": 32}}, "id 41 stands for classes and for codes"),
        ({"condition": {"class": {"start": 41, "size": 5}}}, "Did you mean 'classes'"),
        ({"condition": {"classes": {"start": 44, "size": 9}}}, "names id 48"),
        (
            {"condition": {"classes": {"start": 41, "size": 6}, "unconditional": 46}},
            "id 46 stands for unconditional and for classes",
        ),
        ({"frontend": {"folder": "vqq", "tokenizer": "vq"}}, "folder 'vqq', which does not exist"),
        ({"frontend": {"folder": "vq"}}, "lacks tokenizer"),
        ({"frontend": {"folder": "vq", "tokenizer": "vqq"}}, "Did you mean 'vq'"),
        ({"sampling": {"guidance": 2.0}}, "Did you mean 'guidance_scale'"),
        ({"sampling": {"top_k": -1}}, "sampling.top_k is -1"),
        ({"fps": 8}, "nothing for images"),
        ({"grid": [6, 4]}, "have 25 positions.*at most 20"),
        ({"begin": "x"}, "a list of integers"),
        ({"protocol": "causal"}, "none for a causal one"),
    ],
)
def test_descriptions_of_no_sense_are_refused(folders, tmp_path, values, match):
    refused(folders["masked"], tmp_path, IMAGE | values, match)


def test_models_that_are_not_what_is_said_are_refused(folders, tmp_path):
    refused(
        folders["causal"], tmp_path, IMAGE, "cannot be read|do not fit"
    )  # a Llama is no masked model
    refused(
        folders["clips"],
        tmp_path,
        {k: v for k, v in VIDEO.items() if k != "begin"},
        "no condition and no begin",
        "video",
    )
    refused(
        folders["clips"],
        tmp_path,
        {k: v for k, v in VIDEO.items() if k != "fps"},
        "fps is None",
        "video",
    )
    refused(
        folders["clips"], tmp_path, VIDEO, "makes videos according to its gen.json; expected images"
    )
    refused(
        folders["clips"],
        tmp_path,
        VIDEO | {"frontend": {"folder": "codec", "tokenizer": "vq"}},
        "cannot be read|missing",
        "video",
    )
    for prompt in ("5", "a cat", "-1"):
        with pytest.raises(GenError, match="expected the number of a class"):
            load(folders["masked"])(prompt, sampler="maskgit")
