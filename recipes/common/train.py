"""Training loop of the recipes: AdamW (Muon for hidden matrices on request), warm-up and cosine
decay, a moving average of the weights.

bfloat16 matrix instructions train small models several times faster. A CPU without them would be
slower in bfloat16, and trains in float32. Checkpoints make a run resumable: the same call continues
where the last one stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[[Any, Any], tuple[Tensor, dict[str, float]]]  # (model, batch) -> loss, figures


def cosine(step: int, steps: int, warmup: int = 100, floor: float = 0.02) -> float:
    """Learning-rate factor at a step: linear warm-up, then half a cosine down to ``floor``."""
    if step < warmup:
        return (step + 1) / warmup
    t = (step - warmup) / max(1, steps - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, t)))


def rate(step: int, steps: int, cooldown: tuple[int, int] | None = None) -> float:
    """Learning-rate factor at a step: ``cosine``, and with ``cooldown`` = (first, end) a linear
    descent from step ``first`` to zero at ``end``.
    """
    if cooldown is None or step < cooldown[0]:
        return cosine(step, steps)
    first, end = cooldown
    return cosine(first, steps) * (end - step) / (end - first)


def fast_bfloat16(device: torch.device | str = "cpu") -> bool:
    """Return whether a device multiplies bfloat16 matrices in hardware."""
    able = torch.cpu.get_capabilities()
    on_cpu = any(able.get(name) for name in ("amx_tile", "avx512_bf16"))
    return torch.device(device).type != "cpu" or on_cpu


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of a model without its frozen parameters."""
    frozen = _frozen(model)
    return {k: v for k, v in model.state_dict().items() if k not in frozen}


def load_trained(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load what ``trained_state`` returned; frozen parameters stay.

    Raises:
        RuntimeError: the state is another model's.
    """
    names = _frozen(model)
    frozen = {k: v for k, v in model.state_dict().items() if k in names}
    model.load_state_dict({**frozen, **state})


def _frozen(model: nn.Module) -> set[str]:
    """Names of parameters that are not trained."""
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, p in named if not p.requires_grad}


class Average:
    """Exponential moving average of trained parameters and of buffers, with the usual warm-up of
    its decay."""

    def __init__(self, model: nn.Module, decay: float = 0.998):
        self.decay, self.steps = decay, 0
        self.state = {k: v.detach().clone() for k, v in trained_state(model).items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Add the model's present weights."""
        self.steps += 1
        d = min(self.decay, (1 + self.steps) / (10 + self.steps))
        for k, v in trained_state(model).items():
            if v.dtype.is_floating_point:
                self.state[k].lerp_(v, 1 - d)
            else:
                self.state[k].copy_(v)


def cast_weights(model: nn.Module, dtype: torch.dtype) -> Callable:
    """Forward of the model with cast weights, differentiable with respect to the uncast ones."""
    weights = {k: p.to(dtype) for k, p in model.named_parameters()}
    return lambda *args, **kwargs: torch.func.functional_call(model, weights, args, kwargs)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Parameters of a training run.

    Attributes:
        steps: steps of the learning-rate schedule.
        lr: peak learning rate of AdamW.
        weight_decay: for parameters with two or more axes; others have none.
        betas: of AdamW.
        clip: largest norm of the gradient.
        autocast: run the loss under autocast where ``fast_bfloat16``.
        bfloat16_weights: where ``fast_bfloat16``, cast the weights for the forward and backward
            pass, while the optimiser keeps them in full precision.
        log_every: steps between log lines.
        save_every: steps between checkpoints.
        keep_average_at: step after which the average is saved as ``average.pt``.
        cooldown: (first, end) of an early linear cooldown (``rate``).
        muon: (part, rate): matrices whose name holds ``part`` are trained by Muon at that rate,
            which takes the small transformers here to the same loss in two thirds of the steps.
    """

    steps: int
    lr: float
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    autocast: bool = False
    bfloat16_weights: bool = False
    log_every: int = 50
    save_every: int = 500
    keep_average_at: int | None = None
    cooldown: tuple[int, int] | None = None
    muon: tuple[str, float] | None = None

    @property
    def end(self) -> int:
        """Number of steps that are run."""
        return self.cooldown[1] if self.cooldown else self.steps


class _TrainingState:
    """Model, optimisers and average of a run, with their checkpoint."""

    def __init__(self, model: nn.Module, config: TrainConfig, out: Path):
        self.model, self.config, self.checkpoint = model, config, out / "checkpoint.pt"
        self.optimizers = make_optimizers(model, config)
        self.peak_rates = [[g["lr"] for g in o.param_groups] for o in self.optimizers]
        self.average = Average(model)
        self.device = next(model.parameters()).device
        self.fast = fast_bfloat16(self.device)

    def resume(self, batches: Iterator, log: Callable[[str], None]) -> int:
        """Load the checkpoint, if there is one, and skip its batches. Returns the first step."""
        if not self.checkpoint.is_file():
            return 0
        saved = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.average.state, self.average.steps = saved["average"], saved["step"]
        log(f"resumed at step {saved['step']}")
        for _ in range(saved["step"]):
            next(batches)
        return saved["step"]

    def update(self, step: int, batches: Iterator, loss_fn: Loss) -> dict[str, float]:
        """Train on the next batch. Returns the loss and the figures of ``loss_fn``."""
        config, model = self.config, self.model
        for optimizer, peaks in zip(self.optimizers, self.peak_rates, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * rate(step, config.steps, config.cooldown)
        cast = config.bfloat16_weights and self.fast
        with torch.autocast(
            self.device.type, torch.bfloat16, enabled=config.autocast and self.fast
        ):
            forward = cast_weights(model, torch.bfloat16) if cast else model
            loss, figures = loss_fn(forward, next(batches))
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        self.average.update(model)
        return {"loss": loss.item(), **figures}

    def save(self, step: int) -> None:
        """Write the checkpoint after ``step`` steps."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "average": self.average.state,
            "step": step,
        }
        part = self.checkpoint.with_suffix(".tmp")
        torch.save(state, part)
        part.replace(self.checkpoint)


