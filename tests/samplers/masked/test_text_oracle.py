"""The oracle of text tasks: what one call costs is known, one place per call is always right, and
every way to be wrong is noticed."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from enumeration import enumerate_distribution

from gen.__main__ import main
from gen.bench.oracle import contenders, dial
from gen.contracts.oracle import Board, measure
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.sampling_params import SamplingParams
from gen.modalities.text import oracle as text_oracle
from gen.modalities.text import parallel
from gen.modalities.text.oracle import Oracle, oracle_target
from gen.modalities.text.tasks import OPS, RANDOM, Task, answers, check, random_task
from gen.models.targets.masked import MaskedTarget

SIZES = range(3, 7)
LINEAR = {"name": "masked_iterative", "schedule": "linear", "choice_temperature": 0.0}
SHUFFLE = Task("shuffle", tuple("3120"))


def task_of(op: str, n: int, seed: int = 0) -> Task:
    return random_task(np.random.default_rng(seed), [op], [n])


def some_tasks() -> list[Task]:
    """Two of every op, with answers of different lengths on one canvas."""
    return [
        task_of(op, 3 if op == "add" else n, seed)
        for op in OPS
        for seed, n in ((0, 4), (1, 5 if op in RANDOM else 4))
    ]


def fully(oracle: Oracle) -> torch.Tensor:
    return torch.full((1, oracle.length), oracle.mask_token_id)


# --- The distribution


@pytest.mark.parametrize("op", OPS)
def test_the_distribution_is_that_of_the_answers_that_agree(op):
    """Against its definition, for every canvas that an answer leads to."""
    task = task_of(op, 3)
    oracle, right = Oracle([task]), answers(task)
    ids = [oracle.canvas(a) for a in right]
    for answer, hidden in product(ids, product((False, True), repeat=oracle.length)):
        canvas = [oracle.mask_token_id if h else i for i, h in zip(answer, hidden, strict=True)]
        agree = [
            a
            for a in ids
            if all(c in (x, oracle.mask_token_id) for c, x in zip(canvas, a, strict=True))
        ]
        expected = torch.zeros(oracle.length, oracle.vocab_size, dtype=torch.float64)
        for a in agree:
            expected[range(oracle.length), a] += 1 / len(agree)
        got = oracle.forward(torch.tensor([[0, *canvas]]), oracle.length)[0].exp()
        assert torch.allclose(got, expected, atol=1e-12)


def test_a_canvas_that_no_answer_agrees_with_has_the_distribution_of_the_nearest_ones():
    oracle = Oracle([SHUFFLE])
    a, b, c, d = (oracle.words.index(w) for w in "3120")
    hole = oracle.mask_token_id
    for canvas in (
        [a, a, hole, hole],
        [b, b, b, hole],
        [a, b, c, d],
        [oracle.eos_token_id, hole, hole, hole],
    ):
        sampling = oracle.forward(torch.tensor([[0, *canvas]]), 4)[0].exp()
        agreed = (oracle.tables[0] == torch.tensor(canvas)).sum(1)
        nearest = oracle.tables[0][agreed == agreed.max()]
        assert torch.allclose(sampling.sum(-1), torch.ones(4, dtype=torch.float64))
        assert all(
            math.isclose(float(sampling[t, v]), float((nearest[:, t] == v).double().mean()))
            for t in range(4)
            for v in range(6)
        )


def test_rows_have_the_distribution_of_their_own_task_whatever_stands_beside_them():
    tasks = some_tasks()
    target = oracle_target([*tasks, tasks[0]])
    blank = target.space.empty(target.rows)
    sampling = target.predict(blank).logprobs
    wide = target.model.length
    for i, task in enumerate(tasks):
        alone = Oracle([task], target.model.words, wide).forward(
            torch.cat([torch.zeros(1, 1).long(), blank[:1]], 1), wide
        )
        assert torch.allclose(sampling[i].exp(), alone[0].exp(), atol=1e-12)
    assert torch.equal(sampling[0], sampling[-1]) and not torch.equal(sampling[0], sampling[1])
    again = target.predict(blank[:2], torch.tensor([3, 3])).logprobs
    assert torch.equal(again[0], sampling[3]) and torch.equal(again[1], sampling[3])


def test_what_the_oracle_cannot_serve_is_refused():
    with pytest.raises(GenError, match="guidance_scale is 2"):
        oracle_target([SHUFFLE], SamplingParams(guidance_scale=2.0))
    with pytest.raises(ValueError, match="no task"):
        Oracle([])
    with pytest.raises(ValueError, match="3 positions .* expected 4 positions"):
        Oracle([SHUFFLE], length=3)
    with pytest.raises(ValueError, match="the words"):
        Oracle([SHUFFLE], words=["3", "1"])
    with pytest.raises(ValueError, match="one id of a task"):
        Oracle([SHUFFLE]).forward(torch.zeros(1, 4).long(), 4)


# --- Closed forms


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", SIZES)
def test_one_step_accuracy_and_total_correlation_have_closed_forms(op, n):
    task = task_of(op, min(n, 4) if op == "add" else n, seed=n)
    assert abs(parallel.one_step_accuracy(task) - parallel.closed_accuracy(op, n)) < 1e-9
    assert abs(parallel.total_correlation(task) - parallel.closed_correlation(op, n)) < 1e-9


def test_the_closed_forms_of_other_settings_are_others():
    """Controls: the order that was given counted as right; one place per item for a list that gets
    one more."""
    for n in SIZES:
        assert (
            abs(parallel.one_step_accuracy(task_of("shuffle", n)) - math.factorial(n) / n**n) > 1e-6
        )
        assert (
            abs(
                parallel.one_step_accuracy(task_of("insert", n))
                - parallel.closed_accuracy("insert", n - 1)
            )
            > 1e-3
        )
    exact = [parallel.closed_accuracy("shuffle", n) for n in SIZES]
    assert [round(x, 3) for x in exact] == [0.224, 0.092, 0.038, 0.015]


@pytest.mark.parametrize(
    "counts", [[6], [3, 3], [2, 2, 2], [1] * 6, [4, 2], [1, 5], [5, 1], [3, 2, 1]]
)
def test_a_shuffle_in_groups_has_a_closed_form_whatever_the_places(counts):
    task, rng = task_of("shuffle", 6), np.random.default_rng(len(counts))
    groups = np.split(rng.permutation(6), np.cumsum(counts)[:-1])
    got = parallel.grouped_accuracy(task, [g.tolist() for g in groups])
    assert abs(got - parallel.shuffle_accuracy(6, counts)) < 1e-12
    assert (got < 1 - 1e-3) == (max(counts) > 1)

    independent = math.prod(
        math.perm(m, k) / m**k
        for m, k in zip(6 - np.cumsum([0, *counts[:-1]]), counts, strict=True)
    )
    assert (abs(got - independent) < 5e-3) and (max(counts) == 1 or abs(got - independent) > 1e-6)


def test_what_has_no_closed_form_is_refused():
    for call in (
        lambda: parallel.closed_accuracy("shufle", 4),
        lambda: parallel.closed_accuracy("copy", 1),
        lambda: parallel.shuffle_accuracy(4, [2, 1]),
        lambda: parallel.grouped_accuracy(SHUFFLE, [[0, 1], [1, 2, 3]]),
    ):
        with pytest.raises(GenError, match="expected"):
            call()


# --- Samplers


@pytest.mark.parametrize("order", registry.table("order"))
def test_one_place_per_step_is_always_right(order):
    tasks = some_tasks()
    positions = Oracle(tasks).length
    assert parallel.accuracy({**LINEAR, "order": order, "steps": positions}, tasks, range(8)) == (
        1.0,
        positions,
    )


def test_several_places_per_step_are_not():
    """Control, in the ops that have several answers; in the others nothing is drawn."""
    for op in OPS:
        task = task_of(op, 3 if op == "add" else 4)
        share, calls = parallel.accuracy(
            {**LINEAR, "order": "raster", "steps": 2}, [task], range(64)
        )
        assert calls == min(2, len(answers(task)[0])) and (share < 1) == (op in RANDOM)


@pytest.mark.parametrize(
    "task, groups",
    [
        (Task("shuffle", tuple("312")), [[0, 1], [2]]),
        (SHUFFLE, [[0, 1], [2, 3]]),
        (Task("insert", tuple("312"), new="7"), [[0, 1], [2, 3]]),
        (Task("remove", tuple("3120")), [[0, 1], [2]]),
        (Task("replace", tuple("3120"), new="7"), [[0, 1], [2, 3]]),
    ],
)
def test_a_sampler_is_exactly_as_good_as_its_groups(task, groups):
    """Every outcome of the production sampler, with its probability."""
    oracle = Oracle([task])
    sampler, sampling = resolve_sampler({**LINEAR, "order": "raster", "steps": len(groups)})
    found = enumerate_distribution(
        lambda rng, context: sampler(oracle.target([task] * len(context), sampling), rng).tokens, 1
    )[0]
    right = {tuple(oracle.canvas(a)) for a in answers(task)}
    got = math.fsum(p for ids, p in found.items() if ids in right)
    assert abs(got - parallel.grouped_accuracy(task, groups)) < 1e-12
    assert (
        abs(got - parallel.grouped_accuracy(task, [[i] for i in range(oracle.length)])) > 0.05
    )  # control: other groups, another accuracy


@pytest.mark.parametrize("order", ["random", "halton"])
def test_many_seeds_come_close_to_the_closed_form(order):
    seeds = 3000
    share, calls = parallel.accuracy(
        {**LINEAR, "order": order, "steps": 3}, [task_of("shuffle", 6)], range(seeds)
    )
    exact = parallel.shuffle_accuracy(6, [2, 2, 2])
    bound = 5 * math.sqrt(exact * (1 - exact) / seeds)
    assert calls == 3 and abs(share - exact) < bound
    assert abs(share - parallel.shuffle_accuracy(6, [3, 3])) > bound


def test_the_curve_of_a_sampler_rises_to_one():
    curve = parallel.accuracy_curve(
        {**LINEAR, "order": "halton"}, [task_of("shuffle", 4)], range(200), "steps", (1, 2, 4)
    )
    assert [calls for _, calls in curve] == [1, 2, 4] and curve[0][0] < curve[1][0] < curve[2][
        0
    ] == 1


class Forgetful(Oracle):
    """Broken: it does not look at the canvas."""

    def forward(self, ids, canvas_length):
        return super().forward(
            torch.cat([ids[:, :1], torch.full_like(ids[:, 1:], self.mask_token_id)], 1),
            canvas_length,
        )


@pytest.mark.parametrize("mistake", [None, "forgetful", "generous"])
def test_an_oracle_that_is_wrong_is_caught(monkeypatch, mistake):
    if mistake == "generous":  # broken: the order that was given is right too
        monkeypatch.setattr(text_oracle, "answers", lambda task: [*answers(task), task.items])
    model = (Forgetful if mistake == "forgetful" else Oracle)([SHUFFLE])
    board = Board(
        ["shuffle"] * 200,
        range(200),
        lambda sampling: model.target([SHUFFLE] * 200, sampling),
        lambda tokens: [check(SHUFFLE, model.text(ids)).passed for ids in tokens.tolist()],
        {},
    )
    sampler, sampling = resolve_sampler({**LINEAR, "order": "random", "steps": 4})
    assert (measure(board, sampler, sampling)["shuffle"].accuracy == 1) == (mistake is None)


# --- The benchmark


class Puzzles:
    """A modality that is nothing but its tasks."""

    @staticmethod
    def oracle_bench(prompts: int, repeats: int, seed: int) -> list[Board]:
        rng = np.random.default_rng(seed)
        return [
            parallel.board(
                [random_task(rng, [op], [4]) for op in ("copy", "shuffle") for _ in range(prompts)],
                range(repeats),
            )
        ]


@pytest.fixture
def puzzles(monkeypatch, tmp_path):
    registry.discover()
    monkeypatch.setitem(registry._kinds["modality"], "puzzles", Puzzles)
    monkeypatch.chdir(tmp_path)


def bench(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(["bench", "puzzles", "--oracle", "--prompts", "1", "--repeats", "40", *argv])
    return code, *capsys.readouterr()


def test_the_bench_draws_accuracy_against_calls(puzzles, capsys):
    code, out, _ = bench(capsys, "--samplers", "halton", "--out", "o.json", "--gallery", "page")
    report = json.loads(Path("o.json").read_text())
    rows = {(r["case"], r["value"]): r for r in report["table"]}
    assert (
        code == 0
        and {r["param"] for r in report["table"]} == {"steps"}
        and {r["media"] for r in report["table"]} == {40}
    )
    assert all(r["passed"] == 1 for (case, _), r in rows.items() if case == "copy")
    assert (
        rows["shuffle", 1]["passed"] < 0.5
        and max(r["passed"] for (case, _), r in rows.items() if case == "shuffle") == 1
    )
    assert math.isclose(
        report["cases"]["shuffle"]["one_step"], parallel.closed_accuracy("shuffle", 4)
    )
    page = Path("page/index.html").read_text()
    assert (
        page.count("<h2>") == 2
        and "shuffle: one forward pass is right 9.2% of the time" in page
        and page.count("<circle") == len(rows)
    )
    assert "halton steps=1" in out and "known: one pass" in out


def test_the_bench_finds_whatever_is_registered(puzzles, monkeypatch):
    class Plain(type(resolve_sampler("masked_iterative")[0])):
        pass

    monkeypatch.setitem(registry._kinds["sampler"], "plain", Plain)
    monkeypatch.setitem(
        registry._kinds.setdefault("selector", {}), "all_of_them", lambda step: step.eligible
    )
    found = contenders()
    assert {
        "plain",
        "masked_iterative",
        "maskgit",
        "halton",
        "plain selector=all_of_them",
        "masked_iterative selector=all_of_them",
    } <= found.keys()
    assert "autoregressive" not in found and "sjd" not in found
    probe = Puzzles.oracle_bench(1, 4, 0)[0]
    assert dial({"name": "plain"}, {}, probe)[0] == "steps"
    assert dial({"name": "plain", "selector": "all_of_them"}, {}, probe) == (
        None,
        [],
    )  # one call, whatever its parameters are


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--model", "x"], "--model"),
        (["--batch-sizes", "2"], "--batch-sizes"),
        (["--samplers", "sjd"], "cannot measure"),
        (["--samplers", "haltn"], "Did you mean 'halton'"),
        (["--sweep", "stps=2"], "a parameter that none"),
        (["--repeats", "0"], "--repeats"),
        (["--samplers", "halton", "--guidance-scale", "3"], None),
    ],
)
def test_what_the_bench_cannot_measure_is_said(puzzles, capsys, argv, says):
    code, out, err = bench(capsys, *argv)
    if says is None:  # a distribution that the oracle lacks: the table has the reason
        assert code == 0 and "sampling.guidance_scale is 3" in out
    else:
        assert code == 2 and out == "" and says in err


def test_a_modality_without_such_tasks_says_so(capsys):
    assert (
        main(["bench", "image", "--oracle"]) == 2
        and "no tasks whose distribution is known" in capsys.readouterr().err
    )


def test_the_boards_have_every_op_once():
    boards = parallel.oracle_boards(1, 8, 0)
    cases = [case for board in boards for case in board.exact]
    assert sorted(cases) == sorted(OPS)
    for board in boards:
        assert (
            isinstance(board.target(SamplingParams()), MaskedTarget)
            and len(board.cases) == len(set(board.keys)) == board.target(SamplingParams()).rows
        )
