"""Microbatches: by length, smaller where memory ran out, fixed where a job is to be deterministic;
and what a pipeline refuses."""

from __future__ import annotations

import hashlib

import pytest
import torch
from toyjob import Pipe, files, job, leftovers, run, steady

from gen.config.job import make_job
from gen.core.errors import GenError
from gen.jobs.progress.report import Silent
from gen.jobs.run import run_job
from gen.pipeline.memory import BatchSizes
from gen.store.ledger import read_rows

pytestmark = pytest.mark.usefixtures("toy")
WORDS = ["a", "b", "c", "d", "e", "f"]


class Lengthy(Pipe):
    """A prompt is as long as its text; only so much fits in at once."""

    room = 10**9

    def prompt_lengths(self, items, sampler):
        return [len(i.prompt) for i in items]

    def generate(self, items, *args, **kwargs):
        if len(items) * max(self.prompt_lengths(items, None)) > self.room:
            self.batches.append([i.prompt for i in items])
            raise torch.OutOfMemoryError
        return super().generate(items, *args, **kwargs)


class Mixing(Pipe):
    """Media that depend on the whole microbatch, as the last bits of real ones do."""

    def generate(self, items, *args, **kwargs):
        out = super().generate(items, *args, **kwargs)
        mix = hashlib.sha256(repr([(i.prompt, i.seed) for i in items]).encode()).hexdigest()[:8]
        out.media = [f"{m} {mix}" for m in out.media]
        return out


def test_items_of_about_one_length_run_together(tmp_path):
    prompts = ["a" * n for n in (3, 40, 2, 33, 3, 60)]
    _, pipe = run(tmp_path, Lengthy(), prompts=prompts)
    assert [[len(p) for p in b] for b in pipe.batches] == [[3, 2, 3], [40, 33, 60]]
    assert [len(r["prompt"]) for r in read_rows(tmp_path)] == [
        3,
        40,
        2,
        33,
        3,
        60,
    ]  # the manifest keeps the order of the input


def test_what_fits_is_remembered_for_its_length_and_longer_ones(tmp_path):
    pipe = Lengthy()
    pipe.room = 240
    run(tmp_path, pipe, prompts=["s" * 4] * 8 + ["l" * 64] * 16, batch_size=8, shard_items=8)
    assert [(len(b), len(b[0])) for b in pipe.batches] == [
        (8, 4),
        (8, 64),
        (4, 64),
        *[(2, 64)] * 8,
    ]  # over two shards
    assert all(r["status"] == "ok" for r in read_rows(tmp_path))
    sizes = BatchSizes()
    sizes.lower(0, 5, 8)
    assert [sizes.of(0, n, 8) for n in (4, 5, 6)] == [8, 4, 4] and sizes.of(1, 6, 8) == 8


def test_a_deterministic_job_makes_the_same_bytes_whatever_was_missing(tmp_path):
    run(tmp_path / "whole", Mixing(), prompts=WORDS, batch_size=3, deterministic=True)
    run(tmp_path / "torn", Mixing(), prompts=WORDS, batch_size=3, deterministic=True)
    (tmp_path / "torn" / "000004-e-s0.txt").unlink()
    _, pipe = run(tmp_path / "torn", Mixing(), prompts=WORDS, batch_size=3, deterministic=True)
    assert pipe.batches == [["d", "e", "f"]] and files(tmp_path / "torn") == files(
        tmp_path / "whole"
    )
    assert steady(tmp_path / "torn") == steady(tmp_path / "whole") and not leftovers(
        tmp_path / "torn"
    )


def test_without_it_they_need_not_be(tmp_path):  # the negative control of the test above
    run(tmp_path / "whole", Mixing(), prompts=WORDS, batch_size=3)
    run(tmp_path / "torn", Mixing(), prompts=WORDS, batch_size=3)
    (tmp_path / "torn" / "000004-e-s0.txt").unlink()
    _, pipe = run(tmp_path / "torn", Mixing(), prompts=WORDS, batch_size=3)
    assert pipe.batches == [["e"]] and files(tmp_path / "torn") != files(tmp_path / "whole")


def test_a_deterministic_job_keeps_its_microbatches_or_says_that_it_cannot(tmp_path):
    with pytest.raises(GenError, match="choose a smaller batch_size"):
        run(tmp_path / "a", Pipe(limit=2), prompts=WORDS, batch_size=3, deterministic=True)
    run(tmp_path / "b", prompts=WORDS, batch_size=3, deterministic=True)
    with pytest.raises(GenError, match="batch_size: was 3, now 2"):
        run(tmp_path / "b", prompts=WORDS, batch_size=2, deterministic=True)


