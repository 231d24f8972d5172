"""Wall time, tokens per second and loop overhead of models of the LlamaGen layout with random
weights: speed does not depend on the weights' values.

    python -m gen.recipes.speed --device cuda --dtype bfloat16 --compile --peak 4800 --out speed
        300 M, 1 B and 7 B parameters, 16,384 codes, 24 x 24 positions
    python -m gen.recipes.speed --quick --out speed  a tiny one on a CPU

Random weights accept few drafts, so ``speculative_jacobi`` samples at ``--temperature``, which sets
the entropy of the next token. Compare its wall time with its forward passes, not its forward passes
with those of other samplers. For every model and batch size: forward passes, seconds (median of
interleaved repeats), tokens per second, speed-ups over ``autoregressive`` in forward passes and in
time, and the share of the time outside the model's forward. For the last one the same forward
passes are repeated without the loop, one after the other, and timed. With ``--peak`` there is also
the share of the device's bandwidth that reading the weights once per forward pass takes.

Writes ``speed.json``, ``speed.md`` and, of one profiled run each, ``profile-*.svg``: the time of
operators.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gen.core.checks import parse_counts
from gen.core.errors import GenError
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.graphs import compiled_forward
from gen.models.adapters.language_models import CausalLM
from gen.models.load.libraries import transformers
from gen.models.load.locate import pick_device, pick_dtype
from gen.models.targets.causal import CausalTarget
from gen.samplers.engine.window import AUTO

WINDOWS = "auto,16,32,64"


def samplers(windows: str) -> dict[str, dict[str, Any]]:
    """Return the reference and ``speculative_jacobi`` with each of the windows, by label.

    Raises:
        GenError: a window is neither ``auto`` nor an integer of at least 1.
    """
    found: dict[str, dict[str, Any]] = {"autoregressive": {"name": "autoregressive"}}
    for text in dict.fromkeys(w.strip() for w in windows.split(",")):
        window = AUTO if text == AUTO else parse_counts(text, "--windows")[0]
        found[f"jacobi {text}"] = {"name": "speculative_jacobi", "window": window}
    return found


@dataclass(frozen=True)
class Size:
    """Size of a Llama; ``codes`` of an image of ``side`` x ``side``."""

    width: int
    layers: int
    heads: int
    codes: int = 16_384
    side: int = 24


# about LlamaGen-L and -XL, and the layers of a 7 B Llama
SIZES = {"300M": Size(1024, 24, 16), "1B": Size(2048, 20, 32), "7B": Size(4096, 32, 32)}
TINY = {"tiny": Size(32, 2, 2, 64, 4)}


def make(size: Size, device: torch.device, dtype: torch.dtype, seed: int = 0) -> torch.nn.Module:
    """Create a model with random weights."""
    torch.manual_seed(seed)
    inner = round(size.width * 8 / 3 / 256 + 0.5) * 256
    config = transformers().LlamaConfig(
        vocab_size=size.codes,
        hidden_size=size.width,
        intermediate_size=inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=size.side**2 + 1,
    )
    with torch.device(device):
        return transformers().LlamaForCausalLM(config).to(dtype).eval()


class Arm:
    """Sampler on one model and batch size."""

    def __init__(
        self,
        net: torch.nn.Module,
        size: Size,
        rows: int,
        spec: dict[str, Any],
        sampling: dict[str, Any],
        compile: bool,
    ):
        self.net, self.rows, self.compile = net, rows, compile
        self.sampler, self.sampling = resolve_sampler(spec, sampling)
        self.space = TokenSpace.codes((size.side, size.side), size.codes, size.codes)
        self.learned: dict[Any, Any] = {}  # window widths that ``auto`` chose
        self.seconds: list[float] = []
        self.calls: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.nfe = 0.0

    def target(self, sampling: SamplingParams | None = None) -> CausalTarget:
        """Target of the batch."""
        adapter = CausalLM(self.net)
        if self.compile:
            compiled_forward(adapter)
        target = CausalTarget(
            adapter, torch.zeros(self.rows, 1, dtype=torch.long), self.space, self.sampling
        )
        target.learned = self.learned
        return target

    def run(self, seed: int, note: bool = False) -> float:
        """Decode once and return the seconds. With ``note``, record the arguments of the forward
        passes.
        """
        target = self.target()
        if note:
            forward, self.calls = target.model.forward, []

            def noting(tokens, positions, cache, **more):
                self.calls.append((tokens, positions))
                return forward(tokens, positions, cache, **more)

            target.model.forward = noting
        wait(self.net)
        began = time.perf_counter()
        out = self.sampler(target, CounterRNG(range(seed, seed + self.rows), self.net.device))
        wait(self.net)
        self.nfe = sum(s.nfe for s in out.stats) / self.rows
        return time.perf_counter() - began

    def bare(self) -> float:
        """Seconds of the recorded forward passes alone."""
        target = self.target()
        wait(self.net)
        began = time.perf_counter()
        left = self.rows
        for tokens, positions in self.calls:
            if len(tokens) < left:
                target.cache.keep(torch.arange(left, device=self.net.device) < len(tokens))
                left = len(tokens)
            target.model.forward(tokens, positions, target.cache)
        wait(self.net)
        return time.perf_counter() - began


def wait(net: torch.nn.Module) -> None:
    """Wait for the device of a model."""
    if net.device.type == "cuda":
        torch.cuda.synchronize(net.device)


def measure(
    name: str, size: Size, rows: int, args: argparse.Namespace, profile: Callable[[str, Arm], None]
) -> list[dict[str, Any]]:
    """Measure all samplers on one model and batch size."""
    net = make(size, pick_device(args.device), pick_dtype(args.dtype))
    arms = {
        label: Arm(net, size, rows, spec, {"temperature": args.temperature}, args.compile)
        for label, spec in samplers(args.windows).items()
    }
    weights = sum(p.numel() * p.element_size() for p in net.parameters())
    for repeat in range(-2, args.repeats):  # the first two warm up: kernels, graphs, widths
        turn = repeat % len(arms)
        for label in [*arms][turn:] + [*arms][:turn]:
            seconds = arms[label].run(1000 * (repeat + 2))
            arms[label].seconds += [seconds] if repeat >= 0 else []
    found, base = [], arms["autoregressive"]
    for label, arm in arms.items():
        whole = arm.run(7, note=True)
        alone, mid = min(arm.bare() for _ in range(2)), median(arm.seconds)
        profile(f"{name}-{rows}-{label.replace(' ', '-')}", arm)
        calls, faster = base.nfe / arm.nfe, median(base.seconds) / mid
        found.append(
            {
                "model": name,
                "parameters": sum(p.numel() for p in net.parameters()),
                "rows": rows,
                "sampler": label,
                "nfe": arm.nfe,
                "seconds": mid,
                "spread": [min(arm.seconds), max(arm.seconds)],
                "tokens_per_second": rows * arm.space.length / mid,
                "fewer_calls": calls,
                "faster": faster,
                "kept": faster / calls,
                "outside_forward": max(0.0, 1 - alone / whole),
                "share_of_bandwidth": (
                    len(arm.calls) * weights / mid / (1e9 * args.peak) if args.peak else None
                ),
            }
        )
    return found


def profiled(folder: Path) -> Callable[[str, Arm], None]:
    """Create a function that profiles one run and writes its SVG into ``folder``."""

    def profile(name: str, arm: Arm) -> None:
        kinds = [
            torch.profiler.ProfilerActivity.CPU,
            *([torch.profiler.ProfilerActivity.CUDA] if arm.net.device.type == "cuda" else []),
        ]
        with torch.profiler.profile(activities=kinds) as seen:
            arm.run(7)
        own = "self_device_time_total" if arm.net.device.type == "cuda" else "self_cpu_time_total"
        bars = sorted(((getattr(e, own), e.key) for e in seen.key_averages()), reverse=True)[:16]
        (folder / f"profile-{name}.svg").write_text(drawn(name, bars))

    return profile


def drawn(name: str, bars: list[tuple[float, str]]) -> str:
    """SVG of horizontal bars in microseconds."""
    most, high = max(bars[0][0], 1e-9), 22 * len(bars) + 44
    parts = [
        f'<rect width="780" height="{high}" fill="#fff"/><text x="16" y="24" font-size="15"'
        f' font-weight="600">{escape(name)}: time of operators</text>'
    ]
    for i, (spent, key) in enumerate(bars):
        y, long = 46 + 22 * i, 420 * spent / most
        parts.append(f'<text x="260" y="{y + 12}" text-anchor="end">{escape(key[:40])}</text>')
        parts.append(
            f'<rect x="268" y="{y}" width="{long:.1f}" height="15" fill="#2563eb"/><text'
            f' x="{274 + long:.1f}" y="{y + 12}">{spent / 1000:.1f} ms</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 {high}" font-family="system-ui,'
        f' sans-serif" font-size="12">{"".join(parts)}</svg>\n'
    )


def table(found: list[dict[str, Any]]) -> str:
    """Markdown table of the results."""
    heads = [
        "model",
        "batch",
        "sampler",
        "forward passes",
        "s (least-most)",
        "tokens/s",
        "fewer calls",
        "faster",
        "faster / fewer",
        "outside the forward",
        "of peak bandwidth",
    ]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for r in found:
        least, most = r["spread"]
        cells = [
            r["model"],
            r["rows"],
            r["sampler"],
            f"{r['nfe']:.1f}",
            f"{r['seconds']:.3f} ({least:.3f}-{most:.3f})",
            f"{r['tokens_per_second']:.0f}",
            f"{r['fewer_calls']:.2f}x",
            f"{r['faster']:.2f}x",
            f"{r['kept']:.2f}",
            f"{r['outside_forward']:.1%}",
            "-" if r["share_of_bandwidth"] is None else f"{r['share_of_bandwidth']:.0%}",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the measurements of a command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="device (cpu)")
    parser.add_argument("--dtype", default="float32", help="dtype (float32)")
    parser.add_argument("--compile", action="store_true", help="compile models with torch.compile")
    parser.add_argument(
        "--models", default=",".join(SIZES), metavar="A,B", help="sizes of models (all)"
    )
    parser.add_argument(
        "--rows", default="1,8,64", metavar="N,N", help="batch sizes, separated by commas"
    )
    parser.add_argument(
        "--windows",
        default=WINDOWS,
        metavar="N,N",
        help=f"windows of speculative_jacobi, numbers or auto ({WINDOWS})",
    )
    parser.add_argument(
        "--peak", type=float, metavar="GB/S", help="bandwidth of the device, to compare with"
    )
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repeats (3)")
    parser.add_argument("--temperature", type=float, default=0.05, help="temperature (0.05)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--quick", action="store_true", help="measure a tiny model once")
    args = parser.parse_args(argv)
    sizes = TINY if args.quick else {n: SIZES[n] for n in args.models.split(",") if n in SIZES}
    if unknown := [n for n in args.models.split(",") if n not in SIZES]:
        raise GenError(f"--models names {', '.join(unknown)}; expected some of {', '.join(SIZES)}")
    samplers(args.windows)  # a typing error fails before a model is made
    args.repeats = 1 if args.quick else args.repeats
    args.out.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for name, size in sizes.items():
        for rows in (1, 2) if args.quick else parse_counts(args.rows, "--rows"):
            found += measure(name, size, rows, args, profiled(args.out))
            said = {
                "device": args.device,
                "dtype": args.dtype,
                "compile": args.compile,
                "found": found,
            }
            (args.out / "speed.json").write_text(json.dumps(said, indent=1) + "\n")
    (args.out / "speed.md").write_text(table(found) + "\n")
    print(table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
