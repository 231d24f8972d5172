"""Routes of the page: what it offers, its events, and the calls that it copies."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import uvicorn
from fastapi.testclient import TestClient
from PIL import Image

import gen
from gen.config.yaml_text import load_yaml
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.engine.engine import Engine
from gen.media.audio import open_sound
from gen.media.video import read_video
from gen.serve.app import make_app
from gen.serve.live.routes import PAGE
from gen.serve.settings import Settings

JSON = {"Content-Type": "application/json"}
CIRCLE = "a large red circle at the top left"


@pytest.fixture(scope="module")
def engine():
    engine = Engine(device="cpu")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def app(engine):
    return make_app(engine)


@pytest.fixture(scope="module")
def client(app):
    with TestClient(app, base_url="http://localhost") as client:
        yield client


@contextmanager
def served(app) -> Iterator[str]:
    """Address of a real server, which streams."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(timeout=30)


@pytest.fixture(scope="module")
def address(app):
    with served(app) as address:
        yield address


def events(text: str) -> list[tuple[str, dict]]:
    """Names and data of a stream of events."""
    blocks = (re.fullmatch(r"event: (\w+)\ndata: (.*)", b) for b in text.split("\n\n"))
    return [(b[1], json.loads(b[2])) for b in blocks if b]


def call(client, **body) -> list[tuple[str, dict]]:
    answer = client.post("/live/generate", json=body)
    assert answer.status_code == 200, answer.text
    return events(answer.text)


def replayed(found: list[tuple[str, dict]], length: int) -> list[int | None]:
    """Tokens of item 0 after all of its steps."""
    tokens: list[int | None] = [None] * length
    for name, data in found:
        if name == "step" and data["item"] == 0:
            for position in data["removed"]:
                tokens[position] = None
            for position, token in zip(data["committed"], data["tokens"], strict=True):
                tokens[position] = token
    return tokens


def pixels(media: dict) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(media["png"]))).convert("RGB"))


# --- the page and what it offers


def test_the_page_loads_nothing_from_elsewhere_and_runs_no_inline_script(client):
    answer = client.get("/")
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    names = re.findall(r'(?:src|href)="(static/[^"]+)"', answer.text)
    assert {"static/main.js", "static/page.css", "static/theme.js"} <= set(names)
    assert not re.search(r"<script(?![^>]*src=)|<style| style=| on\w+=", answer.text)
    links = re.findall(r"(?:https?:)?//[\w.]+\.\w+", answer.text)
    for path in PAGE.iterdir():
        served = client.get(f"/static/{path.name}")
        assert served.status_code == 200 and served.content == path.read_bytes()
        links += re.findall(r"https?://[\w.]+", served.text)
    # a link that readers may follow, and a name space; nothing is fetched from either
    assert set(links) <= {"https://arxiv.org", "http://www.w3.org"}


@pytest.mark.parametrize("name", ["../live.py", "..%2Flive.py", "%2Fetc%2Fpasswd", "nothing.js"])
def test_no_other_file_can_be_asked_for(client, name):
    assert client.get(f"/static/{name}").status_code == 404


def test_every_modality_is_offered_with_prompts_that_it_reads(client):
    found = {m["name"]: m for m in client.get("/live/modalities").json()}
    assert set(found) == set(registry.table("modality"))
    for name, offered in found.items():
        modality = registry.get("modality", name)()
        assert offered["examples"] and offered["models"][0]["id"] == name
        for prompt in offered["examples"]:
            modality.condition(prompt)
    assert found["video"]["continues"] and not found["action"]["continues"]


@pytest.mark.parametrize("model", ["image-masked", "text", "speech", "world", "audio"])
def test_samplers_that_suit_a_model_are_offered_with_their_guarantee(client, engine, model):
    about = client.get(f"/live/models/{model}").json()
    names = [s["name"] for s in about["samplers"]]
    assert about["sampler"]["name"] in names
    pipe = engine.models.pipeline(model)
    for sampler in about["samplers"]:
        pipe.model_name(sampler["name"])
        resolved = resolve_sampler(sampler["name"])[0]
        assert sampler["guarantee"] == resolved.guarantee
    # the control: a sampler of another protocol is no choice
    assert ("next_frame" in names) == (model == "world")


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted(registry.table("modality")))
def test_every_offered_sampler_has_parameters_to_show(client, model):
    for sampler in client.get(f"/live/models/{model}").json()["samplers"]:
        answer = client.get("/live/sampler", params={"model": model, "spec": sampler["name"]})
        assert answer.status_code == 200, answer.text
        assert answer.json()["guarantee"] == sampler["guarantee"]


