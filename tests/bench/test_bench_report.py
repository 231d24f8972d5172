"""The table and the page of a benchmark: turns, medians, intervals, where the report goes, and what
becomes of what cannot be measured."""

from __future__ import annotations

import itertools
import json
import re
from types import SimpleNamespace

import pytest
import torch

import gen
from gen.bench.curve import against_calls, marks_of, write_page
from gen.bench.measure import interleaved, measure
from gen.bench.plots import Axis, axis, bars, placed
from gen.bench.run import bench
from gen.bench.table import interval, render, tabulate
from gen.bench.variants import Variant, choose, grid_of
from gen.cli.parser import build
from gen.contracts.modality import Verdict
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import sampler_class
from gen.core.stats import Stats
from gen.jobs.progress.report import Silent

SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "guidance_scale": 1.0}


class Toy:
    name, default_sampling, models = "toy", {"top_k": 7}, {"causal": "toy-causal"}
    default_samplers, masked_params = {"causal": "speculative_jacobi"}, {}

    def check(self, media, prompt):
        return Verdict(prompt in media, True)

    def judge(self, media, condition):
        return self.check(media, condition.text or "")

    def example_prompts(self, count, seed):
        return [f"prompt {seed} {n}" for n in range(count)]


class Unchecked(Toy):
    name = "unchecked"

    def check(self, media, prompt):
        raise GenError("nobody can tell")


class Bare(Toy):
    name = "bare"

    def check(self, media, prompt):
        raise GenError("modality 'bare' has no checker")


class Pipe:
    """Makes the prompt itself, in 12 calls if plain and 3 otherwise."""

    device = torch.device("cpu")

    def __init__(self, modality):
        self.modality, self.order = modality, []

    def plan(self, prompts, num_samples, seed):
        return [SimpleNamespace(prompt=p, seed=seed, given=None) for p in prompts]

    def model_name(self, sampler):
        if sampler_class(sampler).protocol == "masked":
            raise GenError("no masked model")
        return "toy"

    def generate(self, items, sampler, sampling, **_):
        self.order.append(sampler["name"])
        plain = sampler["name"] == "autoregressive"
        stats = (
            Stats(12, 12, 19, 19, 1.0)
            if plain
            else Stats(3, 12, 57, 60, 4.0, acceptance_histogram=[1, 1, 0, 1])
        )
        return SimpleNamespace(media=[i.prompt for i in items], stats=[stats for _ in items])


@pytest.fixture
def toys(monkeypatch, tmp_path):
    registry.discover()
    monkeypatch.setitem(registry._kinds, "modality", {"toy": Toy, "unchecked": Unchecked})
    monkeypatch.chdir(tmp_path)


def run(capsys, *argv: str) -> tuple[str, str]:
    """What a command prints, with the toys in place of pipelines."""
    args = build().parse_args(["bench", *argv])
    assert (
        bench(args, load=lambda name, **_: Pipe({"toy": Toy, "unchecked": Unchecked}[name]())) == 0
    )
    return tuple(capsys.readouterr())


def variant(label: str, **keys) -> Variant:
    return Variant(label, {"name": label}, SAMPLING, keys.pop("base", label), **keys)


def measured(label: str, repeat: int = 0, **keys):
    usual = dict(
        items=4,
        seconds=1.0,
        nfe=4.0,
        draft_nfe=None,
        tokens=64,
        tokens_computed=20.0,
        positions_computed=22.0,
        peak_memory=None,
        acceptance_histogram=[],
        passed=3,
        valid=4,
        unchecked=None,
    )
    return {"sampler": label, "batch_size": 1, "repeat": repeat, **usual, **keys}


# --- what is measured


def turning(rounds: list[list[str]]) -> bool:
    """Whether every round is the one before it, begun one place later."""
    return all(after == before[1:] + before[:1] for before, after in itertools.pairwise(rounds))


