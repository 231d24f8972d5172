"""A pipeline called as those of diffusers, and the files of the embedded models in the classes of
diffusers and transformers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from calls import only
from PIL import Image

import gen
from gen.core.errors import GenError
from gen.interop.diffusers import DiffusersPipeline, diffusers_pipeline
from gen.models.load.locate import ZOO, quiet
from gen.pipeline.pipeline import Pipeline

CIRCLE, RING = "a large red circle at the top left", "a small blue ring in the centre"
QUICK = dict(sampler="maskgit", num_inference_steps=2)


@pytest.fixture(scope="module")
def image() -> DiffusersPipeline:
    return diffusers_pipeline(gen.load("image"))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def same(a, b) -> bool:
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in zip(a, b, strict=True))


# --- what goes in


def test_the_state_of_a_generator_decides_and_goes_on(image):
    g = seeded()
    first, second = (image(CIRCLE, generator=g, **QUICK).images for _ in range(2))
    again = image(CIRCLE, generator=seeded(), num_images_per_prompt=2, **QUICK).images
    assert same(first + second, again)  # the second call goes on where the first one stopped
    assert not same(first, second)
    listed = image(CIRCLE, generator=[seeded(), seeded(1)], num_images_per_prompt=2, **QUICK).images
    assert same(listed[:1], first) and not same(listed[1:], second)
    torch.manual_seed(0)  # without one, torch's own
    assert same(image(CIRCLE, **QUICK).images, first) and not same(
        image(CIRCLE, **QUICK).images, first
    )


def test_parameters_of_the_sampler_are_arguments(image):
    found = image(CIRCLE, sampler="maskgit", steps=2, generator=seeded()).images
    assert image.output.stats[0].nfe < image.pipe(CIRCLE, "maskgit", seed=0).stats[0].nfe
    assert same(found, image(CIRCLE, generator=seeded(), **QUICK).images)
    for given, message in (
        ({"steps": 2, **QUICK}, "num_inference_steps is 2 and sampler.steps 2"),
        ({"sampler": {"name": "maskgit", "steps": 2}, "steps": 3}, "got steps 2, and steps is 3"),
        ({"sampler": "maskgit", "stepz": 3}, "unknown keyword 'stepz'. Did you mean 'steps'"),
        ({"sampler": "maskgit", "height": 3}, "unknown keyword 'height'"),
        ({"sampler": "maskgit", "num_videos_per_prompt": 3}, "Did you mean 'num_images_per_prompt"),
    ):
        with pytest.raises(GenError, match=message):
            image(CIRCLE, **given)


def test_items_are_those_of_the_pipeline_with_the_drawn_seeds(image):
    out = image([CIRCLE, RING], num_images_per_prompt=2, generator=seeded(3), **QUICK)
    assert [i.prompt for i in image.output.items] == [CIRCLE, CIRCLE, RING, RING]
    for item, expected in zip(image.output.items, out.images, strict=True):
        alone = image.pipe(item.prompt, sampler={"name": "maskgit", "steps": 2}, seed=item.seed)
        assert same(alone.media, [expected])
    other = image.pipe(
        CIRCLE, sampler={"name": "maskgit", "steps": 2}, seed=image.output.items[0].seed + 1
    )
    assert not same(other.media, out.images[:1])  # control


def test_the_distribution_changes_in_what_is_said_alone(image):
    usual = image.pipe.resolve("maskgit", None)[1]
    image(CIRCLE, guidance_scale=3.5, top_p=0.9, **QUICK)
    assert (
        image.output.sampling == replace(usual, guidance_scale=3.5, top_p=0.9)
        and usual.top_k == 100
    )
    image(CIRCLE, **QUICK)
    assert image.output.sampling == usual


def test_steps_are_those_of_the_sampler(image):
    for steps in (1, 3):
        image(CIRCLE, sampler="maskgit", num_inference_steps=steps)
        assert image.num_timesteps == steps == image.output.stats[0].nfe
    image(CIRCLE, sampler={"name": "halton", "steps": 2})
    assert image.num_timesteps == 2


def test_a_negative_prompt_takes_the_place_of_none(image, monkeypatch):
    target, seen = Pipeline.target, []

    def watched(self, *args, **kwargs):
        seen.append(target(self, *args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(Pipeline, "target", watched)
    plain, against = (
        image(CIRCLE, negative_prompt=n, generator=seeded(), **QUICK).images for n in (None, RING)
    )
    binding = image.pipe.bound(image.output.model)[1]
    condition = image.pipe.modality.condition(RING)
    assert [t.prompt[1].tolist() for t in seen] == [
        binding.unconditional,
        binding.prompt(condition),
    ]
    assert not same(plain, against)
    sampling = seen[1].sampling(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])).exp()
    assert sampling[0] > sampling[1]  # guidance leads away from it
    for settings, message in (
        ({"negative_prompt": RING, "guidance_scale": 1.0}, "without guidance"),
        ({"negative_prompt": [RING]}, "one text"),
    ):
        with pytest.raises(GenError, match=message):
            image(CIRCLE, **settings, **QUICK)
    with pytest.raises(GenError, match="that a seed would choose"):
        diffusers_pipeline(gen.load("action"))(
            "reach", negative_prompt="push", guidance_scale=2.0, **QUICK
        )


# --- callbacks


@pytest.mark.parametrize(
    ("modality", "prompt", "sampler"),
    [
        ("image", CIRCLE, {"name": "maskgit", "steps": 4}),
        ("text", "sort 3 1 2 =", "speculative_jacobi"),
        ("motion", "a person walks forward", "speculative_jacobi"),
    ],
)
def test_callbacks_come_after_every_call_and_see_what_is_there(modality, prompt, sampler):
    pipeline, seen = diffusers_pipeline(gen.load(modality)), []

    def step(pipe, number, timestep, tensors):
        assert (
            pipe is pipeline
            and set(tensors) == {"tokens", "known"}
            and tensors["tokens"].shape == tensors["known"].shape
        )
        seen.append((number, timestep, tensors["known"].double().mean().item()))
        tensors["tokens"].zero_()  # of a copy: changes nothing

    out = pipeline(
        prompt,
        sampler=sampler,
        generator=seeded(),
        callback_on_step_end=step,
        output_type="latent",
        callback_on_step_end_tensor_inputs=["tokens", "known"],
    ).to_tuple()
    numbers, times, known = zip(*seen, strict=True)
    assert (
        list(numbers) == list(range(len(seen)))
        and list(times) == sorted(times, reverse=True)
        and times[-1] == 0
        and known[-1] == 1
    )
    assert times == pytest.approx([1 - k for k in known])
    assert torch.equal(
        out[-1],
        pipeline(prompt, sampler=sampler, generator=seeded(), output_type="latent").to_tuple()[-1],
    )

    def back(pipe, number, timestep, tensors):
        return tensors  # as diffusers' own callbacks return them

    assert torch.equal(
        out[-1],
        pipeline(
            prompt,
            sampler=sampler,
            generator=seeded(),
            output_type="latent",
            callback_on_step_end=back,
        ).to_tuple()[-1],
    )


@pytest.mark.parametrize(
    ("modality", "prompt", "sampler"),
    [
        ("image", CIRCLE, {"name": "maskgit", "steps": 4}),
        ("image", CIRCLE, {"name": "mar", "steps": 4}),
        ("motion", "a person walks forward", "autoregressive"),
        ("text", "sort 3 1 2 =", "autoregressive"),
        ("text", "sort 3 1 2 =", "llada"),
    ],
)
def test_an_interrupted_call_gives_what_is_there(modality, prompt, sampler):
    pipeline = diffusers_pipeline(gen.load(modality))

    def stop(pipe, number, timestep, tensors):
        pipe._interrupt = number == 1

    short = pipeline(
        prompt, sampler=sampler, generator=seeded(), callback_on_step_end=stop, output_type="latent"
    ).to_tuple()
    assert pipeline.num_timesteps == 2 and pipeline.output is None and pipeline.interrupt
    whole = pipeline(prompt, sampler=sampler, generator=seeded(), output_type="latent").to_tuple()
    assert pipeline.num_timesteps > 2 and not pipeline.interrupt
    assert short[-1].shape == whole[-1].shape
    held = (short[-1] == whole[-1]).flatten(1).sum()
    assert 0 < held < whole[-1].numel()
    if modality != "text":
        media = pipeline(
            prompt, sampler=sampler, generator=seeded(), callback_on_step_end=stop
        ).to_tuple()[0]
        assert len(media) == 1


# --- what comes out


def test_images_come_as_diffusers_names_them(image):
    from diffusers import ImagePipelineOutput

    calls = {
        t: image([CIRCLE, RING], generator=seeded(), output_type=t, **QUICK)
        for t in ("pil", "np", "pt", "latent")
    }
    assert all(type(c) is ImagePipelineOutput for c in calls.values())
    images = calls["pil"].images
    assert all(isinstance(p, Image.Image) for p in images)
    array, tensor = calls["np"].images, calls["pt"].images
    assert (
        array.shape == (2, 64, 64, 3)
        and array.dtype == np.float32
        and same((array * 255).round().astype(np.uint8), images)
    )
    assert tensor.shape == (2, 3, 64, 64) and torch.equal(
        tensor.permute(0, 2, 3, 1), torch.from_numpy(array)
    )
    assert calls["latent"].images.shape == (2, 256)
    found = image(CIRCLE, generator=seeded(), return_dict=False, **QUICK)
    assert isinstance(found, tuple) and len(found) == 1 and same(found[0], images[:1])


def test_other_media_come_as_diffusers_names_them():
    from diffusers import AudioPipelineOutput

    clip = diffusers_pipeline(gen.load("video"))
    steps = dict(sampler="maskgit", num_inference_steps=1)
    array = clip(
        "a red square moves right", generator=seeded(), num_videos_per_prompt=2, **steps
    ).frames
    tensor = clip("a red square moves right", generator=seeded(), output_type="pt", **steps).frames
    images = clip("a red square moves right", generator=seeded(), output_type="pil", **steps).frames
    assert (
        array.shape[0] == 2
        and array.shape[-1] == 3
        and tensor.shape == (1, array.shape[1], 3, *array.shape[2:4])
    )
    assert (
        torch.equal(tensor[0].permute(0, 2, 3, 1), torch.from_numpy(array[0]))
        and len(images[0]) == array.shape[1]
    )
    sound = diffusers_pipeline(gen.load("speech"))(
        "three seven", generator=seeded(), num_waveforms_per_prompt=2, **steps
    )
    assert (
        type(sound) is AudioPipelineOutput
        and len(sound.audios) == 2
        and all(w.ndim == 1 and w.dtype == np.float32 for w in sound.audios)
    )
    text = diffusers_pipeline(gen.load("text"))(
        ["sort 3 1 2 =", "reverse 3 1 ="], generator=seeded(), sampler="fast_dllm"
    )
    assert (
        len(text.texts) == 2
        and all(isinstance(t, str) for t in text.texts)
        and text.sequences.shape == (2, 16)
    )
    motion = diffusers_pipeline(gen.load("motion"))(
        "a person walks forward", generator=seeded(), **steps
    )
    assert len(motion.media) == 1 and motion.media[0].frames > 0


def test_what_is_not_supported_is_named(image):
    def changing(pipe, number, timestep, tensors):
        return {"tokens": tensors["tokens"] + 1}

    for settings, message in (
        ({"height": 64}, "'height'"),
        ({"num_inference_step": 3}, "Did you mean 'num_inference_steps'"),
        ({"latents": torch.zeros(1)}, "'latents'"),
        ({"num_videos_per_prompt": 2}, "'num_videos_per_prompt'"),
        ({"output_type": "jpg"}, "one of pil, np, pt"),
        ({"generator": [seeded()] * 3}, "generator is 3"),
        ({"generator": 7}, "generator is 7"),
        ({"num_images_per_prompt": 0}, "per_prompt is 0"),
        (
            {"num_inference_steps": 3, "sampler": "speculative_jacobi"},
            "num_inference_steps is 3.*masked",
        ),
        ({"num_inference_steps": 3, "sampler": {"name": "maskgit", "steps": 2}}, "one of them"),
        ({"callback_on_step_end": changing}, "returned different 'tokens'"),
        ({"callback_on_step_end_tensor_inputs": ["latents"]}, "'latents'"),
        ({"guidance_scale": "high"}, "guidance_scale is 'high'"),
    ):
        with pytest.raises(GenError, match=message):
            image(CIRCLE, **{"sampler": "maskgit", **settings})
    assert image(CIRCLE, latents=None, **QUICK).images  # what is none is not said


# --- the files


def test_the_embedded_frontends_are_files_of_diffusers_and_transformers():
    import diffusers
    import transformers

    def frontend(name, kind="codes"):
        return gen.load(name).frontend(kind)

    torch.manual_seed(0)
    with quiet():
        vq = diffusers.VQModel.from_pretrained(ZOO / "image-vq", torch_dtype=torch.float32)
        kl = diffusers.AutoencoderKL.from_pretrained(ZOO / "image-kl", torch_dtype=torch.float32)
        mimi = transformers.MimiModel.from_pretrained(ZOO / "speech-codec", dtype=torch.float32)
        emu3 = transformers.Emu3VQVAE.from_pretrained(ZOO / "video-vq", dtype=torch.float32)
        words = transformers.AutoTokenizer.from_pretrained(ZOO / "text-words")
    x = torch.rand(2, 3, 64, 64) * 2 - 1
    with torch.no_grad():
        ours = frontend("image")
        codes = vq.quantize(vq.encode(x).latents)[2][2].view(2, 1, 16, 16)
        assert torch.equal(ours.encode(x), codes)
        entries = vq.quantize.get_codebook_entry(
            codes.flatten(), (2, 16, 16, vq.config.vq_embed_dim)
        )
        assert torch.allclose(
            ours.decode(codes), vq.decode(entries, force_not_quantize=True).sample, atol=1e-4
        )
        ours = frontend("image", "latents")
        z = kl.encode(x).latent_dist.mode()
        assert torch.allclose(
            torch.nn.functional.pixel_shuffle(ours.encode(x), ours.patch),
            z * kl.config.scaling_factor,
            atol=1e-5,
        )
        assert torch.allclose(ours.decode(ours.encode(x)), kl.decode(z).sample, atol=1e-4)
        ours = frontend("speech")
        codes = torch.randint(128, (1, len(ours.config.codebook_sizes), ours.chunk))
        assert torch.equal(ours.decode(codes), mimi.decode(codes).audio_values)
        ours = frontend("video")
        codes = torch.randint(ours.config.codebook_sizes[0], (1, 1, 2, 8, 8))
        assert torch.allclose(ours.decode(codes), emu3.decode(codes[:, 0]), atol=1e-4)
        assert not torch.allclose(
            ours.decode(codes), emu3.decode(codes[:, 0].flip(1)), atol=1e-2
        )  # control
    assert words("sort 3 1 2 =")["input_ids"] == frontend("text").ids("sort 3 1 2 =")


def test_the_embedded_causal_models_are_files_of_transformers():
    import transformers

    import gen.models.nets.grid

    with quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            ZOO / "image-causal", dtype=torch.float64
        )
    pipe = gen.load("image", dtype="float64")
    tokens = pipe(CIRCLE, "speculative_jacobi", **only(temperature=0.0)).tokens
    binding = pipe.bound("image-causal")[1]
    prompt = torch.tensor([binding.prompt(pipe.modality.condition(CIRCLE))])
    sequence = torch.cat([prompt, tokens], 1)
    with torch.no_grad():
        logits = model(sequence).logits[:, prompt.shape[1] - 1 : -1, : model.config.codebook_size]
    assert torch.equal(logits.argmax(-1), tokens)
    wrong = model(torch.cat([prompt.flip(1), tokens], 1)).logits[
        :, prompt.shape[1] - 1 : -1, : model.config.codebook_size
    ]
    assert not torch.equal(wrong.argmax(-1), tokens)  # control
