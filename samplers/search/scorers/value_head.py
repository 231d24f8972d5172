"""Scorer ``value_head``: a small trained network that predicts the reward of unfinished outputs.

    h = 1/T sum_t E[x_t] * G[t],  g = the same of the prompt's tokens
    v(x) = w2 . relu(W1 [h, g] + b1) + b2               x_t: a token, or "undecided"

It is fitted to E[r(x_0) | x_t] by least squares over trajectories of the model, the Monte Carlo
value of SVDD (arXiv 2408.08252). It decodes no media, so it is as fast as a table. The file says
which weights, which codebook and which reward it belongs to, and is refused with others.

    python -m gen.recipes.value_head image --scorer red_area --out red.safetensors
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from gen.contracts.frontend import codebook_digest
from gen.contracts.scorer import Scorer, plain_scorer
from gen.core.errors import GenError, bad_value
from gen.core.registry import register
from gen.models.load.digest import digest_of

WIDTH, HIDDEN = 24, 64  # of embeddings, and of the hidden layer


class HeadNet(nn.Module):
    """Network of a value head.

    Args:
        vocabulary: number of token ids; the id behind the last one means "undecided".
        length: positions of an output.
        slots: positions of a prompt.
    """

    def __init__(self, vocabulary: int, length: int, slots: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary + 1, WIDTH)
        self.words = nn.Embedding(vocabulary + 1, WIDTH)
        self.at = nn.Parameter(torch.ones(length, WIDTH))
        self.slots = nn.Parameter(torch.ones(max(slots, 1), WIDTH))
        self.first = nn.Linear(2 * WIDTH, HIDDEN)
        self.last = nn.Linear(HIDDEN, 1)

    @property
    def undecided(self) -> int:
        """Id of a token that is not decided."""
        return self.tokens.num_embeddings - 1

    def forward(self, tokens: Tensor, prompt: Tensor) -> Tensor:
        """Predict rewards, float [n].

        Args:
            tokens: long [n, T], undecided ones included.
            prompt: long [n, P], padded with the id of undecided tokens.
        """
        bag = (self.tokens(tokens) * self.at).mean(1)
        words = (self.words(prompt) * self.slots[: prompt.shape[1]]).mean(1)
        hidden = self.first(torch.cat([bag, words], 1)).relu()
        return self.last(hidden)[:, 0]


@dataclass(frozen=True)
class HeadFacts:
    """What a value head belongs to.

    Attributes:
        model: digest of the model's weights.
        codebook: digest of the frontend's codebook; empty where it has none.
        reward: spec of the reward, as JSON.
        mean, scale: mean and standard deviation of the rewards that it was fitted to.
    """

    model: str
    codebook: str
    reward: str
    mean: float = 0.0
    scale: float = 1.0

    @classmethod
    def of(cls, models: Any, name: str, reward: Any) -> HeadFacts:
        """Describe a model of a pipeline and a reward."""
        model, binding, _ = models.bound(name)
        table = binding.space.codebook
        spec = json.dumps(named(plain_scorer(reward)), sort_keys=True)
        return cls(digest_of(model), "" if table is None else codebook_digest(table), spec)


def named(spec: Any) -> Any:
    """Return a scorer's spec with its name alone written as ``{"name": ...}``."""
    return {"name": spec} if isinstance(spec, str) else dict(spec)


