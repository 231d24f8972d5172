"""Parts that the commands share: the parser class, the deferred implementation, common flags."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from gen.core.errors import GenError, hint, shown

Commands = argparse._SubParsersAction
Implementation = Callable[[argparse.Namespace], int]


def _ascii(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a type of numbers that takes ASCII digits alone, without spaces and underscores."""

    def read(text: str) -> Any:
        if not text.isascii() or "_" in text or text != text.strip():
            raise ValueError(text)
        return kind(text)

    read.__name__ = kind.__name__  # which the message has
    return read


class Parser(argparse.ArgumentParser):
    """Parser whose errors are ``GenError`` with the nearest name. Abbreviated flags are not
    guessed."""

    def __init__(self, *args, **kwargs):
        super().__init__(
            *args,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **kwargs,
        )
        for kind in (int, float):
            self.register("type", kind, _ascii(kind))

    def error(self, message: str):
        """Raise ``GenError`` with the message of argparse, and a hint for an unknown choice."""
        choice = re.search(r"invalid choice: '?([^' ]*)'? \(choose from (.*)\)", message)
        if choice:
            options = [o.strip(" '") for o in choice[2].split(",")]
            message = (
                f"unknown command or name {choice[1]!r}.{hint(choice[1], options)} Known:"
                f" {', '.join(options)}"
            )
        raise GenError(f"{message} (see {self.prog} --help)")

    def flags(self) -> list[str]:
        """List every flag of this parser."""
        return [flag for action in self._actions for flag in action.option_strings]


def deferred(location: str) -> Implementation:
    """Return a function that imports ``module:function`` when it is called, so that help imports
    nothing heavy."""
    module, _, function = location.partition(":")

    def call(args: argparse.Namespace) -> int:
        return getattr(import_module(module), function)(args)

    return call


def add_command(
    commands: Commands, name: str, implementation: str, text: str, epilog: str = ""
) -> Parser:
    """Add a command and return its parser.

    Args:
        commands: the subparsers of ``gen``.
        name: as it is typed.
        implementation: ``module:function`` that takes the arguments and returns the exit code.
        text: one line of help.
        epilog: examples under the help.
    """
    parser = commands.add_parser(name, help=text, description=text, epilog=epilog)
    parser.set_defaults(command=deferred(implementation), parser=parser)
    loudness = parser.add_mutually_exclusive_group()
    loudness.add_argument("--verbose", action="store_true", help="log events to stderr")
    loudness.add_argument(
        "--quiet", action="store_true", help="print only errors to stderr, no progress or warnings"
    )
    return parser


def add_overrides(parser: Parser, example: str) -> None:
    """Add ``KEY=VALUE`` arguments, their flag, and the flag that lets them read the environment."""
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help=f"any key of a job file, such as {example}",
    )
    parser.add_argument(
        "--set",
        dest="set_values",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="the same as a flag; may be repeated",
    )
    parser.add_argument(
        "--allow-env",
        action="append",
        default=[],
        metavar="NAME",
        help="allow ${oc.env:NAME} to read this environment variable; may be repeated",
    )


def add_json_flag(parser: Parser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_trust_flag(parser: Parser) -> None:
    """Add ``--trust-job``."""
    parser.add_argument(
        "--trust-job",
        action="store_true",
        help="accept what can run code or open connections in the job file: engine_options, import"
        " paths, model_options.trust_remote_code, kernels of the hub, addresses of data sets",
    )


def add_model_flags(parser: Parser) -> None:
    """Add the flags that choose a model and the device that it runs on."""
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="zoo name, folder or hub id (default: the built-in model of the modality)",
    )
    parser.add_argument(
        "--model-option",
        action="append",
        metavar="KEY=VALUE",
        help=(
            "option that the model is loaded with, such as revision=v1, variant=fp16,"
            " quantization=int8, adapters=FOLDER or one of its family (gen ls families); may be"
            " repeated"
        ),
    )
    parser.add_argument("--device", metavar="NAME", help="auto, cpu, cuda, cuda:1, mps (cpu)")
    parser.add_argument(
        "--dtype", metavar="NAME", help="float32, bfloat16, float16, float64 (float32)"
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        default=None,
        help=(
            "compile models with torch.compile: first forward passes are slow, later ones faster"
        ),
    )


def add_sampling_flags(parser: Parser) -> None:
    """Add one flag per sampling parameter that a command line can write."""
    for name, kind in (
        ("guidance_scale", float),
        ("temperature", float),
        ("top_k", int),
        ("top_p", float),
        ("min_p", float),
    ):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            metavar="X",
            help="default: that of the model or modality",
        )
    for flag, kind, said in (
        ("--repetition-penalty", float, "divisor of logits of tokens that prompt or output have"),
        ("--presence-penalty", float, "number taken off the logits of tokens of the output"),
        ("--frequency-penalty", float, "the same, times how often the token came"),
        ("--no-repeat-ngram-size", int, "length of n-grams that may not come twice"),
        ("--min-new-tokens", int, "tokens before which no output may end"),
        ("--max-new-tokens", int, "tokens after which an output is over (text)"),
        ("--max-length", int, "tokens of prompt and output after which it is over (text)"),
        ("--logprobs", int, "log-probabilities of every token and of so many likeliest ones"),
        ("--logit-bias", json_object, 'JSON of token ids or texts, such as {"42": -5}'),
        ("--structured", json_file, "file with a rule for the output, such as a JSON schema"),
    ):
        metavar = {json_object: "JSON", json_file: "FILE"}.get(kind, "X")
        parser.add_argument(flag, type=kind, metavar=metavar, help=said)
    for flag, kind, said in (
        ("--bad-words", str, "text that may not come"),
        ("--stop", str, "text that ends an output, which is cut off before it"),
        ("--stop-token-ids", int, "token that ends an output"),
    ):
        metavar = "ID" if kind is int else "TEXT"
        parser.add_argument(
            flag, type=kind, action="append", metavar=metavar, help=f"{said}; may be repeated"
        )


def json_object(text: str) -> dict[str, Any]:
    """Read a JSON object that came as a flag.

    Raises:
        ArgumentTypeError: the text is none.
    """
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no JSON: {error}") from None
    if not isinstance(tree, dict):
        raise argparse.ArgumentTypeError(f"{shown(text)} is JSON; expected an object: {{...}}")
    return tree


def json_file(path: str) -> dict[str, Any]:
    """Read a file that holds a JSON object; arguments and errors as of ``json_object``."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"the file {path} cannot be read: {error}") from None
    return json_object(text)