def make_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon for the matrices that ``config.muon`` names, for the parameters that have
    gradients."""
    muon = config.muon
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [p for n, p in named if muon and muon[0] in n and p.ndim == 2]
    by_muon = {id(p) for p in matrices}
    decayed = [p for _, p in named if p.ndim >= 2 and id(p) not in by_muon]
    plain = [p for _, p in named if p.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)
    ]
    if muon and matrices:
        optimizers.append(
            torch.optim.Muon(
                matrices,
                lr=muon[1],
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return optimizers


def fit(
    model: nn.Module,
    batches: Iterator,
    loss_fn: Loss,
    config: TrainConfig,
    *,
    out: Path,
    on_step: Callable[[int, nn.Module], None] | None = None,
    log: Callable[[str], None] = print,
) -> Average:
    """Train a model.

    Args:
        model: the model, trained in place.
        batches: the s-th item is the batch of step s, so that a resumed run only skips.
        loss_fn: (model, batch) -> the loss, and figures to log.
        config: parameters of the run.
        out: folder of ``checkpoint.pt``, from which the same call resumes, and of ``average.pt``.
        on_step: called with the step and the model after every update.
        log: receives progress.

    Returns:
        The moving average of the weights.
    """
    # 1. Prepare, or resume
    out.mkdir(parents=True, exist_ok=True)
    state = _TrainingState(model, config, out)
    start, end = state.resume(batches, log), config.end
    if (config.autocast or config.bfloat16_weights) and not state.fast:
        log(f"float32: {state.device} has no bfloat16 matrix instructions")
    model.train()
    began, smoothed = time.time(), {}
    for step in range(start, end):
        # 2. Update weights and average
        figures = state.update(step, batches, loss_fn)
        if step + 1 == config.keep_average_at:
            torch.save(state.average.state, out / "average.pt")
        if on_step:
            on_step(step, model)
        # 3. Log and save
        for name, value in figures.items():
            smoothed[name] = 0.95 * smoothed[name] + 0.05 * value if name in smoothed else value
        if (step + 1) % config.log_every == 0 or step + 1 == end:
            text = "  ".join(f"{name} {value:.4f}" for name, value in smoothed.items())
            seconds = (time.time() - began) / (step + 1 - start)
            log(f"step {step + 1}/{end}  {text}  {seconds:.3f} s/step")
        if (step + 1) % config.save_every == 0 or step + 1 == end:
            state.save(step + 1)
    return state.average


def fit_average(
    model: nn.Module, batches: Iterator, loss_fn: Loss, config: TrainConfig, **options: Any
) -> None:
    """Train a model as ``fit`` does, and load the average of its weights into it."""
    load_trained(model, fit(model, batches, loss_fn, config, **options).state)
