"""Quantised weights: a model decodes with them as any other, and they are part of what it is."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from families import Case
from published import save_quietly, tiny_tokenizer
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    TorchAoConfig,
)
from weight_bytes import layer_bytes, network_bytes

import gen
from gen.core.errors import GenError
from gen.models.load.digest import digest_of
from gen.models.load.quantize import Quantization, block_linears, quantize
from gen.models.published.llamagen import LlamaGen, LlamaGenLM, Sizes

SAMPLERS = ("autoregressive", "speculative_jacobi")
PROMPTS = ["w1 w2 w3", "w9"]
GROUPS = {"name": "int4", "group_size": 32}  # the tiny models are 32 wide
LOW = {  # bytes of the blocks, relative to bfloat16, of a model of usual widths
    "int8": 0.51,
    "int4": 0.27,
    "bitsandbytes_8bit": 0.51,
    "bitsandbytes_4bit": 0.29,  # a float32 scale for 64 numbers
}


def has(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"make test-quantization has {package}")


def package_of(how) -> str:
    return "bitsandbytes" if "bitsandbytes" in Quantization.of(how).name else "torchao"


def llama(folder: Path) -> Case:
    """A tiny Llama whose layers are 64 or 128 wide."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    for p in model.parameters():  # logits far apart
        p.data.mul_(3 if p.dim() > 1 else 1)
    save_quietly(model, folder)
    save_quietly(tiny_tokenizer(), folder)
    return Case("text", folder, {"max_new_tokens": 12}, tuple(PROMPTS), SAMPLERS)


def load(case: Case, **more):
    return gen.load(case.modality, model=case.path, **{"dtype": "float32", **case.options, **more})


def network_of(pipe) -> nn.Module:
    return pipe.bound(pipe.model)[0].adapter("causal").model


def test_a_head_in_a_list_is_no_layer_of_a_block():
    block = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})
    heads = nn.ModuleList([nn.Linear(4, 3)])
    net = nn.ModuleDict({"layers": nn.ModuleList([block]), "heads": heads, "out": nn.Linear(4, 3)})
    assert set(block_linears(net)) == {"layers.0.up", "layers.0.down"}


def test_an_unknown_quantisation_is_refused_with_the_nearest_name():
    with pytest.raises(GenError, match="'int8'"):
        Quantization.of("int9")
    with pytest.raises(GenError, match="'bitsandbytes_4bit'"):
        Quantization.of("bitsandbytes-4bit")
    with pytest.raises(GenError, match="quantization"):
        Quantization.of(8)


def test_forms_of_the_output_head_and_what_tells_them_apart():
    forms = {name: Quantization.of({"name": name, "head": True}) for name in LOW}
    assert all(how.head and how.plain == {"name": n, "head": True} for n, how in forms.items())
    assert Quantization.of({"name": "int8", "head": False}).plain == "int8"
    skips = "llm_int8_skip_modules"
    assert Quantization.of({"name": "bitsandbytes_8bit", skips: []}).head  # as in transformers
    for skipped, head in ((None, False), ([], True)):
        how = Quantization.of(BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skipped))
        assert how.head == head == isinstance(how.plain, dict)
    with pytest.raises(GenError, match="quantization.head is 'lm_head', a str; expected true or"):
        Quantization.of({"name": "int8", "head": "lm_head"})


