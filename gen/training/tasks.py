"""What is trained: a small model over a token grid, or a published language model."""

from __future__ import annotations

import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gen.contracts.condition import CONDITION, Condition, Prompt
from gen.contracts.defaults import STATED_SAMPLING
from gen.contracts.frontend import codebook_digest
from gen.contracts.modality import BUILT_IN, CAPTIONS, CONDITIONS, MEDIA, NOTHING, Modality
from gen.core.errors import GenError, bad_value
from gen.core.files import put_text
from gen.media.containers import require_package
from gen.modalities.condition_medium import STATED as MEDIUM
from gen.modalities.condition_medium import CaptionedMedium
from gen.modalities.grid_base import GridModality
from gen.modalities.own_captions import EXAMPLES, OwnCaptions, modality_of_model
from gen.modalities.text_encoder import STATED, padded
from gen.models.load.digest import digest_of
from gen.models.load.generation_config import GENERATION
from gen.models.load.libraries import LOADING, transformers
from gen.models.load.locate import locate, quiet, read_config, readable, save_model, zoo
from gen.models.load.networks import config_field
from gen.models.nets.grid import GridLlamaConfig, GridLlamaForCausalLM
from gen.models.nets.grid_states import GridStatesConfig, GridStatesForCausalLM
from gen.recipes.common.grid_models import (
    Run,
    Shape,
    block_loss,
    causal_loss,
    masked_loss,
    new_lm,
    sizes_of,
)
from gen.tokenizers.text.hf_text import HFText
from gen.tokenizers.text.trained import FILE, TrainedTokenizer
from gen.training.config import LoRA, NewModel, TrainingConfig
from gen.training.data import SPLIT, TokenData, split
from gen.training.frontends import usual_config
from gen.training.task import ADAPTER, MODEL, Task, Written
from gen.training.texts import TextTask, next_token_loss

MOST_EXAMPLES = 256  # captions that are kept beside a model
# folders of the frontends beside a model, if they are not of the zoo
FRONTEND, MEDIUM_FRONTEND = "frontend", "condition_frontend"


def make_task(config: TrainingConfig, data: TokenData) -> Task:
    """Create the task of a run.

    Raises:
        GenError: a model, a vocabulary or an objective that does not fit the data.
    """
    is_new_text = data.encoder.name == FILE and isinstance(config.model, NewModel)
    if config.sampling and (is_new_text or data.encoder.is_open):
        expected = f"none: the defaults of a language model are those of its {GENERATION}"
        raise bad_value("sampling", config.sampling, expected)
    if config.hide and (is_new_text or data.encoder.is_open):
        raise bad_value("hide", config.hide, "0 for a language model, which has no mask token")
    if is_new_text:
        return TextTask(config, data)
    if data.encoder.is_open:
        return LanguageTask(config, data)
    if config.lora is not None:
        raise bad_value(
            "lora", config.lora, f"none: the model of {data.folder} is small, and no published one"
        )
    return GridTask(config, data)


