"""What can be typed: the parser, and hints for what was mistyped. Imports nothing heavy: help is
quick."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable
from importlib import import_module

from gen.core.errors import GenError
from gen.core.versions import installed

KINDS = (
    "samplers",
    "presets",
    "parts",
    "layouts",
    "tokenizers",
    "modalities",
    "models",
    "families",
    "configs",
)


class Parser(argparse.ArgumentParser):
    """Errors are ``GenError`` with the nearest name; abbreviated flags are not guessed."""

    def __init__(self, *args, **kwargs):
        super().__init__(
            *args,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **kwargs,
        )

    def error(self, message: str):
        choice = re.search(r"invalid choice: '?([^' ]*)'? \(choose from (.*)\)", message)
        if choice:
            options = [o.strip(" '") for o in choice[2].split(",")]
            message = (
                f"unknown command or name {choice[1]!r}.{_hint(choice[1], options)} Known:"
                f" {', '.join(options)}"
            )
        raise GenError(f"{message} (see {self.prog} --help)")


def _hint(got: str, options: list[str]) -> str:
    near = difflib.get_close_matches(got, options, 1, 0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments, with ``command`` the function to call with them. Raises ``GenError``."""
    parser = build()
    args, extra = parser.parse_known_args(argv)
    sub: argparse.ArgumentParser = getattr(args, "parser", parser)
    if hasattr(args, "overrides"):  # argparse drops positionals that follow a flag
        args.overrides += [x for x in extra if not x.startswith("-") and "=" in x]
        extra = [x for x in extra if x.startswith("-") or "=" not in x]
    if extra:
        wrong = next((x for x in extra if x.startswith("-")), extra[0])
        flags = [s for a in sub._actions for s in a.option_strings]
        if wrong.startswith("-"):
            flag = wrong.partition("=")[0]
            raise GenError(
                f"unknown flag {flag!r}.{_hint(flag, flags)} Known:"
                f" {', '.join(f for f in flags if f[:2] == '--')}"
            )
        hint = (
            "quote a prompt of several words"
            if hasattr(args, "prompt")
            else f"see {sub.prog} --help"
        )
        raise GenError(f"unexpected argument {wrong!r}; {hint}")
    if not hasattr(args, "command"):
        parser.print_help()
        raise SystemExit(0)
    return args


def _lazy(module: str, function: str) -> Callable[[argparse.Namespace], int]:
    return lambda args: getattr(import_module(module), function)(args)


