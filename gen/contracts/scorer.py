"""The scorer contract: a reward, which says how good an output is.

A scorer is a frozen dataclass whose fields are its parameters, registered under the kind
``scorer``. In a sampler's parameters it goes by its name, by ``{"name": ..., parameter: value}``,
or it is any function of (media, prompt) that returns a number, also by its import path
(``module:name`` or ``file.py:name``). Higher is better.

    @register("scorer", "brightness")
    @dataclass(frozen=True)
    class Brightness(Scorer):
        def score(self, samples):
            return [float(np.asarray(s.media).mean()) / 255 for s in samples]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from gen.core.errors import GenError
from gen.core.import_paths import is_import_path, load_object
from gen.core.params import check_field
from gen.core.registry import registry

if TYPE_CHECKING:  # modalities import more than a look-up of samplers needs
    from gen.contracts.modality import Modality


@dataclass(frozen=True)
class Sample:
    """Output that a scorer judges, or the estimate of one.

    Attributes:
        media: what the tokens decode to.
        tokens: tokens [T], or latents [T, C].
        prompt: text of the item's prompt.
        condition: typed condition of the item.
        modality: modality of the item.
        item: number of the item in the call.
        known: positions that are decided, bool [T]; None where all are. Media of an output with
            undecided positions hold the model's estimate there, or any allowed token.
    """

    media: Any
    tokens: Tensor
    prompt: str
    condition: Any
    modality: Modality
    item: int
    known: Tensor | None = None

    @property
    def is_partial(self) -> bool:
        """Tell whether positions are undecided."""
        return self.known is not None and not bool(self.known.all())


class Scorer(ABC):
    """Reward of outputs.

    Attributes:
        modalities: names of the modalities whose outputs it judges; empty for all.
        takes_partial: whether it judges outputs with undecided positions.
        about: one line that says what it measures, with its range.
    """

    modalities: ClassVar[tuple[str, ...]] = ()
    takes_partial: ClassVar[bool] = True
    about: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for f in fields(self) if is_dataclass(self) else ():
            check_field(f, getattr(self, f.name), self.name)

    @abstractmethod
    def score(self, samples: Sequence[Sample]) -> Sequence[float]:
        """Return one finite number per sample; higher is better."""

    def attach(self, models: Any, request: Any) -> Scorer:
        """Return the scorer with what it needs of a call, such as another model.

        Args:
            models: the pipeline (``gen.pipeline.prompted.PromptedModels``).
            request: the request (``gen.pipeline.request.GenerationRequest``).
        """
        return self

    @property
    def name(self) -> str:
        """Name in messages."""
        known = registry.table("scorer").items()
        return next((n for n, cls in known if cls is type(self)), type(self).__name__)


@runtime_checkable
class GradesPartial(Protocol):
    """Modality that can tell how good the beginning of an output is."""

    def grade_partial(self, media: Any, prompt: str) -> float:
        """Return how much of an unfinished output may belong to a right one, 0 to 1.

        1 where some right output begins so; the rest of the output need not exist.
        """
        ...


@dataclass(frozen=True)
class FunctionScorer(Scorer):
    """Scorer of a function of (media, prompt).

    Attributes:
        function: the function.
        path: import path that it came from; empty where it came itself.
    """

    function: Callable[[Any, str], float]
    path: str = ""

    @property
    def name(self) -> str:
        return self.path or getattr(self.function, "__qualname__", type(self.function).__name__)

    def score(self, samples):
        return [self.function(sample.media, sample.prompt) for sample in samples]


ScorerSpec = str | Mapping[str, Any] | Callable[[Any, str], float] | Scorer


def read_scorer(spec: ScorerSpec, where: str = "sampler.scorer") -> Scorer:
    """Return the scorer of a spec.

    Args:
        spec: name, import path, ``{"name": ..., parameter: value}``, function or scorer.
        where: parameter that holds it, for messages.

    Raises:
        GenError: the name or a parameter is unknown, a value is bad, or nothing that scores can be
            imported from the path.
    """
    if isinstance(spec, str) and is_import_path(spec):
        return _imported(spec, where)
    if isinstance(spec, Scorer):
        return spec
    if isinstance(spec, type) and issubclass(spec, Scorer):
        raise GenError(f"{where} is the class {spec.__name__}; expected a scorer of it, with ()")
    if callable(spec):
        return FunctionScorer(spec)
    expected = "the name of a scorer, {'name': ..., parameter: value} or a function"
    return registry.build("scorer", spec, where, expected)


def _imported(path: str, where: str) -> Scorer:
    """Return the scorer, or that of the function, of an import path."""
    file = Path(path.rpartition(":")[0]).expanduser()
    found: Any = _object(path, where, file.stat().st_mtime_ns if file.is_file() else 0)
    if isinstance(found, Scorer):
        return found
    if not callable(found):
        raise GenError(
            f"{where} is {path!r}, a {type(found).__name__}; expected a function of (media, prompt)"
        )
    function: Any = found  # its arguments and result are checked when it is called
    return FunctionScorer(function, path)


@cache
def _object(path: str, where: str, written: int) -> Any:
    """Import an object once for every state of its file, since a reward may load a model."""
    return load_object(path, where)


def plain_scorer(spec: ScorerSpec) -> Any:
    """Return a scorer's spec as plain data; a function or an unregistered one by its name."""
    if isinstance(spec, (str, Mapping)):
        return spec
    scorer = read_scorer(spec)
    if type(scorer) in registry.table("scorer").values():
        return {"name": scorer.name, **asdict(scorer)}  # type: ignore[call-overload]
    return scorer.name


