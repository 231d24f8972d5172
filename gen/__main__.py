"""The command ``gen``: every error ends as one line on stderr and an exit code.

0 done, 1 some items failed or some media are broken, 2 wrong input or a disk that cannot be
written, 3 a fault in gen, 75 a run stopped on request (SIGTERM, SIGUSR1) and goes on with the same
command, 130 interrupted. ``GEN_DEBUG=1`` in the environment shows the traceback behind the line,
``--verbose`` and ``GEN_LOG_LEVEL`` show the log.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from gen.cli.parser import parse
from gen.core.errors import GenError
from gen.core.interrupts import terminable
from gen.core.log import configure
from gen.core.memory import is_out_of_memory
from gen.core.printable import printable
from gen.models.load.libraries import hide_quantizers

LONGEST = 4000  # characters of a message: a name that is listed in full fits


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; ``argv`` is the command line without ``gen``."""
    args = None
    if argv is None:  # a process of its own
        hide_quantizers()
    try:
        args = parse(sys.argv[1:] if argv is None else list(argv))
        configure(args.verbose, args.quiet)
        with terminable():  # schedulers end processes so; temporary files are removed all the same
            return args.command(args)
    except SystemExit as leaving:  # --help and --version
        return leaving.code if isinstance(leaving.code, int) else 0
    except KeyboardInterrupt as error:
        kept = args is not None and args.resumable
        end = "; what is finished is kept, and the same command resumes" if kept else ""
        return _say(f"interrupted{end}", 130, error)
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except GenError as error:
        return _say(str(error), 2, error)
    except OSError as error:
        file = f"{error.filename}: " if error.filename else ""
        return _say(f"{file}{error.strerror or error}", 2, error)
    except Exception as error:  # the last line of defence
        if is_out_of_memory(error):
            return _say(f"out of memory: {error}", 2, error)
        return _say(
            f"internal error, {type(error).__name__}: {error} (GEN_DEBUG=1 shows where)", 3, error
        )


def _say(text: str, code: int, error: BaseException) -> int:
    if os.environ.get("GEN_DEBUG"):
        traceback.print_exception(error)
    line = printable(" ".join(text.split()))
    if len(line) > LONGEST:
        line = f"{line[:LONGEST]}... ({len(line):,} characters; GEN_DEBUG=1 shows all)"
    print(f"gen: {line}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
