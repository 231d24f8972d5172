"""Write MP4 files that hold a clip and its sound.

``gen.media.containers`` states what written files promise. PyAV is imported at first use.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from gen.media.containers import av_module, info_to_comment
from gen.media.video import write_mp4

BIT_RATE = 96_000  # of the sound, bits per second


def write_sounding_mp4(
    path: Path,
    frames: Any,
    fps: float,
    wave: Any,
    rate: int,
    info: dict[str, Any] | None = None,
    scale: int = 1,
) -> None:
    """Write an H.264 file with AAC sound that browsers play.

    Args:
        path: Output file.
        frames: Uint8 [T, h, w, 3].
        fps: Frames per second.
        wave: Float [n], one channel; values outside [-1, 1] are clipped.
        rate: Samples per second.
        info: JSON-serialisable metadata, stored as the comment.
        scale: Every pixel becomes a square of ``scale`` by ``scale`` pixels.

    Raises:
        ValueError: Other frames, odd sides after scaling, or another wave.
    """
    av, samples = av_module(), np.asarray(wave, dtype=np.float32)
    if samples.ndim != 1 or not len(samples) or not np.isfinite(samples).all():
        raise ValueError(f"the wave has the shape {samples.shape}; expected finite numbers [n]")
    with TemporaryDirectory() as folder:
        silent = Path(folder) / "silent.mp4"
        write_mp4(silent, frames, fps, scale=scale)
        with (
            av.open(str(silent)) as source,
            av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as target,
        ):
            target.flags |= av.container.Flags.bitexact.value  # no random ids, no library versions
            if info:
                target.metadata["comment"] = info_to_comment(info)
            seen = source.streams.video[0]
            shown = target.add_stream_from_template(seen)
            sound = target.add_stream("aac", rate=rate, layout="mono")
            sound.bit_rate, sound.codec_context.thread_count = BIT_RATE, 1
            sound.codec_context.flags |= av.codec.context.Flags.bitexact.value
            packets = _encoded(av, sound, samples.clip(-1, 1), rate)
            for packet in source.demux(seen):
                if packet.dts is not None:
                    packet.stream = shown
                    target.mux(packet)
            for packet in packets:
                target.mux(packet)


def _encoded(av: Any, stream: Any, samples: np.ndarray, rate: int) -> list[Any]:
    """Encode samples float32 [n] as packets of a stream, whose times begin before zero: the codec
    starts late, and players skip what lies before.
    """
    stream.codec_context.open()
    size, packets = stream.codec_context.frame_size or 1024, []
    for first in range(0, len(samples), size):
        part = np.ascontiguousarray(samples[None, first : first + size])
        frame = av.AudioFrame.from_ndarray(part, format="fltp", layout="mono")
        frame.sample_rate, frame.pts = rate, first
        packets += stream.encode(frame)
    return packets + stream.encode(None)
