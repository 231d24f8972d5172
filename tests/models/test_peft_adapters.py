"""LoRA adapters of PEFT: what a model decodes with one is what its merged weights give."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import tiny_checkpoints
import torch
from families import WRITERS
from peft_folders import SAMPLERS, loaded, network_of, write_adapter
from published import save_quietly
from torch import nn
from torch._dynamo.testing import CompileCounter

from gen.core.errors import GenError
from gen.models.load.hub import HubOptions, NotCached
from gen.models.load.peft_adapters import merge, read_adapter, route
from gen.models.load.routed import router_of
from gen.store.ledger import read_rows

FAMILIES = ["causal_lm", "qwen3", "chameleon", "llamagen"]


def qwen3(folder):
    made = WRITERS["causal_lm"](folder)
    save_quietly(tiny_checkpoints.tiny("qwen3"), folder)
    return made


@pytest.fixture
def case(request, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    return qwen3(folder) if request.param == "qwen3" else WRITERS[request.param](folder)


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES, indirect=True)
@pytest.mark.parametrize("more", [{}, {"use_rslora": True}], ids=["lora", "rslora"])
def test_an_adapter_gives_the_tokens_of_merged_weights(case, more, tmp_path):
    folder, other = tmp_path / "adapter", loaded(case)
    plain = other(list(case.prompts), sampler="autoregressive", seed=3, temperature=0).tokens
    merged = write_adapter(network_of(loaded(case)), folder, **more)
    with torch.no_grad():
        for key, value in network_of(other).state_dict().items():
            value.copy_(merged[key])
    pipe = loaded(case, adapters=folder)
    for sampler in SAMPLERS:
        tokens = pipe(list(case.prompts), sampler=sampler, seed=3, temperature=0).tokens
        assert torch.equal(
            tokens, other(list(case.prompts), sampler=sampler, seed=3, temperature=0).tokens
        )
    assert not torch.equal(tokens, plain)  # control: the adapter does something
    assert pipe.model_options["adapters"] == str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["chameleon"], indirect=True)
@pytest.mark.parametrize("by_name", [False, True])
def test_an_adapter_of_the_head_reaches_a_head_whose_rows_are_copied(case, by_name, tmp_path):
    folder, other = tmp_path / "adapter", loaded(case)
    plain = other(list(case.prompts), sampler="autoregressive", seed=3, temperature=0).tokens
    merged = write_adapter(
        network_of(loaded(case)), folder, embeddings=False, target_modules=["lm_head"]
    )
    with torch.no_grad():
        network_of(other).lm_head.weight.copy_(merged["lm_head.weight"])
    other.bound(other.model)[0].adapter("causal").network_changed()
    pipe = loaded(case, adapters={"a": folder} if by_name else folder)
    more = {"adapter": "a"} if by_name else {}
    how = {"sampler": "autoregressive", "seed": 3, "temperature": 0}
    tokens = pipe(list(case.prompts), **how, **more).tokens
    assert torch.equal(tokens, other(list(case.prompts), **how).tokens)
    assert not torch.equal(tokens, plain)  # control


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES, indirect=True)
def test_rows_of_a_batch_have_their_own_adapters(case, tmp_path):
    folders = {"a": tmp_path / "a", "b": tmp_path / "b"}
    for seed, (name, more) in enumerate({"a": {}, "b": {"r": 5}}.items()):
        write_adapter(network_of(loaded(case)), folders[name], seed, **more)
    prompts, chosen = [case.prompts[0]] * 2 + [case.prompts[1]] * 2, ["a", "b", None, "a"]
    pipe = loaded(case, adapters=folders)
    alone = {name: loaded(case, adapters=folder) for name, folder in folders.items()}
    alone[None] = loaded(case)
    for sampler in SAMPLERS:
        how = {"sampler": sampler, "seed": 3, "temperature": 0}
        out = pipe(prompts, adapter=chosen, **how)
        few = pipe(prompts, adapter=chosen, batch_size=2, **how)  # rows are replaced
        assert torch.equal(out.tokens, few.tokens)
        for item, name, tokens in zip(out.items, chosen, out.tokens, strict=True):
            one = alone[name]([item.prompt], sampler=sampler, seed=item.seed, temperature=0)
            assert torch.equal(one.tokens[0], tokens), (sampler, name)
        wrong = pipe(prompts, adapter=["b", "a", "a", None], **how)
        assert not torch.equal(out.tokens, wrong.tokens)  # control
    with pytest.raises(GenError, match="unknown adapter 'c'"):
        pipe(prompts, adapter="c", sampler="autoregressive")
    with pytest.raises(GenError, match="no adapters by name"):
        alone[None](prompts, adapter="a", sampler="autoregressive")
    page = out.save(tmp_path / "saved")
    assert [r.get("adapter") for r in read_rows(page.parent)] == chosen


@pytest.mark.slow
def test_another_choice_of_adapters_compiles_nothing(tmp_path):
    write_adapter(net(), tmp_path / "a", 1)
    write_adapter(net(), tmp_path / "b", 2)
    network = net()
    route(network, {"a": str(tmp_path / "a"), "b": str(tmp_path / "b")}, "m")
    router, counter = router_of(network), CompileCounter()
    layer = torch.compile(network["layers"][0]["up"], backend=counter, fullgraph=True)
    x, made = torch.randn(3, 2, 8), []
    for index in ([1, 2, 0], [2, 1, 1], [0, 0, 0]):
        with router.rows(torch.tensor(index)), torch.no_grad():
            made.append(layer(x))
    assert counter.frame_count == 1
    assert not torch.equal(made[0], made[1])  # control
    with router.rows(torch.tensor([1])), pytest.raises(GenError, match="3 rows and adapters of 1"):
        network["layers"][0]["up"](x)


def net(width: int = 8) -> nn.Module:
    block = nn.ModuleDict({"up": nn.Linear(width, 8, bias=False)})
    return nn.ModuleDict({"layers": nn.ModuleList([block])})


def test_an_adapter_of_another_kind_or_shape_is_one_error(tmp_path):
    write_adapter(net(), tmp_path)
    merge(net(), tmp_path, "m")  # control
    with pytest.raises(GenError, match=r"layers.0.up \(8, 8\), expected \(8, 9\)"):
        merge(net(9), tmp_path, "m")
    with pytest.raises(GenError, match="layers.0.up, which the model lacks"):
        merge(nn.Linear(8, 8), tmp_path, "m")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    for change, said in (
        ({"use_dora": True}, "use_dora True"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"bias": "all"}, "bias 'all'"),
        ({"r": 5}, "expected rank 5"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(GenError, match=said) as error:
            read_adapter(tmp_path)
        assert "\n" not in str(error.value)
    with pytest.raises(GenError, match="no adapter_config.json"):
        read_adapter(tmp_path / "nothing")


def test_an_adapter_of_the_hub_is_read_with_the_options_of_the_model(tmp_path):
    commit = "0" * 40
    repository = tmp_path / "cache" / "models--me--lora"
    write_adapter(net(), repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    here = HubOptions(cache_dir=tmp_path / "cache", local_files_only=True)
    local, of_hub = net(), net()
    of_hub.load_state_dict(local.state_dict())
    merge(local, repository / "snapshots" / commit, "m")
    merge(of_hub, "me/lora", "m", here)
    assert torch.equal(local["layers"][0]["up"].weight, of_hub["layers"][0]["up"].weight)
    with pytest.raises(NotCached, match="local_files_only"):  # control
        merge(net(), "me/lora", "m", replace(here, cache_dir=tmp_path / "other"))
