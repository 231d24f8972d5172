"""Keywords of gen that ``generate`` has no settings for, put into a request of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from transformers.generation import StopStringCriteria

from gen.constraints.build import build
from gen.constraints.vocabulary import huggingface_vocabulary
from gen.contracts.row_constraint import RowConstraint
from gen.core.errors import GenError
from gen.core.row_rules import HistoryConstraint
from gen.interop.transformers_request import Request
from gen.pipeline.control import AllOf


@dataclass(frozen=True)
class Control:
    """Sampling parameters under gen's names; None where they did not come.

    Attributes:
        params: presence_penalty, frequency_penalty, logit_bias.
        stop: texts that end a row.
        structured: rule that the new tokens must obey.
        tokenizer: tokenizer of the model, which texts need.
        logprobs: number of most probable tokens that come with every token.
    """

    params: dict[str, Any]
    stop: Any = None
    structured: Any = None
    tokenizer: Any = None
    logprobs: int | None = None

    def criteria(self) -> list[StopStringCriteria]:
        """Return the stopping criteria of ``stop``."""
        if self.stop is None:
            return []
        return [StopStringCriteria(self._tokenizer("stop"), self.stop)]

    def controlled(self, request: Request) -> Request:
        """Return a request with these parameters.

        Raises:
            GenError: they contradict the settings of ``generate``, or need a tokenizer.
        """
        asked = {k: v for k, v in self.params.items() if v is not None}
        if "logit_bias" in asked and "logit_bias" in request.sampling:
            raise GenError("logit_bias and sequence_bias are both given; expected one of them")
        names = [*request.controls, *asked, *(["structured"] if self.structured else [])]
        space = request.space
        if self.structured is not None:
            if request.ends.stop is not None:
                raise GenError("structured and stop strings are both given; expected one of them")
            tokenizer = self._tokenizer("structured")
            vocabulary = huggingface_vocabulary(tokenizer, space.vocab_size, space.ends)
            rule = RowConstraint(build(self.structured, vocabulary, space), space.length)
            parts: list[HistoryConstraint] = [rule]
            if space.constraint is not None:
                parts.append(space.constraint)
            space = replace(space, constraint=AllOf(tuple(parts), None))
        sampling = {**request.sampling, **asked, "logprobs": self.logprobs}
        return replace(request, sampling=sampling, space=space, controls=tuple(names))

    def _tokenizer(self, name: str) -> Any:
        if self.tokenizer is None:
            raise GenError(
                f"{name} is about texts, and there is no tokenizer; expected"
                " processing_class=, the tokenizer of the model (generate keeps tokenizer= for"
                " itself)"
            )
        return self.tokenizer
