"""The engine: requests of many callers have the tokens and the media that each has alone."""

from __future__ import annotations

import io
import random
import threading
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image

import gen
from gen.core.edit_spec import EditSpec
from gen.core.errors import GenError
from gen.engine.engine import Engine
from gen.engine.ticket import CANCELLED, DONE, Cancelled, DeadlineExceeded, QueueFull

TEXTS = ["sort 3 1 2 =", "shuffle 5 2 8 0 1 =", "reverse 4 7 1 =", "3 + 8 + 5 ="]
ACTIONS = ["reach", "push the block"]


@pytest.fixture(scope="module")
def pipes():
    """Pipelines in float64, which add no rounding of another batch."""
    names = ("text", "action", "image")
    return {name: gen.load(name, device="cpu", dtype="float64") for name in names}


@pytest.fixture
def engine(pipes):
    engine = Engine(pipes, max_rows=4)
    yield engine
    engine.close()


def plain(media):
    """Media as bytes."""
    if isinstance(media, Image.Image):
        buffer = io.BytesIO()
        media.save(buffer, "PNG")
        return buffer.getvalue()
    if isinstance(media, str):
        return media.encode()
    return np.asarray(media).tobytes()


def requests_of(count, image=False):
    """Requests of mixed models, samplers, prompts, seeds and parameters."""
    kinds = [
        ("text", TEXTS, "autoregressive", {"temperature": 0.8}),
        ("text", TEXTS, "speculative_jacobi", {"temperature": 1.2, "top_k": 5}),
        ("text", TEXTS, {"name": "speculative", "drafter": "prompt_lookup"}, {}),
        ("text", TEXTS, "fast_dllm", {}),
        ("text", TEXTS, "autoregressive", {"temperature": 0.3, "top_p": 0.9, "num_samples": 2}),
        ("text", TEXTS, "autoregressive", {"repetition_penalty": 1.2, "stop": ["7"]}),
        ("action", ACTIONS, "speculative_jacobi", {}),
        ("action", ACTIONS, "maskgit", {"guidance_scale": 1.5}),
    ]
    if image:
        kinds += [
            ("image", ["a red circle", "a small blue ring"], "maskgit", {"temperature": 0.9}),
            ("image", ["a green square"], "sjd", {"guidance_scale": 3.0}),
            ("image", ["a red circle"], "next_scale", {}),
        ]
    drawn = random.Random(0)
    found = []
    for number in range(count):
        model, prompts, sampler, options = kinds[number % len(kinds)]
        prompt = drawn.choice(prompts)
        found.append((model, prompt, sampler, {"seed": drawn.randrange(99), **options}))
    return found


def same_as_alone(pipes, requests, order, max_rows=4):
    engine = Engine(pipes, max_rows=max_rows)
    try:
        tickets = {}
        for number in order:
            model, prompt, sampler, options = requests[number]
            tickets[number] = engine.submit(model, prompt, sampler, **options)
            if number % 3 == 0:
                time.sleep(0.01)
        for number, (model, prompt, sampler, options) in enumerate(requests):
            alone = pipes[model](prompt, sampler, progress=False, **options)
            made = tickets[number].result(timeout=300)
            assert torch.equal(made.tokens, alone.tokens), (number, requests[number])
            assert list(map(plain, made.media)) == list(map(plain, alone.media))
            assert [s.nfe for s in made.stats] == [s.nfe for s in alone.stats]
            assert made.seeds == alone.seeds and made.guarantee == alone.guarantee
        return engine
    finally:
        engine.close()


def test_mixed_requests_have_the_tokens_and_media_they_have_alone(pipes):
    requests = requests_of(16)
    order = list(range(16))
    engine = same_as_alone(pipes, requests, order)
    assert engine.stats.nfe["text"] > engine.stats.steps["text"]  # rows did share passes


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_64_mixed_requests_in_any_order_have_the_tokens_they_have_alone(pipes, seed):
    requests = requests_of(64, image=True)
    order = list(range(64))
    random.Random(seed).shuffle(order)
    same_as_alone(pipes, requests, order, max_rows=8)


def test_a_request_with_another_seed_has_other_tokens(engine):
    """Control of the comparisons above."""
    made = [
        engine.submit("text", TEXTS[1], "autoregressive", seed=s, temperature=2.0) for s in (0, 1)
    ]
    one, other = (ticket.result(60).tokens for ticket in made)
    assert one.shape != other.shape or not torch.equal(one, other)


