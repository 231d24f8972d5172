"""Text models of gen as models of the LM Evaluation Harness (the package ``lm_eval``).

    import gen, lm_eval
    from gen.eval.lm_eval import harness_model

    pipe = gen.load("text", model="Qwen/Qwen3-0.6B", chat=False, max_new_tokens=256)
    lm_eval.simple_evaluate(harness_model(pipe), tasks=["gsm8k"])

Causal models answer requests for log-likelihoods and for texts. Masked models answer requests for
texts: they define no distribution over the continuations of a context, so a task that asks for
log-likelihoods is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from importlib import import_module
from itertools import groupby
from typing import Any

from gen.core.checks import check_int
from gen.core.errors import GenError
from gen.core.resolve import protocol_of
from gen.eval.metric import missing_package
from gen.models.load.chat import render

STOPS = ("until", "stop")
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens")
SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "no_repeat_ngram_size",
    "min_new_tokens",
)
IGNORED = ("do_sample",)  # says that the temperature counts


class HarnessModel:
    """Requests of the harness answered by a pipeline.

    Args:
        pipe: pipeline of a published text model, loaded with ``chat=False``: the harness applies
            the chat template itself.
        sampler: sampler of ``generate_until``; None for the pipeline's default.
        batch_size: requests decoded together.
        seed: seed of every context; contexts that are equal get the seeds after it.

    Raises:
        GenError: no published text model, or one that applies its chat template.
    """

    def __init__(self, pipe: Any, sampler: Any = None, batch_size: int = 8, seed: int = 0):
        checkpoint = pipe.modality.checkpoint
        if pipe.modality.name != "text" or checkpoint is None:
            raise GenError(
                f"the pipeline is one of modality {pipe.modality.name!r} and model"
                f" {pipe.model or 'of the zoo'}; expected a published text model"
            )
        if checkpoint.chat:
            raise GenError(
                f"model {pipe.model} applies its chat template to prompts; expected one loaded with"
                " chat=False, since lm_eval applies the template (apply_chat_template=True)"
            )
        self.pipe, self.checkpoint, self.seed = pipe, checkpoint, check_int("seed", seed, 0)
        self.batch = check_int("batch_size", batch_size, 1)
        if sampler is None:
            protocol = "causal" if "causal" in checkpoint.protocols else "masked"
            sampler = {"causal": "autoregressive", "masked": "maskgit"}[protocol]
        self.sampler = sampler

    # --- the harness asks for these

    def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Score continuations: log-probability, and True where greedy decoding gives them."""
        pairs = [self._encode(*request.args) for request in requests]
        return list(self._scored(pairs))

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """Score whole texts, each in one window behind the token that begins a text."""
        pairs = [([self._first()], self._ids(request.args[0])) for request in requests]
        return [score for score, _ in self._scored(pairs)]

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """Continue contexts up to a stop text; greedily unless a request sets a temperature."""
        numbered = [(str(r.args[1]), n, r) for n, r in enumerate(requests)]
        answers: dict[int, str] = {}
        for _, same in groupby(sorted(numbered, key=lambda x: x[:2]), key=lambda x: x[0]):
            group = list(same)
            made = self._generated([r.args[0] for _, _, r in group], group[0][2].args[1])
            answers |= {n: text for (_, n, _), text in zip(group, made, strict=True)}
        return [answers[n] for n in range(len(requests))]

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, by which the harness keeps its caches apart."""
        return str(self.pipe.model).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the chat template of the model's tokenizer."""
        return (self.checkpoint.tokenizer.chat_template or "") if chat_template else ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Write messages as one text by the tokenizer's chat template."""
        return render(self.checkpoint.tokenizer, chat_history, prompt=add_generation_prompt)

    # --- log-likelihoods

    def _first(self) -> int:
        tokenizer = self.checkpoint.tokenizer
        found = [i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None]
        if not found:
            raise GenError(f"the tokenizer of {self.pipe.model} has no bos token and no eos token")
        return found[0]

    def _ids(self, text: str) -> list[int]:
        return self.checkpoint.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _encode(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the token ids of a context and of its continuation, cut where the text is cut.
        Spaces at the end of the context belong to the first word of the continuation."""
        bare = context.rstrip()
        if not bare:
            return [self._first()], self._ids(context + continuation)
        continuation = context[len(bare) :] + continuation
        begun = self.checkpoint.raw_ids(bare)
        whole = self.checkpoint.raw_ids(bare + continuation)
        return whole[: len(begun)], whole[len(begun) :]

    def _scored(self, pairs: Iterable[tuple[list[int], list[int]]]) -> Iterator[tuple[float, bool]]:
        if "causal" not in self.checkpoint.protocols:
            raise GenError(
                f"model {self.pipe.model} is a masked one, which has no log-likelihood of a"
                " continuation; expected a task of generate_until"
            )
        for context, continuation in pairs:
            if not continuation:
                yield 0.0, True
                continue
            items = self.pipe.plan([{"tokens": [*context, *continuation]}])
            (found,) = self.pipe.prompt_logprobs(items, top=1)
            tokens = found[len(context) :]
            score = sum(token.logprob for token in tokens)
            yield score, all(token.token_id == token.top[0][0] for token in tokens)

    # --- texts

    def _generated(self, contexts: list[str], options: dict[str, Any]) -> list[str]:
        options = dict(options or {})
        stops = next((options.pop(k) for k in STOPS if k in options), [])
        stops = [stops] if isinstance(stops, str) else list(stops or [])
        lengths = [options.pop(k) for k in LENGTHS if k in options]
        sampling = {k: options.pop(k) for k in SAMPLING if k in options}
        sampled = options.pop("do_sample", bool(sampling.get("temperature")))
        if options:
            raise GenError(
                f"a task sets {', '.join(options)}; expected"
                f" {', '.join((*STOPS, *LENGTHS, *SAMPLING, *IGNORED))}"
            )
        if not sampled:
            sampling["temperature"] = 0.0
        is_causal = protocol_of(self.sampler) == "causal"
        length = self.checkpoint.binding.space.length
        if lengths and is_causal:
            sampling["max_new_tokens"] = lengths[0]
        elif lengths and lengths[0] > length:  # a masked model keeps the canvas it was loaded with
            raise GenError(
                f"a task asks for {lengths[0]} new tokens; model {self.pipe.model} was loaded with"
                f" max_new_tokens={length}, expected at least {lengths[0]}"
            )
        if stops and is_causal and self._ends_at_stops:
            sampling["stop"] = stops
        prompts = [{"tokens": self.checkpoint.raw_ids(context)} for context in contexts]
        out = self.pipe(prompts, self.sampler, seed=self.seed, batch_size=self.batch, **sampling)
        text, limit = self.checkpoint.frontend.text, lengths[0] if lengths else None
        return [_cut(text(row[:limit].tolist()), stops) for row in out.tokens]

    @cached_property
    def _ends_at_stops(self) -> bool:
        """True where rows can end at stop texts, which saves forward passes; others are cut."""
        try:
            self.checkpoint.frontend.vocabulary()
        except GenError:  # a tokenizer that does not say what its tokens write
            return False
        return self.checkpoint.binding.space.eos_token_id is not None


def _cut(text: str, stops: Iterable[str]) -> str:
    """Cut a text before the first stop text in it."""
    ends = [text.find(stop) for stop in stops if stop and stop in text]
    return text[: min(ends)] if ends else text


def harness_model(pipe: Any, **options: Any) -> Any:
    """Make a model that ``lm_eval.simple_evaluate`` takes.

    Args:
        pipe: pipeline of a published text model.
        options: arguments of ``HarnessModel``.

    Raises:
        GenError: ``lm_eval`` is not installed, or the pipeline does not serve.
    """
    try:
        base = import_module("lm_eval.api.model").LM  # an extra: imported when it is asked for
    except ImportError:
        raise missing_package("the harness", "lm_eval", "lm-eval") from None

    class PipelineLM(HarnessModel, base):
        """Pipeline as a model of the harness."""

        def __init__(self) -> None:
            base.__init__(self)
            HarnessModel.__init__(self, pipe, **options)

    return PipelineLM()
