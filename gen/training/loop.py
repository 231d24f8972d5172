"""Training loop over accelerate: every process draws its part of a batch, and gradients are
averaged.

A checkpoint holds all that a later step depends on, except the frozen weights under an adapter. A
run that was killed and goes on therefore ends with the same weights, bit for bit, as one that was
not (on one machine with one number of threads). A run that is asked to stop finishes its step and
writes a checkpoint.
"""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gen.core.errors import GenError
from gen.core.files import put, put_text
from gen.jobs.progress.report import duration
from gen.jobs.signals import stoppable
from gen.models.load.libraries import accelerate
from gen.models.load.locate import pick_device
from gen.recipes.common.grid_models import WEIGHTS
from gen.recipes.common.train import (
    Average,
    TrainConfig,
    cast_weights,
    cosine,
    load_trained,
    make_optimizers,
    trained_state,
)
from gen.training.config import AUTO, BFLOAT16, TrainingConfig
from gen.training.data import Batches, split
from gen.training.tasks import Task, seed_of

CHECKPOINT, LOG = "checkpoint.pt", "log.jsonl"
STOPPING = ("SIGINT", "SIGTERM", "SIGUSR1")  # signals that end a run after its step
CLIP = 1.0  # largest norm of the gradient
MEASURED = 4  # batches of the validation loss, at most


def processes(device: str) -> Any:
    """Return the ``Accelerator`` of this process and those that were launched with it.

    Raises:
        GenError: the device does not exist.
    """
    return accelerate().Accelerator(cpu=pick_device(device).type == "cpu")


