"""Measure whether tokens depend on what is decoded beside them, and what ``batch_invariant`` costs.

    python -m gen.bench.parity measure --out FILE.jsonl
    python -m gen.bench.parity measure --model smollm2 --out FILE.jsonl
    python -m gen.bench.parity table FILE.jsonl

``measure`` decodes the same items with every sampler whose guarantee is ``same_tokens``, in
batches of several sizes, with several windows, in the order of the items and in the reverse. Tokens
are compared with those of plain autoregression at batch 1 in the same dtype; those of a search, and
of a sampler of another protocol, with its own at batch 1. With the option all have to be equal;
without it, the control, they are not. In bfloat16 the samplers that matter most are measured in
every batch and window; all others, float16 and the control take one setting of each sampler.

``--model`` names a published language model. It answers requests of ``gen.bench.assistant`` at the
temperatures 0 and 0.8.

The cost of the option is the time with it, divided by the time without it. Both decode the same
items, one after the other in turns. A time ends with the last forward pass: rendering is left out.

Every measurement is appended to the file as it is made, and a second call goes on where the first
one ended.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from gen.bench.assistant import requests
from gen.bench.records import Records, latest, source, weights
from gen.bench.report import machine, measured_on
from gen.bench.table import NOTHING, REFERENCE, laid_out
from gen.bench.variants import serves, spec_of
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import protocol_of, resolve_sampler, sampler_class
from gen.pipeline.pipeline import Pipeline, load

COUNTS = {"image": 100, "text": 100, "speech": 50, "video": 20}  # items of the built-in models
DTYPES = ("bfloat16", "float16")
PARTS = ("with", "without", "cost")
FULL = "bfloat16"  # the dtype that is measured in all settings
TEMPERATURES = (0.0, 0.8)  # of a published model
REPEATS = 5  # of a cost
TREE = "token_recycling nodes=24"
DRAFTED_TREE = "speculative verifier=follow shape=branching branching=3-2-1"
WINDOWS = tuple(f"speculative_jacobi window={n}" for n in (8, 16, 32, 64))

Settings = dict[str, list[tuple[int, bool]]]  # sampler -> batch and whether items are reversed
MAIN: Settings = {  # the first setting of each is also that of float16 and of the control
    REFERENCE: [(8, False), (3, False), (8, True)],
    WINDOWS[0]: [(8, False), (3, True), (1, False)],
    WINDOWS[1]: [(3, False), (1, False), (8, True)],
    WINDOWS[2]: [(8, True), (3, False)],
    WINDOWS[3]: [(3, True), (8, False)],
    "prompt_lookup": [(1, False), (3, False), (8, True)],
    "suffix": [(8, False), (3, True)],
    TREE: [(3, False), (8, True), (1, False)],
    "drafter_invariant": [(8, True), (3, False)],
    DRAFTED_TREE: [(3, False), (8, True), (1, False)],
    "best_of n=2": [(8, False), (3, True)],
}
OTHERS = ((8, False), (3, True), (8, True), (3, False))  # settings of the other samplers, in turn
PUBLISHED: Settings = {
    REFERENCE: [(4, False), (7, False)],
    "prompt_lookup": [(4, True)],
    WINDOWS[0]: [(4, False)],
    "suffix": [(4, False)],
    TREE: [(1, False)],
    WINDOWS[3]: [(1, True)],
}
COSTS = (REFERENCE, WINDOWS[1], WINDOWS[3], "prompt_lookup", "suffix", TREE, "drafter_invariant")


@dataclass(frozen=True)
class Setting:
    """How items are decoded.

    Attributes:
        sampler: sampler with its parameters, as ``speculative_jacobi window=8``.
        batch: items that are decoded at a time.
        reversed: whether the last item comes first.
        temperature: temperature of the target; None for the modality's.
        reference: sampler whose tokens at batch 1 are expected.
    """

    sampler: str
    batch: int = 1
    reversed: bool = False
    temperature: float | None = None
    reference: str = REFERENCE

    def __str__(self) -> str:
        order = ", reversed" if self.reversed else ""
        shown = "" if self.temperature is None else f", temperature {self.temperature:g}"
        return f"{self.sampler}{shown}, batch {self.batch}{order}"

    @property
    def expected(self) -> Setting:
        """Setting whose tokens are the expected ones."""
        return replace(self, sampler=self.reference, batch=1, reversed=False)


@dataclass(frozen=True)
class Subject:
    """A model and what it decodes.

    Attributes:
        modality: name of the modality.
        prompts: the prompts of the items.
        model: name or folder of a published model; None for the built-in one.
        most: new tokens of an item at most; None for as many as its modality has.
        temperatures: temperatures of the target; None for the modality's.
    """

    modality: str
    prompts: tuple[str, ...]
    model: str | None = None
    most: int | None = None
    temperatures: tuple[float | None, ...] = (None,)

    @property
    def name(self) -> str:
        return Path(self.model).name if self.model else self.modality

    def load(self, dtype: str, invariant: bool) -> Pipeline:
        return load(self.modality, self.model, device="cpu", dtype=dtype, batch_invariant=invariant)

    def settings(self, pipe: Pipeline, full: bool) -> list[Setting]:
        """Return the settings of a pipeline, those of references before the others.

        Args:
            pipe: pipeline of the model.
            full: whether samplers have more than one setting.
        """
        chosen = PUBLISHED if self.model else MAIN | others(pipe)
        found = []
        for temperature in self.temperatures:
            for sampler, ways in chosen.items():
                if not serves(pipe, spec_of(sampler), None):
                    continue
                own = compared_with_itself(sampler)
                setting = Setting(
                    sampler,
                    temperature=preset_temperature(sampler, temperature),
                    reference=sampler if own else REFERENCE,
                )
                found.append(setting.expected)
                for batch, order in ways if full or self.model else ways[:1]:
                    found.append(replace(setting, batch=batch, reversed=order))
        return list(dict.fromkeys(found))

    def sampling(self, pipe: Pipeline, temperature: float | None) -> dict[str, Any]:
        """Return the complete sampling parameters, the same ones for all samplers."""
        usual = pipe.resolve(REFERENCE)[1].to_dict()
        given = {"temperature": temperature, "max_new_tokens": self.most}
        return {**usual, **{name: value for name, value in given.items() if value is not None}}


def others(pipe: Pipeline) -> Settings:
    """Return one setting of each sampler of ``same_tokens`` that ``MAIN`` does not name."""
    named = {spec_of(text)["name"] for text in MAIN}
    names = [name for kind in ("sampler", "preset") for name in registry.table(kind)]
    found: Settings = {}
    for name in names:
        if name in named or not serves(pipe, {"name": name}, None):
            continue
        if resolve_sampler(name)[0].guarantee == "same_tokens":
            found[name] = [OTHERS[len(found) % len(OTHERS)]]
    return found


def is_causal(sampler: str) -> bool:
    """Return whether a sampler decodes with causal models, as plain autoregression does."""
    return protocol_of(spec_of(sampler)["name"]) == protocol_of(REFERENCE)


def compared_with_itself(sampler: str) -> bool:
    """Return whether the reference of a sampler is not plain autoregression."""
    return bool(sampler_class(spec_of(sampler)["name"]).wraps) or not is_causal(sampler)


def preset_temperature(sampler: str, usual: float | None) -> float | None:
    """Return the temperature that a preset asks for, or the usual one."""
    preset = registry.table("preset").get(spec_of(sampler)["name"])
    return usual if preset is None else preset.sampling.get("temperature", usual)


def digest_of(tokens: torch.Tensor) -> str:
    """Return a hash of the tokens of an item."""
    return hashlib.sha256(tokens.cpu().numpy().tobytes()).hexdigest()[:12]


class Clock:
    """Callback that keeps the time of the last forward pass, so that rendering is not measured."""

    def __init__(self) -> None:
        self.began = self.last = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def __call__(self, _: object) -> None:
        self.last = self._now()

    def seconds(self) -> tuple[float, float]:
        """Return wall time and CPU time up to the last pass."""
        wall, busy = (last - began for last, began in zip(self.last, self.began, strict=True))
        return wall, busy


def decoded(
    subject: Subject, pipe: Pipeline, setting: Setting, items: Sequence[Any]
) -> dict[str, Any]:
    """Decode items at once; return the hashes of their tokens, forward passes and times."""
    sampling, clock = subject.sampling(pipe, setting.temperature), Clock()
    out = pipe.generate(items, spec_of(setting.sampler), sampling, callback=clock)
    wall, busy = clock.seconds()
    passes = max(one.nfe for one in out.stats)
    tokens = [digest_of(row) for row in out.tokens]
    return {"tokens": tokens, "passes": passes, "seconds": wall, "cpu_seconds": busy}


class Measurements:
    """Measurements of one file.

    Args:
        records: what was measured so far.
        note: is told what is being measured.
    """

    def __init__(self, records: Records, note: Callable[[str], None] = print):
        self.records, self.note = records, note
        self.pipe = cache(Subject.load)

    def tokens(self, subject: Subject, dtype: str, invariant: bool) -> None:
        """Decode all items in all settings, batch by batch."""
        pipe = self.pipe(subject, dtype, invariant)
        plan = pipe.plan(list(subject.prompts), 1, 0)
        for setting in subject.settings(pipe, full=invariant and dtype == FULL):
            if not (invariant or is_causal(setting.sampler)):
                continue  # refused with the option, so that there is nothing to compare
            numbers = list(range(len(plan)))[:: -1 if setting.reversed else 1]
            option = "with" if invariant else "without"
            self.note(f"{subject.name} {dtype}, {option} batch_invariant: {setting}")
            for first in range(0, len(plan), setting.batch):
                mine = numbers[first : first + setting.batch]
                what = self._what(subject, dtype, setting)
                what |= {"invariant": invariant, "items": mine}
                if self.records.find(what) is None:
                    self.records.add(what, self._tokens(subject, pipe, setting, plan, mine))
                if "refused" in (self.records.find(what) or {}):
                    break

    @staticmethod
    def _what(subject: Subject, dtype: str, setting: Setting) -> dict[str, Any]:
        told = {"subject": subject.name, "most": subject.most}
        return {**told, "dtype": dtype, **asdict(setting)}

    @staticmethod
    def _tokens(
        subject: Subject, pipe: Pipeline, setting: Setting, plan: Sequence[Any], mine: list[int]
    ) -> dict[str, Any]:
        try:
            return decoded(subject, pipe, setting, [plan[n] for n in mine])
        except GenError as error:
            return {"refused": str(error)}

    def costs(self, subject: Subject, dtype: str, batches: Sequence[int], repeats: int) -> None:
        """Decode with and without the option, in turns."""
        pipes = {invariant: self.pipe(subject, dtype, invariant) for invariant in (True, False)}
        # long requests have long answers, whose passes weigh more than that of the prompt
        prompts = sorted(subject.prompts, key=len, reverse=True)[: max(batches)]
        plan = pipes[True].plan(prompts, 1, 0)
        for sampler in COSTS:
            if not serves(pipes[True], spec_of(sampler), None):
                continue
            for batch in batches:
                setting = Setting(sampler, batch, temperature=subject.temperatures[-1])
                what = {"cost": True, **self._what(subject, dtype, setting)}
                known = [self.records.find({**what, "repeat": n}) for n in range(repeats)]
                if all(known):
                    continue
                self.note(f"{subject.name} {dtype}, cost: {setting}")
                for n in range(-1, repeats):  # -1 warms up and is not counted
                    if n >= 0 and known[n]:
                        continue
                    order = (True, False) if n % 2 else (False, True)
                    run = {o: decoded(subject, pipes[o], setting, plan[:batch]) for o in order}
                    if n >= 0:
                        found = {"with": run[True], "without": run[False]}
                        self.records.add({**what, "repeat": n}, found)


def subjects(args: argparse.Namespace) -> list[Subject]:
    """Return what a command line measures."""
    if args.model:
        asked = tuple(text for _, text in requests(args.per_kind))
        how = args.max_new_tokens, tuple(args.temperatures)
        return [Subject("text", asked, args.model, *how)]
    found = []
    for modality in args.modalities:
        count = COUNTS[modality]
        prompts = load(modality).modality.example_prompts(count, 0)
        found.append(Subject(modality, tuple(prompts[: max(1, round(args.share * count))])))
    return found


def measure(args: argparse.Namespace) -> None:
    """Append what is missing in the file."""
    torch.set_num_threads(args.threads)
    setting = {"machine": machine(), "source": source(), "weights": weights(args.model)}
    records = Records(args.out, setting)
    if records.left_out:
        print(records.left_out)
    made = Measurements(records, lambda text: print(text, flush=True))
    found = subjects(args)
    for dtype in args.dtypes:
        for part in ("with", "without"):
            for subject in found if part in args.only else ():
                made.tokens(subject, dtype, part == "with")
        for subject in found if "cost" in args.only else ():
            made.costs(subject, dtype, (1, 4, 7) if args.model else (1, 3, 8), args.repeats)


# --- tables

Run = tuple[dict[str, Any], dict[str, Any]]  # what was measured, and what was found


def way_of(what: dict[str, Any]) -> tuple[Any, ...]:
    """Return how items were decoded, apart from the model."""
    return what["sampler"], what["temperature"], what["batch"], what["reversed"]


def share_table(found: Sequence[Run]) -> Iterator[list[str]]:
    """Yield the rows of the table of equal items: with the option, and without it.

    Columns are the models and dtypes, rows the settings.
    """
    tokens: dict[Any, dict[int, str]] = defaultdict(dict)
    expected: dict[Any, tuple[Any, ...]] = {}
    columns, ways = {}, {}
    for what, run in found:
        if "cost" in what or "refused" in run:
            continue
        column, way = (what["subject"], what["dtype"]), way_of(what)
        key = (column, what["invariant"], what["most"])
        tokens[key, way].update(zip(what["items"], run["tokens"], strict=True))
        expected[key, way] = (key, (what["reference"], what["temperature"], 1, False))
        columns[column], ways[way] = what["most"], None
    yield ["sampler", "temperature", "batch", "order", *(f"{a}, {b}" for a, b in columns)]
    for way in ways:
        sampler, temperature, batch, is_reversed = way
        cells = []
        for column, most in columns.items():
            pair = []
            for invariant in (True, False):
                key = (column, invariant, most), way
                mine, theirs = tokens.get(key, {}), tokens.get(expected.get(key), {})
                both = [n for n in mine if n in theirs and expected[key] != key]
                same = sum(mine[n] == theirs[n] for n in both)
                pair.append(f"{same} of {len(both)}" if both else NOTHING)
            cells.append(" / ".join(pair) if pair != [NOTHING, NOTHING] else NOTHING)
        if set(cells) != {NOTHING}:
            order = "reversed" if is_reversed else "as given"
            shown = "usual" if temperature is None else f"{temperature:g}"
            yield [f"`{sampler}`", shown, str(batch), order, *cells]


def cost_table(found: Sequence[Run]) -> Iterator[list[str]]:
    """Yield the rows of the table of costs: medians of ratios, with the middle half of them."""
    ratios: dict[Any, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for what, run in found:
        if "cost" in what:
            row = what["subject"], what["dtype"], what["sampler"]
            pair = [run[side]["cpu_seconds"] / run[side]["passes"] for side in ("with", "without")]
            ratios[row][what["batch"]].append(pair[0] / pair[1])
    batches = sorted({batch for mine in ratios.values() for batch in mine})
    yield ["model", "dtype", "sampler", *(f"batch {batch}" for batch in batches)]
    for (subject, dtype, sampler), mine in ratios.items():
        cells = [cost_cell(mine[batch]) if batch in mine else NOTHING for batch in batches]
        yield [subject, dtype, f"`{sampler}`", *cells]


def cost_cell(ratios: Sequence[float]) -> str:
    """Format ratios: their median and their quartiles."""
    low, high = np.quantile(ratios, (0.25, 0.75))
    return f"{median(ratios):.2f} ({low:.2f}-{high:.2f})"


def tables(path: Path) -> Iterator[str]:
    """Yield the tables of a file in Markdown, and where it was measured."""
    setting, found = latest(path)
    for rows in (list(share_table(found)), list(cost_table(found))):
        if len(rows) > 1:
            yield laid_out(rows, markdown=True)
    refused = {(w["subject"], w["sampler"]): r["refused"] for w, r in found if "refused" in r}
    for (subject, sampler), reason in refused.items():
        yield f"* {subject}, `{sampler}`: {reason}"
    yield measured_on(setting["machine"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line."""
    parser = argparse.ArgumentParser(
        "python -m gen.bench.parity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("measure", help="decode the items in every setting")
    run.add_argument("--out", type=Path, required=True, help="file of measurements, JSON lines")
    run.add_argument("--model", help="published language model (default: the built-in models)")
    run.add_argument("--modalities", nargs="*", default=list(COUNTS), choices=list(COUNTS))
    run.add_argument(
        "--share", type=float, default=1.0, help="of the items, the first ones (default: 1)"
    )
    run.add_argument("--per-kind", type=int, default=5, help="requests of each kind (default: 5)")
    run.add_argument("--max-new-tokens", type=int, default=128, help="of a published model")
    run.add_argument(
        "--temperatures", nargs="*", type=float, default=TEMPERATURES, help="of a published model"
    )
    run.add_argument("--dtypes", nargs="*", default=list(DTYPES))
    run.add_argument(
        "--only", nargs="*", default=PARTS, choices=PARTS,
        help="tokens with the option, tokens without it, its cost (default: all three)",
    )  # fmt: skip
    run.add_argument("--repeats", type=int, default=REPEATS, help="of a cost (default: 5)")
    run.add_argument("--threads", type=int, default=1, help="of the process (default: 1)")
    show = commands.add_parser("table", help="print the tables of a file")
    show.add_argument("file", type=Path)
    args = parser.parse_args(argv)
    if args.command == "measure":
        measure(args)
    else:
        print("\n\n".join(tables(args.file)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
