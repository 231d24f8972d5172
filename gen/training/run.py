"""``gen train``: from a training file to a folder with a model, a log and a page."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from gen.bench.curve import put_page
from gen.bench.plots import COLOURS, Point, axis, panel
from gen.config.job import make_job
from gen.core.condition_parts import KINDS
from gen.core.errors import GenError
from gen.core.files import put_text, sweep_temporaries
from gen.core.tables import plural
from gen.jobs.run import run_job
from gen.media.given import is_data_uri
from gen.recipes.drafters.data import Conditions, Teacher
from gen.recipes.drafters.recipe import QUICK, DrafterRecipe, Plan
from gen.training.config import TrainingConfig, same_run
from gen.training.data import TokenData, load_data, split
from gen.training.frontend_tasks import make_frontend_task
from gen.training.loop import CHECKPOINT, LOG, Loop, processes
from gen.training.media_data import load_media
from gen.training.reconstruction import (
    FOLDER,
    PAIRS,
    SHOWN,
    Reconstruction,
    limit_text,
    reconstruct,
)
from gen.training.shards import read_folder, read_json
from gen.training.tasks import MODEL, Task, Written, make_task

RUN, SAMPLES, CURVE = "run.json", "samples", "curve.svg"
LEARNING = "learning"  # folder of the samples of earlier steps
POINTS = 60  # of a curve, at most
STYLE = (
    "<style>text{font-family:sans-serif;font-size:11px;fill:#374151}"
    ".grid{stroke:#e5e7eb}.name{font-size:13px;font-weight:600}</style>"
)


def train(config: TrainingConfig, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Carry out a training run, or go on with it.

    Args:
        config: keys of the run.
        say: receives progress.

    Returns:
        ``model`` and ``adapter`` (folders that were written), ``page``, ``steps``, ``loss`` of the
        first and the last row of the log, ``validation``, and ``use``, a command that samples from
        the trained model; of a drafter ``model``, ``alpha`` and ``use``. Nothing in processes but
        the first.

    Raises:
        GenError: data, model or objective do not fit each other, or ``out`` holds something else.
    """
    if config.objective == "drafter":
        return train_drafter(config, say)
    if config.objective == "frontend":
        return train_frontend(config, say)
    data, out = load_data(config.data), Path(config.out)
    accelerator = processes(config.device)
    with accelerator.main_process_first():
        open_run(out, config, data.mark)
    task = make_task(config, data)
    loop = Loop(task, config, len(data.tokens), accelerator)
    galleries: list[Path] = sorted((out / LEARNING).glob("step-*"))

    def show() -> None:
        if config.samples and config.sample_every and loop.step % config.sample_every == 0:
            to = out / LEARNING / f"step-{loop.step:06d}"
            made = make_samples(config, data, to, save(task, out))
            galleries[:] = sorted({*galleries, made})
        write_page(config, described(data), loop.rows, out, shown_samples(galleries))

    rows = loop.run(say, show)
    if not accelerator.is_main_process:
        accelerator.wait_for_everyone()
        return {}
    validation = loop.measure()
    written = save(task, out)
    if config.samples:
        galleries.append(make_samples(config, data, out / SAMPLES, written))
    page = write_page(config, described(data), rows, out, shown_samples(galleries))
    accelerator.wait_for_everyone()
    return {
        **written.folders,
        "page": str(page),
        "steps": loop.step,
        "loss": [rows[0]["loss"], rows[-1]["loss"]],
        "validation": validation,
        "use": command(data, written, [s for s in config.samples if isinstance(s, str)]),
    }


def save(task: Task, out: Path) -> Written:
    """Write what was trained up to now. Raises ``GenError`` if it cannot."""
    try:
        return task.save(out)
    except (OSError, SafetensorError) as error:
        raise GenError(f"cannot write {out / MODEL}: {error}") from None


def command(data: TokenData, written: Written, samples: Sequence[str]) -> str:
    """Return a command line that samples from what a run has written, with one of its prompts."""
    said = [parts["text"] for parts in data.conditions if parts and parts.get("text")]
    prompt, media = [text for text in (*samples, *said) if text][:1], []
    if data.medium is not None:
        parts = next(parts for parts in data.conditions if parts)
        prompt = [parts["text"]] if parts.get("text") else []
        kind, path = KINDS[data.medium.part], parts[data.medium.part][0]
        media = [f"--{kind}", kind.upper() if is_data_uri(path) else path]
    words = ["gen", "sample", data.manifest["modality"], *prompt, *media, "--model", written.model]
    if not written.merged:
        words += ["--model-option", f"adapters={written.adapter}"]
    return shlex.join(words)