def test_measurements_are_interleaved_in_turning_order():
    names = ["autoregressive", "sjd", "scd_mc"]
    pipe = Pipe(Toy())
    runs = interleaved(pipe, [variant(n) for n in names], [1, 2], ["a", "b"], 4, 0, {}, Silent())
    for size in (1, 2):
        order = [r["sampler"] for r in runs if r["batch_size"] == size]
        rounds = [order[n : n + 3] for n in range(0, 12, 3)]
        assert turning(rounds) and all(sorted(r) == sorted(names) for r in rounds)
    assert (
        pipe.order[:3] == names and len(runs) == 3 * 4 * 2
    )  # the first round warms up and is not counted
    assert not turning([names] * 4) and not turning(
        [sorted(order)[n : n + 3] for n in range(0, 12, 3)]
    )  # controls


def test_a_refusing_sampler_is_a_row_with_its_reason_or_an_error_where_it_was_asked_for():
    def broken(items):
        raise GenError(reason)

    reason, errors = "a reason of more letters than a column of the table is wide", {}
    rows = [variant("autoregressive"), variant("other", peer="reference", make=broken, asked=False)]
    runs = interleaved(Pipe(Toy()), rows, [1], ["a"], 2, 0, errors, Silent())
    assert (
        errors == {("other", 1): reason} and [r["sampler"] for r in runs] == ["autoregressive"] * 2
    )
    text = render(tabulate(runs, errors, rows))
    assert f"\nother refused: {reason}" in text and max(map(len, text.splitlines()[:3])) < 160
    for left in ([rows[0], variant("sjd", make=broken)], rows[1:]):
        with pytest.raises(GenError, match="a reason"):
            interleaved(Pipe(Toy()), left, [1], ["a"], 2, 0, {}, Silent())


def test_what_does_not_fit_into_memory_is_left_out_from_then_on():
    tried = []

    def full(items):
        tried.append(len(items))
        raise torch.OutOfMemoryError("out of memory")

    errors = {}
    runs = interleaved(
        Pipe(Toy()),
        [variant("autoregressive"), variant("sjd", make=full)],
        [1, 2],
        ["a", "b"],
        3,
        0,
        errors,
        Silent(),
    )
    assert (
        errors == {("sjd", 1): "out of memory", ("sjd", 2): "out of memory"}
        and tried == [1, 2]
        and len(runs) == 3 * 2
    )


def test_every_repeat_has_seeds_of_its_own_and_all_rows_share_them():
    seen = []
    pipe = Pipe(Toy())
    pipe.plan = lambda prompts, count, seed: (
        seen.append(seed) or Pipe.plan(pipe, prompts, count, seed)
    )
    interleaved(
        pipe, [variant("autoregressive"), variant("sjd")], [1, 2], ["a"], 3, 5, {}, Silent()
    )
    assert seen == [5, 6, 7, 8]


def test_medians_and_spread_of_known_runs():
    seconds = [4.0, 1.0, 30.0]
    runs = [measured("autoregressive", n, seconds=s, nfe=16.0) for n, s in enumerate(seconds)]
    runs += [
        measured("sjd", n, seconds=s, nfe=c, acceptance_histogram=h, tokens=60)
        for n, (s, c, h) in enumerate([(2.0, 8.0, [1, 2]), (2.0, 4.0, [0, 1, 5]), (1.0, 3.0, [2])])
    ]
    plain, fast = tabulate(runs, {}, [variant("autoregressive"), variant("sjd")])
    assert (plain["seconds"], plain["seconds_least"], plain["seconds_most"]) == (4.0, 1.0, 30.0)
    assert plain["seconds"] != sum(seconds) / 3  # control: a mean follows the slow repeat
    assert (fast["nfe"], fast["fewer_passes"], fast["speed_up"], fast["overhead"]) == (
        4.0,
        4.0,
        2.0,
        0.5,
    )
    assert fast["acceptance_histogram"] == [3, 3, 5] and fast["mean_acceptance_length"] == 180 / (
        4 * 15
    )
    assert (fast["media"], fast["passed"]) == (12, 0.75) and fast["passed_least"] < 0.75 < fast[
        "passed_most"
    ]


