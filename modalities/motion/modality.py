"""Motion: a person of 22 joints, up to 196 poses at 20 per second, as up to 49 frames of VQ tokens,
one for the lower and one for the upper body.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gen.contracts.modality import Verdict
from gen.core.errors import GenError
from gen.core.registry import register
from gen.core.token_space import TokenSpace
from gen.media.motion.bvh import read_bvh, write_bvh
from gen.media.motion.features import start_of
from gen.media.motion.skeleton import FPS, Motion, axis_rotation
from gen.media.npz import read_npz, write_npz
from gen.media.video import write_mp4
from gen.modalities.grid_base import GridModality
from gen.modalities.motion import captions as moves
from gen.modalities.motion import checker as moves_check
from gen.modalities.motion.stick_figure import render
from gen.modalities.motion.synth import GRID, MIN_POSES
from gen.models.load.locate import ZOO
from gen.tokenizers.motion.motion_vq import MotionVQ

PARTS = ("lower", "upper")  # parts of the body, in the order of their streams
ANYTHING = "a person moves"  # the unconditional prompt
SHORTEST = (MIN_POSES - 1) // GRID  # frames of tokens


class Anything:
    """Condition of the prompt ``ANYTHING``."""

    def __str__(self) -> str:
        return ANYTHING


@register("modality", "motion")
class MotionModality(GridModality):
    """Person who does what a caption states (``gen.modalities.motion.captions``).

    The condition is a ``Caption``; a model's prompt is its five slots. Tokens are those of both
    parts of the body, frame after frame, and then the eos token.
    """

    name = "motion"
    media_kind = "data"
    extension = "npz"
    also = ("bvh", "mp4")
    models = {"causal": "motion-causal", "masked": "motion-masked", "causal-draft": "motion-draft"}
    frontends = {"codes": "motion-vq"}
    default_sampling = {"temperature": 0.7, "guidance_scale": 1.5, "top_k": 50}
    slots = moves.SLOTS
    words = moves.PAIRS
    unconditional = moves.pairs(np.full((1, moves.SLOTS), moves.ANY))[0].tolist()
    layout_name, layout_params = "flatten", {"order": "time_major", "vocabulary": "offset"}
    streams = True
    shortest = SHORTEST
    edited_by = "span"

    def condition(self, prompt: str) -> moves.Caption | Anything:
        if " ".join(prompt.lower().split()).rstrip(".") == ANYTHING:
            return Anything()
        try:
            return moves.parse(prompt)
        except ValueError as error:
            raise GenError(str(error)) from None

    def example_prompts(self, count: int, seed: int) -> list[str]:
        """Held-out captions, to measure with."""
        return [str(c) for c in moves.captions(count, seed=123 + seed, held=True)]

    def prompt_words(self, condition: moves.Caption | Anything) -> list[int]:
        return self.unconditional if isinstance(condition, Anything) else condition.pairs()

    def frontend(self, kind="codes", device="cpu", dtype=torch.float32, folder: Path | None = None):
        return MotionVQ.from_pretrained(folder or ZOO / self.frontends[kind], device, dtype)

    def whole_frames(self, media: Any, frontend) -> Motion:
        if not isinstance(media, Motion):
            raise GenError(
                f"the motion is a {type(media).__name__}; expected a"
                " gen.media.motion.skeleton.Motion, or an .npz or .bvh file"
            )
        step = frontend.config.compression[0]
        if media.frames < step:
            raise GenError(
                f"the motion to continue has {media.frames} poses; expected at least {step},"
                " the poses of one code"
            )
        return media.cut(0, (media.frames - 1) // step * step + 1) if media.frames > step else media

    def edit(self, source: Any, where: str, frontend, space: TokenSpace) -> tuple[Tensor, Any]:
        """Prepare regeneration of parts of a motion.

        ``where`` is ``20:60`` (poses, either end may be omitted), ``upper`` or ``lower``, or both:
        ``upper 20:60``; several are separated by commas. A code is regenerated if any of its four
        poses is. Other positions keep their codes.
        """
        media = self.load(Path(source)) if self.is_path(source) else source
        step = frontend.config.compression[0]
        # a part without poses behind its last code ends there; cut to make room for one, it would
        # lose that code
        whole = (
            media
            if isinstance(media, Motion) and media.frames % step == 0
            else self.whole_frames(media, frontend)
        )
        codes = frontend.encode(frontend.preprocess(whole)[None])[0].cpu()  # [parts, T]
        frames = codes.shape[1]
        if not self.shortest <= frames <= space.grid[0]:
            raise GenError(
                f"the motion to edit has {media.frames} poses; expected {self.shortest * step} to"
                f" {space.grid[0] * step}"
            )
        anew = spans(where, frames * step)
        cells = torch.from_numpy(anew.reshape(len(PARTS), frames, step).any(-1))
        canvas = torch.full((space.length,), space.eos_token_id)
        kept = self.layout(frontend.config.codebook_sizes, (frames,)).to_sequence(codes[None])[0]
        canvas[: len(kept)] = torch.where(cells.T.flatten(), space.mask_token_id, kept)
        heading, origin = start_of(whole)
        return canvas, lambda made: placed(made, heading, origin)

    def sequence(self, pipe: Any, prompts: list[str], **how: Any) -> Motion:
        """Decode one long motion from several prompts (``gen.modalities.motion.sequence``)."""
        # that module drives pipelines of this modality, so it imports this one
        from gen.modalities.motion.sequence import sequence

        return sequence(pipe, prompts, **how)

    def save(self, media: Motion, path: Path, info: dict[str, Any]) -> None:
        joints = media.joints
        write_npz(
            path,
            {
                "joints": joints,
                "root": media.root,
                "rotations": media.rotations,
                "fps": np.array(FPS),
                **info,
            },
        )

    def save_also(self, media: Motion, path: Path, info: dict[str, Any]) -> None:
        if path.suffix == ".bvh":
            write_bvh(path, media)
        else:
            write_mp4(path, render(media), FPS, info)

    def still(self, media: Motion) -> Image.Image:
        return Image.fromarray(render(media, frames=[media.frames // 2])[0])

    def load(self, path: Path) -> Motion:
        path = Path(path)
        if path.suffix.lower() == ".bvh":
            return read_bvh(path)
        if path.suffix.lower() != ".npz":
            raise GenError(f"{path} is not a motion file; expected an .npz or .bvh file")
        arrays = read_npz(path, ("root", "rotations"))
        return Motion(arrays["root"], arrays["rotations"])

    def check(self, media: Motion, prompt: str) -> Verdict:
        condition = self.condition(prompt)
        if isinstance(condition, Anything):
            movement = moves_check.describe(media)
            return Verdict(not movement.fault, not movement.fault, movement.fault or "moves")
        return moves_check.check(media, condition)

    def grade(self, media: Motion, prompt: str) -> float:
        """Return the share of the caption's attributes that a clip shows."""
        condition = self.condition(prompt)
        if isinstance(condition, Anything):
            return float(not moves_check.describe(media).fault)
        return moves_check.grade(media, condition)