def build() -> Parser:
    parser = Parser(
        prog="gen",
        description="Every modality becomes tokens, and one registry of samplers decodes them all.",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"gen {installed('gen-toolkit') or '(not installed)'}",
    )
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)

    def command(name: str, module: str, function: str, text: str, epilog: str = "") -> Parser:
        sub = commands.add_parser(name, help=text, description=text, epilog=epilog)
        sub.set_defaults(command=_lazy(module, function), parser=sub)
        return sub

    sub = command(
        "sample",
        "gen.cli.commands",
        "sample",
        "generate media for one prompt",
        'example: gen sample image "a large red circle at the top left" --num-samples 4 --seed 0'
        " --out out/first",
    )
    sub.add_argument("modality", metavar="MODALITY", help="see gen ls modalities")
    sub.add_argument("prompt", metavar="PROMPT", help="what to generate")
    sub.add_argument(
        "--num-samples", type=int, metavar="N", help="media per prompt, with seeds S, S+1, ... (1)"
    )
    sub.add_argument("--seed", type=int, metavar="S", help="seed of the first one (0)")
    sub.add_argument(
        "--out",
        metavar="DIR",
        help=(
            "folder to write (out/MODALITY/PROMPT-XXXXXX, one per job); the same command again"
            " resumes"
        ),
    )
    sub.add_argument(
        "--source",
        metavar="FILE",
        help="edit this medium: only what --mask or --span says is made anew",
    )
    sub.add_argument("--mask", metavar="FILE", help="a picture, white where to make anew")
    sub.add_argument(
        "--span", metavar="SPAN", help="frames to make anew, such as 20:60, or 'upper 20:60'"
    )
    sub.add_argument(
        "--prefix", metavar="FILE", help="continue this medium: every result begins with it"
    )
    sub.add_argument(
        "--frames",
        type=int,
        metavar="N",
        help="how long results are to be, where a modality lets you say",
    )
    sub.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="items decoded together (8); changes the speed only",
    )
    sub.add_argument(
        "--trace", type=int, metavar="N", help="items whose decoding steps are recorded (1)"
    )
    sub.add_argument(
        "--sampler",
        metavar="NAME",
        help="see gen ls samplers and gen ls presets (speculative_jacobi)",
    )
    sub.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="sets",
        help="any key of a job file, such as sampler.window=64; may be repeated",
    )
    _model_flags(sub)
    _law_flags(sub)

    sub = command(
        "run",
        "gen.cli.commands",
        "run",
        "run a job file",
        "example: gen run image/sjd sampler.window=64 seed=7\nThe same command again makes only"
        " what is missing.",
    )
    sub.add_argument(
        "config", metavar="CONFIG", help="a path, or a packaged config (see gen ls configs)"
    )
    sub.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="such as sampler=sjd, sampler.window=64, jobs.0.seed=3",
    )
    sub.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, say what would be made, write nothing",
    )

    sub = command(
        "work",
        "gen.cli.commands",
        "work",
        "join a job that gen run has begun, from any machine that sees its folder",
    )
    sub.add_argument("folder", metavar="DIR")
    sub.add_argument(
        "--slot",
        type=int,
        default=0,
        metavar="N",
        help="which of several workers this is: they begin at different shards (0)",
    )
    sub.add_argument(
        "--device",
        metavar="NAME",
        help="where the job says cuda: the device of this worker, such as cuda:1",
    )

    sub = command("ls", "gen.cli.info", "ls", "list what there is")
    sub.add_argument("kind", metavar="KIND", choices=KINDS, help=" | ".join(KINDS))
    sub.add_argument("--json", action="store_true", help="for programs")

    sub = command("show", "gen.cli.info", "show", "print a resolved config and its fingerprint")
    sub.add_argument("config", metavar="CONFIG")
    sub.add_argument("overrides", nargs="*", metavar="KEY=VALUE")

    sub = command("cp", "gen.cli.info", "cp", "copy a config to edit it")
    sub.add_argument("config", metavar="CONFIG")
    sub.add_argument("dest", metavar="DEST")

    sub = command(
        "status",
        "gen.jobs.status",
        "status",
        "how far a job folder is, also while a run is at work",
    )
    sub.add_argument("folder", metavar="DIR")
    sub.add_argument("--json", action="store_true", help="for programs")
    sub.add_argument(
        "--watch",
        action="store_true",
        help="show the progress until all is made; with --json, one report per line",
    )

    sub = command(
        "gallery", "gen.cli.commands", "gallery", "write the index.html of a job folder again"
    )
    sub.add_argument("folder", metavar="DIR")

    sub = command(
        "check", "gen.cli.commands", "check", "which media of a job folder fulfil their prompts"
    )
    sub.add_argument("folder", metavar="DIR")
    sub.add_argument("--json", action="store_true", help="for programs")

    sub = command(
        "decode",
        "gen.jobs.decode",
        "decode",
        "make media of the tokens that a job kept, with their frontend or another one",
    )
    sub.add_argument("folder", metavar="DIR")
    sub.add_argument(
        "--out", metavar="D", required=True, help="folder to write; the same command again resumes"
    )
    sub.add_argument(
        "--frontend", metavar="NAME", help="zoo name or folder (the one the tokens were made with)"
    )
    sub.add_argument(
        "--model", metavar="NAME", help="where the model of the tokens lies now, if it was moved"
    )
    sub.add_argument("--device", metavar="NAME", help="default: as the job")
    sub.add_argument("--dtype", metavar="NAME", help="default: as the job")
    sub.add_argument(
        "--force", action="store_true", help="replace what was decoded into D otherwise"
    )
    sub.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="let the code in the model's folder run, as the job did",
    )

    sub = command(
        "export", "gen.jobs.export", "export", "write the rows of a job as one Parquet file"
    )
    sub.add_argument("folder", metavar="DIR")
    sub.add_argument("--parquet", metavar="FILE", required=True)
    sub.add_argument(
        "--media", action="store_true", help="with the media themselves, as a column of bytes"
    )

    sub = command("doctor", "gen.cli.doctor", "doctor", "what this machine can run")
    sub.add_argument("--json", action="store_true", help="for programs")

    sub = command(
        "bench",
        "gen.bench.run",
        "bench",
        "forward calls, wall time and fidelity of samplers, side by side",
        "example: gen bench image --batch-sizes 1,8 --samplers speculative_jacobi,sjd --repeats 3"
        " --out bench.json",
    )
    sub.add_argument(
        "modality",
        metavar="MODALITY",
        help="see gen ls modalities; all: each in turn; or jobs: what the job layer costs",
    )
    sub.add_argument(
        "--items",
        type=int,
        metavar="N",
        help="with jobs: items without a model, per layout (10000)",
    )
    sub.add_argument(
        "--modalities", metavar="A,B", help="with jobs: whose models are measured (all)"
    )
    sub.add_argument(
        "--quick", action="store_true", help="less of everything: fewer prompts, repeats, items"
    )
    sub.add_argument(
        "--samplers",
        metavar="A,B",
        help="names; autoregressive is always measured, as the reference",
    )
    sub.add_argument(
        "--batch-sizes", default="1,8", metavar="N,N", help="items decoded together (1,8)"
    )
    sub.add_argument(
        "--sweep",
        action="append",
        metavar="KNOB=V,V",
        help=(
            "measure samplers that have this knob with each of these values; may be repeated: a"
            " grid"
        ),
    )
    sub.add_argument(
        "--peers",
        metavar="A,B",
        help=(
            "other implementations on the same weights: transformers, diffusers, reference, or all"
        ),
    )
    sub.add_argument(
        "--oracle",
        action="store_true",
        help=(
            "measure every masked sampler, preset and selector against models whose law is known,"
            " in place of a network"
        ),
    )
    sub.add_argument(
        "--prompts",
        type=int,
        metavar="N",
        help="prompts per repeat (8, 2 with --quick); with --oracle, tasks of a kind (96)",
    )
    sub.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        help=(
            "interleaved repeats, with fresh seeds (3, 1 with --quick); with --oracle, seeds per"
            " task (1)"
        ),
    )
    sub.add_argument("--seed", type=int, default=0, metavar="S")
    sub.add_argument("--out", metavar="FILE.json", help="write everything measured, run by run")
    sub.add_argument(
        "--json",
        action="store_true",
        help=(
            "for programs: the same as one line on standard output; the table goes to standard"
            " error"
        ),
    )
    sub.add_argument(
        "--gallery",
        metavar="DIR",
        help="draw fidelity, calls, wall time and acceptance as a page in this folder",
    )
    sub.add_argument("--markdown", action="store_true", help="print the table as markdown")
    _model_flags(sub)
    _law_flags(sub)
    return parser


def _model_flags(sub: Parser) -> None:
    sub.add_argument(
        "--model",
        metavar="NAME",
        help="zoo name, folder or hub id (the modality's own small model)",
    )
    sub.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1, mps (cpu)")
    sub.add_argument(
        "--dtype", metavar="NAME", help="float32, bfloat16, float16, float64 (float32)"
    )
    sub.add_argument(
        "--compile",
        action="store_true",
        default=None,
        help="run models through torch.compile: the first calls take long, later ones less",
    )


def _law_flags(sub: Parser) -> None:
    for name, kind in (
        ("guidance_scale", float),
        ("temperature", float),
        ("top_k", int),
        ("top_p", float),
        ("min_p", float),
    ):
        sub.add_argument(
            f"--{name.replace('_', '-')}", type=kind, metavar="X", help="default: the modality's"
        )
