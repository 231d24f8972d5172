"""Record what a sampler runs on a small model, and count what its forward passes are at any size.

A sampler's forward passes and their shapes do not depend on the size of a model that computes the
same function. So they are recorded on the small model, together with the kernels outside of them,
and the network is counted again on the meta device, from a config alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from gen.bench.estimate.count import Kernel, Meter
from gen.bench.estimate.host_waits import ACCELERATOR, HostWaits
from gen.core.errors import GenError
from gen.models.adapters.fast_llama import LeanLlama, attention
from gen.models.adapters.language_models import LanguageModel
from gen.models.load.locate import DTYPES
from gen.models.zoo import load_lm  # noqa: F401  registers the built-in architectures
from gen.pipeline.request import GenerationRequest


class Pass(NamedTuple):
    """Shape of a forward pass: rows, positions, keys, and positions with logits (0: all)."""

    model: str
    rows: int
    positions: int
    keys: int
    keep: int
    cached: bool
    masked: bool


@dataclass
class Recording:
    """What the decoding of one batch took.

    Attributes:
        items: items of the batch.
        nfe: forward passes of the model per item.
        tokens: tokens of all items.
        passes: how often each forward pass ran, draft models included.
        loop: kernels outside of the networks.
        waits: how often the host waits for an accelerator; 0 where the loop ran as on a CPU.
        uploads: copies to the accelerator that it does not wait for, 0 likewise.
        configs: config of each model by name.
    """

    items: int
    nfe: float
    tokens: int
    passes: Counter[Pass]
    loop: Counter[Kernel]
    waits: int
    uploads: int
    configs: dict[str, dict[str, Any]]

    @property
    def rounds(self) -> int:
        """Forward passes of the batch, without those of draft models."""
        main = next(iter(self.configs))
        return sum(n for one, n in self.passes.items() if one.model == main)


class WatchedLlama(LeanLlama):
    """Fast forward that notes the shapes of its calls and pauses the meter."""

    def watch(self, name: str, meter: Meter, passes: Counter[Pass]) -> WatchedLlama:
        """Note the calls under a name."""
        self.name, self.meter, self.passes = name, meter, passes
        return self

    def run(self, tokens, positions, tables, attend, keep=0, taps=None) -> Tensor:
        seen: list[bool] = []

        def noting(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = attend(layer, q, k, v)
            seen.append(self.meter.keys > k.shape[1])
            return out

        with self.meter.paused():
            logits = super().run(tokens, positions, tables, noting, keep, taps)
        masked = tokens.shape[1] > 1
        one = Pass(self.name, *tokens.shape, self.meter.keys, keep, seen[0], masked)
        self.passes[one] += 1
        return logits


def record(
    pipe: Any,
    spec: Any,
    sampling: Mapping[str, Any],
    items: Sequence[Any],
    accelerator: bool = False,
) -> Recording:
    """Decode one batch of items and return the recording.

    Args:
        pipe: the pipeline, of a model on a CPU.
        spec: the sampler and its parameters.
        sampling: the sampling parameters.
        items: the batch.
        accelerator: whether the loop runs as it does on an accelerator, where it does in kernels
            what it leaves to numpy on a CPU, and asks for as few values as it can.

    Raises:
        GenError: the network of a model is no plain Llama.
    """
    request = GenerationRequest(
        items, pipe.defaults.complete_sampler(spec), *pipe.resolve(spec, sampling)
    )
    prepared = pipe.prepare(request)
    passes: Counter[Pass] = Counter()
    meter, host, configs = Meter(), HostWaits(), {}
    draft_names = pipe.draft_names(request.spec) if prepared.drafts else []
    names = [prepared.model, *draft_names]
    for name, target in zip(names, (prepared.target, *prepared.drafts), strict=True):
        adapter = target.model
        if not isinstance(adapter, LanguageModel) or not adapter.has_fast_forward:
            raise GenError(f"model {name} is no plain Llama, whose cost is not estimated")
        adapter.use_forward(WatchedLlama(adapter.model).watch(name, meter, passes))
        configs[name] = adapter.model.config.to_dict()
        if accelerator:
            target.device = ACCELERATOR
    with host if accelerator else nullcontext(), meter, torch.no_grad():
        out = pipe.run(prepared)
    nfe = sum(s.nfe for s in out.stats) / len(items)
    tokens = sum(s.tokens for s in out.stats)
    waits = host.synchronisations, host.uploads
    return Recording(len(items), nfe, tokens, passes, meter.kernels, *waits, configs)


def count_pass(
    config: Mapping[str, Any], one: Pass, dtype: str, fused: bool = False
) -> Counter[Kernel]:
    """Count the kernels of a forward pass of a model with a config; no weights are needed.

    ``fused``: norms are one kernel, as on a GPU.
    """
    lean = _on_meta(_Frozen(dict(config)), dtype)
    with torch.device("meta"), torch.no_grad():
        shape = (one.rows, one.positions)
        tokens = torch.zeros(shape, dtype=torch.long)
        tables = lean.tables(max(one.keys, one.positions))
        stored = [
            torch.zeros(one.rows, one.keys, lean.groups, lean.dim, dtype=DTYPES[dtype])
            for _ in range(2)
        ]
        mask = (
            torch.zeros(one.rows, 1, one.positions, one.keys, dtype=DTYPES[dtype])
            if one.masked and one.cached
            else None
        )

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if not one.cached:
                return attention(q, k, v, mask)
            for buffer, new in zip(stored, (k, v), strict=True):
                buffer[:, : one.positions] = new
            return attention(q, *stored, mask)

        with Meter(fused) as meter:
            lean.run(tokens, tokens, tables, attend, one.keep)
    return meter.kernels


class _Frozen(dict):
    """Config that is a key of a cache."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(sorted(self.items(), key=lambda pair: pair[0])))


@cache
def _on_meta(config: _Frozen, dtype: str) -> LeanLlama:
    """Build a network without weights.

    Raises:
        GenError: it is no plain Llama.
    """
    kind = config["model_type"]
    built = AutoConfig.for_model(**{k: v for k, v in config.items() if k != "transformers_version"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built, dtype=DTYPES[dtype]).eval()
    lean = LeanLlama.of(model)
    if lean is None:
        raise GenError(f"a {kind} is no plain Llama, whose cost is not estimated")
    return lean
