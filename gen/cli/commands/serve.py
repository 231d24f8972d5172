"""``gen serve``."""

from __future__ import annotations

from gen.cli.arguments import Commands, Parser, add_command

HOST, PORT = "127.0.0.1", 8123


def add_serve(commands: Commands) -> None:
    """Add the command ``serve``."""
    parser = add_command(
        commands,
        "serve",
        "gen.cli.serve:serve",
        "serve all models behind OpenAI's API",
        "Models are loaded when they are first asked for. A client of OpenAI's API finds them at\n"
        "http://127.0.0.1:8123/v1, and http://127.0.0.1:8123/docs describes all endpoints.\n\n"
        "  gen serve --port 8123\n"
        "  GEN_API_KEY=... gen serve --host 0.0.0.0\n"
        "  gen serve --model mine=image:checkpoints/shapes\n"
        "  gen serve --model mine=text:org/model --model-option mine:revision=v1",
    )
    parser.add_argument(
        "--host", default=HOST, metavar="NAME", help=f"address to listen on ({HOST})"
    )
    parser.add_argument(
        "--port", type=int, default=PORT, metavar="N", help=f"port; 0 takes a free one ({PORT})"
    )
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="ID=MODALITY:PATH",
        help="a model of yours by its folder, file or hub id; may be repeated (all of the package)",
    )
    parser.add_argument(
        "--model-option",
        action="append",
        default=[],
        metavar="ID:KEY=VALUE",
        help=(
            "option that the model ID is loaded with, such as mine:revision=v1, or"
            " mine:adapters.poet=FOLDER, which is served as mine:poet; may be repeated"
        ),
    )
    parser.add_argument("--device", metavar="NAME", help="auto, cpu, cuda, cuda:1, mps (auto)")
    parser.add_argument(
        "--dtype", metavar="NAME", help="float32, bfloat16, float16, float64 (float32)"
    )
    _add_limit_flags(parser)


def _add_limit_flags(parser: Parser) -> None:
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="API keys, one per line; GEN_API_KEY of the environment is one more",
    )
    for flag, kind, metavar, text in (
        ("--max-waiting", int, "N", "outputs that may wait (256); more are answered with 429"),
        ("--max-rows", int, "N", "rows of a batch (8)"),
        ("--max-body", int, "BYTES", "size of a request (16000000)"),
        ("--max-connections", int, "N", "connections that may be open (2000)"),
        ("--rate", int, "N", "requests per minute of one client (no limit)"),
        ("--deadline", float, "SECONDS", "time after which a request fails (600)"),
        ("--constraint-seconds", float, "SECONDS", "time of building structured output (2)"),
        ("--constraint-states", int, "N", "states of an automaton of structured output (50000)"),
        ("--constraint-megabytes", float, "MB", "memory of building structured output (256)"),
    ):
        parser.add_argument(flag, type=kind, metavar=metavar, help=text)
    parser.add_argument(
        "--cors",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="origin whose pages may ask, such as http://localhost:3000; may be repeated (none)",
    )
    parser.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="processes behind one address, by Ray Serve (extra ray); models of the package alone",
    )
    parser.add_argument(
        "--batches",
        metavar="FOLDER",
        help="folder of uploaded files and batches, which go on after a restart (none)",
    )
