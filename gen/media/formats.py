"""Extensions of the media files that gen writes."""

from __future__ import annotations

from gen.media import audio, images, video

KINDS_OF_FILES = (*images.FORMATS, "jpeg", *audio.FORMATS, *video.FORMATS, "txt", "npz")