# --- decoding


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "how",
    [
        "int8",
        GROUPS,
        "bitsandbytes_8bit",
        "bitsandbytes_4bit",
        {"name": "bitsandbytes_4bit", "bnb_4bit_quant_type": "fp4"},
        {"name": "bitsandbytes_4bit", "bnb_4bit_use_double_quant": True},
        {**GROUPS, "head": True},
        {"name": "bitsandbytes_8bit", "head": True},
        {"name": "bitsandbytes_4bit", "head": True},
    ],
    ids=str,
)
def test_speculation_gives_its_own_tokens_alone_and_in_a_batch(how, dtype, tmp_path):
    has(package_of(how))
    case = llama(tmp_path)
    pipe = load(case, dtype=dtype, quantization=how)
    for temperature in (0.0, 1.0):
        given = {"seed": 3, "temperature": temperature}
        plain, fast = (pipe(PROMPTS, sampler=s, **given) for s in SAMPLERS)
        assert torch.equal(plain.tokens, fast.tokens), temperature
        assert fast.stats[0].nfe < plain.stats[0].nfe
        for item, tokens in zip(fast.items, fast.tokens, strict=True):
            one = pipe(item.prompt, sampler="speculative_jacobi", **{**given, "seed": item.seed})
            assert torch.equal(one.tokens[0], tokens), temperature
    assert pipe.model_options["quantization"] == how
    plain = load(case, dtype=dtype)
    layers, others = (block_linears(network_of(x)) for x in (pipe, plain))
    if "head" in how:
        layers["lm_head"], others["lm_head"] = network_of(pipe).lm_head, network_of(plain).lm_head
    for (name, layer), other in zip(layers.items(), others.values(), strict=True):
        x = torch.randn(5, layer.in_features, dtype=other.weight.dtype)
        with torch.no_grad():
            got, want = layer(x), other(x)
        off = ((got - want).norm() / want.norm()).item()
        assert 1e-4 < off < (0.03 if "8" in str(how) else 0.25), name  # another, close number


@pytest.mark.slow
def test_configurations_of_transformers_that_include_the_head(tmp_path):
    has("torchao")
    from torchao.quantization import Int8WeightOnlyConfig  # lies beside the environment

    case, config = llama(tmp_path), Int8WeightOnlyConfig(set_inductor_config=False)
    whole = load(case, quantization=TorchAoConfig(config, modules_to_not_convert=[]))
    assert type(network_of(whole).lm_head.weight) is not nn.Parameter
    blocks = load(case, quantization=TorchAoConfig(config))
    assert type(network_of(blocks).lm_head.weight) is nn.Parameter  # control
    assert whole.model_options["quantization"] != blocks.model_options["quantization"]
    said = refusal(case, quantization=TorchAoConfig(config, modules_to_not_convert=["lm_head"]))
    assert "modules_to_not_convert is ['lm_head']; expected none" in said
    both = TorchAoConfig(config, include_input_output_embeddings=True)
    assert "input_output_embeddings is True; expected" in refusal(case, quantization=both)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "bitsandbytes_4bit"])
def test_the_matrix_of_a_quantised_head_is_read_where_it_can_be(name, tmp_path):
    has(package_of(name))
    pipe = load(llama(tmp_path), quantization={"name": name, "head": True})
    adapter = pipe.bound(pipe.model)[0].adapter("causal")
    if name == "int8":
        assert adapter.output_weight.shape == (64, 64)
        return
    with pytest.raises(GenError, match="the drafter reads the matrix of the output head"):
        _ = adapter.output_weight


@pytest.mark.slow
def test_int8_rounds_to_the_nearest_of_its_numbers(tmp_path):
    has("torchao")
    case = llama(tmp_path)
    layers = block_linears(network_of(load(case, quantization="int8")))
    for key, layer in block_linears(network_of(load(case))).items():
        off = (layers[key].weight.dequantize() - layer.weight).abs().amax(1)
        assert (off <= layer.weight.abs().amax(1) / 127 * 0.51 + 1e-7).all() and off.max() > 0


@pytest.mark.slow
def test_configurations_of_the_libraries_are_what_their_names_are(tmp_path):
    has("torchao")
    has("bitsandbytes")
    from torchao.quantization import Int8WeightOnlyConfig  # lies beside the environment

    case = llama(tmp_path)
    same = {
        "int8": [Int8WeightOnlyConfig(), TorchAoConfig(Int8WeightOnlyConfig())],
        "bitsandbytes_8bit": [BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)],
        "bitsandbytes_4bit": [
            BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_compute_dtype=torch.float32,
            )
        ],
    }
    for name, configs in same.items():
        pipes = [load(case, quantization=how) for how in (name, *configs)]
        made = [p(PROMPTS, sampler="autoregressive", seed=1, logprobs=1).logprobs for p in pipes]
        assert all(x == made[0] for x in made[1:]), name
        assert all("\n" not in str(p.model_options["quantization"]) for p in pipes)


