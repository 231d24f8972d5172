"""Compare samplers on a published language model, beside transformers and llama.cpp.

    python -m gen.bench.assistant measure --model FOLDER --out FILE.jsonl
    python -m gen.bench.assistant table FILE.jsonl

``measure`` decodes 60 requests of six kinds (``assistant_prompts.yaml``) one at a time at
temperature 0, with the model's chat template. For every request all systems run once, each request
beginning with another system, so that a machine that slows down slows all alike; each system
decodes one request before, which does not count. Every measurement is appended to the file as it is
made, and a second call goes on where the first one ended.

The systems are ``generate`` of transformers, plain and with prompt lookup, and samplers, all on the
same module; ``--gguf FILE`` adds llama.cpp on that file by the package xllamacpp. ``--untrained``
takes every causal sampler and preset that needs no trained drafter. A sampler that refuses the
model stands under the table with its reason.

``table`` prints, per system, tokens per second, the time of a request relative to
``autoregressive`` by kind of request, forward passes per token, and the requests whose tokens are
those of ``generate`` and of ``autoregressive``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from yaml import safe_load

from gen.bench.baselines.base import Calls, Network, network
from gen.bench.variants import spec_of
from gen.contracts.protocol import ModelProtocol
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import protocol_of, resolve_sampler, sampler_class
from gen.models.adapters.language_models import CausalLM
from gen.pipeline.pipeline import Pipeline, load

REFERENCE = "autoregressive"
PLAIN, LOOKUP, LLAMA = "generate", "generate (prompt lookup)", "llama.cpp"
LOOKED_UP = 10  # tokens that are looked up at once, the number in transformers' documentation
USUAL = (
    REFERENCE,
    "prompt_lookup",
    "suffix",
    "token_recycling",
    "speculative_jacobi",
    "speculative_jacobi window=8",
    "speculative_jacobi window=auto",
)


@dataclass(frozen=True)
class Answer:
    """Answer to one request.

    Attributes:
        count: number of its tokens, up to and including the end.
        tokens: their ids, and ``passes``: forward passes; None where the system tells neither.
    """

    count: int
    tokens: list[int] | None = None
    passes: int | None = None


System = Callable[[str, int], Answer]  # of a request and the number of new tokens at most


def requests(per_kind: int | None = None) -> list[tuple[str, str]]:
    """Return the requests as (kind, text), kind by kind in turn.

    Args:
        per_kind: number of requests of each kind; None for all.
    """
    kinds = safe_load((Path(__file__).parent / "assistant_prompts.yaml").read_text("utf-8"))
    found = [[(kind, text) for text in texts[:per_kind]] for kind, texts in kinds.items()]
    return [request for turn in zip(*found, strict=True) for request in turn]


def untrained() -> list[str]:
    """Return the causal samplers and presets that decode one answer without a draft model."""
    found = []
    for name in (*registry.table("sampler"), *registry.table("preset")):
        if protocol_of(name) != "causal" or sampler_class(name).wraps:
            continue
        sampler = resolve_sampler(name)[0]
        kind: type[ModelProtocol] = registry.get("protocol", sampler.protocol)
        if "codes" in sampler.kinds and kind.left_to_right and not sampler.drafted:
            found.append(name)
    return found


def of_sampler(pipe: Pipeline, text: str) -> System:
    """Return a sampler as a system."""
    spec = spec_of(text)

    def answer(request: str, most: int) -> Answer:
        out = pipe([request], sampler=spec, temperature=0.0, max_new_tokens=most, seed=0)
        stats = out.stats[0]
        return Answer(stats.tokens, out.tokens[0, : stats.tokens].tolist(), stats.nfe)

    return answer


def of_generate(net: Network, **settings: Any) -> System:
    """Return ``generate`` of transformers as a system."""
    ends = torch.tensor(net.space.ends)

    def answer(request: str, most: int) -> Answer:
        ids = torch.tensor([net.binding.prompt(request)])
        with Calls(net.module) as calls:
            made = net.module.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=most,
                eos_token_id=ends.tolist(),
                pad_token_id=net.space.eos_token_id,
                **settings,
            )[0, ids.shape[1] :]
        over = torch.isin(made, ends).nonzero()
        tokens = made[: int(over[0]) + 1 if len(over) else None].tolist()
        return Answer(len(tokens), tokens, calls.n)

    return answer


def of_llama_cpp(file: Path, threads: int, net: Network) -> System:
    """Return llama.cpp as a system. Its tokens are not compared: its weights stay quantised."""
    library = import_module("xllamacpp")
    params = library.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.verbosity = str(file), 2048, 1, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = library.Server(params)

    def answer(request: str, most: int) -> Answer:
        body = {"prompt": net.binding.prompt(request), "n_predict": most, "temperature": 0.0}
        made = server.handle_completions({**body, "cache_prompt": False})
        return Answer(made["usage"]["completion_tokens"])

    return answer


def systems_of(pipe: Pipeline, samplers: Sequence[str], gguf: Path | None) -> dict[str, System]:
    """Return the systems by name.

    Raises:
        GenError: the model is no causal language model of transformers.
    """
    net = network(pipe, "causal", CausalLM)
    if net is None:
        raise GenError(f"{pipe.model} is no causal language model; expected one of transformers")
    found = {PLAIN: of_generate(net)}
    found[LOOKUP] = of_generate(net, prompt_lookup_num_tokens=LOOKED_UP)
    found |= {text: of_sampler(pipe, text) for text in dict.fromkeys((REFERENCE, *samplers))}
    if gguf is not None:
        found[LLAMA] = of_llama_cpp(gguf, torch.get_num_threads(), net)
    return found


def refusals(systems: dict[str, System], request: str) -> dict[str, str]:
    """Decode a few tokens with every system; return the reasons of those that refuse."""
    found = {}
    for name, system in systems.items():
        try:
            system(request, 8)
        except GenError as error:
            found[name] = str(error)
    return found


def measure(args: argparse.Namespace) -> None:
    """Append what is missing in the file."""
    if args.threads:
        torch.set_num_threads(args.threads)
    pipe = load("text", args.model, dtype=args.dtype, batch_invariant=args.batch_invariant)
    systems = systems_of(pipe, untrained() if args.untrained else args.samplers, args.gguf)
    asked = requests(args.per_kind)
    known = {(r["system"], r["request"]) for r in records(args.out) if "seconds" in r}
    with args.out.open("a", encoding="utf-8") as file:

        def append(record: dict[str, Any]) -> None:
            file.write(json.dumps({**record, "dtype": args.dtype}) + "\n")
            file.flush()

        for name, reason in refusals(systems, asked[0][1]).items():
            append({"system": name, "refused": reason})
            del systems[name]
        for n, (kind, request) in enumerate(asked):
            names = [*systems][n % len(systems) :] + [*systems][: n % len(systems)]
            for name in names:
                if (name, request) in known:
                    continue
                began = time.perf_counter()
                answer = systems[name](request, args.max_new_tokens)
                seconds = time.perf_counter() - began
                made = {"kind": kind, "request": request, "seconds": seconds, **asdict(answer)}
                append({"system": name, **made})


def records(path: Path) -> list[dict[str, Any]]:
    """Return the measurements of a file; none where it does not exist."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def table(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Print measurements as lines of Markdown."""
    by_system: dict[str, dict[str, dict[str, Any]]] = {}
    for record in found:
        if "seconds" in record:
            by_system.setdefault(record["system"], {})[record["request"]] = record
    kinds = list(dict.fromkeys(r["kind"] for r in found if "kind" in r))
    heads = ["system", "tokens/s, median", "time, all", *kinds, "passes per token"]
    heads += ["as `generate`", f"as `{REFERENCE}`"]
    yield f"| {' | '.join(heads)} |"
    yield "|" + " --- |" * len(heads)
    if REFERENCE not in by_system:
        raise GenError(f"the file has no measurement of {REFERENCE}; expected one of `measure`")
    reference, plain = by_system[REFERENCE], by_system.get(PLAIN, {})
    for name, mine in by_system.items():
        speed = median(r["count"] / r["seconds"] for r in mine.values())
        ratios = {q: r["seconds"] / reference[q]["seconds"] for q, r in mine.items()}
        cells = [f"`{name}`", f"{speed:.1f}", f"{median(ratios.values()):.2f}"]
        for kind in kinds:
            of_kind = [ratio for q, ratio in ratios.items() if mine[q]["kind"] == kind]
            cells.append(f"{median(of_kind):.2f}" if of_kind else "-")
        if name == LLAMA:  # another precision: neither its passes nor its tokens are compared
            yield f"| {' | '.join([*cells, '-', '-', '-'])} |"
            continue
        cells.append(f"{mean(r['passes'] / len(r['tokens']) for r in mine.values()):.2f}")
        for other in (plain, reference):
            same = sum(mine[q]["tokens"] == other[q]["tokens"] for q in mine if q in other)
            cells.append(f"{same} of {sum(q in other for q in mine)}")
        yield f"| {' | '.join(cells)} |"
    yield ""
    for name, reason in {r["system"]: r["refused"] for r in found if "refused" in r}.items():
        yield f"* `{name}`: {reason}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("measure", help="decode the requests with every system")
    run.add_argument("--model", default="smollm2", help="folder, file or hub id")
    run.add_argument("--out", type=Path, required=True, help="file of measurements, JSON lines")
    run.add_argument("--dtype", default="float32")
    run.add_argument("--batch-invariant", action="store_true", help="see gen.load")
    run.add_argument("--samplers", nargs="*", default=USUAL, metavar="'NAME PARAM=VALUE'")
    run.add_argument("--untrained", action="store_true", help="every sampler without a drafter")
    run.add_argument("--gguf", type=Path, help="file of the model for llama.cpp")
    run.add_argument("--per-kind", type=int, help="requests of each kind (default: all ten)")
    run.add_argument("--max-new-tokens", type=int, default=64)
    run.add_argument("--threads", type=int, help="threads of the process (default: torch's)")
    show = commands.add_parser("table", help="print the table of a file")
    show.add_argument("file", type=Path)
    args = parser.parse_args(argv)
    if args.command == "measure":
        measure(args)
    else:
        print("\n".join(table(records(args.file))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