def test_parameters_are_those_that_the_chosen_parts_read(client):
    def names(spec):
        found = client.get("/live/sampler", params={"model": "image", "spec": spec}).json()
        return {p["name"]: p for p in found["params"]}

    plain = names("maskgit")
    assert plain["steps"]["default"] == 12 and "kl_threshold" not in plain
    assert "klass" in plain["selector"]["options"]
    assert "kl_threshold" in names('{"name": "maskgit", "selector": "klass"}')
    spec = '{"name": "sjd", "w": 1}'
    answer = client.get("/live/sampler", params={"model": "image", "spec": spec})
    assert answer.status_code == 400 and "parameter" in answer.json()["error"]["message"]


# --- calls


@pytest.mark.parametrize(
    "body",
    [
        {"model": "image", "prompt": CIRCLE, "sampler": {"name": "sjd", "window": 8}, "seed": 3},
        {"model": "image", "prompt": CIRCLE, "sampler": {"name": "maskgit_remask"}, "seed": 5},
        {"model": "text", "prompt": "sort 3 1 2 =", "seed": 1, "sampling": {"temperature": 0.7}},
    ],
)
def test_steps_replayed_are_the_tokens_of_the_offline_call(client, body):
    found = call(client, **body)
    names = [name for name, _ in found]
    assert names[0] == "start" and names[-1] == "result" and "part" in names
    assert names.index("canvas") < names.index("step")
    pipe = gen.load(body["model"], device="cpu")
    sampling = body.get("sampling", {})
    out = pipe(body["prompt"], sampler=body.get("sampler"), seed=body["seed"], **sampling)
    length = dict(found)["canvas"]["length"]
    tokens = replayed(found, length)
    own = out.stats[0].tokens
    assert tokens[:own] == out.tokens[0, :own].tolist()
    assert tokens != replayed(found[:-4], length)  # the control: without the last steps
    item = found[-1][1]["items"][0]
    assert item["nfe"] == out.stats[0].nfe == [d for n, d in found if n == "step"][-1]["nfe"]
    if body["model"] == "image":
        assert np.array_equal(pixels(item["media"]), np.asarray(out.images[0]))
        previews = [d for n, d in found if n == "part" and d["preview"]]
        if body["sampler"]["name"] != "maskgit_remask":  # any token may change until the end
            assert not np.array_equal(pixels(previews[0]), pixels(item["media"]))
    else:
        assert item["media"]["text"] == out.texts[0]
        said = "".join(t for n, d in found if n == "step" for t in d["texts"])
        assert said.strip() == out.texts[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, prompt, kind",
    [
        ("video", "a red square moves right", "frames"),
        ("speech", "three seven", "sound"),
        ("audio", "a red ball bounces 2 times, high", "sound"),
        ("motion", "a person kicks slowly with the left leg once", "motion"),
        ("action", "reach from 0.58 0.61 to 0.80 0.22", "action"),
        ("world", "up up left", "frames"),
    ],
)
def test_every_kind_of_media_is_shown_whole(client, model, prompt, kind):
    found = call(client, model=model, prompt=prompt, seed=2)
    media = found[-1][1]["items"][0]["media"]
    out = gen.load(model, device="cpu")(prompt, seed=2).media[0]
    assert media["kind"] == kind and media["file"]["data"]
    if kind == "sound":
        samples = np.frombuffer(base64.b64decode(media["samples"]), "<i2")
        assert len(samples) == len(out) and np.abs(samples / 32767 - out).max() < 1e-4
    elif kind == "frames":
        strips = [pixels({"png": s}) for s in media["strips"]]
        assert np.array_equal(np.concatenate(strips).reshape(out.shape), out)
    elif kind == "motion":
        joints = np.frombuffer(base64.b64decode(media["joints"]), "<f4").reshape(out.frames, 22, 3)
        assert np.abs(joints[:, 0] - out.root).max() < 1e-4
    else:
        assert np.abs(np.array(media["actions"]) - out.action).max() < 1e-3


