"""Train a drafter for a causal model, and measure it.

    python -m gen.recipes.drafters --model text-causal --kind ar --out W
    python -m gen.recipes.drafters --model motion-causal --kind eagle --minutes 5 --out W
    gen sample motion "a person jumps left twice" --model-option draft_model=W/drafter

The model draws sequences for prompts that no evaluation uses, and says how it drew each token. A
drafter is trained on them, kinds that can on sequences that they draft themselves as well, and
written to ``W/drafter`` with the digest of the model and its sampling parameters; samplers refuse
it for others. ``alpha`` is the acceptance sum_v min(p_v, q_v) of a first draft on held-out
prefixes. The last line is a command that drafts with the result. ``--quick`` runs the same path in
seconds. Training is for one thread, and an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gen.core.errors import GenError, unknown
from gen.models.targets.identity import distribution_of, target_digest
from gen.recipes.common.train import TrainConfig, fit_average
from gen.recipes.drafters.base import Kind, Options
from gen.recipes.drafters.data import Batch, Sequences, Teacher, batches, with_drafts
from gen.recipes.drafters.kinds import KINDS
from gen.recipes.drafters.losses import acceptance, mean_over

TIMED = 5  # steps that tell how long a step takes


@dataclass(frozen=True)
class Plan:
    """Sizes of a run.

    Attributes:
        prompts: sequences of the target.
        held_out: sequences on held-out prompts.
        minutes: time of training; 0 for ``steps``.
        steps: steps of a phase.
        batch: sequences per step at most.
    """

    prompts: int = 2000
    held_out: int = 200
    minutes: float = 3.0
    steps: int = 0
    batch: int = 64


QUICK = Plan(prompts=16, held_out=4, minutes=0, steps=4, batch=8)


class DrafterRecipe:
    """Stages that make a drafter.

    Args:
        model: name of the model, or a folder.
        kind: kind of the drafter.
        out: folder of the work and of the drafter.
        plan: sizes.
        options: options of the kind, by name.
        modality: modality of the model; None for the one that its config states.
        log: receives progress.
        teach: makes the teacher of so many prompts, held-out ones where its second argument says
            so; None for ``Teacher.of_model``.
    """

    def __init__(
        self,
        model: str,
        kind: str,
        out: Path,
        plan: Plan,
        options: dict[str, str] | None = None,
        modality: str | None = None,
        log: Callable[[str], None] = print,
        teach: Callable[[int, bool], Teacher] | None = None,
    ):
        if kind not in KINDS:
            raise unknown("kind of drafter", kind, KINDS, "--kind")
        self.out, self.plan, self.log = out, plan, log
        self.teach = teach or partial(Teacher.of_model, model, modality)
        teacher = self.teach(plan.prompts, False)
        chosen = read_options(KINDS[kind].options_type, options or {})
        self.kind: Kind = KINDS[kind](teacher, chosen)
        self.teacher = self.kind.teacher

    def run(self) -> dict[str, Any]:
        """Run all stages; return the figures."""
        self.out.mkdir(parents=True, exist_ok=True)
        data = self.sequences()
        began = time.time()
        net = self.train(data)
        minutes = (time.time() - began) / 60
        folder = self.out / "drafter"
        self.kind.export(net, folder)
        figures = {
            "kind": self.kind.name,
            "parameters": sum(p.numel() for p in net.parameters() if p.requires_grad),
            "minutes": round(minutes, 2),
            "alpha": round(self.measure(net), 4),
            "drafter": str(folder),
            "use": self.command(folder),
        }
        (self.out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
        return figures

    def command(self, folder: Path) -> str:
        """Return a command line that samples with the drafter."""
        pipe, item = self.teacher.pipe, self.teacher.items[0]
        words = ["gen", "sample", pipe.modality_name(), *filter(None, [item.prompt])]
        words += ["--model", str(pipe.model), "--model-option", f"draft_model={folder}"]
        return shlex.join(words)

    def sequences(self) -> Sequences:
        """Draw the target's sequences, or read those of an earlier part of the run.

        Raises:
            GenError: the folder holds a run of another kind, model, distribution or number of
                prompts.
        """
        file, settings = self.out / "sequences.pt", self.settings()
        if file.is_file():
            stored = torch.load(file, weights_only=True)
            if stored["settings"] != settings:
                came = {k: stored["settings"].get(k) for k in settings}
                raise GenError(
                    f"{self.out} holds another run, of {came}; expected {settings}, or a new folder"
                )
            tokens = stored["tokens"]
        else:
            began = time.time()
            tokens = self.teacher.sample()
            torch.save({"settings": settings, "tokens": tokens}, file)
            self.log(f"{len(tokens)} sequences in {time.time() - began:.0f} s")
        return self.teacher.label(torch.arange(len(tokens)), tokens)

    def settings(self) -> dict[str, Any]:
        """Return what another run in the same folder would have to share."""
        target = self.teacher.target
        return {
            "kind": self.kind.name,
            "target": target_digest(target),
            "prompts": self.plan.prompts,
            **distribution_of(target.sampling),
        }

    def train(self, data: Sequences) -> nn.Module:
        """Train the network: on the target's sequences, then on drafted ones beside them."""
        net = self.kind.network()
        phases = 2 if self.kind.num_drafts else 1
        self._fit(net, data, "target", self.kind.options.lr, phases)
        if phases == 2:
            drafted = self._drafted(net, data)
            both = Sequences.concatenated([data, drafted])
            self._fit(net, both, "drafted", self.kind.options.lr / 2, phases)
        return net.eval()

    def _drafted(self, net: nn.Module, data: Sequences) -> Sequences:
        """Return sequences that the network goes on with."""
        generator = torch.Generator().manual_seed(17)

        @torch.no_grad()
        def draft(batch: Batch) -> torch.Tensor:
            q = self.kind.logq(net, batch).exp()
            drawn = torch.multinomial(q.flatten(0, 1), 1, generator=generator)
            return drawn.view(batch.tokens.shape)

        return with_drafts(self.teacher, data, draft, self.kind.num_drafts, seed=18)

    def _fit(self, net: nn.Module, data: Sequences, name: str, lr: float, phases: int) -> None:
        """Train the network on sequences in a work folder of this name."""
        size = min(self.kind.options.batch, self.plan.batch, len(data))
        steps = self._steps(net, data, name, size, phases)
        config = TrainConfig(
            steps=steps,
            lr=lr,
            muon=(self.kind.muon, 3 * lr) if self.kind.muon else None,
            weight_decay=0.01,
            bfloat16_weights=True,
            log_every=max(1, steps // 10),
            save_every=max(1, steps // 20),
        )
        made = self._batches(data, size)
        fit_average(net, made, self.kind.loss, config, out=self.out / name, log=self.log)

    def _batches(self, data: Sequences, size: int) -> Iterator[Batch]:
        return batches(self.teacher, data, size, seed=19)

    def _steps(self, net: nn.Module, data: Sequences, name: str, size: int, phases: int) -> int:
        """Return the number of steps that fit into the time of a phase.

        An interrupted run keeps the number that it began with.
        """
        if not self.plan.minutes:
            return self.plan.steps
        file = self.out / f"{name}-steps.json"
        if file.is_file():
            return int(json.loads(file.read_text()))
        config = TrainConfig(steps=TIMED, lr=0.0, weight_decay=0.0, bfloat16_weights=True)
        before = {k: v.clone() for k, v in net.state_dict().items()}
        began, folder = time.time(), self.out / f"{name}-timed"
        made = self._batches(data, size)
        fit_average(net, made, self.kind.loss, config, out=folder, log=lambda _: None)
        (folder / "checkpoint.pt").unlink()
        folder.rmdir()
        net.load_state_dict(before)
        each = (time.time() - began) / TIMED
        steps = max(TIMED, int(self.plan.minutes * 60 / phases / each))
        file.write_text(json.dumps(steps))
        return steps

    @torch.no_grad()
    def measure(self, net: nn.Module) -> float:
        """Return the acceptance of a first draft on held-out prefixes of the target's sequences."""
        held = self.teach(self.plan.held_out, True)
        tokens = held.sample()
        teacher = held.with_layers(self.teacher.layers)
        data = teacher.label(torch.arange(len(tokens)), tokens)
        found, weights = [], []
        for rows in torch.arange(len(data)).split(16):
            batch = teacher.unpack(data, rows)
            found.append(acceptance(batch.logp, self.kind.logq(net, batch).float()))
            weights.append(self.kind.usable(batch))
        return float(mean_over(torch.cat(found), torch.cat(weights)))


def read_options(kind: type[Options], given: dict[str, str]) -> Any:
    """Read options of a command line.

    Args:
        kind: dataclass of the options.
        given: values by name, as text.

    Raises:
        GenError: a name is unknown, or a value has another type.
    """
    known = {f.name: f.default for f in fields(kind)}
    values: dict[str, Any] = {}
    for name, text in given.items():
        if name not in known:
            raise unknown("option", name, known, "--options")
        wanted = type(known[name])
        try:
            values[name] = text.lower() in ("1", "true", "yes") if wanted is bool else wanted(text)
        except ValueError:
            raise GenError(
                f"option {name} came as {text!r}; expected a value such as {known[name]!r}"
            ) from None
    return kind(**values)


def main(argv: list[str] | None = None) -> int:
    """Train the drafter of a command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="name of the model, or a folder")
    parser.add_argument("--modality", help="its modality (default: that of its config)")
    parser.add_argument("--kind", required=True, help=" or ".join(KINDS))
    parser.add_argument("--out", type=Path, required=True, metavar="W", help="folder to write")
    parser.add_argument("--minutes", type=float, default=Plan.minutes, help="of training (3)")
    parser.add_argument("--prompts", type=int, default=Plan.prompts, help="sequences to train on")
    parser.add_argument(
        "--options", nargs="*", default=[], metavar="NAME=VALUE", help="options of the kind"
    )
    parser.add_argument("--quick", action="store_true", help="run all stages briefly")
    args = parser.parse_args(argv)
    bad = [entry for entry in args.options if "=" not in entry]
    if bad:
        raise GenError(f"--options came with {bad[0]!r}; expected NAME=VALUE")
    torch.set_num_threads(1)
    plan = QUICK if args.quick else Plan(prompts=args.prompts, minutes=args.minutes)
    options = dict(entry.split("=", 1) for entry in args.options)
    recipe = DrafterRecipe(args.model, args.kind, args.out, plan, options, args.modality)
    figures = recipe.run()
    use = figures.pop("use")
    print(json.dumps(figures))
    print(use)
    return 0