def test_chunks_of_a_text_make_up_its_text(pipes, engine):
    chunks, alone = [], pipes["text"](TEXTS[0], "autoregressive", seed=1)
    ticket = engine.submit("text", TEXTS[0], "autoregressive", seed=1, on_chunk=chunks.append)
    ticket.result(60)
    assert "".join(chunk.media for chunk in chunks) == alone.media[0]
    assert 0 < len(chunks[0].media) < len(alone.media[0])
    assert ticket.submitted < ticket.first_chunk < ticket.ended


def test_steps_of_an_item_lead_to_its_tokens(engine):
    steps = []
    out = engine.submit("action", ACTIONS[0], "maskgit", seed=1, on_step=steps.append)
    made = out.result(60)
    assert [step.nfe for step in steps] == list(range(1, made.stats[0].nfe + 1))
    assert steps[-1].known.all() and np.array_equal(steps[-1].tokens, made.tokens[0].numpy())
    assert sum(len(step.committed) for step in steps) == made.tokens.shape[1]
    assert all(a.known.sum() < b.known.sum() for a, b in pairwise(steps))


def test_a_cancelled_request_frees_its_row_within_one_round(engine):
    started = threading.Event()
    ticket = engine.submit(
        "image", "a red circle", "autoregressive", on_step=lambda _: started.set()
    )
    assert started.wait(60)
    assert engine.stats.running["image"] == 1
    steps = engine.stats.steps["image"]
    ticket.cancel()
    with pytest.raises(Cancelled):
        ticket.result(60)
    assert ticket.state == CANCELLED
    assert engine.stats.running["image"] == 0
    assert engine.stats.steps["image"] <= steps + 2  # the one that ran, and the one it saw


def test_a_request_that_is_not_done_in_time_ends_with_its_deadline(engine):
    ticket = engine.submit("image", "a red circle", "autoregressive", deadline=0.2)
    with pytest.raises(DeadlineExceeded, match=r"within 0\.2 seconds"):
        ticket.result(60)
    assert ticket.ended - ticket.submitted < 5


def test_a_full_queue_refuses_and_takes_requests_again_later(pipes):
    engine = Engine(pipes, max_rows=1, max_waiting=3)
    try:
        tickets = [
            engine.submit("image", "a red circle", "autoregressive", seed=n) for n in range(2)
        ]
        with pytest.raises(QueueFull, match="expected at most 3 waiting") as refused:
            engine.submit("image", "a red circle", "maskgit", num_samples=9)
        assert refused.value.retry_after > 0
        for ticket in tickets:
            ticket.cancel()
        for ticket in tickets:
            with pytest.raises(Cancelled):
                ticket.result(60)
        assert engine.submit("text", TEXTS[0]).result(60).media
        assert engine.stats.waiting.total() == engine.stats.running.total() == 0
    finally:
        engine.close()


def test_a_full_queue_estimates_the_time_of_work_and_not_that_of_silence(pipes):
    engine = Engine(pipes, max_rows=1, max_waiting=1)
    try:
        worked = 0.0
        for seed in range(3):
            began = time.monotonic()
            engine.submit("text", TEXTS[0], seed=seed).result(60)
            worked += time.monotonic() - began
            time.sleep(1 + worked)  # longer than all work so far
        with pytest.raises(QueueFull) as refused:
            engine.submit("text", TEXTS[0], num_samples=2)
        assert 0 < refused.value.retry_after <= worked
    finally:
        engine.close()


def test_a_request_that_fails_fails_alone(pipes, engine):
    """Every token of its second position is banned; the others of its batch are made again."""
    sampler = "autoregressive"

    def broken(input_ids, scores):
        return scores * float("nan") if input_ids.shape[1] > 0 else scores

    good = [engine.submit("text", TEXTS[n], sampler, seed=n) for n in range(3)]
    bad = engine.submit("text", TEXTS[0], sampler, logits_processor=[broken])
    with pytest.raises(GenError, match="NaN"):
        bad.result(60)
    for n, ticket in enumerate(good):
        assert ticket.result(60).media == pipes["text"](TEXTS[n], sampler, seed=n).media


