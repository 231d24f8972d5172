"""OpenVLA: a language model whose last words are bins of robot actions (Kim et al., arXiv
2406.09246).

    prompt   bos, [features of the image,] "In: What action should the robot take to
             {instruction}?\nOut:", the empty piece
    answer   one id for each dimension of the action: bin b = 1 .. E is id V - b, V the vocabulary
             without its padding

The vision part (``vision_backbone``, of timm) is not loaded. Its features may come from a file, and
the checkpoint's projector brings them into the language model. Without features the model answers
to words alone, as its own class does without images; this is not enough to move a robot.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from gen.contracts.checkpoint import Checkpoint, CheckpointFiles, LoadOptions
from gen.contracts.condition import Condition
from gen.contracts.modality import Binding
from gen.core.condition_parts import FEATURES
from gen.core.errors import GenError, bad_value, unknown
from gen.core.files import sha256
from gen.core.registry import register
from gen.core.token_space import TokenSpace
from gen.modalities.open_vocabulary import FreeAction
from gen.models.adapters.conditioning import Conditions, MappedLM, Vocabulary
from gen.models.load.pretrained import tokenizer_of
from gen.models.load.weights import Weights, fill, without_storage
from gen.tokenizers.action.base import ActionStatistics, at_least
from gen.tokenizers.action.edges import ActionEdges

TEMPLATE = "In: What action should the robot take to {instruction}?\nOut:"
# of checkpoints with "v01" in their name, which were trained on a chat
TEMPLATE_V01 = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives"
    " helpful, detailed, and polite answers to the user's questions. USER: What action should the"
    " robot take to {instruction}? ASSISTANT:"
)
# piece of an empty word, 29871 in Llama's tokenizer: every training prompt ends with it
EMPTY = "\u2581"
RENAMES = ((r"^language_model\.", ""),)
ELSEWHERE = (r"^vision_backbone\.", r"^projector\.")
PATCHES = 1 << 14  # ids in prompts that stand for one file of features


@dataclass(frozen=True)
class Instruction:
    """Instruction, and the file with features of the camera image, if any. ``digest``: sha256 of
    the file of an observation."""

    text: str
    features: str = ""
    digest: str = ""

    def __str__(self) -> str:
        if self.digest:
            return f"{self.text} | {self.digest[:16]}"
        return f"{self.text} | {self.features}" if self.features else self.text


class Projector(nn.Module):
    """Features of a vision backbone [P, vision] -> inputs of the language model [P, hidden]: linear
    layers with GELU between them.
    """

    def __init__(self, shapes: list[tuple[int, ...]]):
        super().__init__()
        for i, (out, into) in enumerate(shapes, 1):
            setattr(self, f"fc{i}", nn.Linear(into, out))

    def forward(self, x: Tensor) -> Tensor:
        """Features [P, vision] -> [P, hidden]."""
        layers = list(self.children())
        for layer in layers[:-1]:
            x = nn.functional.gelu(layer(x))
        return layers[-1](x)


class SeeingLM(MappedLM):
    """Language model over bins whose prompts may hold features: model id V + PATCHES n + j is row j
    of condition n.
    """

    keeps = False
    superposes = False  # some inputs are features of a condition

    def __init__(self, model, vocabulary: Vocabulary, conditions: Conditions):
        super().__init__(model, vocabulary)
        self.conditions = conditions

    @torch.no_grad()
    def forward(self, tokens: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Logits over the bins [B, T, V]; prompt ids from V on are replaced by their features."""
        ids = self.vocabulary.to_model(tokens)
        feature_ids = ids - self.config.vocab_size
        is_feature = feature_ids >= 0
        if not bool(is_feature.any()):
            return super().forward(tokens, positions, cache)
        x = self.model.get_input_embeddings()(ids.masked_fill(is_feature, 0))
        number, row = feature_ids // PATCHES, feature_ids % PATCHES
        for condition in number[is_feature].unique():
            selected = is_feature & (number == condition)
            x[selected] = self.conditions.of(condition[None])[0]["features"].to(x)[row[selected]]
        mask = cache.at(positions, self.dtype)
        logits = self.model(
            inputs_embeds=x,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        ).logits
        return logits[..., self.vocabulary.ids.to(logits.device)]


