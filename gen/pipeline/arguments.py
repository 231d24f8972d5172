"""Arguments of a call, read as users write them: prompts, counts, seeds, keywords."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch

from gen.contracts.condition import Condition
from gen.contracts.modality import Modality
from gen.core.counts import ITEM, free_bytes, require_count
from gen.core.errors import GenError, WrongType, bad_type, bad_value, shown, unknown
from gen.core.params import check_field
from gen.core.plain import require_plain
from gen.core.resolve import SamplerSpec, accepted_names, sampler_class, spell
from gen.core.sampler import Sampler
from gen.core.sampling_params import SAMPLING_FIELDS, SamplingOptions

MAX_ITEMS = 1_000_000  # of one call; jobs stream their rows
FEW_ITEMS = 1000  # which any machine holds
SEEDS = 2**62
DRAWN_SEEDS = 2**31


class CallOptions(SamplingOptions, total=False):
    """Further keywords of a call: sampling parameters, and other libraries' names of arguments.

    ``prompt`` stands for ``prompts``; the counts for ``num_samples``. ``adapter`` is the name of
    the adapter of all prompts, or a list with one for each, None for the model without one.
    """

    adapter: Any

    prompt: Any
    n: int
    num_images_per_prompt: int
    num_return_sequences: int


COUNT_NAMES = ("num_samples", "n", "num_images_per_prompt", "num_return_sequences")


def read_prompts(prompts: Any, prompt: Any = None) -> list[Condition]:
    """Return the conditions of a call.

    Args:
        prompts: one prompt or several, text, ``Condition`` or mapping of its parts: a list, a
            generator, an array, a column of a table or a data set of texts.
        prompt: the same under its other name.

    Raises:
        GenError: none came, both came, or there are more than a call takes.
        WrongType: something else came.
    """
    if prompts is not None and prompt is not None:
        raise GenError("prompt and prompts are both given; expected one of them")
    given = prompt if prompts is None else prompts
    if isinstance(given, (str, Condition, Mapping)):
        return [Condition.of(given)]
    if given is None or isinstance(given, (bytes, bytearray)):
        raise bad_type("prompts", given, "a text, or several of them")
    try:
        each = _each(given)
    except TypeError:  # an array without axes
        raise bad_type("prompts", given, "a text, or several of them") from None
    found = [Condition.of(p) for p in islice(each, MAX_ITEMS + 1)]
    if not found:
        raise GenError("there are no prompts; expected at least one")
    require_items(len(found), 1)
    return found


def _each(prompts: Any) -> Iterator[Any]:
    """Iterate over a collection of prompts.

    Columns of Arrow hold scalars of their own, and a data set that knows its length need not raise
    IndexError behind its end.
    """
    if hasattr(prompts, "to_pylist"):
        return iter(prompts.to_pylist())
    if isinstance(prompts, Iterable):
        return iter(prompts)
    if hasattr(prompts, "__getitem__") and hasattr(prompts, "__len__"):
        return (prompts[i] for i in range(len(prompts)))
    raise bad_type("prompts", prompts, "a text, or several of them")


def require_items(prompts: int, num_samples: int) -> None:
    """Raise ``GenError`` for more items than one call takes, or than memory holds."""
    if prompts * num_samples > MAX_ITEMS:
        raise GenError(
            f"{prompts:,} prompts with {num_samples:,} samples each are"
            f" {prompts * num_samples:,} items; expected at most {MAX_ITEMS:,} in one call"
        )
    if prompts * num_samples > FEW_ITEMS:
        require_count("num_samples", num_samples, ITEM * prompts, free_bytes())


def read_count(num_samples: Any, options: dict[str, Any]) -> int:
    """Return the number of samples per prompt, and take its other names out of ``options``.

    Raises:
        GenError: two names with different numbers, or no positive number.
    """
    given = {"num_samples": num_samples, **{k: options.pop(k, None) for k in COUNT_NAMES[1:]}}
    counts = {k: read_integer(k, v, 1) for k, v in given.items() if v is not None}
    if len(set(counts.values())) > 1:
        said = " and ".join(f"{k}={v}" for k, v in counts.items())
        raise GenError(f"{said} are names of the same argument; expected one of them")
    return next(iter(counts.values()), 1)


def read_limits(options: dict[str, Any], prompts: int) -> list[int] | None:
    """Return the ``max_new_tokens`` of every prompt where several came; their largest stays.

    Args:
        options: keywords of the call, of which ``max_new_tokens`` is changed.
        prompts: number of prompts.

    Raises:
        GenError: another number of them came, or one is no positive integer.
    """
    given = options.get("max_new_tokens")
    if given is None or isinstance(given, (str, Real)) or not isinstance(given, Iterable):
        return None
    try:
        values = list(given)
    except TypeError:  # an array without axes
        raise bad_type("max_new_tokens", given, "an integer, or one for each prompt") from None
    limits = [read_integer("max_new_tokens", value, 1) for value in values]
    if len(limits) != prompts:
        raise GenError(
            f"max_new_tokens has {len(limits)} numbers and there are {prompts} prompts; expected"
            " one for each, or one number"
        )
    options["max_new_tokens"] = max(limits)
    return limits


def read_adapters(adapter: Any, prompts: int) -> list[str | None] | None:
    """Return the name of every prompt's adapter, and None if none is given.

    Args:
        adapter: one name, a list with one for each prompt, or None.
        prompts: number of prompts.

    Raises:
        GenError: another number of them came.
        WrongType: something else came.
    """
    if adapter is None:
        return None
    names = [adapter] * prompts if isinstance(adapter, str) else adapter
    if not isinstance(names, (list, tuple)) or not all(
        name is None or isinstance(name, str) for name in names
    ):
        raise bad_type("adapter", adapter, "a name, or a list of names")
    if len(names) != prompts:
        raise GenError(
            f"adapter has {len(names)} names and there are {prompts} prompts; expected one for"
            " each, or one name"
        )
    return list(names)


def read_seed(seed: Any) -> int:
    """Return a seed; of None a new one, drawn from torch's generator.

    ``torch.manual_seed`` therefore makes calls without a seed reproducible, as it does those of
    transformers.
    """
    if seed is None:
        return int(torch.randint(DRAWN_SEEDS, ()))
    return read_integer("seed", seed, 0)


def read_integer(name: str, value: Any, least: int, limit: int = SEEDS) -> int:
    """Return an integer, of Python or NumPy.

    Args:
        name: name of the argument.
        value: what came.
        least: smallest value allowed.
        limit: smallest value that is too large.

    Raises:
        GenError: the number is out of range.
        WrongType: another type came.
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise bad_type(name, value, f"an integer of at least {least}")
    if not least <= value < limit:
        expected = f"an integer of at least {least}" + (" below 2**62" if limit == SEEDS else "")
        raise bad_value(name, int(value), expected)
    return int(value)