class GridTask(Task):
    """Small model over a token grid (``gen.models.nets.grid``). The loss is that of the recipes."""

    casts = True

    def __init__(self, config: TrainingConfig, data: TokenData):
        self.config, self.data = config, data
        torch.manual_seed(config.seed)
        self.model = self._model()
        shape = self.model.config
        if config.objective == "block" and math.prod(shape.grid) % config.block:
            raise bad_value(
                "block", config.block, f"a divisor of {math.prod(shape.grid)} positions"
            )
        self.shape = Shape(
            tuple(shape.grid),
            shape.prefix_length,
            shape.codebook_size,
            shape.mask_token_id - shape.codebook_size,
        )
        self.codes, self.copies, self.prompts, self.nothing = self._tensors()
        self.states = self._states()
        self.generator = torch.Generator()
        self._losses = self._make_losses()

    # --- model

    def _model(self) -> GridLlamaForCausalLM:
        if isinstance(self.config.model, NewModel):
            made, is_new = self._new(self.config.model), True
        else:
            made, is_new = self._started(self.config.model), False
        name = self._frontend_name()
        made.config.modality = self.data.encoder.modality.name  # folders may have any name
        made.config.frontend = name
        made.config.codebook_digest = self.data.encoder.digest
        if is_new and self.data.captions is None and self.data.medium is None:
            made.config.conditions = BUILT_IN if any(self.data.conditions) else NOTHING
        if self.config.sampling:
            setattr(made.config, STATED_SAMPLING, dict(self.config.sampling))
        if self.config.hide:
            made.config.trained_at_mask = True
        self._keep_rate(made.config)
        made.config.architectures = [type(made).__name__]
        return made

    def _keep_rate(self, config: GridLlamaConfig) -> None:
        """Note the samples per second of a codec of another rate than the modality's.

        Raises:
            GenError: the model would speak the language of the modality, whose checker has its own
                rate.
        """
        encoder = self.data.encoder
        if not encoder.frontend.rate or encoder.frontend.rate == encoder.modality.rate:
            return
        if config.conditions == BUILT_IN:
            raise GenError(
                f"the codec {encoder.name} has {encoder.frontend.rate} samples per second, and the"
                f" built-in language of {encoder.modality.name} goes with {encoder.modality.rate};"
                " expected gen encode --tokenizer own"
            )
        config.sampling_rate = encoder.frontend.rate

    def _new(self, asked: NewModel) -> GridLlamaForCausalLM:
        """Create a model of the data's grid, codes and captions, or of the modality's prompt."""
        encoder, objective = self.data.encoder, self.config.objective
        usual = usual_config(encoder.modality)
        codes = self._code_ids()
        slots, words = usual["prefix_length"], usual["vocab_size"] - usual["codebook_size"] - 1
        captions = self.data.captions
        if captions is not None or self.data.medium is not None:
            slots, words = self.data.prompt_sizes
        grid = tuple(self.data.manifest["grid"]) or tuple(usual["grid"])
        run = Run(
            1,
            asked.width,
            asked.layers,
            causal=objective == "causal",
            block=self.config.block if objective == "block" else 0,
            share=self.config.share,
            tied=asked.tied,
        )
        shape = Shape(grid, slots, codes, words)
        if captions is not None and captions.encoder is not None:
            about = captions.encoder.to_dict()
            config = GridStatesConfig(
                state_size=about["width"], caption_encoder=about, **sizes_of(shape, run)
            )
            made: GridLlamaForCausalLM = GridStatesForCausalLM(config)
        else:
            made = new_lm(shape, run)
        self._state_prompts(made.config)
        self.modality = self._modality(made.config, self.data.folder)
        return made

    def _state_prompts(self, config: GridLlamaConfig) -> None:
        """Note in a config how captions and media of one's own are read, if there are any."""
        captions, medium = self.data.captions, self.data.medium
        if captions is not None or medium is not None:
            config.conditions = MEDIA if captions is None else captions.kind
        if medium is not None:
            name = self._medium_frontend_name()
            config.condition_medium = {**medium.to_dict(), "frontend_name": name}

    def _code_ids(self) -> int:
        """Number of ids of the grid: codes, and the end of a sequence where lengths differ."""
        encoder = self.data.encoder
        sizes = encoder.frontend.config.codebook_sizes
        if not isinstance(encoder.modality, GridModality) or encoder.frontend.config.kind == "ids":
            return sizes[0]
        streams = encoder.modality.streams
        grid = tuple(self.data.manifest["grid"]) or tuple(usual_config(encoder.modality)["grid"])
        layout = encoder.modality.layout(sizes, grid[:1] if streams else grid)
        return layout.code_ids + bool(encoder.modality.shortest)

    def _started(self, name: str) -> GridLlamaForCausalLM:
        """Load a model to start from, for the objective of the run.

        Raises:
            GenError: another architecture, or a model of another frontend.
        """
        folder, objective = locate(name), self.config.objective
        found = read_config(name)
        kinds = {
            c.config_class.model_type: c for c in (GridLlamaForCausalLM, GridStatesForCausalLM)
        }
        cls = kinds.get(found.get("model_type", ""))
        if not isinstance(folder, Path) or cls is None:
            kind = found.get("model_type") or "checkpoint of the hub"
            raise GenError(
                f"model {name} is a {kind!r}, and the tokens of {self.data.folder} are those of"
                f" {self.data.encoder.name}; expected a model of gen's own architecture, or"
                " {width: ..., layers: ...}"
            )
        config = cls.config_class.from_pretrained(folder)
        config.causal = objective == "causal"
        config.block_length = self.config.block if objective == "block" else 0
        config.whole = objective == "block" and self.config.share < 1
        if objective != "masked":  # a masked model keeps what it is
            config.shifted = objective == "causal"
        is_other = self._takes_other_prompts(config, folder, name)
        self._state_prompts(config)
        if is_other:
            config.prefix_length, words = self.data.prompt_sizes
            config.mask_token_id = config.codebook_size + words
            config.vocab_size = config.mask_token_id + 1
            config.max_position_embeddings = config.prefix_length + math.prod(config.grid)
        self.modality = self._modality(config, folder)
        self.modality.bind(config, self.data.encoder.frontend, name)  # raises for what does not fit
        with LOADING, readable("model", name), quiet():
            if is_other:
                source = GridLlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
                return with_other_captions(source, config)
            return cls.from_pretrained(folder, config=config, dtype=torch.float32)

    def _takes_other_prompts(self, config: GridLlamaConfig, folder: Path, name: str) -> bool:
        """Return whether a model has other prompts than the data's captions and media.

        Raises:
            GenError: one of both has a text encoder, or media in its conditions, that the other
                lacks.
        """
        captions, medium = self.data.captions, self.data.medium
        mine = {} if captions is None or captions.encoder is None else captions.encoder.to_dict()
        stated = config_field(config, STATED) or {}
        if stated.get("digest") != mine.get("digest"):
            raise GenError(
                f"model {name} reads prompts with {stated.get('folder') or 'no text encoder'}, and"
                f" the captions of {self.data.folder} are read with"
                f" {mine.get('folder') or 'none'}; expected the same, or a new model"
            )
        reads = dict(config_field(config, MEDIUM) or {}, frontend_name="")
        given = dict(medium.to_dict() if medium else {}, frontend_name="")
        if reads != given and (medium is None or mine):
            raise GenError(
                f"model {name} reads {reads.get('part', 'no media')} of {reads.get('axes')} in its"
                f" conditions, and {self.data.folder} has {given.get('part', 'none')} of"
                f" {given.get('axes')}; expected the same, or a new model"
            )
        if mine or (captions is None and medium is None):
            return False
        kind = MEDIA if captions is None else CAPTIONS
        slots, _ = self.data.prompt_sizes
        if reads != given or (config_field(config, CONDITIONS), config.prefix_length) != (
            kind,
            slots,
        ):
            return True
        if captions is None:
            return False
        return TrainedTokenizer.from_folder(folder).digest != captions.tokenizer.digest

    def _modality(self, config: GridLlamaConfig, folder: Path) -> Modality:
        """Return the modality as it serves a model with this config.

        Args:
            config: config of the model.
            folder: folder of the model, whose tokenizer counts where the data have none.
        """
        where = folder if self.data.captions is None else self.data.folder
        return modality_of_model(
            self.data.encoder.modality, str(self.config.model), config.to_dict(), where
        )

    def _frontend_name(self) -> str:
        """Name of the frontend in the model's config: a zoo name, or a folder beside the model."""
        encoder = self.data.encoder
        return encoder.name if encoder.name in zoo() else FRONTEND

    def _medium_frontend_name(self) -> str:
        """Name of the frontend of media in conditions, as of ``_frontend_name``."""
        assert self.data.medium is not None
        name = self.data.medium.frontend_name
        if name in zoo():
            return name
        return FRONTEND if name == self.data.encoder.name else MEDIUM_FRONTEND

    # --- data

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return codes [N, T], those of the samples and of their copies [N, K, T], prompts [N, P]
        and unconditional prompts [N, P], long."""
        encoder, model = self.data.encoder, self.model.config
        binding = self.modality.bind(model, encoder.frontend, "of the run")
        total, end = binding.space.length, binding.space.eos_token_id
        rows = []
        each = 1 + max(map(len, self.data.copies), default=0)
        copies = self.data.copies or [[]] * len(self.data.tokens)
        pairs = zip(self.data.tokens, copies, strict=True)
        for tokens in (t for first, rest in pairs for t in (first, *rest)):
            if len(tokens) > total or (len(tokens) < total and end is None):
                raise GenError(
                    f"the data of {self.data.folder} have sequences of {len(tokens)} tokens, and"
                    f" the model has {total} positions; expected as many"
                )
            rows.append(F.pad(tokens, (0, total - len(tokens)), value=end or 0))
        prompts, nothing = [], []
        for row, parts in enumerate(self.data.conditions):
            parsed = None if parts is None else self._parsed(row, parts)
            without = binding.without(parsed)
            nothing.append(without)
            prompts.append(without if parsed is None else binding.prompt(parsed))
        mark = model.vocab_size  # of a position that takes a state
        plain = [
            [mark if t == CONDITION else t for t in (p.tokens if isinstance(p, Prompt) else p)]
            for p in prompts
        ]
        ids = [torch.tensor(p) - model.codebook_size for p in (plain, nothing)]
        codes = torch.stack(rows).unflatten(0, (-1, each))
        return codes[:, 0], codes, ids[0], ids[1]

    def _parsed(self, row: int, parts: dict[str, Any]) -> Any:
        """Return the typed condition of a sample, its medium as the tokens that it was encoded
        to."""
        if not self.data.given:
            return self.modality.parse(Condition.of(parts))
        text = " ".join(parts.get("text", "").split())
        return CaptionedMedium(text, tuple(self.data.given[row].tolist()))

    def _states(self) -> Tensor | None:
        """Return the states of prompts by a text encoder, [N, P, width]; None without one."""
        captions = self.data.captions
        if captions is None or captions.encoder is None:
            return None
        none = torch.zeros(0, self.model.config.state_size)
        texts = [" ".join((c or {}).get("text", "").split()) for c in self.data.conditions]
        slots = self.model.config.prefix_length
        return padded([captions.states.get(text, none) for text in texts], slots)

    def given(self, forward: Any, rows: Tensor) -> Any:
        """Return a forward pass that is given the states of some samples' prompts, if they have
        any."""
        if self.states is None:
            return forward
        device = next(self.model.parameters()).device
        return partial(forward, states=self.states[rows].to(device))

    # --- loss

    def _make_losses(self) -> tuple[Any, Any]:
        """Losses of a step that trains blocks, and of one that trains whole sequences."""
        config, shape = self.config, self.shape
        if config.objective == "causal":
            plain = causal_loss(shape, config.hide, self.generator)
            return plain, plain
        shifted = bool(self.model.config.shifted)
        whole = masked_loss(shape, self.generator, shifted=shifted)
        if config.objective == "masked":
            return whole, whole
        return block_loss(shape, config.block, self.generator), whole

    def loss(self, forward: Any, rows: Tensor, seed: int, drop: float) -> Tensor:
        self.generator.manual_seed(seed)
        device = next(self.model.parameters()).device
        dropped = torch.rand(len(rows), 1, generator=self.generator) < drop
        words = torch.where(dropped, self.nothing[rows], self.prompts[rows])
        blocks, whole = self._losses
        chosen = torch.rand((), generator=self.generator) < self.config.share
        codes = self.codes[rows]
        if self.model.training and self.copies.shape[1] > 1:
            drawn = torch.randint(self.copies.shape[1], (len(rows),), generator=self.generator)
            codes = self.copies[rows, drawn]
        batch = (words.to(device), codes.to(device))
        return (blocks if chosen else whole)(self.given(forward, rows), batch)[0]

    def save(self, out: Path) -> Written:
        save_model(self.model, out / MODEL)
        if self._frontend_name() == FRONTEND:
            source = locate(self.data.encoder.name, "frontend")
            shutil.copytree(source, out / FRONTEND, dirs_exist_ok=True)
        medium = self.data.medium
        if medium is not None and self._medium_frontend_name() == MEDIUM_FRONTEND:
            shutil.copytree(medium.frontend_folder, out / MEDIUM_FRONTEND, dirs_exist_ok=True)
        if isinstance(self.modality, OwnCaptions):
            if isinstance(self.modality.tokenizer, TrainedTokenizer):
                self.modality.tokenizer.save(out / MODEL)
            if self.modality.has_examples:
                put_text(out / MODEL / EXAMPLES, "".join(f"{text}\n" for text in self._examples()))
        return Written(str(out / MODEL))

    def _examples(self) -> list[str]:
        """Return captions to measure the model with: those it was not trained on first."""
        trained, held = split(len(self.codes), self.config.validation, self.config.seed)
        found = (self.data.conditions[i] for i in [*held.tolist(), *trained.tolist()])
        texts = dict.fromkeys(" ".join(parts["text"].split()) for parts in found if parts)
        return [text for text in texts if text][:MOST_EXAMPLES]


def with_other_captions(
    source: GridLlamaForCausalLM, config: GridLlamaConfig
) -> GridLlamaForCausalLM:
    """Return a model with the layers and the codes of another one. What a caption's tokens and
    slots stand for is learned anew, except where both have the same."""
    made = GridLlamaForCausalLM(config)
    weights, codes = made.state_dict(), config.codebook_size
    for name, value in source.state_dict().items():
        mine = weights[name]
        if mine.shape == value.shape:
            mine.copy_(value)
        elif name == "prefix.weight":
            same = min(len(mine), len(value))
            mine[:same] = value[:same]
        else:  # the ids of the vocabulary: codes, captions, mask
            mine[:codes], mine[-1] = value[:codes], value[source.config.mask_token_id]
    return made


class LanguageTask(Task):
    """Published causal language model, whole or through low-rank adapters (PEFT).

    The loss is that of the tokens behind the condition, whose text stands before them.
    """

    casts = False

    def __init__(self, config: TrainingConfig, data: TokenData):
        if config.objective != "causal":
            raise bad_value("objective", config.objective, "'causal' for a published text model")
        if not isinstance(config.model, str):
            raise bad_value(
                "model", config.model, "the folder of a causal language model with this tokenizer"
            )
        self.config, self.data = config, data
        name = config.model
        folder = locate(name)
        if not isinstance(folder, Path):
            raise bad_value("model", name, "a folder on this machine")
        tokenizer = HFText.from_pretrained(folder)
        if codebook_digest(tokenizer.fingerprint) != data.encoder.digest:
            raise GenError(
                f"model {name} has another vocabulary than the tokens of {data.folder}, which are"
                f" those of {data.encoder.name}; expected its own: gen encode text --frontend"
                f" {name}"
            )
        torch.manual_seed(config.seed)
        with LOADING, readable("model", name), quiet():
            auto = transformers().AutoModelForCausalLM
            where = folder.absolute()  # an adapter names its base so
            model = auto.from_pretrained(where, dtype=torch.float32, local_files_only=True)
        self.tokenizer = tokenizer.tokenizer
        self.model = model
        if config.lora is not None:
            self.base = digest_of(model)
            self.model = adapted(model, config.lora, config.merge)
        self.heads = [
            [] if c is None else data.encoder.frontend.ids(c["text"]) for c in data.conditions
        ]

    def loss(self, forward: Any, rows: Tensor, seed: int, drop: float) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        device = next(self.model.parameters()).device
        pairs = []
        for row in rows.tolist():
            dropped = bool(torch.rand((), generator=generator) < drop)
            head = [] if dropped else self.heads[row]
            pairs.append((torch.tensor(head, dtype=torch.long), self.data.tokens[row]))
        return next_token_loss(forward, pairs, self.config.max_length, device)

    def save(self, out: Path) -> Written:
        model: Any = self.model
        adapter = None
        if self.config.lora is not None:
            adapter = str(out / ADAPTER)
            save_model(model, adapter, save_embedding_layers=False)
            if not self.config.merge:
                return Written(str(self.config.model), adapter, merged=False)
            model = model.merge_and_unload()
        save_model(model, out / MODEL)
        self.tokenizer.save_pretrained(out / MODEL)
        return Written(str(out / MODEL), adapter)


def adapted(model: nn.Module, lora: LoRA, merge: bool) -> Any:
    """Add low-rank adapters to a model.

    Args:
        model: the model, which is changed.
        lora: the adapters.
        merge: whether the model is written with the adapters merged into its weights.

    Raises:
        GenError: PEFT is missing, the model lacks the layers, or it could not load what is written.
    """
    peft = require_package("peft", '"gen-toolkit[peft]"', "a training with lora")
    options = {"target_modules": list(lora.modules)} if lora.modules else {}
    config = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, task_type="CAUSAL_LM", **options)
    layers = dict(model.named_modules())
    tables = {id(m.weight) for m in layers.values() if isinstance(m, nn.Embedding)}
    try:
        made = peft.get_peft_model(model, config)
    except ValueError as error:
        raise GenError(f"lora does not fit {type(model).__name__}: {error}") from None
    for name in made.targeted_module_names:
        layer = layers[name]
        is_own = isinstance(layer, nn.Linear) and id(layer.weight) not in tables
        if not is_own and not merge:
            raise GenError(
                f"lora adapts {name} of {type(model).__name__}, which is no linear layer with"
                " weights of its own, and the pipeline adds to those alone; expected other"
                " lora.modules, or merge=true"
            )
    return made


def seed_of(seed: int, step: int, rank: int = 0) -> int:
    """Return the seed of a step's masks, another one in every process."""
    return (seed * SPLIT + step) * SPLIT + rank