@register("checkpoint", "openvla")
class OpenVLA(Checkpoint):
    """OpenVLA's language model: actions from an instruction, and from image features where a prompt
    names them.

    A prompt is an instruction, or ``instruction | features.npy``: floats [patches, width] of the
    vision backbone. An observation has the instruction as ``task`` and may have the file as
    ``observation.features``.

    Args:
        unnorm_key: data set whose statistics put actions into physical units; needed if there are
            several.
        horizon: actions of a chunk (1).
        template: prompt around {instruction}; by default that of the checkpoint's name, which
            differs where it has ``v01``.
    """

    accepts = frozenset({"text", "observation"})
    modalities = ("action",)
    protocols = ("causal",)
    sampling = {"temperature": 0.0}
    tested = (
        "tiny random language models in the published layout against transformers'"
        " LlamaForCausalLM; images only as features computed elsewhere: the vision backbones"
        " of timm are not loaded"
    )

    @classmethod
    def matches(cls, files: CheckpointFiles) -> bool:
        return files.model_type == "openvla"

    def __init__(
        self,
        files: CheckpointFiles,
        modality: str,
        load: LoadOptions,
        *,
        unnorm_key: str | None = None,
        horizon: int = 1,
        template: str | None = None,
    ):
        text_config = dict(files.config.get("text_config") or {})
        if text_config.get("model_type", "llama") != "llama":
            raise GenError(
                f"the language model of {files.name} is a {text_config['model_type']!r}; expected"
                " 'llama'"
            )
        if template is None:
            template = TEMPLATE_V01 if "v01" in files.name else TEMPLATE
        if "{instruction}" not in template:
            raise bad_value("template", template, "a text that holds {instruction}")
        statistics = statistics_of(files, unnorm_key)
        config = transformers.LlamaConfig(
            **{k: v for k, v in text_config.items() if k != "model_type"}
        )
        size = config.vocab_size - int(files.config.get("pad_to_multiple_of", 64))
        bins = int(files.config.get("n_action_bins", 256))
        self.frontend = ActionEdges(
            bins, at_least("horizon", horizon, 1), statistics.dimensions, statistics, load.device
        )
        self.vocabulary = Vocabulary(size - 1 - torch.arange(bins), config.vocab_size)
        self.tokenizer, self.template = (
            tokenizer_of(files.path, name=files.name, trust_remote_code=load.trust_remote_code),
            template,
        )
        self.empty = self.tokenizer.get_vocab().get(EMPTY)
        if self.empty is None:
            raise GenError(
                f"the tokenizer of {files.name} has no piece {EMPTY!r}; expected Llama's, whose"
                " prompts end with it"
            )
        weights = Weights(files.path)
        self.model = fill(
            without_storage(lambda: transformers.LlamaForCausalLM(config)),
            weights,
            rename=RENAMES,
            drop=ELSEWHERE,
            device=load.device,
            dtype=load.dtype,
            device_map=load.device_map,
            name=files.name,
        )
        self.projector = projector_of(weights, config.hidden_size, load, files.name)
        self.conditions = Conditions(self._features)
        space = TokenSpace.codes(
            self.frontend.grid, bins, bins, codebook=self.frontend.table.float()
        )
        self.binding = Binding(space, self.prompt, self.prompt(Instruction("")))
        self.modality = FreeAction(self)

    def adapter(self, protocol: str) -> SeeingLM:
        return SeeingLM(self.model, self.vocabulary, self.conditions)

    def parse(self, condition: Condition) -> Instruction:
        """Return the instruction that a text or an observation states.

        Raises:
            GenError: both came, the observation has no task, camera images, whose vision backbone
                is not loaded, or features that cannot be read.
        """
        if condition.observation is None:
            return super().parse(condition)
        condition.require(frozenset({"observation"}), "a policy")
        task, camera = condition.observation.get("task"), next(iter(condition.cameras()), None)
        if not isinstance(task, str) or not task.strip():
            raise bad_value("task", task, "the instruction as a text", "the observation")
        if camera is not None:
            raise GenError(
                f"the observation has {camera}, and the model takes features of images, computed"
                f" elsewhere; expected {FEATURES}, an .npy file"
            )
        file = str(condition.observation.get(FEATURES) or "")
        if not file:
            return Instruction(task.strip())
        instruction = Instruction(task.strip(), file)
        self.conditions.of(torch.tensor([self.number(instruction)]))  # an unreadable file fails
        return replace(instruction, digest=sha256(Path(file).expanduser()))

    def condition(self, prompt: str) -> Instruction:
        text, bar, file = (part.strip() for part in prompt.partition("|"))
        if not text or bool(bar) != bool(file):
            raise GenError(
                f"the prompt {prompt!r} has no instruction; expected one, or 'instruction |"
                " features.npy'"
            )
        instruction = Instruction(text, file)
        if file:
            # an unreadable file fails here
            self.conditions.of(torch.tensor([self.number(instruction)]))
        return instruction

    def prompt(self, condition: Instruction) -> list[int]:
        """Ids of a prompt. Words are lower-cased, as in training."""
        ids = list(
            self.tokenizer(self.template.replace("{instruction}", condition.text.lower()))[
                "input_ids"
            ]
        )
        ids += [self.empty] * (ids[-1] != self.empty)
        if condition.features:
            number = self.number(condition)
            count = len(self.conditions.of(torch.tensor([number]))[0]["features"])
            first = self.model.config.vocab_size + PATCHES * number
            ids[1:1] = range(first, first + count)  # behind bos
        return self.vocabulary.prompt(ids)

    def number(self, condition: Instruction) -> int:
        """Number of the condition's file in its present state, since robots overwrite one file
        again and again.
        """
        path = Path(condition.features).expanduser()
        if path.suffix != ".npy" or not path.is_file():
            raise GenError(
                f"the features {condition.features} are no existing .npy file; expected floats"
                " [patches, width] of the vision backbone"
            )
        return self.conditions.number((str(path), os.stat(path).st_mtime_ns))

    def _features(self, file: tuple[str, int]) -> dict[str, Tensor]:
        if self.projector is None:
            raise GenError(
                "the prompt has image features and the checkpoint has no projector; expected"
                " its file with projector.fc1.weight ..."
            )
        try:
            array = np.load(file[0], allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise GenError(f"the features {file[0]} cannot be read: {error}") from None
        width = self.projector.fc1.in_features
        if (
            array.ndim != 2
            or array.shape[1] != width
            or not 0 < len(array) < PATCHES
            or array.dtype.kind != "f"
            or not np.isfinite(array).all()
        ):
            raise GenError(
                f"the features {file[0]} are {array.dtype} {array.shape}; expected finite floats"
                f" [patches, {width}]"
            )
        weight = self.projector.fc1.weight
        return {"features": self.projector(torch.from_numpy(array).to(weight.device, weight.dtype))}


def statistics_of(files: CheckpointFiles, key: str | None) -> ActionStatistics:
    """Statistics of one data set, with -1 and 1 for dimensions that are not normalised.

    A fine-tuned checkpoint has them in a file of their own, dataset_statistics.json.

    Raises:
        GenError: there are none, or ``key`` is not among them; the message lists the data sets.
    """
    known: Mapping[str, Any] = (
        files.json("dataset_statistics.json") or files.config.get("norm_stats") or {}
    )
    if not known:
        raise GenError(
            f"model {files.name} has no statistics of actions; expected 'norm_stats' in its config,"
            " or dataset_statistics.json"
        )
    if key is None and len(known) > 1:
        raise GenError(
            f"model {files.name} was trained on several data sets; expected unnorm_key, one of"
            f" {', '.join(sorted(known))}"
        )
    key = next(iter(known)) if key is None else key
    if key not in known:
        raise unknown("unnorm_key", key, known, files.name)
    action = known[key].get("action", {})
    low, high = action.get("q01"), action.get("q99")
    if not low or not high or len(low) != len(high) or len(action.get("mask") or low) != len(low):
        raise GenError(
            f"the statistics {key!r} of {files.name} are {str(action)[:120]}; expected q01, q99"
            " and mask with one value for every dimension"
        )
    mask = action.get("mask") or [True] * len(low)
    return ActionStatistics(
        [a if m else -1.0 for a, m in zip(low, mask, strict=True)],
        [a if m else 1.0 for a, m in zip(high, mask, strict=True)],
    )


def projector_of(weights: Weights, hidden: int, load: LoadOptions, name: str) -> Projector | None:
    """Load the projector, if the checkpoint has one.

    Args:
        weights: tensors of the checkpoint.
        hidden: width of the language model.
        load: device and dtype.
        name: the checkpoint, for messages.

    Raises:
        GenError: its layers do not follow each other, or do not end at ``hidden``.
    """
    tensors = {k: s for k, s in weights.shapes.items() if k.startswith("projector.")}
    if not tensors:
        return None
    shapes = [tensors[k] for k in sorted(tensors) if k.endswith(".weight")]
    consecutive = not any(len(s) != 2 for s in shapes) and all(
        a[0] == b[1] for a, b in itertools.pairwise(shapes)
    )
    if not shapes or not consecutive or shapes[-1][0] != hidden:
        named = ", ".join(f"{k} {tensors[k]}" for k in sorted(tensors) if k.endswith(".weight"))
        raise GenError(
            f"the projector of {name} has the weights {named}; expected linear layers whose"
            f" sizes follow each other, the last with {hidden} outputs"
        )
    return fill(
        without_storage(lambda: Projector(shapes)),
        weights,
        rename=((r"^projector\.", ""),),
        drop=(r"^vision_backbone\.", r"^language_model\."),
        device=load.device,
        dtype=load.dtype,
        name=name,
    )