@pytest.mark.parametrize(
    ("share", "n", "low", "high"),
    [
        (0.0, 10, 0.0, 0.2775),
        (0.5, 10, 0.2366, 0.7634),
        (1.0, 10, 0.7225, 1.0),
        (0.9, 200, 0.8506, 0.9343),
    ],
)
def test_intervals_are_wilsons(share, n, low, high):
    assert interval(share, n) == pytest.approx((low, high), abs=1e-4)
    if share in (0.0, 1.0):
        naive = 1.959964 * (share * (1 - share) / n) ** 0.5
        assert (
            naive == 0 and interval(share, n)[1] - interval(share, n)[0] > 0.2
        )  # control: the normal interval would have no width


@pytest.fixture(scope="module")
def action():
    return gen.load("action")


def test_the_acceptance_histogram_sums_to_the_forward_passes(action):
    items = action.plan(action.modality.example_prompts(2, 0))
    sampling = {**SAMPLING, "temperature": 0.2}
    for name, drafts in (
        ("speculative_jacobi", True),
        ("sjd", True),
        ("autoregressive", False),
        ("maskgit", False),
    ):
        found = measure(
            action, items, Variant(name, {"name": name}, sampling, name), 2, None, check=True
        )
        calls = found["nfe"] * found["items"]
        assert sum(found["acceptance_histogram"]) == (calls if drafts else 0)
        accepted = sum(k * n for k, n in enumerate(found["acceptance_histogram"]))
        assert (
            not drafts or accepted + calls >= found["tokens"] > calls
        )  # every call commits what it accepted and at most one more
    assert (
        found["peak_memory"] is None
        and found["tokens"] == 2 * 32
        and found["tokens_computed"] == 12 * 40
    )


def test_peak_memory_is_counted_anew_for_every_row_on_cuda_and_by_nobody_elsewhere(monkeypatch):
    held = {"now": 0, "most": 900}
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: held.update(most=held["now"])
    )
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: held["most"])
    pipe = Pipe(Toy())
    pipe.device = torch.device("cuda")

    def use(size):
        return lambda items: (
            held.update(most=max(held["most"], size))
            or Pipe.generate(pipe, items, {"name": "sjd"}, {})
        )

    def run(size):
        return measure(
            pipe, pipe.plan(["a", "b"], 1, 0), variant("sjd", make=use(size)), 1, None, check=True
        )["peak_memory"]

    assert (run(700), run(300)) == (700, 300) and held[
        "most"
    ] == 300  # control: without the reset, 900 from before would stay
    pipe.device = torch.device("cpu")
    assert run(300) is None


# --- where it goes


def test_json_is_one_line_that_equals_the_file_and_the_table_goes_elsewhere(toys, capsys):
    out, err = run(capsys, "toy", "--quick", "--batch-sizes", "1", "--json", "--out", "b.json")
    assert out.count("\n") == 1 and json.loads(out) == json.loads(open("b.json").read())
    assert "autoregressive" in err and "sampling: top_k 7" in err
    out, err = run(capsys, "toy", "--quick", "--batch-sizes", "1")
    assert (
        "autoregressive" in out and "autoregressive  1" not in err
    )  # control: without it the table is the output
    with pytest.raises(ValueError):
        json.loads(out)


def test_all_measures_every_modality_in_turn(toys, capsys):
    out, err = run(
        capsys,
        "all",
        "--quick",
        "--samplers",
        "sjd,maskgit",
        "--batch-sizes",
        "1",
        "--json",
        "--gallery",
        "page",
    )
    report = json.loads(out)["modalities"]
    assert list(report) == ["toy", "unchecked"] and [
        one["modality"] for one in report.values()
    ] == ["toy", "unchecked"]
    for one in report.values():  # what a modality has no model for is there, with the reason
        assert [(r["sampler"], r["error"]) for r in one["table"]] == [
            ("autoregressive", None),
            ("sjd", None),
            ("maskgit", "no model for it"),
        ]
    page = open("page/index.html").read()
    assert (
        "<h2>toy</h2>" in page
        and "<h2>unchecked</h2>" in page
        and err.index("toy\n") < err.index("unchecked\n")
    )
    with pytest.raises(GenError, match="--model"):
        run(capsys, "all", "--model", "image-causal")