class Loop:
    """One training run.

    Args:
        task: model and loss.
        config: keys of the run.
        count: number of samples.
        accelerator: processes of the run (``processes``).
    """

    def __init__(self, task: Task, config: TrainingConfig, count: int, accelerator: Any):
        self.task, self.config, self.out = task, config, Path(config.out)
        self.accelerator = accelerator
        self.world = self.accelerator.num_processes
        if config.batch_size % (self.world * config.accumulate):
            raise GenError(
                f"batch_size is {config.batch_size}; expected a multiple of"
                f" {self.world * config.accumulate}: processes x accumulate"
            )
        train, held = split(count, config.validation, config.seed)
        self.batches, self.held = Batches(train, config.batch_size, config.seed), held
        self.model = task.model.to(self.accelerator.device).train()
        self.optimizers = self._make_optimizers()
        self.peaks = [[g["lr"] for g in o.param_groups] for o in self.optimizers]
        self.average = Average(self.model) if config.average else None
        self.step, self.since = 0, [0.0, 0]
        self.best: dict[str, torch.Tensor] = {}
        self.stopping = (0, math.inf)  # step and value of the lowest held-out loss
        if config.patience and not len(held):
            raise GenError("patience is set, and no samples are held out; expected validation > 0")
        self.rows: list[dict[str, Any]] = []

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        config = self.config
        muon = (".layers.", 3 * config.lr) if config.muon and self.task.casts else None
        options = TrainConfig(
            steps=config.steps, lr=config.lr, weight_decay=config.weight_decay, muon=muon
        )
        return make_optimizers(self.model, options)

    def run(
        self, say: Callable[[str], None], show: Callable[[], Any] | None = None
    ) -> list[dict[str, Any]]:
        """Train to the end, from the checkpoint if there is one.

        Args:
            say: receives progress.
            show: called behind every checkpoint but the last one, with the weights of that step.

        Returns:
            The rows of the log: ``step``, ``loss`` since the last row, ``validation`` where it was
            measured, ``lr`` and ``seconds``.

        Raises:
            KeyboardInterrupt: a signal came; the steps up to now are in the checkpoint.
        """
        self._resume(say)
        began, first = time.time(), self.step
        with stoppable(say, "step", STOPPING) as asked:
            while not self._is_done:
                self._update()
                is_mark = self.step % self.config.save_every == 0
                if self.step % self.config.log_every == 0 or self._is_done or is_mark:
                    self._log((time.time() - began) / (self.step - first), say)
                stops = self._stops(asked())
                if stops or is_mark or self._is_done:
                    self._save()
                    if show is not None and is_mark and not (self._is_done or stops):
                        self._show(show)
                if stops and not self._is_done:
                    raise KeyboardInterrupt
        if self.best:
            load_trained(self.model, self.best)
            step, loss = self.stopping
            say(f"the weights of step {step}, whose validation {loss:.4f} is the lowest")
        elif self.average is not None:
            load_trained(self.model, self.average.state)
        return self.rows

    @property
    def _is_done(self) -> bool:
        return self.step == self.config.steps or self._is_early

    @property
    def _is_early(self) -> bool:
        """Whether the held-out loss has not fallen for as long as ``patience`` allows."""
        patience, (best, _) = self.config.patience, self.stopping
        return bool(patience) and self.step - best >= patience

    def _show(self, show: Callable[[], Any]) -> None:
        """Call ``show`` in the first process with the weights that would be written now."""
        if not self.accelerator.is_main_process:
            return
        state = {k: v.clone() for k, v in trained_state(self.model).items()}
        if self.average is not None:
            load_trained(self.model, self.average.state)
        self.model.eval()
        try:
            show()
        finally:
            load_trained(self.model, state)
            self.model.train()

    def _watch(self, held: float) -> None:
        """Keep the weights of the lowest held-out loss, for ``patience``."""
        if held >= self.stopping[1]:
            return
        state = trained_state(self.model) if self.average is None else self.average.state
        self.best = {k: v.detach().clone() for k, v in state.items()}
        self.stopping = (self.step, held)

    def _stops(self, asked: bool) -> bool:
        """Return True where a process was asked to stop: all of them stop after the same step."""
        if self.world == 1:
            return asked
        number = torch.tensor(float(asked), device=self.accelerator.device)
        return bool(self.accelerator.reduce(number, "sum") > 0)

    def _loss(self, rows: torch.Tensor, seed: int, drop: float) -> torch.Tensor:
        """Return the loss of samples in the precision of the run."""
        precision, casts = self.config.precision, self.task.casts
        is_low = precision == BFLOAT16 or (precision == AUTO and casts and torch.float32 != WEIGHTS)
        if is_low and casts:
            return self.task.loss(cast_weights(self.model, torch.bfloat16), rows, seed, drop)
        kind = self.accelerator.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=is_low):
            return self.task.loss(self.model, rows, seed, drop)

    def _update(self) -> None:
        """Train on the next batch."""
        config, rank = self.config, self.accelerator.process_index
        factor = cosine(self.step, config.steps, config.warmup_steps)
        for optimizer, peaks in zip(self.optimizers, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
        rows, parts = self.batches(self.step)[rank :: self.world], config.accumulate
        self.model.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self.accelerator.device)
        for number, some in enumerate(rows.chunk(parts)):
            seed = seed_of(config.seed, self.step, rank * parts + number)
            part = self._loss(some, seed, config.drop) / parts
            self.accelerator.backward(part)
            loss += part.detach()
        if self.world > 1:
            for weight in self.model.parameters():
                if weight.grad is not None:
                    weight.grad = self.accelerator.reduce(weight.grad, "mean")
            loss = self.accelerator.reduce(loss, "mean")
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for optimizer in self.optimizers:
            optimizer.step()
        if self.average is not None:
            self.average.update(self.model)
        self.task.on_step(self.step)
        self.step += 1
        self.since = [self.since[0] + loss.item(), self.since[1] + 1]

    @torch.no_grad()
    def measure(self) -> float | None:
        """Return the loss of samples that are not trained on, with the weights of now; None
        without any."""
        if not len(self.held):
            return None
        size, losses = self.config.batch_size, []
        self.model.eval()
        for number, rows in enumerate(self.held.split(size)[:MEASURED]):
            seed = seed_of(self.config.seed, -1 - number)
            losses.append(self._loss(rows, abs(seed), 0.0).item())
        self.model.train()
        return sum(losses) / len(losses)

    def _log(self, seconds: float, say: Callable[[str], None]) -> None:
        """Append a row to the log."""
        total, count = self.since
        row: dict[str, Any] = {"step": self.step, "loss": round(total / count, 6)}
        if self.step % self.config.save_every == 0 or self._is_done:
            held = self.measure()
            if held is not None:
                row["validation"] = round(held, 6)
                if self.config.patience:
                    self._watch(held)
        row["lr"] = self.optimizers[0].param_groups[0]["lr"]
        row["seconds"] = round(seconds, 4)
        self.since = [0.0, 0]
        self.rows.append(row)
        if self.accelerator.is_main_process:
            text = "".join(json.dumps(r) + "\n" for r in self.rows)
            put_text(self.out / LOG, text)
            held_text = f"  validation {row['validation']:.4f}" if "validation" in row else ""
            say(
                f"step {self.step}/{self.config.steps}  loss {row['loss']:.4f}{held_text}"
                f"  {seconds:.3f} s/step{self._left(seconds)}"
            )

    def _left(self, seconds: float) -> str:
        """Spell how long the steps that are left take."""
        steps = 0 if self._is_early else self.config.steps - self.step
        return f", {duration(steps * seconds)} left" if steps else ""

    def _save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        if not self.accelerator.is_main_process:
            return
        state = {
            "step": self.step,
            "base": self.task.base,
            "model": trained_state(self.model),
            "task": self.task.state(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "average": None if self.average is None else self.average.state,
            "best": self.best,
            "stopping": self.stopping,
            "since": self.since,
            "rows": self.rows,
        }
        data = io.BytesIO()
        torch.save(state, data)
        put(self.out / CHECKPOINT, lambda temporary: temporary.write_bytes(data.getbuffer()))

    def _resume(self, say: Callable[[str], None]) -> None:
        """Load the checkpoint, if there is one. Raises ``GenError`` for a damaged one."""
        path = self.out / CHECKPOINT
        if not path.is_file():
            return
        try:
            device = self.accelerator.device
            where = "cpu" if device.type == "cpu" else device  # torch loads no weights to cpu:0
            saved = torch.load(path, weights_only=True, map_location=where)
            load_trained(self.model, saved["model"])
            self.task.load_state(saved["task"])
            base = saved["base"]
        except Exception as error:  # the library raises bare exceptions for damaged files
            raise GenError(f"the checkpoint {path} cannot be read: {error}") from None
        if base != self.task.base:
            raise GenError(
                f"the checkpoint {path} holds an adapter of other weights than model"
                f" {self.config.model} has now; expected the same model, or a new folder"
            )
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        if self.average is not None:
            self.average.state, self.average.steps = saved["average"], saved["step"]
        self.best, self.stopping = saved["best"], tuple(saved["stopping"])
        self.step, self.since, self.rows = saved["step"], saved["since"], saved["rows"]
        say(f"resumed at step {self.step}")