def write_head(path: Path, net: HeadNet, facts: HeadFacts) -> None:
    """Write a value head in float16."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {k: v.detach().half().contiguous() for k, v in net.state_dict().items()}
    save_file(arrays, str(path), metadata={k: str(v) for k, v in vars(facts).items()})


def read_head(path: str) -> tuple[HeadNet, HeadFacts]:
    """Read a value head.

    Raises:
        GenError: the file cannot be read, or is none of a value head.
    """
    try:
        with safe_open(path, "pt") as file:
            arrays = {k: file.get_tensor(k).float() for k in file.keys()}  # noqa: SIM118
            said: Mapping[str, str] = file.metadata() or {}
        net = HeadNet(len(arrays["tokens.weight"]) - 1, len(arrays["at"]), len(arrays["slots"]))
        net.load_state_dict(arrays)
        numbers = {k: float(said[k]) for k in ("mean", "scale")}
        facts = HeadFacts(said["model"], said["codebook"], said["reward"], **numbers)
    except (OSError, SafetensorError, KeyError, RuntimeError, ValueError) as error:
        raise GenError(
            f"value_head.path {path!r} cannot be read as a value head: {type(error).__name__}:"
            f" {error}; expected a file of python -m gen.recipes.value_head"
        ) from None
    return net.eval().requires_grad_(False), facts


@register("scorer", "value_head")
@dataclass(frozen=True)
class ValueHead(Scorer):
    """Reward that a trained head predicts from the tokens that are decided.

    ``path``: file of the head, which belongs to one model and one reward.
    """

    path: str = ""

    about: ClassVar[str] = "prediction of a reward by a trained head; the reward's range"

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, Path)) or not Path(self.path).is_file():
            raise bad_value("value_head.path", self.path, "a file of gen.recipes.value_head")

    def score(self, samples):
        raise GenError(
            "scorer 'value_head' needs the model of a call; expected a call of a pipeline"
        )

    def attach(self, models: Any, request: Any) -> Scorer:
        """Return the scorer with the prompts of a call.

        Raises:
            GenError: the head belongs to another model, codebook or reward.
        """
        net, facts = read_head(str(self.path))
        name = models.model_name(request.spec)
        reward = plain_scorer(getattr(request.sampler, "scorer", self))
        own = isinstance(reward, Mapping) and reward.get("name") == "value_head"
        here = HeadFacts.of(models, name, json.loads(facts.reward) if own else reward)
        for what, expected in (("model", name), ("codebook", name), ("reward", here.reward)):
            found, wanted = getattr(facts, what), getattr(here, what)
            if found != wanted:
                raise GenError(
                    f"value_head.path {str(self.path)!r} is of {what} {found}; expected {wanted}"
                    + (f" ({expected})" if expected != wanted else "")
                )
        prompts = prompt_tokens(models, name, [i.condition for i in request.items])
        return _Predicted(net, facts, prompts)


class _Predicted(Scorer):
    """Value head of a call.

    Args:
        net: the network.
        facts: what it belongs to.
        prompts: tokens of every item's prompt.
    """

    def __init__(self, net: HeadNet, facts: HeadFacts, prompts: Sequence[list[int]]):
        self.net, self.facts, self.prompts = net, facts, prompts

    @property
    def name(self) -> str:
        return "value_head"

    @torch.no_grad()
    def score(self, samples):
        net, length = self.net, len(self.net.at)
        rows = [(s.tokens, s.known) for s in samples]
        if any(len(tokens) != length for tokens, _ in rows):
            raise GenError(f"value_head is of {length} positions; got outputs of {len(rows[0][0])}")
        tokens = torch.stack(
            [t if known is None else t.where(known, net.undecided) for t, known in rows]
        )
        prompts = padded([self.prompts[s.item] for s in samples], net)
        out = net(tokens, prompts).double() * self.facts.scale + self.facts.mean
        return out.tolist()


def prompt_tokens(models: Any, name: str, conditions: Sequence[Any]) -> list[list[int]]:
    """Return the token ids of prompts, as a model of a pipeline reads them."""
    made = [models.bound(name)[1].prompt(condition) for condition in conditions]
    return [p if isinstance(p, list) else list(p.tokens) for p in made]


def padded(prompts: Sequence[list[int]], net: HeadNet) -> Tensor:
    """Return prompts as rows of a network's slots, long [n, P]; what is longer is cut."""
    slots = len(net.slots)
    rows = [[*p, *[net.undecided] * slots][:slots] for p in prompts]
    return torch.tensor(rows).clamp(max=net.undecided)