@pytest.mark.slow
def test_a_model_of_gen_decodes_in_int8_as_it_would_alone():
    has("torchao")
    pipe = gen.load("image", model="image-causal", quantization="int8", device="cpu")
    given = {"seed": 0, "temperature": 0}
    plain, fast = (pipe("a small red circle", sampler=s, **given) for s in SAMPLERS)
    assert torch.equal(plain.tokens, fast.tokens)
    assert fast.stats[0].nfe < plain.stats[0].nfe / 2
    network = pipe.bound("image-causal")[0]
    layers = block_linears(network)
    taken = sum(layer_bytes(m) for m in layers.values())
    assert layers and taken < 0.6 * 2 * sum(m.weight.numel() for m in layers.values())


# --- bytes


def realistic() -> LlamaForCausalLM:
    """81 million parameters: 24 blocks for 4,096 tokens, the proportions of 1 B for 16,384."""
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=24,
        vocab_size=4096,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    return model.to_empty(device="cpu").eval()  # bytes do not depend on values


@pytest.mark.slow
@pytest.mark.parametrize("how", LOW)
def test_weights_of_usual_proportions_are_below_0_6_of_bfloat16(how):
    has(package_of(how))
    model = realistic()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.02)
    count = sum(p.numel() for p in model.parameters())
    inside = sum(m.weight.numel() for m in block_linears(model).values())
    assert network_bytes(model) == 2 * count  # control
    quantize(model, Quantization.of(how), "model")
    blocks = sum(layer_bytes(m) for m in block_linears(model).values())
    assert 0.25 < blocks / (2 * inside) < LOW[how]
    assert network_bytes(model) / (2 * count) < (0.6 if "8" in how else 0.35)
    assert network_bytes(model) == blocks + 2 * (count - inside)


PUBLISHED = {  # name: width, inner width, layers, heads for keys, vocabulary
    "Llama 2 7B": (4096, 11008, 32, 32, 32000),
    "Llama 3 8B": (4096, 14336, 32, 8, 128256),
    "LlamaGen B": (768, 2048, 12, 12, 16384),
    "LlamaGen XL": (1280, 3584, 36, 20, 16384),
}


@pytest.mark.slow
@pytest.mark.parametrize(("head", "least", "most"), [(False, 0.6, 0.63), (True, 0.54, 0.57)])
def test_the_output_head_takes_llamagen_b_below_0_6(head, least, most):
    has("torchao")
    width, hidden, layers, _, codes = PUBLISHED["LlamaGen B"]
    sizes = Sizes(codes, width, 12, 12, layers, hidden, prompt=1, classes=1000)
    with torch.device("meta"):
        network = LlamaGen(sizes, columns=24).to(torch.bfloat16)
    adapter = LlamaGenLM(network.to_empty(device="cpu"))
    with torch.no_grad():
        for p in network.parameters():
            p.normal_(std=0.02)
    count = sum(p.numel() for p in network.parameters())
    assert network_bytes(network) == 2 * count and 110e6 < count < 113e6
    how = Quantization.of({"name": "int8", "head": head})
    quantize(network, how, "LlamaGen B", adapter.output_heads)
    assert least < network_bytes(network) / (2 * count) < most


def published_bytes(name: str, how) -> tuple[int, int]:
    """Bytes of a published shape, quantised and in bfloat16: one layer of each size is quantised,
    and counts as often as the network has it."""
    width, inner, layers, keys, vocabulary = PUBLISHED[name]
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=32 if width == 4096 else width // 64,
        num_key_value_heads=keys,
        vocab_size=vocabulary,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    linears, taken = block_linears(model).values(), {}
    for shape in {tuple(m.weight.shape) for m in linears}:
        layer = nn.Linear(shape[1], shape[0], bias=False, dtype=torch.bfloat16)
        one = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"x": layer})])})
        quantize(one, Quantization.of(how), name)
        taken[shape] = layer_bytes(block_linears(one)["layers.0.x"])
    whole = sum(p.nbytes for p in model.parameters())
    blocks = sum(m.weight.nbytes for m in linears)
    return whole - blocks + sum(taken[tuple(m.weight.shape)] for m in linears), whole


