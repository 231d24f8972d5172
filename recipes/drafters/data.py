"""What drafters are trained on: sequences that a causal model draws, with the distribution that it
draws each token from and the hidden states that it is made of.

Distributions are final: guidance, temperature, top-k and top-p are applied. Position t of a
sequence is the t-th token of the output. ``Batch.logp[:, t]`` is the distribution of token t given
the tokens before it, and ``Batch.states[layer][:, t]`` the hidden states that it comes from, those
of the token before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gen.contracts.modality import BUILT_IN, CONDITIONS, NOTHING, Modality
from gen.contracts.modality_of import modality_of
from gen.core.errors import GenError
from gen.core.sampling_params import SamplingParams
from gen.modalities.action import tasks as tabletop_tasks
from gen.modalities.image import captions as shapes
from gen.modalities.motion import captions as moves
from gen.modalities.speech import synth as spoken
from gen.modalities.text import tasks as text_tasks
from gen.modalities.video import captions as moving
from gen.models.adapters.language_models import CausalLM
from gen.models.targets.causal import CausalTarget
from gen.pipeline.pipeline import Pipeline, Prompt, load
from gen.pipeline.request import GenerationRequest

SAMPLER = "autoregressive"
KEPT = 128  # most probable tokens of a distribution that are stored
ROWS, POSITIONS = 32, 16_384  # sequences and positions of a forward pass that labels, at most
SEED = 20_000
HELD_SEED = 1 << 32  # of held-out items of a model without conditions

# conditions that no evaluation uses: (count, seed) -> prompts
TRAINING: dict[str, Callable[[int, int], Sequence[object]]] = {
    "action": lambda n, seed: [
        tabletop_tasks.described(s) for s in tabletop_tasks.episodes(n, seed, held=False).states
    ],
    "image": lambda n, seed: shapes.captions(n, seed, held=False),
    "motion": lambda n, seed: moves.captions(n, seed, held=False),
    "speech": lambda n, seed: spoken.utterances(n, seed, held=False),
    "text": lambda n, seed: text_tasks.tasks(n, seed, held=False),
    "video": lambda n, seed: moving.captions(n, seed, held=False),
}


def training_prompts(modality: Modality, count: int, seed: int = SEED) -> list[str]:
    """Draw prompts to train with, none of which is held out.

    A modality without conditions of its own for training gives its example prompts of another seed,
    without those that ``held_out_prompts`` returns.
    """
    if modality.name in TRAINING:
        return [str(c) for c in TRAINING[modality.name](count, seed)]
    held = set(held_out_prompts(modality, count))
    found = [p for p in modality.example_prompts(2 * count, seed) if p not in held][:count]
    if not found:
        raise GenError(
            f"the modality {modality.name} has {len(held)} prompts, all held out; expected more"
        )
    return found


def held_out_prompts(modality: Modality, count: int) -> list[str]:
    """Draw prompts to measure with."""
    return modality.example_prompts(count, 0)


@dataclass(frozen=True)
class Batch:
    """Sequences of B items with what their model says of every position.

    Attributes:
        prompt: prompts, long [B, P], padded on the right.
        prompt_length: long [B].
        tokens: long [B, T].
        weight: float [B, T]; 0 at positions behind the eos token, and where no drafter stands.
        logp: log-probabilities of the target, float32 [B, T, V].
        states: hidden states by layer, [B, T, D], those that ``logp`` comes from.
        prompt_states: hidden states by layer of the prompt without its last token, [B, P - 1, D].
    """

    prompt: Tensor
    prompt_length: Tensor
    tokens: Tensor
    weight: Tensor
    logp: Tensor
    states: dict[str, Tensor]
    prompt_states: dict[str, Tensor]

    def inputs(self) -> tuple[Tensor, Tensor]:
        """Return prompt and tokens in one row.

        Returns:
            Token ids, long [B, P + T], each row's prompt followed by its tokens and then padding;
            and the slots of the positions' inputs, long [B, T]: the token before each.
        """
        p, t = self.prompt.shape[1], self.tokens.shape[1]
        slot = torch.arange(p + t, device=self.tokens.device)
        at = slot - self.prompt_length[:, None]
        ids = self.tokens.gather(1, at.clamp(0, t - 1))
        given = F.pad(self.prompt, (0, t))
        before = self.prompt_length[:, None] - 1 + torch.arange(t, device=self.tokens.device)
        return torch.where(at < 0, given, ids), before


@dataclass(frozen=True)
class Sequences:
    """Sequences of N items with stored distributions and hidden states.

    Attributes:
        items: number of each sequence's prompt, long [N].
        tokens: long [N, T].
        weight: float [N, T].
        ids: most probable tokens, long or int32 [N, T, K].
        logp: their log-probabilities, float16 [N, T, K].
        states: hidden states by layer, [N, T, D].
        prompt_states: the same of the prompts, [N, P - 1, D].
    """

    items: Tensor
    tokens: Tensor
    weight: Tensor
    ids: Tensor
    logp: Tensor
    states: dict[str, Tensor]
    prompt_states: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def concatenated(cls, parts: Sequence[Sequences]) -> Sequences:
        """Join sequences of one teacher."""
        first = parts[0]
        return cls(
            torch.cat([p.items for p in parts]),
            torch.cat([p.tokens for p in parts]),
            torch.cat([p.weight for p in parts]),
            torch.cat([p.ids for p in parts]),
            torch.cat([p.logp for p in parts]),
            {k: torch.cat([p.states[k] for p in parts]) for k in first.states},
            {k: torch.cat([p.prompt_states[k] for p in parts]) for k in first.prompt_states},
        )


@dataclass(frozen=True)
class Conditions:
    """Conditions of media, to train with and held out."""

    trained: Sequence[Prompt]
    held: Sequence[Prompt]


class Teacher:
    """Causal model with the prompts of its items, which labels sequences.

    Args:
        pipe: pipeline of the model.
        prompts: prompts of the items.
        layers: layers whose hidden states are kept.
        seed: seed of the first item of every prompt.

    Raises:
        GenError: the model is no causal language model of tokens.
    """

    def __init__(
        self,
        pipe: Pipeline,
        prompts: Sequence[Prompt],
        layers: tuple[str, ...] = (),
        seed: int = 0,
    ):
        self.pipe, self.layers = pipe, layers
        self.items = pipe.plan(prompts, seed=seed)
        sampler, sampling = pipe.resolve({"name": SAMPLER})
        target = pipe.target(sampler, sampling, self.items)
        if not isinstance(target, CausalTarget) or not isinstance(target.model, CausalLM):
            raise GenError(
                f"drafters are trained for causal language models of tokens, and {target.name} is"
                f" a {type(target.model).__name__}"
            )
        self.target: CausalTarget = target
        self.sampling: SamplingParams = sampling
        self.model: CausalLM = target.model

    @classmethod
    def of_model(
        cls,
        model: str,
        modality: str | None,
        prompts: int,
        held: bool,
        given: Conditions | None = None,
    ) -> Teacher:
        """Make the teacher of a model with drawn prompts.

        Args:
            model: name of the model, or a folder.
            modality: its modality; None for the one that its config states.
            prompts: number of prompts.
            held: draw held-out prompts.
            given: conditions to draw from; None for those of the modality's language.

        Raises:
            GenError: the model was trained with conditions of another language, and none are given.
        """
        pipe = load(modality or modality_of(model), model)
        conditions = pipe.files(model).config.get(CONDITIONS, BUILT_IN)
        if conditions == NOTHING:  # held-out items have other seeds
            return cls(pipe, [""] * prompts, seed=HELD_SEED if held else 0)
        if given is not None:
            drawn = given.held if held else given.trained
            return cls(pipe, [drawn[i % len(drawn)] for i in range(prompts)])
        if conditions != BUILT_IN:
            raise GenError(
                f"model {model} was trained with conditions of its own; expected gen train with"
                " objective=drafter and data, the folder of gen encode that it was trained on"
            )
        return cls(pipe, (held_out_prompts if held else training_prompts)(pipe.modality, prompts))

    def with_layers(self, layers: tuple[str, ...]) -> Teacher:
        """Return the same teacher with other hidden states."""
        other = Teacher.__new__(Teacher)
        vars(other).update(vars(self), layers=layers)
        return other

    def with_prompts(self, prompts: Sequence[str]) -> Teacher:
        """Return a teacher of the same model with other prompts."""
        return Teacher(self.pipe, prompts, self.layers)

    def sample(self, batch: int = 64) -> Tensor:
        """Draw one sequence for each item from the model: long [N, T]."""
        sampler, sampling = self.pipe.resolve({"name": SAMPLER})
        spec = {"name": SAMPLER}
        rows = []
        for first in range(0, len(self.items), batch):
            some = self.items[first : first + batch]
            request = GenerationRequest(some, spec, sampler, sampling)
            prepared = self.pipe.prepare(request)
            rows.append(self.pipe.run(prepared).tokens.cpu())
        return torch.cat(rows)

    def until_end(self, tokens: Tensor) -> Tensor:
        """Weigh positions 1 up to the end and 0 behind it: float [n, T]."""
        ended = self.target.space.is_end(tokens).long()
        return (ended.cumsum(1) - ended == 0).float()

    def label(self, items: Tensor, tokens: Tensor, weight: Tensor | None = None) -> Sequences:
        """Run the model over sequences and store what it says of them.

        Args:
            items: number of each sequence's item, long [n].
            tokens: long [n, T].
            weight: float [n, T]; None weighs all positions up to the end 1.
        """
        weight = self.until_end(tokens) if weight is None else weight
        parts: list[Sequences] = []
        at_once = max(1, min(ROWS, POSITIONS // tokens.shape[1]))
        for rows in torch.arange(len(tokens)).split(at_once):
            batch = self.batch(items[rows], tokens[rows])
            kept = min(KEPT, batch.logp.shape[-1])
            logp, ids = batch.logp.topk(kept, -1)
            logp = logp.log_softmax(-1).half()
            parts.append(
                Sequences(
                    items[rows],
                    tokens[rows],
                    weight[rows],
                    ids.int(),
                    logp,
                    batch.states,
                    batch.prompt_states,
                )
            )
        return Sequences.concatenated(parts)

    def batch(self, items: Tensor, tokens: Tensor) -> Batch:
        """Run the model over sequences once.

        Args:
            items: number of each sequence's item, long [B].
            tokens: long [B, T].
        """
        target = self.target.of_items(items.numpy())
        if self.layers:
            target.require_hidden_states(self.layers, "a drafter")
        tokens = tokens.to(target.device)
        length = tokens.shape[1]
        before = torch.cat([tokens[:, :1], tokens[:, :-1]], 1)
        at = torch.arange(length, device=target.device).expand_as(tokens)
        out = target.predict(before, at)
        states = out.hidden_states or {}
        of_prompt = {} if out.prompt_states is None else out.prompt_states.states
        prompt, lengths = self._prompts(items)
        return Batch(
            prompt, lengths, tokens, self.until_end(tokens), out.logprobs.float(), states, of_prompt
        )

    def _prompts(self, items: Tensor) -> tuple[Tensor, Tensor]:
        """Return the conditional prompts of items, long [B, P], and their lengths."""
        prompts = self.target.prompts
        return prompts.all_tokens[items], prompts.all_lengths[items]

    def unpack(self, data: Sequences, rows: Tensor) -> Batch:
        """Return stored sequences as a batch.

        Args:
            data: the sequences.
            rows: those of the batch, long [B].
        """
        size = self.target.legal.shape[-1]
        ids, logp = data.ids[rows].long(), data.logp[rows].float()
        full = logp.new_full((*logp.shape[:-1], size), -torch.inf).scatter_(-1, ids, logp)
        prompt, lengths = self._prompts(data.items[rows])
        states = {k: v[rows].float() for k, v in data.states.items()}
        of_prompt = {k: v[rows].float() for k, v in data.prompt_states.items()}
        weight, tokens = data.weight[rows], data.tokens[rows]
        return Batch(prompt, lengths, tokens, weight, full, states, of_prompt)


def batches(teacher: Teacher, data: Sequences, size: int, seed: int) -> Iterator[Batch]:
    """Draw endless batches of stored sequences, epoch by epoch."""
    generator = torch.Generator().manual_seed(seed)
    size = min(size, len(data))
    while True:
        for rows in torch.randperm(len(data), generator=generator).split(size):
            if len(rows) == size:
                yield teacher.unpack(data, rows)


def with_drafts(
    teacher: Teacher,
    data: Sequences,
    draft: Callable[[Batch], Tensor],
    count: int,
    seed: int,
) -> Sequences:
    """Make sequences that a drafter goes on with, and label them.

    A random position of each sequence becomes the first draft, and ``count`` drafts follow the
    target's tokens there. Only the drafted positions and the one behind them weigh: a drafter
    stands nowhere else.

    Args:
        teacher: the model.
        data: sequences of the target.
        draft: draws the token of every position given those before it, long [B, T].
        count: drafts in a row.
        seed: seed of the positions.
    """
    generator = torch.Generator().manual_seed(seed)
    total = data.tokens.shape[1]
    made, weights = [], []
    for rows in torch.arange(len(data)).split(ROWS):
        batch = teacher.unpack(data, rows)
        length = batch.weight.sum(1)
        cut = (torch.rand(len(rows), generator=generator) * length).long()[:, None]
        tokens, column = batch.tokens.clone(), torch.arange(total)
        for step in range(count):
            drawn = draft(replace(batch, tokens=tokens))
            tokens = torch.where(column == cut + step, drawn, tokens)
        at = (column >= cut) & (column <= cut + count)
        made.append(tokens)
        weights.append(at.float() * teacher.until_end(tokens))
    return teacher.label(data.items, torch.cat(made), torch.cat(weights))
