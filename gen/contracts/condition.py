"""The condition of an item: text, media and observations that generation starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from gen.core.errors import GenError


@dataclass(frozen=True, eq=False)
class Condition:
    """Parts of a condition, as the user gives them; absent parts are None or empty.

    A plain string stands for ``Condition(text=...)`` wherever a condition is expected.

    Attributes:
        text: prompt.
        messages: turns of a conversation, ``{"role": ..., "content": ...}`` each.
        images: images, or paths of them.
        audio: waveforms, or paths of them.
        video: clips, or paths of them.
        observation: state and camera images of a robot, by name.
        tokens: token ids that are the condition themselves.
    """

    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    images: tuple[Any, ...] = ()
    audio: tuple[Any, ...] = ()
    video: tuple[Any, ...] = ()
    observation: Mapping[str, Any] | None = None
    tokens: tuple[int, ...] | None = None

    @classmethod
    def of(cls, prompt: object) -> Condition:
        """Return the condition of a prompt.

        Raises:
            GenError: the prompt is neither a string nor a condition.
        """
        if isinstance(prompt, Condition):
            return prompt
        if isinstance(prompt, str):
            return cls(text=prompt)
        raise GenError(f"prompt {prompt!r} is a {type(prompt).__name__}; expected a string")

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that are there."""
        named = {f.name: self.__dict__[f.name] for f in fields(self)}
        return tuple(name for name, value in named.items() if value is not None and value != ())

    def require(self, accepted: frozenset[str], taker: str) -> None:
        """Check that something takes all parts of the condition.

        Args:
            accepted: names of the parts that are taken.
            taker: name of what takes them, for the message.

        Raises:
            GenError: a part is not taken, or there is none.
        """
        for part in self.parts or ("nothing",):
            if part not in accepted:
                raise GenError(
                    f"{taker} takes {' and '.join(sorted(accepted))} as its condition; {part} came"
                )