@pytest.mark.slow
def test_published_shapes_of_7b_in_int4_are_below_6_gib():
    has("torchao")
    for name in ("Llama 2 7B", "Llama 3 8B"):
        low, whole = published_bytes(name, "int4")
        assert whole > 12 * 2**30 > 2 * low and low < 6 * 2**30, name


@pytest.mark.slow
def test_int8_of_published_shapes_is_below_0_6_unless_the_vocabulary_is_large():
    has("torchao")
    share = {
        name: low / whole for name in PUBLISHED for low, whole in [published_bytes(name, "int8")]
    }
    assert all(share[name] < 0.6 for name in ("Llama 2 7B", "Llama 3 8B", "LlamaGen XL")), share
    assert 0.6 < share["LlamaGen B"] < 0.63  # 111 M, a quarter of it for 16,384 codes


# --- what cannot be honoured


def refusal(case: Case, **more) -> str:
    with pytest.raises(GenError) as error:
        load(case, **more)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600
    return str(error.value)


@pytest.mark.slow
def test_what_torchao_cannot_compute_is_one_error(tmp_path):
    has("torchao")
    case = llama(tmp_path)
    for how in ("int8", GROUPS):
        said = refusal(case, dtype="float64", quantization=how)
        assert "torchao cannot run model" in said and "its weights are float64" in said
    said = refusal(case, quantization="int4")  # groups of 128 in layers of 64
    assert "torchao leaves layers as they are in 'int4': model.layers.0.self_attn.q_proj" in said
    assert "'group_size': 64" in said
    narrow = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"x": nn.Linear(48, 32)})])})
    with pytest.raises(GenError, match="layers.0.x .32, 48.; expected a group_size .*, or int8"):
        quantize(narrow, Quantization.of(GROUPS), "narrow")
    assert "options of torchao" in refusal(case, quantization={"name": "int8", "bits": 3})


@pytest.mark.slow
def test_what_bitsandbytes_cannot_compute_is_one_error(tmp_path):
    has("bitsandbytes")
    case = llama(tmp_path / "wide")
    for name in ("bitsandbytes_8bit", "bitsandbytes_4bit"):
        said = refusal(case, dtype="float64", quantization=name)
        assert "bitsandbytes cannot run model" in said and "its weights are float64" in said
    # an outlier in one row would change how all rows are computed
    said = refusal(case, quantization=BitsAndBytesConfig(load_in_8bit=True))
    assert "llm_int8_threshold is 6.0" in said and "expected 0.0" in said
    wrong = {"name": "bitsandbytes_4bit", "bnb_4bit_quant_typ": "nf4"}
    assert "Did you mean 'bnb_4bit_quant_type'" in refusal(case, quantization=wrong)
    skips = {"name": "bitsandbytes_8bit", "llm_int8_skip_modules": ["q_proj"]}
    assert "llm_int8_skip_modules is ['q_proj']; expected none" in refusal(case, quantization=skips)


@pytest.mark.slow
def test_outliers_would_make_a_row_depend_on_the_others():
    has("bitsandbytes")
    from bitsandbytes.nn import Int8Params, Linear8bitLt  # lies beside the environment

    torch.manual_seed(0)
    weight, x = torch.randn(32, 64), torch.randn(2, 64)
    x[1, 7] = 50.0
    for threshold in (6.0, 0.0):
        layer = Linear8bitLt(64, 32, bias=False, has_fp16_weights=False, threshold=threshold)
        layer.weight = Int8Params(weight.clone(), requires_grad=False, has_fp16_weights=False)
        layer = layer.to("cpu").eval()
        with torch.no_grad():
            off = (layer(x)[0] - layer(x[:1])[0]).abs().max().item()
        assert (off > 1e-4) == (threshold > 0)


@pytest.mark.slow
def test_a_missing_package_is_one_error_with_a_line_for_pip(tmp_path, monkeypatch):
    from gen.models.load import quantize as module

    monkeypatch.setattr(module, "show_quantizers", lambda: None)
    for name, package in (("int8", "torchao"), ("bitsandbytes_4bit", "bitsandbytes")):
        monkeypatch.setitem(sys.modules, package, None)
        said = refusal(llama(tmp_path / name), quantization=name)
        assert f"needs the package {package}" in said
        assert 'pip install "gen-toolkit[quantization]"' in said


