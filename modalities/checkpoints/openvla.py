"""OpenVLA: a language model whose last words are bins of robot actions (Kim et al., arXiv
2406.09246).

    prompt   bos, [features of the image,] "In: What action should the robot take to
             {instruction}?\nOut:", the empty piece
    answer   one id for each dimension of the action: bin b = 1 .. E is id V - b, V the vocabulary
             without its padding

The vision backbone (``gen.models.published.prismatic``) makes features of a camera image, or they
come from a file, and the checkpoint's projector brings them into the language model. Without either
the model answers to words alone, as its own class does without images; this is not enough to move a
robot.
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

from gen.contracts.checkpoint import FROM_PRETRAINED, Checkpoint, CheckpointFiles, LoadOptions
from gen.contracts.condition import Condition
from gen.contracts.modality import Binding
from gen.core.condition_parts import FEATURES
from gen.core.errors import GenError, bad_value, unknown
from gen.core.files import sha256
from gen.core.registry import register
from gen.core.token_space import TokenSpace
from gen.media.bounds import load_array
from gen.media.given import GivenMedia
from gen.modalities.open_vocabulary import FreeAction
from gen.models.adapters.conditioning import Conditions, MappedLM, Vocabulary
from gen.models.load.cache_argument import with_cache
from gen.models.load.pretrained import tokenizer_of
from gen.models.load.weights import Weights, fill, without_storage
from gen.models.published.prismatic import VisionBackbone, load_vision
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
PATCHES = 1 << 14  # ids in prompts that stand for the features of one image


@dataclass(frozen=True)
class Instruction:
    """Instruction, and the camera image or the file with its features, if any. ``digest``: sha256
    of the file of an observation."""

    text: str
    features: str = ""
    digest: str = ""
    image: GivenMedia | None = None

    def __str__(self) -> str:
        seen = self.image or self.digest[:16] or self.features
        return f"{self.text} | {seen}" if seen else self.text


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
    of image n.
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
        words = self.model.get_input_embeddings()(ids.masked_fill(is_feature, 0))
        x = self.conditions.placed(words, feature_ids, PATCHES, "features")
        mask = cache.at(positions, self.dtype)
        logits = self.model(
            inputs_embeds=x,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            **with_cache(self.model, cache),
        ).logits
        return logits[..., self.vocabulary.ids.to(logits.device)]


@register("checkpoint", "openvla")
class OpenVLA(Checkpoint):
    """OpenVLA: actions from an instruction and a camera image of any size, with one vision
    transformer or two.

    A prompt is an instruction, and ``images`` its camera image. An observation has the instruction
    as ``task`` and one camera image. Features [patches, width] that were computed elsewhere may
    stand for the image, in an .npy file: ``instruction | features.npy`` as the prompt, or
    ``observation.features``.

    Args:
        unnorm_key: data set whose statistics put actions into physical units; needed if there are
            several.
        horizon: actions of a chunk (1).
        template: prompt around {instruction}; by default that of the checkpoint's name, which
            differs where it has ``v01``.
    """

    accepts = frozenset({"text", "images", "observation"})
    most = {"images": 1}
    takes = FROM_PRETRAINED
    modalities = ("action",)
    protocols = ("causal",)
    sampling = {"temperature": 0.0}
    tested = (
        "tiny random weights in the published layout: the language model against transformers'"
        " LlamaForCausalLM, both vision transformers and the projector against a plain forward"
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
            **{k: v for k, v in text_config.items() if k != "model_type"},
            attn_implementation=load.attn_implementation,
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
        weights = Weights(files.path, variant=load.hub.variant)
        self.model = fill(
            without_storage(lambda: transformers.LlamaForCausalLM(config)),
            weights,
            rename=RENAMES,
            drop=ELSEWHERE,
            **load.fill_keywords,
            name=files.name,
        )
        self.projector = projector_of(weights, config.hidden_size, load, files.name)
        self.vision = self._vision(files, weights, load)
        self.conditions = Conditions(self._features)
        space = TokenSpace.codes(
            self.frontend.grid, bins, bins, codebook=self.frontend.table.float()
        )
        self.binding = Binding(space, self.prompt, self.prompt(Instruction("")))
        self.modality = FreeAction(self)

    def adapter(self, protocol: str) -> SeeingLM:
        return SeeingLM(self.model, self.vocabulary, self.conditions)

    def _vision(
        self, files: CheckpointFiles, weights: Weights, load: LoadOptions
    ) -> VisionBackbone | None:
        """Load the vision backbone, if the checkpoint has one. Raises ``GenError`` where the
        projector takes other features than it makes."""
        config = files.config
        acts = [act for act in config.get("timm_override_act_layers") or () if act is not None]
        if acts:
            raise bad_value(
                f"timm_override_act_layers of {files.name}", acts[0], "null, which is GELU"
            )
        names = config.get("timm_model_ids") or ()
        processor = files.json("preprocessor_config.json")
        vision = load_vision(weights, names, processor, load.device, load.dtype, files.name)
        if vision is None or self.projector is None:
            return vision
        width = self.projector.fc1.in_features
        if vision.width != width:
            raise GenError(
                f"the vision transformers of {files.name} make {vision.width} features of a patch;"
                f" expected {width}, as its projector takes"
            )
        return vision

    def parse(self, condition: Condition) -> Instruction:
        """Return the instruction that a text and an image, or an observation state.

        Raises:
            GenError: both came, the observation has no task, several cameras, or images or features
                that cannot be read.
        """
        condition.require(self.accepts, "the model", self.most)
        if condition.observation is None:
            instruction = self.condition(condition.text or "")
            images = condition.media("images")
            return self._seeing(instruction, images[0]) if images else instruction
        condition.require(frozenset({"observation"}), "a policy")
        task, cameras = condition.observation.get("task"), condition.cameras()
        if not isinstance(task, str) or not task.strip():
            raise bad_value("task", task, "the instruction as a text", "the observation")
        instruction = Instruction(task.strip(), str(condition.observation.get(FEATURES) or ""))
        if len(cameras) > 1:
            raise GenError(
                f"the observation has the images {', '.join(cameras)}; the model takes one camera"
            )
        for image in cameras.values():
            return self._seeing(instruction, image)
        if not instruction.features:
            return instruction
        self.conditions.of(torch.tensor([self.number(instruction)]))  # an unreadable file fails
        return replace(instruction, digest=sha256(Path(instruction.features).expanduser()))

    def _seeing(self, instruction: Instruction, image: GivenMedia) -> Instruction:
        """Return the instruction with its camera image. Raises ``GenError`` where the model makes
        no features of it, or the instruction names some already."""
        if instruction.features:
            raise GenError(
                f"the condition has an image and the features {instruction.features}; expected one"
                " of them"
            )
        if self.vision is None:
            raise GenError(
                "the condition has an image and the checkpoint has no vision_backbone; expected"
                f" {FEATURES}, an .npy file of features computed elsewhere"
            )
        seeing = replace(instruction, image=image)
        self.conditions.of(torch.tensor([self.number(seeing)]))  # a missing projector fails
        return seeing

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
        if condition.features or condition.image is not None:
            number = self.number(condition)
            count = len(self.conditions.of(torch.tensor([number]))[0]["features"])
            first = self.model.config.vocab_size + PATCHES * number
            ids[1:1] = range(first, first + count)  # behind bos
        return self.vocabulary.prompt(ids)

    def number(self, condition: Instruction) -> int:
        """Number of the condition's image, or of its file in its present state, since robots
        overwrite one file again and again.
        """
        if condition.image is not None:
            return self.conditions.number(condition.image)
        path = Path(condition.features).expanduser()
        if path.suffix != ".npy" or not path.is_file():
            raise GenError(
                f"the features {condition.features} are no existing .npy file; expected floats"
                " [patches, width] of the vision backbone"
            )
        return self.conditions.number((str(path), os.stat(path).st_mtime_ns))

    def _features(self, seen: GivenMedia | tuple[str, int]) -> dict[str, Tensor]:
        """Inputs of the language model for an image or a file of features."""
        if self.projector is None:
            raise GenError(
                "the prompt has image features and the checkpoint has no projector; expected"
                " its file with projector.fc1.weight ..."
            )
        if isinstance(seen, GivenMedia):
            return {"features": self.projector(self.vision.features(seen.array))}
        return {"features": self._of_file(seen[0])}

    def _of_file(self, file: str) -> Tensor:
        try:
            array = load_array(file)
        except (OSError, ValueError, EOFError) as error:
            raise GenError(f"the features {file} cannot be read: {error}") from None
        width = self.projector.fc1.in_features
        if (
            array.ndim != 2
            or array.shape[1] != width
            or not 0 < len(array) < PATCHES
            or array.dtype.kind != "f"
            or not np.isfinite(array).all()
        ):
            raise GenError(
                f"the features {file} are {array.dtype} {array.shape}; expected finite floats"
                f" [patches, {width}]"
            )
        weight = self.projector.fc1.weight
        return self.projector(torch.from_numpy(array).to(weight.device, weight.dtype))


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
