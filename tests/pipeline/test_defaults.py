"""One place decides the defaults of a request, so it means the same at every door."""

from __future__ import annotations

import argparse
from dataclasses import fields
from functools import cache

import pytest
from families import WRITERS

from gen.bench import variants
from gen.cli import make
from gen.cli.parser import parse
from gen.config.job import make_job
from gen.contracts.defaults import Defaults
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.interop.diffusers import diffusers_pipeline
from gen.interop.lerobot import Policy
from gen.jobs.defaults import SAMPLING_FLAGS
from gen.pipeline.pipeline import Pipeline

MODALITIES = ("action", "image", "motion", "speech", "text", "video")
PROMPTS = {
    "action": "push the block", "image": "a red circle", "motion": "a person walks forward",
    "speech": "three seven", "text": "sort 3 1 2 =", "video": "a red square moves right",
}  # fmt: skip
NO_FLAGS = dict.fromkeys((*SAMPLING_FLAGS, "model_option"))


@cache
def pipe(modality: str) -> Pipeline:
    return Pipeline(modality, device="cpu")


def by_job(modality: str, sampler: str | None, model: str | None = None) -> tuple[dict, dict]:
    tree = {"modality": modality, "prompts": [PROMPTS[modality]], "model": model}
    entry = make_job(tree | ({"sampler": sampler} if sampler else {}), where="a test").entries[0]
    return entry.sampler, entry.sampling


def by_command(modality: str, sampler: str | None, monkeypatch) -> tuple[dict, dict]:
    made = []
    monkeypatch.setattr(make, "_run", lambda job, *_, **__: made.append(job) or 0)
    words = ["sample", modality, PROMPTS[modality], *(["--sampler", sampler] if sampler else [])]
    assert make.sample(parse(words)) == 0
    return made[0].entries[0].sampler, made[0].entries[0].sampling


def by_call(modality: str, sampler: str | None) -> tuple[dict, dict]:
    request = pipe(modality).request(PROMPTS[modality], sampler, None, 0, {})
    return request.spec, request.sampling.to_dict()


def by_bench(modality: str, sampler: str) -> tuple[dict, dict]:
    said = {"modality": modality, "model": None, "samplers": sampler, "sweep": None}
    args = argparse.Namespace(**said, **NO_FLAGS)
    row = next(v for v in variants.choose(args) if v.base == sampler)
    return row.spec, row.sampling


def by_diffusers(modality: str, sampler: str | None) -> tuple[dict, dict]:
    call, seen = diffusers_pipeline(pipe(modality)), []

    class Seen(Exception):
        pass

    def generate(items, spec, sampling, callback):
        seen.append((call.pipe.defaults.complete_sampler(spec), sampling.to_dict()))
        raise Seen

    call.pipe = Pipeline(modality, device="cpu")
    call.pipe.generate = generate
    with pytest.raises(Seen):
        call(PROMPTS[modality], sampler=sampler)
    return seen[0]


def full(spec: dict) -> dict:
    """Every parameter of a sampler, whether the spec has it or not."""
    made = resolve_sampler(spec)[0]
    return {f.name: getattr(made, f.name) for f in fields(made)}


@pytest.mark.parametrize("sampler", [None, "autoregressive", "maskgit"])
@pytest.mark.parametrize("modality", MODALITIES)
def test_every_door_has_the_defaults_of_the_modality(modality, sampler, monkeypatch):
    spec, sampling = by_call(modality, sampler)
    doors = {
        "job": by_job(modality, sampler),
        "command": by_command(modality, sampler, monkeypatch),
        "bench": by_bench(modality, sampler or "speculative_jacobi"),
        "diffusers": by_diffusers(modality, sampler),
    }
    if modality == "action":
        policy = Policy(pipe(modality), sampler)
        doors["policy"] = policy.sampler, policy.sampling.to_dict()
    for door, (own_spec, own_sampling) in doors.items():
        assert own_sampling == sampling, door
        assert full(own_spec) == full(spec), door
    usual = registry.get("modality", modality).default_sampling
    assert {k: sampling[k] for k in usual} == dict(usual)
    off = resolve_sampler(spec)[1].to_dict()
    assert sampling != off or modality == "text"  # control: they are not those of no defaults


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(WRITERS))
def test_a_published_model_has_one_set_of_defaults_loaded_or_not(family, tmp_path):
    case = WRITERS[family](tmp_path)
    loaded = Pipeline(case.modality, str(case.path), device="cpu", **case.options)
    named = Defaults.named(case.modality, str(case.path), case.options)
    assert named == loaded.defaults
    assert named.sampling or family.startswith("described")
    assert loaded.model_name(named.complete_sampler(None)) == str(case.path)  # it suits the model


def test_keywords_override_single_defaults_at_every_door():
    tree = {"modality": "image", "prompts": ["a red circle"], "sampling": {"temperature": 0.5}}
    expected = {"temperature": 0.5, "top_k": 100, "guidance_scale": 2.0}
    by_file = make_job(tree, where="a test").entries[0].sampling
    called = pipe("image").request("a red circle", None, None, 0, {"temperature": 0.5}).sampling
    assert by_file == called.to_dict() and {k: by_file[k] for k in expected} == expected


def test_a_sampler_chooses_the_model_that_suits_it():
    image = pipe("image")
    assert image.model_name("mar") == "image-mar" and image.model_name("cspd") == (
        "image-causal-latents"
    )
    assert image.model_name("maskgit") == "image-masked"  # control
    assert by_job("image", "mar")[1]["top_k"] == 0  # latents have none
    with pytest.raises(GenError, match="no masked-latents model"):
        pipe("text").model_name("mar")
    with pytest.raises(GenError, match="samplers that suit the model: .*masked_iterative"):
        Pipeline("image", "image-masked", device="cpu").model_name("mar")


@pytest.mark.parametrize(
    "modality, model, expected",
    [
        ("text", "text-masked", "fast_dllm"),
        ("text", "text-causal", "speculative_jacobi"),
        ("image", "image-masked", "maskgit"),
        ("image", "image-mar", "mar"),
        ("image", "image-causal-latents", "autoregressive"),
        ("image", None, "speculative_jacobi"),
    ],
)
def test_a_model_chooses_a_sampler_that_suits_it(modality, model, expected):
    loaded = Pipeline(modality, model, device="cpu")
    assert loaded.config["sampler"]["name"] == expected
    assert by_job(modality, None, model)[0]["name"] == expected
    assert loaded.model_name(expected) == (model or "image-causal")


def test_masked_samplers_take_the_steps_of_the_modality_unless_told():
    def steps(modality, spec):
        return resolve_sampler(pipe(modality).defaults.complete_sampler(spec))[0].steps

    assert [steps("video", s) for s in ("maskgit", "halton", "masked_iterative")] == [64] * 3
    assert steps("speech", "maskgit") == 30 and steps("image", "maskgit") == 12
    assert steps("video", {"name": "maskgit", "steps": 5}) == 5
    assert steps("video", {"name": "maskgit", "num_inference_steps": 6}) == 6
    assert steps("video", "llada") == 128  # the method's own