# --- with other features


def adapter(folder: Path, path: Path, seed: int) -> str:
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(
        target_modules=["q_proj", "up_proj"], r=3, lora_alpha=60, init_lora_weights=False
    )
    peft.get_peft_model(model, config).save_pretrained(path)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["int8", GROUPS, "bitsandbytes_8bit", "bitsandbytes_4bit"], ids=str)
def test_an_adapter_is_merged_before_weights_are_quantised(how, tmp_path):
    has(package_of(how))
    case = llama(tmp_path / "model")
    folder = adapter(case.path, tmp_path / "adapter", 1)
    peft = pytest.importorskip("peft")
    merged = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(case.path), folder
    ).merge_and_unload()
    save_quietly(merged, tmp_path / "merged")
    save_quietly(tiny_tokenizer(), tmp_path / "merged")
    other = Case("text", tmp_path / "merged", case.options, case.prompts, case.samplers)
    made = [
        load(x, quantization=how, **more)(PROMPTS, sampler="speculative_jacobi", seed=1).tokens
        for x, more in ((case, {"adapters": folder}), (other, {}), (case, {}))
    ]
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])  # control


@pytest.mark.slow
def test_adapters_by_name_run_on_int8_and_are_refused_by_bitsandbytes(tmp_path):
    has("torchao")
    has("bitsandbytes")
    case = llama(tmp_path / "model")
    folders = {n: adapter(case.path, tmp_path / n, k) for k, n in enumerate("ab")}
    pipe = load(case, quantization="int8", adapters=folders)
    prompts, chosen = [PROMPTS[0]] * 3, ["a", "b", None]
    out = [pipe(prompts, adapter=chosen, sampler=s, seed=1, temperature=0).tokens for s in SAMPLERS]
    assert torch.equal(*out) and len(out[0].unique(dim=0)) == 3
    plain = load(case, quantization="int8")(prompts[:1], sampler=SAMPLERS[0], seed=1, temperature=0)
    assert torch.equal(plain.tokens[0], out[0][2])
    said = refusal(case, quantization="bitsandbytes_4bit", adapters=folders)
    assert "RoutedLinear, which bitsandbytes does not quantise" in said


@pytest.mark.slow
@pytest.mark.parametrize("how", ["int8", "bitsandbytes_4bit"])
def test_a_quantised_pipeline_is_not_saved(how, tmp_path):
    has(package_of(how))
    pipe = load(llama(tmp_path / "model"), quantization=how)
    with pytest.raises(GenError, match="loaded with quantization, and weights are saved as they"):
        pipe.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


# --- checkpoints that are stored in few bits


STORED = {
    "bitsandbytes 8": lambda: BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0),
    "bitsandbytes 4": lambda: BitsAndBytesConfig(load_in_4bit=True),
    "torchao": lambda: TorchAoConfig(import_module("torchao.quantization").Int8WeightOnlyConfig()),
}


def stored(folder: Path, config) -> Path:
    case = llama(folder / "model")
    network = AutoModelForCausalLM.from_pretrained(
        case.path, quantization_config=config, dtype=torch.float32
    )
    network.save_pretrained(folder / "stored")
    save_quietly(tiny_tokenizer(), folder / "stored")
    return folder / "stored"


