"""Prompts of ``/v1/completions``: as they are, echoed before the output, and scored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gen.contracts.condition import Condition
from gen.contracts.frontend import TokenFrontend
from gen.contracts.modality import Modality
from gen.core.errors import GenError
from gen.core.logprobs import ItemLogprobs
from gen.core.stats import SampleOutput, Stats
from gen.engine.ticket import Compute
from gen.pipeline.output import PipelineOutput
from gen.pipeline.pipeline import Pipeline
from gen.pipeline.request import GenerationRequest
from gen.pipeline.scoring import Check
from gen.serve.api.errors import ApiError
from gen.tokenizers.base.text_bytes import TextBytes

Given = str | list[str] | list[int] | list[list[int]]


def listed(given: Given, param: str = "prompt") -> list[str | list[int]]:
    """Return the prompts of a field that holds one text, one list of token ids, or several.

    Raises:
        ApiError: there is none.
    """
    if isinstance(given, str):
        return [given]
    if not given:
        message = f"{param} is []; expected a text, token ids, or a list of them"
        raise ApiError(message, param, "invalid_value")
    return [given] if isinstance(given[0], int) else given


def raw(prompt: str | list[int], modality: Modality, param: str = "prompt") -> str | Condition:
    """Return a prompt that goes into no chat template, and keeps the white space around it.

    Args:
        prompt: a text or token ids.
        modality: modality of the model, as the model serves it.
        param: field that holds it, for messages.

    Raises:
        ApiError: the model takes no such prompt.
    """
    try:
        if not isinstance(prompt, str):
            return _of_ids(prompt)
        ids = modality.raw_ids(prompt)
        return prompt if ids is None or _is_plain(prompt, ids, modality) else _of_ids(ids)
    except GenError as error:
        raise ApiError(str(error), param, "invalid_value") from None


def _of_ids(ids: list[int]) -> Condition:
    return Condition.of({"tokens": ids})


def _is_plain(prompt: str, ids: list[int], modality: Modality) -> bool:
    """Return whether the model makes these token ids of a prompt by itself: then it is that of a
    call of the pipeline, and draws what that draws."""
    try:
        condition = modality.parse(Condition(text=prompt))
        return prompt == prompt.strip() and modality.checkpoint.binding.prompt(condition) == ids
    except GenError:  # the chat template refuses it, which it does not go into
        return False


@dataclass(frozen=True)
class Echo:
    """Prompts that texts begin with.

    Attributes:
        texts: text of every prompt.
        logprobs: log-probabilities of its tokens; None where nobody asked for them.
        n: outputs of every prompt.
    """

    texts: Sequence[str] = ()
    logprobs: Sequence[ItemLogprobs] | None = None
    n: int = 1

    @classmethod
    def of(cls, prompts: Sequence[str | list[int]], frontend: TokenFrontend, n: int) -> Echo:
        """Return the echo of prompts.

        Args:
            prompts: texts or token ids that the model takes.
            frontend: frontend of its tokens.
            n: outputs of every prompt.
        """
        return cls([p if isinstance(p, str) else _written(p, frontend) for p in prompts], None, n)

    def text(self, i: int) -> str:
        """Return the text before an output; empty where nothing is echoed."""
        return self.texts[i // self.n] if self.texts else ""

    def before(self, output: PipelineOutput) -> PipelineOutput:
        """Return an output whose texts and log-probabilities begin with those of the prompts."""
        if not self.texts:
            return output
        media = [self.text(i) + text for i, text in enumerate(output.media)]
        found = output.logprobs
        if found is not None and self.logprobs is not None:
            found = [[*self.logprobs[i // self.n], *own] for i, own in enumerate(found)]
        return replace(output, media=media, logprobs=found)


def _written(ids: list[int], frontend: TokenFrontend) -> str:
    """Return what token ids write, special tokens nothing."""
    assert isinstance(frontend, TextBytes), "models that take token ids make texts"
    parts = [frontend.token_text(i, is_first=not n)[1] or b"" for n, i in enumerate(ids)]
    return b"".join(parts).decode("utf-8", "replace")


def scoring(top: int) -> Compute:
    """Return what computes the log-probabilities of prompts, with ``top`` likeliest tokens each."""

    def compute(pipe: Pipeline, request: GenerationRequest, check: Check) -> list[ItemLogprobs]:
        return pipe.prompt_logprobs(request.items, top, check)

    return compute


def no_tokens(pipe: Pipeline, request: GenerationRequest, check: Check) -> PipelineOutput:
    """Compute the output of a request for no new tokens: what else is wrong with it is still
    refused."""
    count = len(request.items)
    made = SampleOutput(
        torch.zeros(count, 0, dtype=torch.long),
        [Stats(0, 0, 0, 0, 0.0) for _ in range(count)],
        None,
        None if request.sampling.logprobs is None else [[] for _ in range(count)],
    )
    return pipe.complete(pipe.prepare(request), made, [])


def known(x: float) -> float | None:
    """Return a log-probability that JSON can hold; None of NaN, that of a first token. -9999 stands
    for -inf, as in OpenAI's API."""
    return None if math.isnan(x) else max(x, -9999.0)


def usage_details(prompt: int, made: int) -> dict[str, Any]:
    """Return the counts of a request's tokens, with the details that clients parse.

    Args:
        prompt: tokens of prompts, each counted once.
        made: tokens of outputs.
    """
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
