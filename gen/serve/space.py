"""Gradio app of one modality, for a Space or to be mounted beside other apps.

A Space needs an ``app.py`` of two lines, and ``gen-toolkit`` and ``gradio`` as requirements:

    from gen.serve.space import make_blocks
    make_blocks("image").launch()

    app = gradio.mount_gradio_app(fastapi_app, make_blocks("speech"), path="/speech")

``python -m gen.serve.space image`` opens it on this machine.
"""

from __future__ import annotations

import argparse
import queue
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gen
from gen.core.resolve import describe_guarantee
from gen.engine.engine import Engine
from gen.engine.ticket import Ticket
from gen.media.containers import require_package
from gen.pipeline.output import PipelineOutput
from gen.pipeline.pipeline import Pipeline
from gen.pipeline.streaming import Chunk
from gen.serve.live.catalogue import suitable_samplers
from gen.tokenizers.base.text_bytes import TextBytes

LARGEST_SEED = 2**31 - 1


def make_blocks(modality: str = "image", model: str | None = None, device: str = "auto") -> Any:
    """Return a ``gradio.Blocks`` with prompt, sampler, seed and output.

    Args:
        modality: name of a modality.
        model: zoo name, folder or hub id; None takes the modality's own models.
        device: device of the model.

    Raises:
        GenError: gradio is not installed, or the model cannot be read.
    """
    gr = require_package("gradio", "gradio", "a Gradio app")
    pipe = gen.load(modality, model, device=device)
    engine = Engine({modality: pipe})
    usual = pipe.defaults.complete(None, {})[0]["name"]
    kind = pipe.modality.media_kind
    outputs = {"image": gr.Image, "audio": gr.Audio, "video": gr.Video}
    output = outputs.get(kind, gr.Textbox if modality == "text" else gr.Video)

    def run(prompt: str, sampler: str, seed: float) -> Iterator[tuple[Any, str]]:
        try:
            yield from _outputs(engine, modality, prompt, sampler, int(seed))
        except gen.GenError as error:
            raise gr.Error(str(error)) from None

    with gr.Blocks(title=f"gen: {modality}") as blocks:
        examples = pipe.modality.example_prompts(3, 0)
        prompt = gr.Textbox(examples[0], label="Prompt")
        sampler = gr.Dropdown(suitable_samplers(pipe), value=usual, label="Sampler")
        seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=LARGEST_SEED)
        button = gr.Button("Generate", variant="primary")
        shown, note = output(label=modality), gr.Markdown()
        gr.Examples([[text] for text in examples], [prompt])
        gr.on([button.click, prompt.submit], run, [prompt, sampler, seed], [shown, note])
    return blocks


def _outputs(
    engine: Engine, name: str, prompt: str, sampler: str, seed: int
) -> Iterator[tuple[Any, str]]:
    """Yield what is known of an output, with a note; the last is the output.

    Images and texts come while they are decoded.
    """
    pipe, text = engine.models.pipeline(name), ""
    grows = isinstance(pipe.frontend(), TextBytes)
    is_image = pipe.modality.media_kind == "image"
    news: queue.SimpleQueue[Chunk | Ticket] = queue.SimpleQueue()
    streams = news.put if grows or is_image else None
    how: dict[str, Any] = {"seed": seed, "on_chunk": streams, "partial_images": 8}
    ticket = engine.submit(name, prompt, sampler, **how)
    ticket.add_done_callback(news.put)
    try:
        while isinstance(chunk := news.get(), Chunk):
            text = text + chunk.media if grows else ""
            yield text if grows else chunk.media, "decoding"
    finally:  # a visitor who leaves, too
        ticket.cancel()
    out = ticket.result()
    told = describe_guarantee(pipe.resolve(sampler)[0], out.guarantee)
    yield _shown(pipe, out), f"{out.stats[0].nfe} forward passes: {told}"


def _shown(pipe: Pipeline, out: PipelineOutput) -> Any:
    """Return an output as the component of its kind takes it."""
    media, modality = out.media[0], pipe.modality
    if isinstance(media, str) or modality.media_kind == "image":
        return media
    if modality.media_kind == "audio":
        assert out.frontend is not None, "an output of a pipeline has its frontend"
        return out.frontend.rate, media
    # the app copies the film from here to where it serves it
    path = Path(tempfile.mkdtemp(prefix="gen-"), "output.mp4")
    (modality.save if modality.extension == "mp4" else modality.save_also)(media, path, {})
    return str(path)


def main() -> None:
    """Open the app on this machine."""
    parser = argparse.ArgumentParser(prog="python -m gen.serve.space", description=main.__doc__)
    parser.add_argument("modality", nargs="?", default="image")
    parser.add_argument("--model")
    args = parser.parse_args()
    make_blocks(args.modality, args.model).launch()


if __name__ == "__main__":
    main()
