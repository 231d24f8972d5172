"""``gen eval``: metrics of a job folder, and the held-out loss of a model."""

from __future__ import annotations

import argparse
import json
from typing import Any

from gen.core.checks import check_int
from gen.core.errors import GenError
from gen.core.printable import printable
from gen.core.tables import EMPTY, columns
from gen.eval.geneval import write_geneval
from gen.eval.metric import parse_metrics
from gen.eval.run import evaluate
from gen.training.held_out import held_out_loss


def evaluate_folder(args: argparse.Namespace) -> int:
    """Carry out ``gen eval``; return 1 if media are broken, else 0."""
    check_int("--workers", args.workers, 1)
    if args.write_geneval is not None:
        return _write_geneval(args)
    if args.held_out is not None:
        return _held_out(args)
    if args.metrics is None:
        raise GenError("--metrics is missing; expected names separated by commas (gen ls metrics)")
    metrics = parse_metrics(args.metrics, args.overrides or ())
    results = evaluate(
        args.folder,
        metrics,
        reference=args.reference,
        workers=args.workers,
        device=args.device or "cpu",
        fresh=args.fresh,
    )
    if args.json:
        print(printable(json.dumps(results, ensure_ascii=False, indent=2)))
    else:
        _print_results(results)
    return 1 if results["broken"] else 0


def _write_geneval(args: argparse.Namespace) -> int:
    if args.metrics is not None:
        raise GenError("--write-geneval and --metrics are two steps; expected one of them")
    found = write_geneval(args.folder, args.write_geneval)
    if args.json:
        print(json.dumps(found))
    else:
        print(f"{args.write_geneval}: {found['prompts']} prompts, {found['images']} images")
        if found["broken"]:
            print(f"{found['broken']} items have no image (gen check names them)")
    return 1 if found["broken"] else 0


def _held_out(args: argparse.Namespace) -> int:
    if args.metrics is not None or args.reference is not None or args.overrides:
        raise GenError(
            "--held-out measures a model and no media; expected it without --metrics, --reference"
            " and parameters of metrics"
        )
    found = held_out_loss(args.folder, args.held_out, args.device or "cpu")
    if args.json:
        print(json.dumps(found))
    else:
        rows = [("figure", "value"), *((key, _value(value)) for key, value in found.items())]
        print(columns(rows))
    return 0


def _print_results(results: dict[str, Any]) -> None:
    rows = [("metric", "sampler", "items", "figure", "value")]
    for name, found in results["metrics"].items():
        groups = [("all", found), *found["by_sampler"].items()]
        for group, part in groups:
            figures = part["scores"].items() or [(EMPTY, EMPTY)]
            rows += [(name, group, str(part["items"]), key, _value(v)) for key, v in figures]
    print(printable(columns(rows)))
    for name, found in results["metrics"].items():
        for reason, count in found["skipped"].items():
            print(printable(f"{name}: {count} items not judged: {reason}"))
        for group, part in found["by_sampler"].items():
            if "problem" in part:
                print(printable(f"{group}: {part['problem']}"))
    broken = list(results["broken"].items())
    for item, reason in broken[:10]:
        print(printable(f"{item}: {reason}"))
    if len(broken) > 10:
        print(f"... and {len(broken) - 10} more (--json lists all)")


def _value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
