"""The training loop that the recipes share: AdamW (Muon for hidden matrices on request), warm-up
and cosine decay, a moving average of the weights.

Where a machine has bfloat16 matrix instructions, they train small models several times faster; a
CPU without them is slower for it, and trains in float32. Checkpoints make a run resumable: the same
call continues where the last one stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn


def cosine(step: int, steps: int, warmup: int = 100, floor: float = 0.02) -> float:
    """The learning-rate factor at a step: linear warm-up, then half a cosine down to ``floor``."""
    if step < warmup:
        return (step + 1) / warmup
    t = (step - warmup) / max(1, steps - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, t)))


def rate(step: int, steps: int, cooldown: tuple[int, int] | None = None) -> float:
    """``cosine``, or with ``cooldown`` = (first, end) that until step ``first`` and from there
    straight down to zero at ``end``."""
    if cooldown is None or step < cooldown[0]:
        return cosine(step, steps)
    first, end = cooldown
    return cosine(first, steps) * (end - step) / (end - first)


def fast_bfloat16(device: torch.device | str = "cpu") -> bool:
    """Whether a device multiplies bfloat16 matrices in hardware."""
    return torch.device(device).type != "cpu" or bool(torch.cpu.get_capabilities().get("amx_tile"))


class Average:
    """An exponential moving average of parameters and buffers, with the usual warm-up of its
    decay."""

    def __init__(self, model: nn.Module, decay: float = 0.998):
        self.decay, self.steps = decay, 0
        self.state = {k: v.detach().clone() for k, v in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.steps += 1
        d = min(self.decay, (1 + self.steps) / (10 + self.steps))
        for k, v in model.state_dict().items():
            if v.dtype.is_floating_point:
                self.state[k].lerp_(v, 1 - d)
            else:
                self.state[k].copy_(v)


def _cast(model: nn.Module, dtype: torch.dtype) -> Callable:
    """The model's forward with cast weights, differentiable with respect to the uncast ones."""
    weights = {k: p.to(dtype) for k, p in model.named_parameters()}
    return lambda *args, **kwargs: torch.func.functional_call(model, weights, args, kwargs)


def fit(
    model: nn.Module,
    batches: Iterator,
    loss_fn: Callable[[nn.Module, object], tuple[Tensor, dict[str, float]]],
    *,
    steps: int,
    lr: float,
    out: Path,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.95),
    clip: float = 1.0,
    autocast: bool = False,
    bfloat16_weights: bool = False,
    log_every: int = 50,
    save_every: int = 500,
    keep_average_at: int | None = None,
    cooldown: tuple[int, int] | None = None,
    muon: tuple[str, float] | None = None,
    on_step: Callable[[int, nn.Module], None] | None = None,
    log: Callable[[str], None] = print,
) -> Average:
    """Trains ``model`` and returns the moving average of its weights.

    ``loss_fn(model, batch)`` returns the loss and figures to log. Where ``fast_bfloat16``,
    ``autocast`` runs it under autocast, and ``bfloat16_weights`` hands it the model with its
    weights cast for the forward and backward pass, while the optimiser keeps them in full
    precision. ``batches`` must yield its batch of step s as its s-th item, so that a resumed run
    only skips. ``out`` receives ``checkpoint.pt``, and ``average.pt``, the average after
    ``keep_average_at`` steps. ``cooldown`` ends the run early (``rate``). ``muon`` = (part, rate):
    the matrices whose name holds ``part`` are trained by Muon at that rate, which takes the small
    transformers here to the same loss in two thirds of the steps.
    """
    out.mkdir(parents=True, exist_ok=True)
    hidden = [p for n, p in model.named_parameters() if muon and muon[0] in n and p.ndim == 2]
    chosen = {id(p) for p in hidden}
    decay = [p for p in model.parameters() if p.ndim >= 2 and id(p) not in chosen]
    plain = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": decay, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=lr, betas=betas)]
    if hidden:
        optimizers.append(
            torch.optim.Muon(
                hidden, lr=muon[1], weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        )
    full_rates = [[g["lr"] for g in o.param_groups] for o in optimizers]
    average, start = Average(model), 0
    checkpoint = out / "checkpoint.pt"
    if checkpoint.is_file():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        for o, state in zip(optimizers, saved["optimizers"], strict=True):
            o.load_state_dict(state)
        average.state, average.steps, start = saved["average"], saved["step"], saved["step"]
        log(f"resumed at step {start}")
        for _ in range(start):
            next(batches)
    model.train()
    t0, running = time.time(), {}
    device = next(model.parameters()).device
    fast = fast_bfloat16(device)
    if (autocast or bfloat16_weights) and not fast:
        log(f"float32: {device} has no bfloat16 matrix instructions")
    end = cooldown[1] if cooldown else steps
    for step in range(start, end):
        for o, full_rate in zip(optimizers, full_rates, strict=True):
            for g, full in zip(o.param_groups, full_rate, strict=True):
                g["lr"] = full * rate(step, steps, cooldown)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast and fast):
            loss, figures = loss_fn(
                _cast(model, torch.bfloat16) if bfloat16_weights and fast else model, next(batches)
            )
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        for o in optimizers:
            o.step()
        average.update(model)
        if step + 1 == keep_average_at:
            torch.save(average.state, out / "average.pt")
        if on_step:
            on_step(step, model)
        for k, v in {"loss": loss.item(), **figures}.items():
            running[k] = v if k not in running else 0.95 * running[k] + 0.05 * v
        if (step + 1) % log_every == 0 or step + 1 == end:
            text = "  ".join(f"{k} {v:.4f}" for k, v in running.items())
            log(
                f"step {step + 1}/{end}  {text}  {(time.time() - t0) / (step + 1 - start):.3f}"
                " s/step"
            )
        if (step + 1) % save_every == 0 or step + 1 == end:
            books = [o.state_dict() for o in optimizers]
            state = {"model": model.state_dict(), "optimizers": books, "average": average.state}
            torch.save({**state, "step": step + 1}, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)
    return average
