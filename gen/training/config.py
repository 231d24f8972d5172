"""Training files: their keys, the overrides of a command line, and the checks of both."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from gen.config.layers import read_yaml
from gen.config.packaged import find_config
from gen.config.yaml_text import load_yaml
from gen.core.checks import check_int
from gen.core.errors import GenError, bad_value, shown, unknown
from gen.core.paths import expand_user
from gen.core.sampling_params import SAMPLING_FIELDS, SamplingParams

OBJECTIVES = ("causal", "masked", "block", "drafter", "frontend")
FRONTENDS = ("image", "speech", "video", "motion")  # modalities whose frontends can be trained
AUTO, FLOAT32, BFLOAT16 = PRECISIONS = ("auto", "float32", "bfloat16")
SIZES = {  # channels and layers of new models
    "tiny": (64, 2),
    "small": (128, 4),
    "base": (256, 6),
    "large": (512, 8),
    "huge": (768, 12),
}
FACTORS = (2, 4, 8, 16)  # pixels of a code along each side


@dataclass(frozen=True)
class NewModel:
    """Sizes of a new model; in a file also ``size``, a name of ``SIZES`` for width and layers.

    Attributes:
        width: channels of a position, a multiple of 32.
        layers: transformer layers.
        tied: input and output ids share one table.
    """

    width: int = 128
    layers: int = 4
    tied: bool = False


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters of a published model (Hu et al., arXiv 2106.09685).

    Attributes:
        rank: rank of every adapter.
        alpha: factor of an adapter, times its rank.
        modules: names of the adapted layers; empty for those that PEFT knows of the architecture.
    """

    rank: int = 8
    alpha: float = 16.0
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Drafter:
    """Options of the objective ``drafter`` (``gen.recipes.drafters``).

    Attributes:
        kind: kind of drafter.
        modality: modality of the model; empty for the one that its config states.
        minutes: time of training.
        prompts: sequences of the model to train on.
        options: options of the kind.
        quick: run all stages briefly.
    """

    kind: str = "ar"
    modality: str = ""
    minutes: float = 3.0
    prompts: int = 2000
    options: Mapping[str, Any] = field(default_factory=dict)
    quick: bool = False