@pytest.mark.parametrize(
    "body, param, says",
    [
        ({"model": "imgae", "prompt": "x"}, "model", "Did you mean 'image'?"),
        ({"prompt": None}, "prompt", "prompt is missing"),
        ({"prompt": "a red blob of nothing"}, "prompt", ""),
        ({"sed": 1}, "sed", "Did you mean 'seed'?"),
        ({"seed": -1}, "seed", "an integer from 0"),
        ({"seed": True}, "seed", "an integer from 0"),
        ({"num_samples": 99}, "num_samples", "an integer from 1"),
        ({"sampling": {"temprature": 1}}, "temprature", "temperature"),
        ({"sampling": {"temperature": "1"}}, "temperature", "finite number"),
        ({"sampling": {"stop": ["a"]}}, "stop", "finite number"),
        ({"sampling": {"max_new_tokens": 10**6}}, "max_new_tokens", "at most 32768"),
        ({"sampling": {"max_length": 10**6}}, "max_length", "at most 32768"),
        ({"sampling": {"min_new_tokens": 10**6}}, "min_new_tokens", "at most 32768"),
        ({"sampling": {"logprobs": 10**6}}, "logprobs", "at most 20"),
        ({"sampler": "sjd"}, "sampler", "an object"),
        ({"sampler": {"name": "sdj"}}, "sampler", "Did you mean"),
        ({"sampler": {}}, "sampler.name", "expected the name of a sampler"),
        ({"prefix": "/etc/passwd"}, "prefix", "name and data"),
        ({"source": {"name": "a.png", "data": "?"}}, "source.data", "base64"),
        ({"source": {"name": "a/../b", "data": ""}}, "source.name", "ending"),
        ({"model": "x" * 300}, "model", "at most 200 characters"),
    ],
)
def test_bad_calls_are_answered_with_400_and_one_message(client, body, param, says):
    asked = {"model": "image", "prompt": CIRCLE, **body}
    answer = client.post("/live/generate", json={k: v for k, v in asked.items() if v is not None})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and error["code"]
    assert says in error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"[" * 9999, b"\xff", b"NaN"])
def test_what_is_no_json_object_is_refused(client, body):
    for path in ("generate", "copy", "cancel", "prefix"):
        answer = client.post(f"/live/{path}", content=body, headers=JSON)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "body"
        assert client.post(f"/live/{path}", content=body).status_code == 415


@pytest.mark.parametrize(
    "model", ["/etc", "../image-draft", "~", "org/name", "os.system", "pyproject.toml", "docs"]
)
def test_a_call_names_no_path_of_the_server(client, model):
    sampler = {"name": "speculative", "draft_model": model}
    body = {"model": "image", "prompt": CIRCLE, "sampler": sampler}
    answer = client.post("/live/generate", json=body)
    assert answer.status_code == 400 and "cannot name files" in answer.json()["error"]["message"]


def test_a_call_names_models_that_are_served(client):
    """The control of the refusals: a draft model by its name."""
    sampler = {"name": "speculative", "draft_model": "text-draft"}
    found = call(client, model="text", prompt="sort 3 1 2 =", sampler=sampler)
    assert found[-1][0] == "result"


def test_requests_of_other_pages_and_large_ones_are_refused(client):
    body = {"model": "text", "prompt": "sort 3 1 2 ="}
    for origin, status in (("http://example.org", 403), ("null", 403), ("http://localhost", 200)):
        answer = client.post("/live/copy", json=body, headers={"Origin": origin})
        assert answer.status_code == status
    assert (
        client.post("/live/generate", content=b" " * (Settings().max_body + 1)).status_code == 413
    )


# --- calls that end early

LONG = {"model": "video", "prompt": "a red square moves right", "num_samples": 4, "seed": 1}
LONG |= {"sampler": {"name": "autoregressive"}}


def cancelled(engine: Engine) -> int:
    return sum(n for (_, state), n in engine.stats.requests.items() if state == "cancelled")


