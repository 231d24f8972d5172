"""Frame after frame, each given an action."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gen.contracts.protocol import ModelProtocol
from gen.core.registry import register
from gen.models.adapters.frames import FrameLM
from gen.models.targets.frames import FramesTarget


@register("protocol", "frames")
class Frames(ModelProtocol):
    """Clean latents of a noised frame given its action and the frames before it."""

    targets = {"latents": FramesTarget}
    adapters = {"latents": FrameLM}
    replaces_rows = False
    closed_form = "Frames"

    @classmethod
    def serves(cls, config: Mapping[str, Any]) -> bool:
        return "frame" in config and "actions" in config