@dataclass(frozen=True)
class Frontend:
    """Options of the objective ``frontend``.

    Attributes:
        modality: ``image``, ``video`` or ``motion`` (vector quantisation), or ``speech`` (residual
            quantisation of any sounds).
        size: size of the media, such as ``64x64``, or samples of sounds; empty for that of the
            modality's models.
        codes: vectors of a codebook.
        factor: pixels of an image that a code is wide and high.
        streams: codebooks of a frame of sound.
        width: channels of the first layer.
        start: zoo name or folder of a frontend to start from; empty for a new one.
    """

    modality: str = "image"
    size: str = ""
    codes: int = 256
    factor: int = 4
    streams: int = 4
    width: int = 32
    start: str = ""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Keys of a training file.

    Attributes:
        data: folder of ``gen encode``; of media for the objective ``frontend``.
        out: folder of the run.
        objective: ``causal``, ``masked``, ``block``, ``drafter`` or ``frontend``.
        model: zoo name or folder of the model to start from, or the sizes of a new one.
        steps: updates of the weights.
        batch_size: samples of an update, over all processes.
        lr: peak learning rate.
        weight_decay: of AdamW, for matrices.
        warmup: steps of the linear warm-up; None for a tenth of the steps, at most 100.
        muon: train the matrices of layers by Muon at three times the rate, not by AdamW.
        average: save the moving average of the weights, not the last ones.
        seed: seed of new weights, batches and masks.
        block: positions of a block, for the objective ``block``.
        share: share of the steps of ``block`` that train blocks; others mask the whole sequence.
        drop: share of samples whose condition is dropped, for classifier-free guidance.
        hide: largest share of a sample's tokens that a causal model predicts the others without.
        validation: share of the samples that are only measured, never trained on.
        patience: steps without a lower held-out loss after which the run ends, with the weights of
            the lowest one; 0 runs all steps.
        accumulate: parts of a batch whose gradients are summed up one after the other.
        precision: ``float32``, ``bfloat16`` (mixed: weights and optimiser stay in float32), or
            ``auto``: bfloat16 for gen's own models where the device multiplies it.
        max_length: tokens of a sequence of a published model; longer ones are cut.
        log_every: steps between rows of ``log.jsonl``.
        save_every: steps between checkpoints.
        device: device of the training.
        lora: adapters of a published model; None trains all weights.
        merge: write the weights with the adapters of ``lora`` added, too.
        sampling: default sampling parameters of the model, such as ``{temperature: 0.7}``, over
            those of its modality.
        samples: prompts, or rows of a job, that the trained model is asked for at the end.
        sample_every: steps after which it is asked for them, too, at the next checkpoint; 0 for
            the end alone.
        drafter: options of the objective ``drafter``.
        frontend: options of the objective ``frontend``.
    """

    out: str
    objective: str = "causal"
    data: str = ""
    model: str | NewModel = NewModel()
    steps: int = 1000
    batch_size: int = 32
    lr: float = 2e-3
    weight_decay: float = 0.05
    warmup: int | None = None
    muon: bool = True
    average: bool = True
    seed: int = 0
    block: int = 0
    share: float = 1.0
    drop: float = 0.1
    hide: float = 0.0
    validation: float = 0.05
    patience: int = 0
    accumulate: int = 1
    precision: str = AUTO
    max_length: int = 512
    log_every: int = 10
    save_every: int = 100
    device: str = "cpu"
    lora: LoRA | None = None
    merge: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    samples: tuple[str | dict[str, Any], ...] = ()
    sample_every: int = 0
    drafter: Drafter = Drafter()
    frontend: Frontend = Frontend()

    @property
    def warmup_steps(self) -> int:
        """Steps of the linear warm-up."""
        return min(100, self.steps // 10) if self.warmup is None else self.warmup

    def to_dict(self) -> dict[str, Any]:
        """Return the keys as plain data."""
        return json.loads(json.dumps(asdict(self)))


KEYS = tuple(f.name for f in fields(TrainingConfig))
NODES: dict[str, Any] = {"model": NewModel, "lora": LoRA, "drafter": Drafter, "frontend": Frontend}
FREE = ("device", "merge", "sampling")  # keys that may differ when a run is resumed


def load_training(
    path_or_name: str | Path, overrides: Sequence[str] = (), allow_env: Collection[str] = ()
) -> TrainingConfig:
    """Read a training file: a path, or the name of one that comes with gen.

    Args:
        path_or_name: such as ``configs/train/image-quick.yaml`` or ``train/image-quick``.
        overrides: ``key=value`` texts.
        allow_env: names of environment variables that the file may refer to.

    Raises:
        GenError: an unknown key or a wrong value, with its origin.
    """
    path = find_config(path_or_name, training=True)
    tree = dict(read_yaml(path, allow_env))
    for key in tree:
        if key not in KEYS:
            raise unknown("key", key, KEYS, str(path))
    for text in overrides:
        _override(tree, text)
    return make_training(tree, str(path))


def _override(tree: dict[str, Any], text: str) -> None:
    """Lay ``key=value`` or ``node.key=value`` over a tree."""
    key, equals, value = text.partition("=")
    first, _, second = key.strip().partition(".")
    where = f"override {shown(text)}"
    if not equals:
        raise GenError(f"{where} has no '='; expected key=value, such as steps=100")
    if first not in KEYS or (second and first not in (*NODES, "sampling")):
        raise unknown("key", key, KEYS, where)
    if not second:
        tree[first] = load_yaml(value)
        return
    below = tree.get(first)
    kept = dict(below) if isinstance(below, Mapping) else {}
    if (first, second) == ("model", "size"):  # the name stands for both
        kept = {k: v for k, v in kept.items() if k not in ("width", "layers")}
    tree[first] = {**kept, second: load_yaml(value)}


def make_training(tree: Mapping[str, Any], where: str) -> TrainingConfig:
    """Check the keys of a training file.

    Args:
        tree: keys and values.
        where: origin, for messages.

    Raises:
        GenError: an unknown key, or a wrong value.
    """
    values = dict(tree)
    for key in values:
        if key not in KEYS:
            raise unknown("key", key, KEYS, where)
    for key, cls in NODES.items():
        if isinstance(values.get(key), Mapping):
            values[key] = _node(key, cls, values[key], where)
    samples = values.get("samples") or ()
    if isinstance(samples, str) or not all(isinstance(s, (str, dict)) for s in samples):
        raise bad_value("samples", samples, "a list of prompts", where)
    values["samples"] = tuple(samples)
    values["sampling"] = _sampling(values.get("sampling") or {}, where)
    for key in ("data", "out"):
        value = values.get(key)
        if value is None and (key == "data" and values.get("objective") == "drafter"):
            continue
        if not isinstance(value, (str, Path)) or not str(value):
            raise bad_value(key, value, "a folder", where)
        values[key] = str(expand_user(value))
    config = TrainingConfig(**values)
    _check(config, where)
    return config


def _sampling(said: Any, where: str) -> dict[str, Any]:
    if not isinstance(said, Mapping):
        raise bad_value("sampling", said, "{temperature: ...}", where)
    for name in said:
        if name not in SAMPLING_FIELDS:
            known = [f"sampling.{n}" for n in SAMPLING_FIELDS]
            raise unknown("key", f"sampling.{name}", known, where)
    SamplingParams(**said)  # raises for a wrong value
    return dict(said)


def _node(key: str, cls: Any, value: Mapping[str, Any], where: str) -> Any:
    names, value = [f.name for f in fields(cls)], dict(value)
    if cls is NewModel and (size := value.pop("size", None)) is not None:
        if size not in SIZES:
            raise unknown("model.size", size, SIZES, where)
        value = dict(zip(("width", "layers"), SIZES[size], strict=True)) | value
    for name in value:
        if name not in names:
            raise unknown("key", f"{key}.{name}", [f"{key}.{n}" for n in names], where)
    if cls is Frontend:  # ``start:`` without a value is an empty text; a size may be one number
        value = {k: "" if v is None and k in ("size", "start") else v for k, v in value.items()}
        if type(value.get("size")) is int:
            value["size"] = str(value["size"])
    made = cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in value.items()})
    if isinstance(made, NewModel):
        check_int("model.layers", made.layers, 1, where=where)
        check_int("model.width", made.width, 32, where=where)
        if made.width % 32:
            raise bad_value("model.width", made.width, "a multiple of 32", where)
        _check_bools({"model.tied": made.tied}, where)
    elif isinstance(made, Drafter):
        check_int("drafter.prompts", made.prompts, 1, where=where)
        _check_number("drafter.minutes", made.minutes, 0, float("inf"), where)
        _check_bools({"drafter.quick": made.quick}, where)
        if not isinstance(made.options, Mapping):
            raise bad_value("drafter.options", made.options, "options of the kind", where)
    elif isinstance(made, Frontend):
        _check_frontend(made, where)
    else:
        check_int("lora.rank", made.rank, 1, where=where)
        _check_number("lora.alpha", made.alpha, 0, float("inf"), where)
    return made


def _check_frontend(made: Frontend, where: str) -> None:
    if made.modality not in FRONTENDS:
        raise unknown("frontend.modality", made.modality, FRONTENDS, where)
    if made.factor not in FACTORS:
        raise bad_value("frontend.factor", made.factor, f"one of {FACTORS}", where)
    check_int("frontend.codes", made.codes, 2, where=where)
    check_int("frontend.streams", made.streams, 2, where=where)
    check_int("frontend.width", made.width, 16, where=where)
    step = 32 if made.modality == "video" else 16  # channels of a normalised group
    if made.width % step:
        raise bad_value("frontend.width", made.width, f"a multiple of {step}", where)
    for name in ("size", "start"):
        if not isinstance(getattr(made, name), str):
            raise bad_value(f"frontend.{name}", getattr(made, name), "a text", where)


def _check(config: TrainingConfig, where: str) -> None:
    if config.objective not in OBJECTIVES:
        raise unknown("objective", config.objective, OBJECTIVES, where)
    if not isinstance(config.model, (str, NewModel)) or not config.model:
        raise bad_value(
            "model", config.model, "a name, a folder or {width: ..., layers: ...}", where
        )
    if config.lora is not None and not isinstance(config.lora, LoRA):
        raise bad_value("lora", config.lora, "{rank: ...} or null", where)
    if not isinstance(config.drafter, Drafter):
        raise bad_value("drafter", config.drafter, "{kind: ...}", where)
    if not isinstance(config.frontend, Frontend):
        raise bad_value("frontend", config.frontend, "{modality: ...}", where)
    if config.objective == "drafter" and not isinstance(config.model, str):
        raise bad_value("model", config.model, "the name of the model to draft for", where)
    for name in ("steps", "batch_size", "log_every", "save_every", "max_length", "accumulate"):
        check_int(name, getattr(config, name), 1, where=where)
    for name in ("seed", "patience", "sample_every"):
        check_int(name, getattr(config, name), 0, where=where)
    if config.precision not in PRECISIONS:
        raise unknown("precision", config.precision, PRECISIONS, where)
    if config.warmup is not None:
        check_int("warmup", config.warmup, 0, where=where)
    check_int("block", config.block, 1 if config.objective == "block" else 0, where=where)
    _check_number("lr", config.lr, 0, 1, where)
    _check_number("weight_decay", config.weight_decay, 0, 1, where)
    for name in ("share", "drop", "hide", "validation"):
        _check_number(name, getattr(config, name), 0, 1, where)
    if config.hide and config.objective != "causal":
        raise bad_value("hide", config.hide, "0 for an objective other than causal", where)
    if config.sampling and config.objective in ("drafter", "frontend"):
        expected = "none: a drafter is trained for the defaults of its model, a frontend draws none"
        raise bad_value("sampling", config.sampling, expected, where)
    _check_bools({k: getattr(config, k) for k in ("average", "muon", "merge")}, where)
    if config.merge and config.lora is None:
        raise bad_value("merge", True, "false without lora, which has nothing to merge", where)


def _check_number(name: str, value: Any, low: float, high: float, where: str) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high:
        raise bad_value(name, value, f"a number of {low:g} to {high:g}", where)


def _check_bools(values: Mapping[str, Any], where: str) -> None:
    for name, value in values.items():
        if not isinstance(value, bool):
            raise bad_value(name, value, "true or false", where)


def same_run(config: TrainingConfig) -> dict[str, Any]:
    """Return the keys that must be the same when a run is resumed."""
    kept = replace(config, device=TrainingConfig.device).to_dict()
    return {k: v for k, v in kept.items() if k not in (*FREE, "out")}
