"""A tree of drafts against the slot cache is what every branch is by itself, computed anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import WRITERS
from small_llama import small_llama
from transformers import Qwen3Config, Qwen3ForCausalLM

import gen
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.language_models import CausalLM
from gen.models.adapters.protocols import TreeModel
from gen.models.adapters.slot_cache import SlotCache
from gen.models.targets.causal import CausalTarget
from gen.samplers.engine.draft import tree_positions

CLOSE, V = 1e-9, 12
ROWS, LENGTHS, ROUNDS = 4, (3, 5, 4, 2), 3
SLOTS = max(LENGTHS) + 4 * ROUNDS + 8


def qwen3() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    size = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "vocab_size": V}
    return Qwen3ForCausalLM(Qwen3Config(**size, **heads, max_position_embeddings=64))


FAMILIES = ("chameleon", "emu3", "janus")
NETS = {
    "llama": lambda: CausalLM(small_llama(V).double()),
    "qwen3": lambda: CausalLM(qwen3().double()),
}


def adapter(name: str, folder: Path):
    """A tiny causal model in float64."""
    if name in NETS:
        return NETS[name]()
    case = WRITERS[name](folder)
    pipe = gen.load(case.modality, model=case.path, dtype="float64", **case.options)
    sampler, sampling = pipe.resolve("autoregressive", None)
    return pipe.target(sampler, sampling, pipe.plan(case.prompts[0])).model


def random_tree(nodes: int, g: torch.Generator) -> torch.Tensor:
    """Parents of another tree in every row, [B, n]."""
    columns = [torch.randint(-1, n, (ROWS,), generator=g) for n in range(nodes)]
    return torch.stack(columns, 1)


def error(model, g: torch.Generator) -> float:
    """Largest difference of a logit over some rounds of trees and ragged commits."""
    size = min(V, model.vocab_size)
    rows = [torch.randint(size, (n,), generator=g).tolist() for n in LENGTHS]
    cache, worst = model.new_cache(SLOTS), 0.0
    width = max(LENGTHS)
    at = torch.tensor([[min(i, n - 1) for i in range(width)] for n in LENGTHS])
    tokens = torch.tensor(
        [[row[i] for i in columns] for row, columns in zip(rows, at, strict=True)]
    )
    model.forward(tokens, at, cache)
    for nodes in (5, 7, 4)[:ROUNDS]:
        parents = random_tree(nodes, g)
        drafts = torch.randint(size, (ROWS, nodes), generator=g)
        start = torch.tensor([len(row) for row in rows])
        positions = tree_positions(start, parents) - 1
        last = torch.tensor([[row[-1]] for row in rows])
        found = model.forward_tree(torch.cat([last, drafts], 1), positions, parents, cache)
        ends, lines = torch.randint(-1, nodes, (ROWS,), generator=g), []
        for row in range(ROWS):
            for column in range(-1, nodes):
                line = branch(parents[row], column)
                alone = torch.tensor([rows[row] + drafts[row, line].tolist()])
                where = torch.arange(alone.shape[1])[None]
                wanted = model.forward(alone, where, model.new_cache(SLOTS))[0, -1]
                worst = max(worst, float((found[row, column + 1] - wanted).abs().max()))
            lines.append(branch(parents[row], int(ends[row])))
        path = torch.zeros(ROWS, nodes, dtype=torch.long)
        for row, line in enumerate(lines):
            path[row, : len(line)] = torch.tensor(line, dtype=torch.long)
            rows[row] += [*drafts[row, line].tolist(), int(torch.randint(size, (1,), generator=g))]
        cache.commit_path(path, torch.tensor([len(line) for line in lines]))
    return worst


def branch(parents: torch.Tensor, column: int) -> list[int]:
    """Columns from the root to a draft."""
    line: list[int] = []
    while column >= 0:
        line.insert(0, column)
        column = int(parents[column])
    return line


@pytest.mark.parametrize("name", [*NETS, *FAMILIES])
@pytest.mark.thinned(2)
def test_every_branch_is_the_sequence_it_stands_for(name, tmp_path):
    model = adapter(name, tmp_path)
    assert isinstance(model, TreeModel)
    assert error(model, torch.Generator().manual_seed(1)) < CLOSE


def sees_all_branches(self, positions, parents, dtype):
    """The mask of a cache that lets drafts see other branches, those of earlier rounds too."""
    mask = tree_mask(self, positions, parents, dtype)
    mask[..., 1:, self.slots :] = 0
    return mask


tree_mask = SlotCache.tree


def test_control_drafts_that_see_other_branches(monkeypatch):
    monkeypatch.setattr(SlotCache, "tree", sees_all_branches)
    assert error(NETS["llama"](), torch.Generator().manual_seed(1)) > 1e-3


def test_control_a_path_that_is_not_copied(monkeypatch):
    monkeypatch.setattr(SlotCache, "commit_path", lambda *args: None)
    assert error(NETS["llama"](), torch.Generator().manual_seed(1)) > 1e-3


def test_control_a_path_of_another_row(monkeypatch):
    copy = SlotCache.commit_path

    def roll(self, nodes, count):
        copy(self, nodes.roll(1, 0), count)

    monkeypatch.setattr(SlotCache, "commit_path", roll)
    assert error(NETS["llama"](), torch.Generator().manual_seed(1)) > 1e-3


TREES = {
    "traversal": {"shape": "best_first", "verifier": "traversal", "nodes": 6, "tree_depth": 3},
    "recursive": {"shape": "branching", "verifier": "recursive", "branching": "2-2"},
    "k_seq": {"shape": "paths", "verifier": "k_seq", "paths": 2, "path_length": 3},
}


@pytest.mark.parametrize("tree", TREES)
def test_rows_with_guidance_do_not_depend_on_their_batch(tree):
    """Each branch of guidance has a prompt and a cache row of its own."""
    sampler = resolve_sampler({"name": "speculative", **TREES[tree]})[0]
    big, small = (CausalLM(small_llama(V, seed).double()) for seed in (0, 1))

    def decode(rows):
        def target(model):
            prompt = torch.arange(4 * ROWS).view(ROWS, 4)[rows] % V
            lengths = torch.tensor(LENGTHS).clamp_max(4)[rows]
            uncond, params = prompt[:, :2].flip(1), SamplingParams(guidance_scale=2.0)
            space = TokenSpace.codes((9,), V, V)
            return CausalTarget(model, prompt, space, params, uncond, lengths)

        rng = CounterRNG([71 * r + 3 for r in rows])
        return sampler(target(big), rng, draft=target(small))

    whole = decode(list(range(ROWS)))
    for rows in ([2], [3, 1]):
        part = decode(rows)
        assert torch.equal(part.tokens, whole.tokens[rows])
        assert [s.nfe for s in part.stats] == [whole.stats[r].nfe for r in rows]
        assert [s.draft_nfe for s in part.stats] == [whole.stats[r].draft_nfe for r in rows]
