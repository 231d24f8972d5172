"""Command ``encode``."""

from __future__ import annotations

import argparse
import json
import sys

from gen.core.printable import printable
from gen.core.tables import plural
from gen.jobs.progress.terminal import for_terminal
from gen.training.encode import EncodeOptions, encode_folder, spelled_reasons


def encode(args: argparse.Namespace) -> int:
    """Carry out ``gen encode``."""
    options = EncodeOptions(
        args.frontend,
        args.size,
        args.resize,
        args.skip_unreadable,
        args.shard_items,
        args.device,
        args.tokenizer,
        args.vocab_size,
        args.copies,
        args.text_encoder,
        args.labels,
        args.skeleton,
        args.given,
        args.given_frontend,
        args.given_size,
    )
    made = encode_folder(args.modality, args.folder, args.out, options, for_terminal())
    if args.json:
        kept = {k: v for k, v in made.items() if k != "shards"}
        print(json.dumps(kept, ensure_ascii=False))
    else:
        print(
            f"{args.out}: {plural(made['samples'], 'sample')}, {made['captioned']} with a"
            f" condition, {made['tokens']} tokens of {made['frontend']['name']}"
        )
    if made["skipped"]:
        count = plural(len(made["skipped"]), "file")
        said = f"left out {count}: {spelled_reasons(made['skipped'], 10)}"
        print(f"gen: {printable(said)}", file=sys.stderr)
    return 0