def train_drafter(config: TrainingConfig, say: Callable[[str], None]) -> dict[str, Any]:
    """Train a drafter of a model by the recipe ``gen.recipes.drafters``, in the folder of the run.

    With ``data`` it learns on conditions of those, else on such of the modality's language.

    Returns:
        ``model``: folder of the drafter; ``alpha``: acceptance of its first drafts; ``use``: a
        command that drafts with it.
    """
    asked, given = config.drafter, None
    if config.data:
        manifest, shards = read_folder(config.data)
        found = [parts for shard in shards for parts in shard.conditions]
        found = found[:: manifest.get("copies", 1)]
        parts = split(len(found), max(config.validation, 1 / len(found)), config.seed)
        drawn = [[found[i] for i in rows.tolist() if found[i] is not None] for rows in parts]
        given = Conditions(*drawn) if all(drawn) else None
    plan = QUICK if asked.quick else Plan(prompts=asked.prompts, minutes=asked.minutes)
    options = {k: str(v) for k, v in asked.options.items()}
    teach = partial(Teacher.of_model, str(config.model), asked.modality or None, given=given)
    out = Path(config.out)
    torch.set_num_threads(1)
    recipe = DrafterRecipe(str(config.model), asked.kind, out, plan, options, log=say, teach=teach)
    made = recipe.run()
    return {"model": made["drafter"], "alpha": made["alpha"], "use": made["use"]}


def train_frontend(config: TrainingConfig, say: Callable[[str], None]) -> dict[str, Any]:
    """Train a frontend of the media of a folder, and measure what it keeps of media that it was not
    trained on.

    Returns:
        As ``train``, with ``reconstruction`` (``Reconstruction.to_dict``); ``use`` is a command
        that encodes the folder with the frontend.
    """
    asked, out = config.frontend, Path(config.out)
    accelerator = processes(config.device)
    if accelerator.num_processes > 1:
        raise GenError(
            f"the objective frontend runs in {accelerator.num_processes} processes; expected one:"
            " unused codes are revived from the media that a process has seen"
        )
    data = load_media(config.data, asked.modality, asked.size, say)
    open_run(out, config, data.mark)
    task = make_frontend_task(config, data)
    loop = Loop(task, config, len(data.signals), accelerator)
    measured = loop.held if len(loop.held) else torch.arange(len(data.signals))
    about = f"{plural(len(data.signals), asked.modality + ' sample')}"

    def show() -> tuple[Path, Reconstruction]:
        task.model.eval()
        made = reconstruct(task.frontend(), [*task.signals(measured[:SHOWN])])
        assert made is not None, "what can be trained can be measured"
        task.model.train()
        source = made.write(out).relative_to(out).as_posix()
        shown = f'<h2>Originals, and decoded</h2><p>{made}</p><img src="{source}" alt="">'
        return write_page(config, about, loop.rows, out, shown), made

    rows = loop.run(say, show)
    validation, written, (page, made) = loop.measure(), task.save(out), show()
    say(f"{made}: {page.parent / FOLDER / PAIRS}")
    if made.is_limit:
        say(limit_text(asked.modality))
    words = ["gen", "encode", asked.modality, config.data, "--frontend", written.model, "--out"]
    return {
        **written.folders,
        "page": str(page),
        "steps": loop.step,
        "loss": [rows[0]["loss"], rows[-1]["loss"]],
        "validation": validation,
        "reconstruction": made.to_dict(),
        "use": shlex.join([*words, str(out.with_name(f"{out.name}-tokens"))]),
    }