class Evaluator(Protocol):
    """Judgement of the outputs of a call: what a search sees of prompts and media."""

    def scores(
        self, scorer: Scorer, tokens: Tensor, items: np.ndarray, known: Tensor | None = None
    ) -> np.ndarray:
        """Score outputs.

        Args:
            scorer: the reward.
            tokens: tokens [n, T] or latents [n, T, C].
            items: item of each, int64 [n].
            known: decided positions, bool [n, T]; None where all are.

        Returns:
            Finite float64 [n].

        Raises:
            GenError: the scorer raises, or returns anything but one finite number per output.
        """
        ...

    def answers(self, tokens: Tensor, items: np.ndarray) -> list[Hashable]:
        """Return what each output says: equal values where two outputs agree."""
        ...


def checked_scores(scorer: Scorer, samples: Sequence[Sample]) -> np.ndarray:
    """Score samples and check what the scorer returns: finite float64 [n].

    Raises:
        GenError: the scorer raises, or returns anything but one finite number per sample.
    """
    served = scorer.modalities
    for sample in samples[:1]:
        if served and sample.modality.name not in served:
            raise GenError(
                f"scorer {scorer.name!r} judges outputs of {', '.join(served)}; got modality"
                f" {sample.modality.name!r}"
            )
    partial = next((s for s in samples if s.is_partial), None)
    if partial is not None and not scorer.takes_partial:
        raise GenError(
            f"scorer {scorer.name!r} judges finished outputs alone, and a search asks it about one"
            " with undecided positions; expected another one in sampler.value"
        )
    try:
        found = scorer.score(samples)
    except GenError:
        raise
    except Exception as error:  # a function of the caller's may raise anything
        raise GenError(
            f"scorer {scorer.name!r} failed on {samples[0].prompt!r}:"
            f" {type(error).__name__}: {error}"
        ) from error
    try:
        scores = np.asarray(found, dtype=np.float64)
    except (TypeError, ValueError):
        scores = np.empty(0)
    if scores.shape != (len(samples),):
        shape = getattr(found, "shape", None) or type(found).__name__
        raise GenError(
            f"scorer {scorer.name!r} returned {shape} for {len(samples)} outputs; expected one"
            " number per output"
        )
    if not np.isfinite(scores).all():
        bad = int((~np.isfinite(scores)).argmax())
        raise GenError(
            f"scorer {scorer.name!r} returned {scores[bad]} for {samples[bad].prompt!r}; expected a"
            " finite number"
        )
    return scores