@pytest.mark.slow
@pytest.mark.parametrize("kind", STORED)
def test_a_checkpoint_that_is_stored_in_few_bits_loads_and_is_saved_as_it_is(kind, tmp_path):
    has(kind.partition(" ")[0])
    folder = stored(tmp_path, STORED[kind]())
    pipe = gen.load("text", model=folder, max_new_tokens=8)
    made = [pipe(PROMPTS, sampler=s, seed=1, temperature=0, logprobs=1) for s in SAMPLERS]
    assert torch.equal(made[0].tokens, made[1].tokens)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = pipe.modality.checkpoint.prompt(PROMPTS[0])
    ours = [(x.token_id, x.logprob) for x in made[0].logprobs[0]]
    ids = torch.tensor([[*prompt, *(token for token, _ in ours)]])
    with torch.no_grad():
        want = theirs(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    off = [abs(want[n, token].item() - x) for n, (token, x) in enumerate(ours)]
    # bitsandbytes rounds activations to int8, on some CPUs in 4 bits to bfloat16, which makes a
    # difference of 1e-7 a whole step of theirs
    near = 1e-4 if kind == "torchao" else 0.1
    assert max(off) < near
    assert want.roll(1, 0)[0, ours[0][0]].item() - ours[0][1] < -near  # control
    again = gen.load(pipe.save_pretrained(tmp_path / "saved"))
    assert torch.equal(
        again(PROMPTS, sampler=SAMPLERS[0], seed=1, temperature=0).tokens, made[0].tokens
    )


@pytest.mark.slow
def test_a_checkpoint_whose_rows_depend_on_each_other_is_refused(tmp_path):
    has("bitsandbytes")
    folder = stored(tmp_path, BitsAndBytesConfig(load_in_8bit=True))
    with pytest.raises(GenError, match="llm_int8_threshold is 6.0"):
        gen.load("text", model=folder)


@pytest.mark.slow
def test_reading_weights_of_4_bits_does_not_change_them(tmp_path):
    has("bitsandbytes")
    case = llama(tmp_path / "model")
    pipe = load(case, quantization="bitsandbytes_4bit")
    how = {"sampler": SAMPLERS[0], "seed": 1, "logprobs": 1}
    before = pipe(PROMPTS, **how).logprobs
    network = network_of(pipe)
    digest = digest_of(network)
    assert pipe(PROMPTS, **how).logprobs == before and digest_of(network) == digest
    layer = network.model.layers[0].mlp.down_proj
    scales = layer.weight.quant_state.absmax
    assert scales.dtype == torch.float32 and layer(torch.ones(1, 128)).dtype == torch.float32


@pytest.mark.slow
def test_the_digest_of_quantised_weights_is_of_their_numbers(tmp_path):
    has("torchao")
    case, found = llama(tmp_path), []
    for change in (False, False, True):
        network = network_of(load(case, quantization="int8"))
        if change:
            network.model.layers[1].mlp.up_proj.weight.qdata[0, 0] += 1
        found.append(digest_of(network))
    assert found[0] == found[1] != found[2]
    assert found[0] != digest_of(network_of(load(case)))


# --- commands


@pytest.mark.slow
@pytest.mark.parametrize("how", [None, "int8", "bitsandbytes_4bit"])
def test_a_command_is_quiet_and_imports_only_what_it_needs(how, tmp_path):
    has("torchao")
    has("bitsandbytes")
    case = llama(tmp_path / "model")
    words = ["gen", "sample", "text", "w1 w2", "--model", str(case.path), "--seed", "0", "--quiet"]
    options = ["model_options.max_new_tokens=4", "--out", str(tmp_path / "out")]
    options += [f"model_options.quantization={how}"] if how else []
    code = (
        "import sys; from gen.__main__ import main; code = main();"
        "found = [m for m in ('torchao', 'bitsandbytes') if sys.modules.get(m)];"
        "print(*found, file=sys.stderr, end=''); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, *words[1:], *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    needed = "" if how is None else package_of(how)
    assert done.returncode == 0, done.stderr
    assert done.stderr == needed
    assert len(list((tmp_path / "out").glob("*.txt"))) == 1


@pytest.mark.slow
def test_a_command_reads_a_checkpoint_that_is_stored_in_few_bits(tmp_path):
    has("bitsandbytes")
    folder = stored(tmp_path, STORED["bitsandbytes 4"]())
    command = [sys.executable, "-m", "gen", "sample", "text", "w1", "--model", str(folder)]
    command += ["model_options.max_new_tokens=4", "--out", str(tmp_path / "out"), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_control_without_hiding_they_are_imported_and_say_so():
    has("torchao")
    has("bitsandbytes")
    code = "import sys, diffusers.models.modeling_utils; sys.exit('torchao' not in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "torchao" in done.stderr