def open_run(out: Path, config: TrainingConfig, mark: str) -> None:
    """Write the settings of a run into a new or empty folder, or find the same ones there. Those of
    a run that has no checkpoint are replaced.

    Raises:
        GenError: the folder holds something else, or another run.

    ``mark``: digest of the data.
    """
    mine = {**same_run(config), "data_digest": mark}
    mine.pop("data")  # the data may move
    path = out / RUN
    if out.is_file():
        raise GenError(f"out is {str(out)!r}, which is a file; expected a folder")
    if path.is_file():
        there = read_json(path)
        changed = sorted(k for k in {*there, *mine} if there.get(k) != mine.get(k))
        if changed and (out / CHECKPOINT).is_file():
            raise GenError(
                f"{out} holds another run, which differs in {', '.join(changed)}; expected a new"
                " or empty folder"
            )
        if changed:  # it failed before its first checkpoint
            put_text(path, json.dumps(mine, ensure_ascii=False, indent=1) + "\n")
        sweep_temporaries(out)
        return
    if out.is_dir() and any(out.iterdir()):
        raise GenError(f"{out} is not empty and holds no run; expected a new or empty folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GenError(f"cannot write {out}: {error.strerror or error}") from None
    put_text(path, json.dumps(mine, ensure_ascii=False, indent=1) + "\n")


def make_samples(config: TrainingConfig, data: TokenData, out: Path, written: Written) -> Path:
    """Decode the prompts of ``samples`` with a model, as a job with its own gallery in ``out``."""
    tree = {
        "modality": data.manifest["modality"],
        **written.load,
        "prompts": list(config.samples),
        "seed": config.seed,
        "out": str(out),
    }
    run_job(make_job(tree, where="the samples of the run"))
    return out


def curve(rows: list[dict[str, Any]]) -> str:
    """Draw the losses of a log as an SVG."""
    points = []
    for name, colour in (("loss", COLOURS[0]), ("validation", COLOURS[1])):
        found = [r for r in rows if name in r]
        every = -(-len(found) // POINTS)
        kept = [r for i, r in enumerate(found) if i % every == 0 or r is found[-1]] if found else []
        points += [
            Point(
                r["step"],
                r[name],
                name if r is kept[-1] else "",
                f"step {r['step']}: {name} {r[name]:.4f}",
                colour,
                line=name,
            )
            for r in kept
        ]
    steps, losses = [p.x for p in points], [p.y for p in points]
    x, y = axis([0.0, *steps], "step", "{:.0f}".format, log=False), axis(losses, "loss", log=False)
    return panel("learning curve", points, x, y)


def curve_file(rows: list[dict[str, Any]]) -> str:
    """Draw the losses of a log as an SVG file of its own."""
    head = '<svg xmlns="http://www.w3.org/2000/svg" '
    return curve(rows).replace("<svg ", head, 1).replace(">", f">{STYLE}", 1) + "\n"


def described(data: TokenData) -> str:
    """Say what a model is trained on, as HTML."""
    return f"{data.manifest['samples']} samples of {escape(data.manifest['modality'])}"


def shown_samples(galleries: list[Path]) -> str:
    """Return the samples of a run as HTML, the latest ones first."""
    parts = []
    for folder in reversed(galleries):
        source = SAMPLES if folder.name == SAMPLES else f"{LEARNING}/{folder.name}"
        title = "Samples" if folder.name == SAMPLES else f"Samples, {folder.name}"
        images = "".join(
            f'<img src="{source}/{p.name}" alt="" width="128">'
            for p in sorted(folder.glob("*.png"))[:24]
        )
        parts.append(f'<h2>{title}</h2><p>{images}</p><p><a href="{source}/index.html">gallery</a>')
    return "".join(parts)


def write_page(
    config: TrainingConfig, data: str, rows: list[dict[str, Any]], out: Path, shown: str = ""
) -> Path:
    """Write ``index.html`` (the learning curve, the keys of the run, and what was made) and the
    curve as a file of its own.

    Args:
        config: keys of the run.
        data: what it is trained on, as HTML.
        rows: rows of the log up to now.
        out: folder of the run.
        shown: samples or reconstructions, as HTML.
    """
    settings = "".join(
        f"<li>{escape(k)}: {escape(json.dumps(v))}</li>"
        for k, v in same_run(config).items()
        if v not in (None, [], ())
    )
    last = rows[-1]
    held = f", validation {last['validation']:.4f}" if "validation" in last else ""
    about = (
        f"{data}, step {last['step']} of {config.steps}: loss {rows[0]['loss']:.4f} to"
        f' {last["loss"]:.4f}{held}. Rows: <a href="{LOG}">{LOG}</a>.'
    )
    body = f'<div class="panels">{curve(rows)}</div>{shown}<h2>Keys</h2><ul>{settings}</ul>'
    put_text(out / CURVE, curve_file(rows))
    return put_page(out, f"gen train: {out.name}", about, body)
