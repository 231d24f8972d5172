"""The measurement of loading: rows load the same model, and the table has medians."""

from __future__ import annotations

import pytest
import torch
from families import WRITERS

from gen.core.errors import GenError
from gen.recipes.text import loading


def test_a_row_loads_the_model_twice_and_measures_both(tmp_path):
    WRITERS["causal_lm"](tmp_path)
    found = loading.measure("folder", str(tmp_path))
    assert list(found)[:3] == ["first, clock", "first, cores", "MiB"]
    assert set(found) == {"first, clock", "first, cores", "MiB", "again, clock", "again, cores"}
    assert all(value > 0 for value in found.values())
    for row in ("transformers", loading.LLAMA):
        with pytest.raises(GenError, match="is no GGUF file"):
            loading.measure(row, str(tmp_path))


def test_the_table_has_medians():
    rows = [{"first, clock": x, "MiB": 100 * x} for x in (3.0, 1.0, 2.0)]
    assert loading.table({"gen": rows, "folder": rows[:1]}).split() == (
        "first, clock MiB gen 2.00 200 folder 3.00 300".split()
    )


@pytest.mark.slow
def test_transformers_alone_makes_the_weights_of_gen(tmp_path):
    pytest.importorskip("gguf", reason="make test-quantization has gguf")
    import tiny_gguf
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4))
    file = str(tiny_gguf.write(model, tmp_path / "tiny.gguf"))
    network, tokenizer = loading.in_transformers(file)
    own = loading.in_gen(file).modality.checkpoint.model.state_dict()
    assert all(torch.equal(x, own[key]) for key, x in network.state_dict().items())
    assert tokenizer("he")["input_ids"]