def test_a_deterministic_job_computes_with_one_thread_and_puts_back_what_it_found(tmp_path):
    seen, before = [], torch.get_num_threads()
    torch.set_num_threads(2)
    pipe = Pipe()
    plain = pipe.generate
    pipe.generate = lambda *a, **k: (
        seen.append((torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()))
        or plain(*a, **k)
    )
    try:
        run(tmp_path / "a", pipe, deterministic=True)
        run(tmp_path / "b", pipe)
    finally:
        after = torch.get_num_threads()
        torch.set_num_threads(before)
    assert (
        seen == [(1, True), (2, False)]
        and after == 2
        and not torch.are_deterministic_algorithms_enabled()
    )


class Refusing(Pipe):
    """A pipeline that refuses some prompts only when it sees them."""

    def generate(self, items, *args, **kwargs):
        if any(i.prompt in self.bad for i in items):
            self.batches.append([i.prompt for i in items])
            raise GenError("that prompt is longer than the model's window")
        return super().generate(items, *args, **kwargs)


def test_one_prompt_that_the_model_refuses_is_one_failed_item(tmp_path):
    summary, _ = run(tmp_path, Refusing(bad=["a", "d"]), prompts=WORDS, batch_size=4)
    assert [f["prompt"] for f in summary["failed"]] == ["a", "d"] and "window" in summary["failed"][
        0
    ]["error"]
    assert [r["status"] for r in read_rows(tmp_path)] == [
        "failed",
        "ok",
        "ok",
        "failed",
        "ok",
        "ok",
    ]


def test_what_no_item_survives_ends_the_job(tmp_path):  # the negative control of the test above
    pipe = Refusing(bad=WORDS)
    with pytest.raises(GenError, match="window"):
        run(tmp_path / "o", pipe, prompts=WORDS, batch_size=2)
    assert len(pipe.batches) == 3 and not (tmp_path / "o").exists()


def test_rows_with_parameters_of_their_own_fail_on_their_own(tmp_path):
    rows = [{"prompt": "a", "sampling": {"top_k": 3}}, "b"]
    summary, pipe = run(tmp_path, Refusing(bad=["a"]), prompts=rows)
    assert [f["prompt"] for f in summary["failed"]] == ["a"] and pipe.batches == [["a"], ["b"]]
    assert (
        read_rows(tmp_path)[0]["overrides"] == {"sampling": {"top_k": 3}}
        and "overrides" not in read_rows(tmp_path)[1]
    )


# --- several batches at once


class Turning(Pipe):
    """Puts the next item in the place of one that is done. ``limit``: items that fit in at a time;
    ``large``: one that never does. ``made``: what came out."""

    large = None

    def __init__(self, **how):
        super().__init__(**how)
        self.most, self.handed, self.made = self.limit, [], []

    def guarantee(self, sampler):
        return sampler.guarantee

    def turns(self, sampler):
        return 4

    def generate(self, items, *args, max_batch=None, **kwargs):
        self.handed.append((len(items), max_batch))
        self.limit = (
            0
            if min(max_batch, len(items)) > self.most or self.large in [i.prompt for i in items]
            else 10**9
        )
        out = super().generate(items, *args, max_batch=max_batch, **kwargs)
        self.made += [i.prompt for i in items]
        return out


MANY = [f"{n:02d}" for n in range(16)]


def test_several_batches_are_handed_over_at_once_and_one_is_decoded_at_a_time(tmp_path):
    heard = []

    class Heard(Silent):
        def batch(self, label, rows):
            heard.append(rows)

    pipe = Turning()
    run_job(
        job(tmp_path, prompts=MANY[:11], batch_size=2, shard_items=16),
        load=pipe.load,
        progress=Heard(),
    )
    assert pipe.handed == [(8, 2), (3, 2)] and heard == [2, 2]
    assert [r["batch"] for r in read_rows(tmp_path)] == [2] * 11 and pipe.made == MANY[:11]
    _, plain = run(tmp_path / "plain", prompts=MANY[:11], batch_size=2, shard_items=16)
    assert [len(b) for b in plain.batches] == [2] * 5 + [1] and steady(
        tmp_path / "plain"
    ) == steady(tmp_path)