def stepped(lines) -> dict:
    """Data of the first event; returns once a pass was made."""
    start = None
    for line in lines:
        if line.startswith("data: ") and start is None:
            start = json.loads(line[6:])
        if line == "event: step":
            assert start is not None
            return start
    raise AssertionError("no step came")


def test_a_call_is_cancelled_by_its_id(address, engine):
    before = cancelled(engine)
    with httpx.stream("POST", f"{address}/live/generate", json=LONG, timeout=60) as answer:
        lines = answer.iter_lines()
        start = stepped(lines)
        said = httpx.post(f"{address}/live/cancel", json={"id": start["id"]}).json()
        assert said == {"cancelled": True}
        rest = [line for line in lines if line.startswith("event: ")]
    assert rest[-1] == "event: cancelled" and "event: result" not in rest
    assert cancelled(engine) == before + 1
    said = httpx.post(f"{address}/live/cancel", json={"id": start["id"]}).json()
    assert said == {"cancelled": False}


def test_a_reader_who_leaves_cancels_the_call(address, engine):
    before = cancelled(engine)
    with httpx.stream("POST", f"{address}/live/generate", json=LONG, timeout=60) as answer:
        stepped(answer.iter_lines())
    until = time.monotonic() + 10
    while cancelled(engine) == before and time.monotonic() < until:
        time.sleep(0.02)
    assert cancelled(engine) == before + 1 and engine.stats.running.total() == 0


def test_a_full_queue_is_answered_with_429_and_when_to_try_again():
    engine = Engine(device="cpu", max_waiting=1)
    with TestClient(make_app(engine), base_url="http://localhost") as client:
        body = {"model": "text", "prompt": "sort 3 1 2 =", "num_samples": 2}
        answer = client.post("/live/generate", json=body)
        assert answer.status_code == 429 and int(answer.headers["Retry-After"]) >= 1
        assert call(client, **{**body, "num_samples": 1})[-1][0] == "result"
    engine.close()


def test_a_call_beyond_the_deadline_ends_with_an_error(engine):
    with TestClient(
        make_app(engine, Settings(deadline=0.2)), base_url="http://localhost"
    ) as client:
        name, data = call(client, **LONG)[-1]
    assert name == "error" and "within 0.2 seconds" in data["message"]


# --- copied calls

COPIED = {"model": "text", "prompt": "shuffle 5 6 1 2 0 3 =", "seed": 4, "num_samples": 2}
COPIED |= {"sampler": {"name": "speculative_jacobi", "window": 5}}
COPIED |= {"sampling": {"temperature": 0.8}}


def made_in(copied: dict) -> str:
    """Folder of the outputs of a copied call."""
    return load_yaml(copied["job"])["out"]


def executed(copied: dict, folder, monkeypatch) -> list[list[int]]:
    """Tokens of the Python of a copied call."""
    monkeypatch.chdir(folder)
    names: dict = {}
    exec(compile(copied["python"], "copied", "exec"), names)
    assert (folder / made_in(copied) / "manifest.jsonl").exists()
    return names["out"].tokens.tolist()


def test_the_copied_python_gives_the_tokens_of_the_page(client, tmp_path, monkeypatch):
    found = call(client, **COPIED)
    tokens = executed(client.post("/live/copy", json=COPIED).json(), tmp_path, monkeypatch)
    count = found[-1][1]["items"][0]["tokens"]
    assert replayed(found, len(tokens[0]))[:count] == tokens[0][:count]
    other = {**COPIED, "seed": 5}  # the control: another seed, other tokens
    assert executed(client.post("/live/copy", json=other).json(), tmp_path, monkeypatch) != tokens


@pytest.mark.parametrize("prompt", ['it\'s $HOME `id` \\ "x"\nEND\n%s', "ä 一 🙂 </script>", ""])
def test_a_copied_call_keeps_the_prompt_as_it_is(client, prompt):
    body = {"model": "text", "prompt": prompt}
    copied = client.post("/live/copy", json=body).json()
    assert repr(prompt) in copied["python"]
    assert load_yaml(copied["job"])["prompts"] == [prompt]
    shell = "curl() { cat; }\n" + copied["curl"]  # what curl would send
    sent = subprocess.run(["bash", "-c", shell], capture_output=True, check=True)
    assert json.loads(sent.stdout)["prompt"] == prompt