def spans(text: str, poses: int) -> np.ndarray:
    """Mask of the poses and parts of the body in a span: bool [parts, poses].

    Args:
        text: spans such as '20:60', 'upper' or 'upper 20:60', separated by commas.
        poses: poses of the motion.

    Raises:
        GenError: the text is no span, or goes beyond the poses.
    """
    out = np.zeros((len(PARTS), poses), bool)
    for piece in text.split(","):
        match = re.fullmatch(r"\s*(lower|upper)?\s*(?:(\d*):(\d*))?\s*", piece)
        if not match or not piece.strip():
            raise GenError(
                f"span {piece.strip()!r} names no poses; expected a range such as '20:60', ':40',"
                " 'upper' or 'upper 20:60'"
            )
        part, first, last = match.groups()
        first, last = int(first or 0), poses if not last else int(last)
        if not 0 <= first < last <= poses:
            raise GenError(
                f"span {piece.strip()!r} goes from pose {first} to {last}; expected a range inside"
                f" 0:{poses}"
            )
        out[PARTS.index(part) if part else slice(None), first:last] = True
    return out


def placed(motion: Motion, heading: float, origin: tuple[float, float]) -> Motion:
    """Turn a motion that starts at the origin and faces +z by a heading in radians, and move it to
    x and z.
    """
    turn = axis_rotation("y", np.array(heading))
    root = motion.root @ turn.T + np.array([origin[0], 0.0, origin[1]])
    rotations = motion.rotations.copy()
    rotations[:, 0] = turn @ rotations[:, 0]
    return Motion(root, rotations)