def test_where_memory_runs_out_fewer_are_decoded_at_a_time_and_nothing_is_lost_or_made_twice(
    tmp_path,
):
    summary, pipe = run(tmp_path, Turning(limit=2), prompts=MANY, batch_size=8, shard_items=16)
    assert (
        pipe.handed == [(16, 8), (16, 4), (8, 2), (8, 2)]
        and pipe.made == MANY
        and not summary["failed"]
    )
    run(tmp_path / "calm", Turning(), prompts=MANY, batch_size=8, shard_items=16)
    assert steady(tmp_path / "calm") == steady(tmp_path) and files(tmp_path / "calm") == files(
        tmp_path
    )


@pytest.mark.parametrize("size", [1, 4])
def test_an_item_that_has_no_room_even_alone_is_the_only_one_that_fails(tmp_path, size):
    pipe = Turning()
    pipe.large = "05"
    summary, _ = run(tmp_path, pipe, prompts=MANY, batch_size=size, shard_items=16)
    assert [f["prompt"] for f in summary["failed"]] == ["05"] and sorted([*pipe.made, "05"]) == MANY
    assert [r["prompt"] for r in read_rows(tmp_path)] == MANY


class Picky(Turning, Refusing):
    """Refuses what ``Refusing`` does, of several batches at once."""


@pytest.mark.parametrize("kind", [Turning, Picky])
def test_one_bad_item_among_several_batches_fails_alone_and_the_others_keep_their_batches(
    tmp_path, kind
):
    summary, pipe = run(tmp_path, kind(bad=["05"]), prompts=MANY, batch_size=4, shard_items=16)
    assert [f["prompt"] for f in summary["failed"]] == ["05"] and sorted([*pipe.made, "05"]) == MANY
    assert [n for n, _ in pipe.handed] == [16, 4, 4, 1, 1, 1, 1, 4, 4]
    assert [r["batch"] for r in read_rows(tmp_path)] == [4] * 4 + [1] * 4 + [4] * 8


def test_control_without_items_alone_the_good_ones_beside_a_bad_one_fail_too(tmp_path):
    class All(Turning):
        def generate(self, items, *args, **kwargs):
            if len(items) == 1:  # what an isolation that kept the batch would come to
                raise KeyError(items[0].prompt)
            return super().generate(items, *args, **kwargs)

    summary, _ = run(tmp_path, All(bad=["05"]), prompts=MANY, batch_size=4, shard_items=16)
    assert [f["prompt"] for f in summary["failed"]] == MANY[4:8]


def test_a_deterministic_job_hands_over_the_microbatches_of_its_plan(tmp_path):
    _, pipe = run(tmp_path, Turning(), prompts=WORDS, batch_size=2, deterministic=True)
    assert pipe.handed == [(2, 2)] * 3


def test_a_request_to_stop_is_heard_after_what_was_handed_over_which_is_kept(tmp_path):
    pipe = Turning()
    keys = {"prompts": MANY, "batch_size": 2, "shard_items": 16}
    assert (
        run_job(job(tmp_path, **keys), load=pipe.load, stop=lambda: bool(pipe.handed))["pending"]
        == 8
    )
    assert [r["prompt"] for r in read_rows(tmp_path)] == MANY[:8]
    run(tmp_path, pipe, **keys)
    assert pipe.made == MANY


def test_replaced_rows_take_fewer_passes_and_leave_the_rows_of_items_made_one_by_one(tmp_path):
    from gen.pipeline.pipeline import load

    pipe = load("text", dtype="float64")
    rounds = []

    class Counted(Silent):
        def step(self, info):
            rounds[-1] += 1

    def made(name: str, size: int, turns: int) -> list[dict]:
        rounds.append(0)
        pipe.turns = lambda sampler: turns
        said = {
            "modality": "text",
            "sampler": "autoregressive",
            "prompts": pipe.modality.example_prompts(16, 0),
            "dtype": "float64",
        }
        tree = {**said, "batch_size": size, "shard_items": 16, "out": str(tmp_path / name)}
        run_job(make_job(tree, where="test"), load=lambda *_, **__: pipe, progress=Counted())
        return steady(tmp_path / name)

    turns = pipe.turns("autoregressive")
    one, batches, groups = made("one", 1, 1), made("batches", 4, 1), made("groups", 4, turns)
    assert (
        one == batches == groups
        and all(r["status"] == "ok" for r in one)
        and len({r["nfe"] for r in one}) > 3
    )
    assert rounds[2] < rounds[1] < rounds[0] == sum(r["nfe"] for r in one)