def test_media_that_nobody_checks_have_a_dash_and_the_reason(toys, capsys):
    out, _ = run(
        capsys,
        "unchecked",
        "--quick",
        "--batch-sizes",
        "1",
        "--samplers",
        "sjd",
        "--out",
        "b.json",
        "--gallery",
        "page",
    )
    rows = json.loads(open("b.json").read())["table"]
    assert (
        all(r["passed"] is None and r["passed_least"] is None for r in rows)
        and "prompt accuracy -: nobody can tell" in out
    )
    page = open("page/index.html").read()
    assert (
        "nobody can tell" in page
        and "wall time against forward passes" in page
        and "prompt accuracy against" not in page
    )
    assert (
        "nobody can tell"
        not in run(capsys, "toy", "--quick", "--batch-sizes", "1", "--samplers", "sjd")[0]
    )  # control


def test_a_modality_without_any_checker_is_measured():
    pipe = Pipe(Bare())
    found = measure(pipe, pipe.plan(["a"], 1, 0), variant("sjd"), 1, None, check=True)
    assert found["passed"] is None and "no checker" in found["unchecked"] and found["nfe"] == 3


def test_quick_takes_fewer_prompts_and_repeats_and_the_same_samplers(toys, capsys):
    reports = {}
    for flags in ((), ("--quick",), ("--quick", "--prompts", "3")):
        run(capsys, "toy", "--batch-sizes", "1", "--out", "b.json", *flags)
        reports[flags] = json.loads(open("b.json").read())
    media = {flags: (len(r["prompts"]), r["repeats"]) for flags, r in reports.items()}
    assert media == {(): (8, 3), ("--quick",): (2, 1), ("--quick", "--prompts", "3"): (3, 1)}
    assert len({json.dumps(r["samplers"]) for r in reports.values()}) == 1


def test_sweeps_make_a_grid(toys):
    args = build().parse_args(
        [
            "bench",
            "toy",
            "--samplers",
            "sjd",
            "--sweep",
            "window=4,8",
            "--sweep",
            "coupling=fresh,gumbel",
        ]
    )
    plain, *found = choose(args)
    assert plain.param is None and {(v.spec["window"], v.spec["coupling"]) for v in found} == {
        (4, "fresh"),
        (4, "gumbel"),
        (8, "fresh"),
        (8, "gumbel"),
    }
    assert {(v.base, v.param) for v in found} == {
        ("sjd coupling=fresh", "window"),
        ("sjd coupling=gumbel", "window"),
    }
    assert len({v.label for v in found}) == 4
    for texts, says in (
        (["window=4", "window=8"], "twice"),
        (["window"], "PARAM=VALUE"),
        (["window=4,[1]"], "--sweep"),
    ):
        with pytest.raises(GenError, match=says):
            grid_of(texts)


def test_distributions_that_differ_are_said():
    runs = [measured("autoregressive"), measured("sjd"), measured("other")]
    other = Variant("other", {}, {**SAMPLING, "temperature": 0.0}, "other")
    text = render(tabulate(runs, {}, [variant("autoregressive"), variant("sjd"), other]))
    assert text.endswith("sampling: the model's own\nsampling of other: temperature 0")
    assert "sampling of" not in render(
        tabulate(runs[:2], {}, [variant("autoregressive"), variant("sjd")])
    )  # control


def test_what_was_not_measured_has_a_row_with_the_reason():
    variants = [
        variant("autoregressive"),
        variant("alone", serial=True),
        variant("absent", missing="not for this model"),
    ]
    table = tabulate(
        [measured("autoregressive")],
        {("alone", 1): "batch 1 only", ("absent", 1): "not for this model"},
        variants,
    )
    assert [(r["sampler"], r["error"]) for r in table] == [
        ("autoregressive", None),
        ("alone", "batch 1 only"),
        ("absent", "not for this model"),
    ]
    assert all(line in render(table) for line in ("batch 1 only", "not for this model")) and render(
        table, markdown=True
    ).startswith("| sampler |")


# --- the page


def rows_of_a_page():
    runs = [
        measured("autoregressive", nfe=32.0, seconds=0.4),
        measured("sjd", nfe=8.0, seconds=0.2, acceptance_histogram=[2, 5, 1]),
        measured("other", nfe=16.0, seconds=0.1),
    ]
    return tabulate(
        runs,
        {("gone", 1): "batch 1 only"},
        [
            variant("autoregressive"),
            variant("sjd"),
            variant("other", peer="reference"),
            variant("gone"),
        ],
    )


