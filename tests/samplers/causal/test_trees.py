"""A drafter may return a tree: the loop gives it to the target, and commits the accepted path."""

from __future__ import annotations

import pytest
import torch
from constrained import with_end
from decoding import decode_causal
from small_llama import small_llama
from tabular import TabularCausal, causal_target

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.language_models import CausalLM
from gen.models.targets.causal import CausalTarget
from gen.samplers.engine.causal_loop import Drafter
from gen.samplers.engine.draft import Draft, Verdict

ITEMS, POSITIONS = 5, 11
KEYS = [3, 14, 15, 92, 65]
SAMPLING = {"plain": SamplingParams(), "guided": SamplingParams(guidance_scale=2.0, top_k=6)}
# two drafts after the root, two after the second of them, one more level
PARENTS = (-1, -1, 1, 1, 3, 0)


class OracleTree(Drafter):
    """Drafter that knows the tokens, and is wrong in branches and at some positions.

    A path is accepted while a child is the token that autoregression draws there.
    """

    window = 1 + len(PARENTS)

    def __init__(self, known: torch.Tensor, parents: tuple[int, ...]):
        self.known, self.parents = known, parents

    def propose(self, step, tokens):
        b, length = len(tokens), len(self.parents)
        depth = [0] * length
        for i, parent in enumerate(self.parents):
            depth[i] = 0 if parent < 0 else depth[parent] + 1
        at = (step.start[:, None] + torch.tensor(depth)).clamp_max(POSITIONS - 1)
        right = self.known[step.rows[:, None], at]
        # the first child of a node is wrong, and so is every fourth position
        first = torch.tensor([self.parents.index(p) == i for i, p in enumerate(self.parents)])
        drafts = torch.where(first | (at % 4 == 3), (right + 1) % 20, right)
        exists = torch.ones(b, length, dtype=torch.bool)
        self.draft = Draft(drafts, exists, parents=torch.tensor(self.parents).expand(b, -1))
        return self.draft

    def verify(self, step, draft, output):
        ids = step.categorical(output.logprobs, "token", step.valid, shared=True)
        b, length = self.draft.tokens.shape
        path, tokens = torch.zeros(b, length, dtype=torch.long), ids.clone()
        accepted = torch.zeros(b, dtype=torch.long)
        for row in range(b):
            node, count = -1, 0
            tokens[row, 0] = ids[row, 0]
            while True:
                drawn = int(ids[row, node + 1])
                tokens[row, count] = drawn
                children = [
                    i
                    for i, parent in enumerate(self.parents)
                    if parent == node and self.draft.exists[row, i]
                    if int(self.draft.tokens[row, i]) == drawn
                ]
                if not children:
                    break
                node = path[row, count] = children[0]
                node, count = int(node), count + 1
            accepted[row] = count
        return Verdict(accepted, tokens, path)


def target(sampling: SamplingParams) -> CausalTarget:
    space = TokenSpace.codes((POSITIONS,), 24, 20)
    prompt, length = torch.arange(4 * ITEMS).view(ITEMS, 4), torch.tensor([4, 1, 3, 2, 4])
    uncond = torch.zeros(ITEMS, 2, dtype=torch.long) if sampling.guided else None
    model = CausalLM(small_llama(24).double())
    return CausalTarget(model, prompt, space, sampling, uncond, length)


@pytest.mark.parametrize("rows", [ITEMS, 2])
@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_the_accepted_path_of_a_tree_is_committed(sampling, rows):
    """The tokens are those of autoregression, whose cache holds no branch."""
    plain = registry.get("sampler", "autoregressive")()(target(sampling), CounterRNG(KEYS))
    now = target(sampling)
    now.at_most(rows)
    out = decode_causal(now, CounterRNG(KEYS), OracleTree(plain.tokens, PARENTS), trace=True)
    assert torch.equal(out.tokens, plain.tokens)
    assert all(s.nfe < 0.7 * POSITIONS and s.tokens == POSITIONS for s in out.stats)
    assert all(0 < s.draft_acceptance_rate < 1 for s in out.stats)
    for row, trace in zip(out.tokens.tolist(), out.traces, strict=True):
        committed = {n: x for step in trace for n, x in step.committed.items()}
        assert [committed[n] for n in range(POSITIONS)] == row
        assert all(set(step.committed) <= set(step.window) for step in trace)
        assert max(n for step in trace for n in step.window) == POSITIONS - 1


def test_control_a_path_that_is_not_moved_to_its_positions_gives_other_tokens(monkeypatch):
    sampling = SAMPLING["plain"]
    plain = registry.get("sampler", "autoregressive")()(target(sampling), CounterRNG(KEYS))
    monkeypatch.setattr(CausalTarget, "commit_path", lambda *args: None)
    out = decode_causal(target(sampling), CounterRNG(KEYS), OracleTree(plain.tokens, PARENTS))
    assert not torch.equal(out.tokens, plain.tokens)


class Chains(TabularCausal):
    """Model that takes no trees."""

    forward_tree = None


def test_a_model_of_chains_refuses_a_tree():
    model = Chains(4)
    known = torch.zeros(1, POSITIONS, dtype=torch.long)
    for space in (TokenSpace.codes((POSITIONS,), 4, 4), with_end(POSITIONS, 4)):
        now = causal_target(model, space, SamplingParams(), [0])
        with pytest.raises(GenError, match="the draft is a tree"):
            decode_causal(now, CounterRNG([1]), OracleTree(known, PARENTS))
