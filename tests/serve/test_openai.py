"""OpenAI's client drives every endpoint; what it gets is what a call of the pipeline makes."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
import wave

import numpy as np
import openai
import pytest
from PIL import Image
from served import serving

import gen
from gen.media.video import write_lossless
from gen.serve.api.media import encoded, wav_header

PROMPT = "a small blue ring in the centre"
TASK = "sort 3 1 2 ="


@pytest.fixture(scope="module")
def server():
    with serving() as made:
        yield made


@pytest.fixture(scope="module")
def client(server):
    return server.client()


@pytest.fixture(scope="module")
def pipes():
    made = {}

    def of(name):
        return made.setdefault(name, gen.load(name, device="cpu"))

    return of


def same_file(output, extension, content, i=0) -> bool:
    return encoded(output.served, output.media[i], extension) == content


def test_health_and_models(server, client):
    assert server.ask("/health")[1]["status"] == "ok"
    named = {m.id: m.gen for m in client.models.list()}
    assert {"image", "image-masked", "speech", "text", "video", "motion", "action"} <= set(named)
    assert named["image"]["endpoints"] == ["/v1/images/generations", "/v1/images/edits"]
    assert client.models.retrieve("image").id == "image"
    with pytest.raises(openai.NotFoundError, match="Did you mean 'image'"):
        client.models.retrieve("imagee")


def test_images_are_those_of_a_call(client, pipes):
    sampler = {"name": "maskgit", "steps": 6}
    made = client.images.generate(
        model="image", prompt=PROMPT, n=2, extra_body={"sampler": sampler, "seed": 3}
    )
    alone = pipes("image")(PROMPT, sampler, num_samples=2, seed=3)
    assert [d.gen["seed"] for d in made.data] == [3, 4]
    for i, image in enumerate(made.data):
        assert same_file(alone, "png", base64.b64decode(image.b64_json), i)
        assert image.gen["nfe"] == alone.stats[i].nfe == 6
        assert image.gen["guarantee"] == alone.guarantee
    assert (made.size, made.output_format) == ("64x64", "png")


def test_a_stream_of_previews_ends_with_the_image_of_the_call(client, pipes):
    sampler = {"name": "halton", "steps": 8}
    events = list(
        client.images.generate(
            model="image",
            prompt=PROMPT,
            stream=True,
            partial_images=3,
            extra_body={"sampler": sampler, "seed": 5},
        )
    )
    previews = [c.media for c in pipes("image").stream(PROMPT, sampler, seed=5) if c.preview]
    kinds = [e.type.removeprefix("image_generation.") for e in events]
    assert kinds == ["partial_image"] * len(previews) + ["completed"] and previews
    for i, (event, preview) in enumerate(zip(events[:-1], previews, strict=True)):
        assert event.partial_image_index == i
        shown = Image.open(io.BytesIO(base64.b64decode(event.b64_json)))
        assert np.array_equal(np.asarray(shown), np.asarray(preview))
    alone = pipes("image")(PROMPT, sampler, seed=5)
    assert same_file(alone, "png", base64.b64decode(events[-1].b64_json))
    assert events[-1].gen["nfe"] == alone.stats[0].nfe


def test_completions_are_those_of_a_call(client, pipes):
    made = client.completions.create(
        model="text", prompt=[TASK, "reverse 5 6 7 ="], n=2, seed=7, logprobs=1, max_tokens=8
    )
    alone = pipes("text")([TASK, "reverse 5 6 7 ="], num_samples=2, seed=7, logprobs=1)
    assert [c.text for c in made.choices] == alone.texts
    assert [c.gen["seed"] for c in made.choices] == alone.seeds
    first = made.choices[0].logprobs
    assert first.tokens == [t.text for t in alone.logprobs[0]]
    assert first.token_logprobs == [t.logprob for t in alone.logprobs[0]]
    assert made.usage.completion_tokens == sum(s.tokens for s in alone.stats)
    assert {c.finish_reason for c in made.choices} == {"stop"}


def test_limits_and_stops_say_why_a_text_ended(client):
    def ended(**how):
        made = client.completions.create(model="text", prompt=TASK, seed=0, **how)
        return made.choices[0].text, made.choices[0].finish_reason

    whole = ended()
    assert whole[1] == "stop"
    assert ended(max_tokens=2) == (" ".join(whole[0].split()[:2]), "length")
    assert ended(stop=["2"]) == (whole[0].partition("2")[0], "stop")


@pytest.mark.parametrize("sampler", ["speculative_jacobi", "fast_dllm"])
def test_streamed_texts_join_to_those_of_a_call(client, pipes, sampler):
    how = {"sampler": sampler, "seed": 4}
    stream = client.completions.create(
        model="text",
        prompt=TASK,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=how,
    )
    parts = list(stream)
    alone = pipes("text")(TASK, **how)
    assert "".join(p.choices[0].text for p in parts if p.choices) == alone.texts[0]
    assert [p.choices[0].finish_reason for p in parts if p.choices][-1] == "stop"
    assert parts[-1].usage.completion_tokens == alone.stats[0].tokens


def test_chat_answers_whole_and_streamed_alike(client):
    how = {"model": "text", "messages": [{"role": "user", "content": TASK}], "seed": 2}
    whole = client.chat.completions.create(**how, logprobs=True, top_logprobs=2)
    parts = list(client.chat.completions.create(**how, logprobs=True, stream=True))
    assert parts[0].choices[0].delta.role == "assistant"
    said = "".join(p.choices[0].delta.content or "" for p in parts)
    assert said == whole.choices[0].message.content
    tokens = [t.token for t in whole.choices[0].logprobs.content]
    assert [t.token for t in parts[-1].choices[0].logprobs.content] == tokens
    assert all(len(t.top_logprobs) == 2 for t in whole.choices[0].logprobs.content[:-1])


def test_a_response_format_is_obeyed(client):
    schema = {"name": "number", "schema": {"type": "integer", "minimum": 20, "maximum": 29}}
    made = client.chat.completions.create(
        model="text",
        messages=[{"role": "user", "content": TASK}],
        response_format={"type": "json_schema", "json_schema": schema},
    )
    assert 20 <= json.loads(made.choices[0].message.content) <= 29
    free = client.chat.completions.create(
        model="text", messages=[{"role": "user", "content": TASK}]
    )
    assert free.choices[0].message.content == "1 2 3"  # the control: no number from 20 to 29


def test_the_asynchronous_client_shares_the_batch(server):
    async def work():
        async with server.async_client() as client:
            calls = [
                client.completions.create(model="text", prompt=TASK, seed=seed) for seed in range(8)
            ]
            made = await asyncio.gather(*calls)
            stream = await client.completions.create(model="text", prompt=TASK, stream=True, seed=1)
            parts = [part.choices[0].text async for part in stream]
            return [m.choices[0].text for m in made], "".join(parts)

    texts, streamed = asyncio.run(work())
    assert len(texts) == 8 and streamed == texts[1]


@pytest.mark.slow
def test_edits_by_mask_and_by_instruction(client, pipes):
    image = pipes("image")("a large red circle at the left", "maskgit", seed=1).media[0]
    file = io.BytesIO()
    image.save(file, "PNG")
    region = np.zeros((64, 64), np.uint8)
    region[32:, 32:] = 255
    masks = {"L": Image.fromarray(region)}
    clear = Image.new("RGBA", (64, 64), (0, 0, 0, 255))
    clear.putalpha(Image.fromarray(255 - region))
    masks["RGBA"] = clear  # transparent where the image is made anew, as OpenAI's masks are
    prompt = "a large red circle at the left and a small yellow cross at the bottom right"
    sampler = {"name": "maskgit", "steps": 6}
    alone = pipes("image")(prompt, sampler, source=image, mask=region > 0, seed=2)
    for mask in masks.values():
        held = io.BytesIO()
        mask.save(held, "PNG")
        made = client.images.edit(
            model="image",
            image=("a.png", file.getvalue(), "image/png"),
            mask=("../../mask.png", held.getvalue(), "image/png"),
            prompt=prompt,
            extra_body={"sampler": sampler, "seed": 2},
        )
        assert same_file(alone, "png", base64.b64decode(made.data[0].b64_json))
    asked = {"text": "make the circle blue", "image": image}
    alone = pipes("image")(asked, "maskgit", seed=2)
    events = client.images.edit(
        model="image",
        image=("a.png", file.getvalue(), "image/png"),
        prompt="make the circle blue",
        stream=True,
        partial_images=1,
        extra_body={"sampler": "maskgit", "seed": 2},
    )
    last = list(events)[-1]
    assert last.type == "image_edit.completed"
    assert same_file(alone, "png", base64.b64decode(last.b64_json))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["wav", "flac", "mp3"])
def test_speech_is_that_of_a_call(client, pipes, form):
    made = client.audio.speech.create(
        model="speech",
        input="three seven",
        voice="high",
        response_format=form,
        extra_body={"seed": 1, "speed": "fast"},
    )
    alone = pipes("speech")("three seven, high voice, fast", seed=1)
    assert same_file(alone, form, made.content)
    assert made.response.headers["x-gen-nfe"] == str(alone.stats[0].nfe)
    assert made.response.headers["x-gen-seed"] == "1"
    assert made.response.headers["x-gen-guarantee"] == alone.guarantee


def samples(content: bytes) -> bytes:
    with wave.open(io.BytesIO(content)) as file:
        return file.readframes(file.getnframes())


@pytest.mark.slow
def test_streamed_sound_joins_to_the_file_and_begins_early(client, pipes):
    alone = pipes("speech")("three seven two one, low voice", seed=1)
    file = encoded(alone.served, alone.media[0], "wav")
    how = {"model": "speech", "input": "three seven two one", "voice": "low"}
    for form, extra in (("pcm", {}), ("wav", {"stream_format": "audio"})):
        began, times, parts = time.monotonic(), [], []
        with client.audio.speech.with_streaming_response.create(
            **how, response_format=form, extra_body={"seed": 1, **extra}
        ) as answer:
            for part in answer.iter_bytes():
                times.append(time.monotonic() - began)
                parts.append(part)
        head = wav_header(16_000) if form == "wav" else b""
        assert b"".join(parts) == head + samples(file)
        assert len(parts) > 2 and times[0] < times[-1] / 2
    with client.audio.speech.with_streaming_response.create(
        **how, response_format="pcm", stream_format="sse", extra_body={"seed": 1}
    ) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    joined = b"".join(base64.b64decode(e["audio"]) for e in events[:-1])
    assert joined == samples(file)
    assert events[-1]["gen"]["nfe"] == alone.stats[0].nfe


@pytest.mark.slow
def test_text_and_images_begin_before_half_of_their_time(client):
    def times(create, **how):
        began = time.monotonic()
        return [time.monotonic() - began for _ in create(stream=True, **how)]

    how = {"sampler": "autoregressive", "seed": 0}
    image = {"model": "image", "prompt": PROMPT, "partial_images": 3, "extra_body": how}
    text = {"model": "text", "prompt": "copy 1 2 3 4 5 6 7 8 =", "seed": 0}
    text["extra_body"] = {"sampler": "autoregressive"}
    for create, asked in ((client.images.generate, image), (client.completions.create, text)):
        times(create, **asked)  # the model is loaded
        tries = [times(create, **asked) for _ in range(5)]  # other work may delay a first part
        assert min(map(len, tries)) >= 4 and any(t[0] < t[-1] / 2 for t in tries)


def finished(client, video):
    for _ in range(600):
        video = client.videos.retrieve(video.id)
        if video.status in ("completed", "failed"):
            return video
        time.sleep(0.1)
    raise AssertionError(f"the video is {video.status} after a minute")


@pytest.mark.slow
def test_videos_are_made_asked_about_and_fetched(client, pipes):
    how = {"sampler": "speculative_jacobi", "seed": 3}
    video = client.videos.create(model="video", prompt="a red square moves right", extra_body=how)
    assert video.status in ("queued", "in_progress")
    done = finished(client, video)
    assert (done.status, done.progress) == ("completed", 100)
    assert (done.seconds, done.size) == ("2", "256x256")
    alone = pipes("video")("a red square moves right", **how)
    answer = client.videos.download_content(done.id)
    assert same_file(alone, "mp4", answer.content)
    assert answer.response.headers["x-gen-nfe"] == str(alone.stats[0].nfe)
    more = client.videos.create(
        model="video",
        prompt="a red square moves right",
        input_reference=("clip.mp4", answer.content, "video/mp4"),
        extra_body={**how, "prefix_frames": 8},
    )
    assert finished(client, more).status == "completed"
    assert [v.id for v in client.videos.list()] == [more.id, done.id]
    assert client.videos.delete(done.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(done.id)


@pytest.mark.slow
def test_motions_and_actions_are_those_of_a_call(client, pipes):
    made = client.post(
        "/motions",
        cast_to=object,
        body={"model": "motion", "prompt": "a person walks forward", "seed": 1},
    )
    alone = pipes("motion")("a person walks forward", seed=1)
    joints = np.asarray(made["data"][0]["joints"])
    assert np.array_equal(joints, alone.media[0].joints.astype(float).round(5))
    state = {"observation.state": [0.2, 0.3, 0.6, 0.5, 0, 0, 0], "task": "reach"}
    other = {"observation.state": [0.7, 0.3, 0.1, 0.5, 0, 0, 0], "task": "reach"}
    made = client.post(
        "/actions", cast_to=object, body={"observations": [state, other], "n": 2, "seed": 1}
    )
    asked = [{"observation": state}, {"observation": other}]
    alone = pipes("action")(asked, num_samples=2, seed=1)
    for entry, chunk in zip(made["data"], alone.media, strict=True):
        assert np.array_equal(np.asarray(entry["action"], np.float32), chunk.action)
    assert [entry["observation"] for entry in made["data"]] == [0, 0, 1, 1]


@pytest.mark.slow
def test_media_are_described_and_clips_sounded(client, pipes, tmp_path):
    image = pipes("image")("a large red circle at the left", "maskgit", seed=1)
    content = base64.b64encode(encoded(image.served, image.media[0], "png")).decode()
    url = {"url": f"data:image/png;base64,{content}"}
    parts = [{"type": "text", "text": "describe"}, {"type": "image_url", "image_url": url}]
    made = client.chat.completions.create(
        model="text", messages=[{"role": "user", "content": parts}], seed=0
    )
    alone = pipes("text")({"text": "describe", "image": image.media[0]}, seed=0)
    assert made.choices[0].message.content == alone.texts[0]
    clip = np.random.default_rng(0).integers(0, 255, (16, 16, 16, 3), dtype=np.uint8)
    write_lossless(tmp_path / "clip.mkv", clip, 8)
    content = (tmp_path / "clip.mkv").read_bytes()
    how = {"seed": 0, "sampler": "maskgit"}
    alone = pipes("audio")({"text": "a ball bounces", "video": content}, **how)
    how["video"] = base64.b64encode(content).decode()
    made = client.audio.speech.create(
        model="audio", input="a ball bounces", voice="auto", extra_body=how
    )
    assert same_file(alone, "wav", made.content)