def test_the_page_has_all_plots_and_says_what_is_missing(tmp_path):
    page = write_page(tmp_path / "page", {"toy": rows_of_a_page()}, "a <title>").read_text()
    assert page.count("<svg") == 4 and "a &lt;title&gt;" in page
    for said in (
        "prompt accuracy against forward passes",
        "prompt accuracy against seconds",
        "wall time against forward passes",
        "drafts accepted in a pass",
        "overhead 1",
    ):
        assert said in page
    assert page.count("<path d=") == 3 and page.count("<circle") == 2 * 3  # peers are diamonds
    assert "Not measured, batch 1 only: gone (batch 1)." in page and page.count("<rect") == 3


def test_the_line_of_overhead_1_goes_through_the_reference():
    rows = [r for r in rows_of_a_page() if not r["error"]]
    svg = against_calls(rows, marks_of(rows))
    x1, y1, x2, y2 = (
        float(v)
        for v in re.search(
            r'class="rule" x1="(.*?)" y1="(.*?)" x2="(.*?)" y2="(.*?)"', svg
        ).groups()
    )
    positions = {
        name: (float(x), float(y))
        for x, y, name in re.findall(
            r'<circle cx="(.*?)" cy="(.*?)" r="4.5" fill="[^"]*"><title>(\w+)', svg
        )
    }

    def off(name):
        return abs(y1 + (y2 - y1) * (positions[name][0] - x1) / (x2 - x1) - positions[name][1])

    assert (
        off("autoregressive") < 0.3 and off("sjd") > 10
    )  # four times fewer passes in half the time: above it
    assert positions["sjd"][1] < y1 + (y2 - y1) * (positions["sjd"][0] - x1) / (x2 - x1)


def overlapping(found) -> bool:
    """Whether texts of a plot cover each other, as wide as their letters at least."""
    boxes = [
        ({"middle": x - 2.5 * len(t), "start": x, "end": x - 5 * len(t)}[a], y, 5 * len(t))
        for x, y, a, t in found
    ]
    return any(
        abs(a[1] - b[1]) < 9 and a[0] < b[0] + b[2] and b[0] < a[0] + a[2]
        for n, a in enumerate(boxes)
        for b in boxes[:n]
    )


def test_labels_cover_neither_each_other_nor_the_frame():
    points = [(100.0 + 6 * n, 60.0 + (n % 3), f"sampler {n}", None) for n in range(9)] + [
        (400.0, 200.0, "at the right edge", None)
    ]
    found = placed(points, (50, 30, 410, 250))
    assert (
        2 <= len(found) < len(points)
        and not overlapping(found)
        and ("at the right edge", "end") in {(t, a) for *_, a, t in found}
    )
    assert overlapping(
        [(x, y, "start", label) for x, y, label, _ in points]
    )  # control: without care they do
    line = [(100.0 + n, 60.0, str(n), "line") for n in range(4)]
    assert [t for *_, t in placed(line, (50, 30, 410, 250))] == ["0 to 3"]


@pytest.mark.parametrize(
    ("low", "high"), [(12.0, 256.0), (0.0012, 0.9), (11.8, 13.2), (100.0, 100.0), (0.0, 1.0)]
)
@pytest.mark.parametrize("log", [True, False])
def test_axes_hold_their_values_and_have_round_ticks_inside(low, high, log):
    found = axis([low or 0.1, high], "x", log=log)
    assert isinstance(found, Axis) and all(
        0 <= found.at(v) <= 1 for v in (low or 0.1, high, *found.ticks())
    )
    assert 3 <= len(found.ticks()) <= 12 and all(
        len(f"{t:.4g}".replace(".", "").strip("0")) <= 3 for t in found.ticks()
    )


def test_bars_are_shares():
    svg = bars("sjd", [6, 3, 0, 1, 0, 0], "#000", "accepted")
    heights = [float(h) for h in re.findall(r'height="([\d.]+)" fill', svg)]
    assert (
        len(heights) == 4
        and heights[0] == pytest.approx(2 * heights[1], abs=0.2)
        and heights[2] == 0
    )