@pytest.mark.slow
def test_the_copied_curl_and_job_give_the_output_of_the_page(client, address, tmp_path):
    texts = [i["media"]["text"] for i in call(client, **COPIED)[-1][1]["items"]]
    copied = httpx.post(f"{address}/live/copy", json=COPIED).json()
    assert f"curl {address}/v1/completions" in copied["curl"]
    made = json.loads(curled(copied, tmp_path))
    assert [choice["text"] for choice in made["choices"]] == texts
    (tmp_path / "page.yaml").write_text(copied["job"])
    run_job(tmp_path)
    written = sorted((tmp_path / made_in(copied)).glob("*.txt"))
    assert [path.read_text().strip() for path in written] == texts


def curled(copied: dict, folder, **environment: str) -> bytes:
    """What the curl of a copied call prints."""
    shell = "curl() { command curl -s --noproxy '*' \"$@\"; }\n" + copied["curl"]
    env = {**os.environ, **environment}
    done = subprocess.run(["bash", "-c", shell], capture_output=True, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, prompt, num_samples, path",
    [
        ("image", CIRCLE, 2, "/v1/images/generations"),
        ("speech", "three seven", 1, "/v1/audio/speech"),
        ("speech", "three seven", 2, "/live/generate"),
        ("motion", "a person kicks slowly with the left leg once", 1, "/v1/motions"),
        ("action", "reach from 0.58 0.61 to 0.80 0.22", 1, "/v1/actions"),
        ("video", "a red square moves right", 1, "/live/generate"),
        ("world", "up up left", 1, "/live/generate"),
    ],
)
def test_the_copied_curl_gives_the_media_of_the_page(
    client, address, tmp_path, model, prompt, num_samples, path
):
    body = {"model": model, "prompt": prompt, "num_samples": num_samples, "seed": 6}
    items = call(client, **body)[-1][1]["items"]
    copied = httpx.post(f"{address}/live/copy", json=body).json()
    assert f"{address}{path} " in copied["curl"]
    made = curled(copied, tmp_path)
    if path == "/live/generate":
        assert [i["digest"] for i in events(made.decode())[-1][1]["items"]] == [
            i["digest"] for i in items
        ]
    elif model == "speech":
        (tmp_path / "page.wav").write_bytes(base64.b64decode(items[0]["media"]["file"]["data"]))
        waves = [open_sound(tmp_path / name)[0] for name in ("page.wav", "speech.wav")]
        assert np.array_equal(*waves)
    else:
        data = json.loads(made)["data"]
        assert [d["gen"]["nfe"] for d in data] == [i["nfe"] for i in items]
        if model == "image":
            assert [d["b64_json"] for d in data] == [i["media"]["file"]["data"] for i in items]
        elif model == "action":
            assert np.allclose(data[0]["action"], items[0]["media"]["actions"], atol=1e-3)


@pytest.mark.slow
def test_the_copied_curl_takes_the_key_of_the_environment(engine, tmp_path):
    with served(make_app(engine, Settings(api_keys=("a-key",)))) as address:
        headers = {"Authorization": "Bearer a-key"}
        copied = httpx.post(f"{address}/live/copy", json=COPIED, headers=headers).json()
        assert "a-key" not in copied["curl"]
        assert "choices" in json.loads(curled(copied, tmp_path, GEN_API_KEY="a-key"))
        assert "error" in json.loads(curled(copied, tmp_path, GEN_API_KEY="another"))


def run_job(folder) -> None:
    command = [sys.executable, "-m", "gen", "run", "page.yaml"]
    env = {**os.environ, "PYTHONPATH": str(Path(gen.__file__).parents[1])}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def as_file(image: Image.Image, name: str) -> dict:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return {"name": name, "data": base64.b64encode(buffer.getvalue()).decode()}