def read_parameters(
    sampler: SamplerSpec | None,
    usual: Callable[[], str],
    options: dict[str, Any],
    known: Iterable[str],
) -> SamplerSpec | None:
    """Return the sampler of a call with the parameters that came as keywords of the call.

    Args:
        sampler: the sampler as the user wrote it.
        usual: returns the name of the sampler where none is given.
        options: keywords of the call; parameters of the sampler are removed.
        known: names of the call's own arguments.

    Raises:
        GenError: a parameter comes twice, or the call has an argument of its name.
        WrongType: an unknown keyword, with the nearest name.
    """
    if isinstance(sampler, Sampler):
        chosen, spec = sampler, {}
    else:
        spec = {} if sampler is None else spell(sampler)
        chosen = spec = spec if spec.get("name") is not None else {**spec, "name": usual()}
    names, own = accepted_names(chosen), {*SAMPLING_FIELDS, *known}
    given: dict[str, Any] = {}
    for key, value in list(options.items()):
        if key in own:
            if chosen is spec and key not in spec:
                _require_meant(key, value, spec)
        elif key not in names:
            raise WrongType(str(unknown("keyword", key, own | names)))
        elif isinstance(sampler, Sampler):
            raise GenError(
                f"{key} is {shown(value)}, and the sampler is an object with parameters of its own;"
                f" expected {key} there, or the name of a sampler"
            )
        elif key in spec:
            raise GenError(
                f"sampler {spec['name']!r} got {key} {shown(spec[key])}, and {key} is"
                f" {shown(value)} among the keywords; expected one of them"
            )
        else:
            given[key] = _plain(options.pop(key))
    return {**spec, **given} if given else sampler


def _require_meant(key: str, value: Any, spec: Mapping[str, Any]) -> None:
    """Refuse an argument of the call that may be meant for the sampler, which has a parameter of
    the same name and could take the value, too."""
    field = sampler_class(spec).__dataclass_fields__.get(key)
    if field is None or value is None:
        return
    if "expected" not in field.metadata and not isinstance(value, type(field.default)):
        return
    try:
        check_field(field, _plain(value))
    except GenError:
        return
    name, other = spec["name"], COUNT_NAMES[0]
    own = f"{other}={value!r} for the call, or " if key in COUNT_NAMES and key != other else ""
    raise GenError(
        f"{key} is {shown(value)}, and both the call and sampler {name!r} have {key}; expected"
        f" {own}sampler={{'name': {name!r}, {key!r}: {shown(value)}}} for the sampler"
    )


def read_sampling(options: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Return the sampling parameters that have a value, as plain numbers.

    Args:
        options: keywords of a call that are no argument of their own.
        known: further keywords of the call, which a typo may have meant.

    Raises:
        WrongType: an unknown keyword, with the nearest name.
    """
    for key in options:
        if key not in SAMPLING_FIELDS:
            raise WrongType(str(unknown("keyword", key, {*SAMPLING_FIELDS, *known})))
    return {k: _plain(v) for k, v in options.items() if v is not None}


def _plain(value: Any) -> Any:
    """Return a number of NumPy as one of Python; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def check_types(callback: Any, trace: Any) -> None:
    """Raise ``WrongType`` for a callback that cannot be called, and a trace that is no bool."""
    if callback is not None and not callable(callback):
        raise bad_type("callback", callback, "a function")
    if not isinstance(trace, bool):
        raise bad_type("trace", trace, "true or false")


def check_loading(
    modality: Any, model: Any, flags: Mapping[str, Any], plain: Mapping[str, Any]
) -> None:
    """Check the arguments of ``gen.load`` before anything is looked for.

    Args:
        modality: a name, or a modality.
        model: name or path of the model; None for none.
        flags: arguments that are true or false.
        plain: arguments that are plain data, or objects of other libraries.

    Raises:
        GenError: one of them can be none.
    """
    if not isinstance(modality, (str, Modality)):
        raise bad_type("modality", modality, "a name, such as 'image'")
    if model is not None and (not isinstance(model, (str, Path)) or not str(model)):
        raise bad_type("model", model, "a zoo name, a folder, a file or a hub id")
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise bad_value(name, value, "true or false")
    for name, value in {"model": model, **plain}.items():
        require_plain(name, str(value) if isinstance(value, Path) else value)