def test_a_batch_that_fails_is_made_again_item_by_item(pipes, engine, monkeypatch):
    from gen.engine.open_batch import OpenBatch

    step, failed = OpenBatch.step, []

    def fails_with_several_rows(batch):
        if batch.rows > 1:
            failed.append(batch.rows)
            raise GenError("a row of the batch has no distribution")
        step(batch)

    monkeypatch.setattr(OpenBatch, "step", fails_with_several_rows)
    chunks = [[], [], []]
    tickets = [
        engine.submit("text", TEXTS[n], "autoregressive", seed=n, on_chunk=chunks[n].append)
        for n in range(3)
    ]
    for n, ticket in enumerate(tickets):
        alone = pipes["text"](TEXTS[n], "autoregressive", seed=n)
        assert ticket.result(60).media == alone.media
        assert "".join(chunk.media for chunk in chunks[n]) == alone.media[0]
    assert failed


def test_a_lane_gets_fewer_rows_where_memory_runs_out(pipes, engine, monkeypatch):
    from gen.engine.open_batch import OpenBatch

    step, rows = OpenBatch.step, []

    def out_of_memory(batch):
        rows.append(batch.rows)
        if batch.rows > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        step(batch)

    monkeypatch.setattr(OpenBatch, "step", out_of_memory)
    ticket = engine.submit("text", TEXTS[0], "autoregressive", num_samples=6, seed=0)
    alone = pipes["text"](TEXTS[0], "autoregressive", num_samples=6, seed=0)
    assert ticket.result(60).media == alone.media
    assert max(rows) == 4 and rows[-1] <= 2


def test_rows_are_admitted_as_memory_allows(pipes):
    """After the first forward pass it is known how much a row takes."""
    engine = Engine(pipes, max_rows=8, max_bytes=1)
    try:
        first = engine.submit("text", TEXTS[0], "autoregressive", seed=0)
        first.result(60)
        seen = []
        tickets = [
            engine.submit(
                "text",
                TEXTS[0],
                "autoregressive",
                seed=n,
                on_step=lambda _: seen.append(engine.stats.running["text"]),
            )
            for n in range(4)
        ]
        for ticket in tickets:
            ticket.result(60)
        assert max(seen[len(seen) // 2 :]) <= 4
    finally:
        engine.close()


def test_edits_and_continuations_are_those_of_a_call(pipes, engine):
    maskgit = {"name": "maskgit", "steps": 3}
    source = pipes["image"]("a red circle", maskgit, seed=0).media[0]
    mask = Image.new("L", source.size, 0)
    mask.paste(255, (0, 0, 32, 64))
    start = EditSpec(source, mask)
    made = engine.submit("image", "a blue circle", maskgit, seed=1, start=start).result(60)
    alone = pipes["image"]("a blue circle", maskgit, seed=1, source=source, mask=mask)
    assert plain(made.media[0]) == plain(alone.media[0])


def test_bad_requests_fail_before_they_wait(engine):
    for options, message in [
        ({"model": "imag"}, "Did you mean 'image'"),
        ({"sampler": "autoregresive"}, "Did you mean 'autoregressive'"),
        ({"temperatur": 1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"num_samples": 0}, "num_samples"),
    ]:
        given = {"model": "text", "prompts": TEXTS[0], **options}
        with pytest.raises(GenError, match=message):
            engine.submit(
                given.pop("model"), given.pop("prompts"), given.pop("sampler", None), **given
            )
    assert engine.stats.waiting.total() == 0


def test_closing_ends_all_requests(pipes):
    engine = Engine(pipes, max_rows=1)
    tickets = [engine.submit("image", "a red circle", "autoregressive", seed=n) for n in range(3)]
    engine.close()
    for ticket in tickets:
        with pytest.raises(Cancelled):
            ticket.result(1)
    with pytest.raises(Cancelled, match="closed"):
        engine.submit("text", TEXTS[0])


def test_a_result_that_is_not_there_yet_is_a_timeout(engine):
    ticket = engine.submit("image", "a red circle", "autoregressive")
    with pytest.raises(TimeoutError):
        ticket.result(0.01)
    ticket.cancel()
    ended = threading.Event()
    ticket.add_done_callback(lambda _: ended.set())
    assert ended.wait(30) and ticket.state != DONE