@pytest.mark.slow
def test_an_edit_keeps_what_is_not_painted_here_and_in_the_copied_calls(
    client, address, tmp_path, monkeypatch
):
    body = {"model": "image", "prompt": CIRCLE, "seed": 3, "sampler": {"name": "maskgit"}}
    source = Image.fromarray(pixels(call(client, **body)[-1][1]["items"][0]["media"]))
    mask = np.zeros((64, 64), np.uint8)
    mask[32:, 32:] = 255
    body["prompt"] = f"{CIRCLE} and a small yellow cross at the bottom right"
    body |= {"source": as_file(source, "a.png"), "mask": as_file(Image.fromarray(mask), "m.png")}
    item = call(client, **body)[-1][1]["items"][0]
    edited = pixels(item["media"])
    kept = mask == 0
    assert np.array_equal(edited[kept], np.asarray(source)[kept])
    assert not np.array_equal(edited[~kept], np.asarray(source)[~kept])
    for name in ("source", "mask"):
        (tmp_path / f"{name}.png").write_bytes(base64.b64decode(body[name]["data"]))
    copied = httpx.post(f"{address}/live/copy", json=body).json()
    made = json.loads(curled(copied, tmp_path))["data"][0]
    assert np.array_equal(pixels({"png": made["b64_json"]}), edited)
    executed(copied, tmp_path, monkeypatch)
    made = next((tmp_path / made_in(copied)).glob("*.png"))
    assert np.array_equal(np.asarray(Image.open(made).convert("RGB")), edited)
    (tmp_path / "page.yaml").write_text(copied["job"].replace("out: out/", "out: out/job/"))
    run_job(tmp_path)
    made = next((tmp_path / "out/job").glob("*/*.png"))
    assert np.array_equal(np.asarray(Image.open(made).convert("RGB")), edited)


@pytest.mark.slow
def test_a_clip_is_continued_from_the_share_that_is_kept(client, tmp_path):
    body = {"model": "video", "prompt": "a red square moves right", "seed": 1}
    item = call(client, **body)[-1][1]["items"][0]
    first = np.concatenate([pixels({"png": s}) for s in item["media"]["strips"]])
    asked = {"model": "video", "file": item["kept"], "share": 0.5}
    prefix = client.post("/live/prefix", json=asked).json()
    path = tmp_path / prefix["name"]
    path.write_bytes(base64.b64decode(prefix["data"]))
    clip = first.reshape(16, 32, 32, 3)
    assert np.array_equal(read_video(path, (32, 32)), clip[:8])
    again = call(client, **{**body, "seed": 2}, prefix=prefix)
    out = gen.load("video", device="cpu")(body["prompt"], seed=2, prefix=clip[:8])
    strip = pixels({"png": again[-1][1]["items"][0]["media"]["strips"][0]})
    assert np.array_equal(strip, out.media[0].reshape(-1, 32, 3))
    for share in (0, 1, "x", True):
        assert client.post("/live/prefix", json={**asked, "share": share}).status_code == 400


# --- the world


@pytest.mark.slow
def test_the_world_is_played_while_the_engine_decodes_worlds(client, address):
    world = gen.load_world(seed=5, device="cpu")
    begun = client.post("/world/new", json={"seed": 5}).json()
    pipe = gen.load("world", device="cpu")
    right = pipe("right*12 up", seed=2).tokens
    done: list[list] = []
    work = threading.Thread(
        target=lambda: done.extend(
            call(client, model="world", prompt="right*12 up", seed=2)[-1][1]["items"]
            for _ in range(4)
        )
    )
    work.start()
    for action in ["right", "up", "left", "down"] * 6:
        body = {"session": begun["session"], "action": action}
        seen = client.post("/world/step", json=body).json()
        frame = np.frombuffer(base64.b64decode(seen["frame"]), np.uint8)
        assert np.array_equal(frame.reshape(*seen["size"], 3), world.step(action))
    work.join()
    digest = hashlib.sha256(right[0].contiguous().numpy().tobytes()).hexdigest()[:16]
    assert [items[0]["digest"] for items in done] == [digest] * 4


def test_the_world_is_played_under_the_same_address(client):
    page = client.get("/world")
    assert b"<canvas" in page.content
    begun = client.post("/world/new", json={"seed": 3}).json()
    seen = client.post("/world/step", json={"session": begun["session"], "action": "up"}).json()
    assert seen["count"] == 1
    assert client.post("/world/step", json={"session": "x", "action": "up"}).status_code == 400
    other = {"Origin": "http://example.org"}
    assert client.post("/world/new", json={"seed": 3}, headers=other).status_code == 403
