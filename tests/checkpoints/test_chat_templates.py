"""Prompts in chat templates: the token ids of every text family are those that transformers makes,
for twenty kinds of templates; what a template refuses is one clear error."""

from __future__ import annotations

import json

import masked_folders
import pytest
import tiny_checkpoints
import torch
from chat_templates import CONVERSATIONS, SIZE, TEMPLATES, as_text, byte_tokenizer, in_form, turn
from published import save_quietly

import gen
from gen.contracts.condition import Condition
from gen.core.errors import GenError
from gen.models.load.chat import chat_text

MASKED = {
    "llada": (masked_folders.LLADA | {"embedding_size": SIZE}, masked_folders.llada),
    "dream": (masked_folders.DREAM, masked_folders.dream),
    "llada2": (masked_folders.LLADA2, masked_folders.llada2),
}


def chat_token_ids(tokenizer, turns):
    return tokenizer(chat_text(tokenizer, turns, ""), add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """One checkpoint of every text family, all with one tokenizer, by family."""
    found = {}
    for name in ("causal_lm", *MASKED):
        folder = tmp_path_factory.mktemp(name)
        if name == "causal_lm":
            from transformers import LlamaConfig, LlamaForCausalLM

            torch.manual_seed(0)
            shape = tiny_checkpoints.SHAPE | {"vocab_size": SIZE, "max_position_embeddings": 1024}
            save_quietly(LlamaForCausalLM(LlamaConfig(num_key_value_heads=1, **shape)), folder)
        else:
            config, weights = MASKED[name]
            config = config | {"vocab_size": SIZE, "mask_token_id": 3}
            masked_folders.write(folder, config, weights(config))
        save_quietly(byte_tokenizer(chat_template=TEMPLATES["chatml"]), folder)
        pipe = gen.load("text", model=folder, max_new_tokens=4)
        found[name] = pipe.modality.checkpoint
    return found


def prompt_of(checkpoint, given) -> list[int]:
    """Token ids of a condition's prompt, as the pipeline makes them."""
    return list(checkpoint.binding.prompt(checkpoint.parse(Condition.of(given))))


def expected(template: str, turns) -> list[int] | None:
    """Token ids that transformers makes of turns; None where the template refuses them."""
    tokenizer = byte_tokenizer(chat_template=TEMPLATES[template])
    try:
        encoded = tokenizer.apply_chat_template(
            in_form(template, turns), tokenize=True, add_generation_prompt=True, return_dict=True
        )
    except Exception:
        return None
    return encoded["input_ids"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_prompts_are_those_of_transformers_in_every_family(checkpoints, template):
    for said, turns in CONVERSATIONS.items():
        wanted = expected(template, turns)
        for name, checkpoint in checkpoints.items():
            checkpoint.tokenizer.chat_template = TEMPLATES[template]
            if wanted is None:
                with pytest.raises(GenError, match="chat template .* refuses the conversation: "):
                    prompt_of(checkpoint, {"messages": turns})
                continue
            assert prompt_of(checkpoint, {"messages": turns}) == wanted, (name, said)
            if said == "one turn":
                text = turns[0]["content"]
                plain = expected(template, [turn("user", text.strip())])
                assert prompt_of(checkpoint, text) == plain  # a text is the user's message


def test_the_conversations_are_taken_by_some_templates_and_refused_by_others():
    made = {t: [expected(t, turns) for turns in CONVERSATIONS.values()] for t in TEMPLATES}
    assert len(made) == 20
    assert all(any(row) for row in made.values())
    assert sum(not all(row) for row in made.values()) >= 3
    assert len({str(row) for row in made.values()}) == 20  # no two templates are one


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_tokenised_twice_or_without_its_end_is_another_prompt(template):
    """Negative control of the equality above."""
    tokenizer = byte_tokenizer(chat_template=TEMPLATES[template])
    turns = in_form(template, CONVERSATIONS["one turn"])
    ids = chat_token_ids(tokenizer, turns)
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    twice = tokenizer(text)["input_ids"]  # begins with bos once more
    assert twice != ids and twice[1:] == ids
    unended = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True)["input_ids"]
    ends = "add_generation_prompt" in TEMPLATES[template]
    assert (unended != ids) == ends
    assert tokenizer.decode(ids).count("sky") == 1


def test_lists_of_texts_reach_templates_of_texts_as_one_text_and_the_other_way_round():
    tokenizer = byte_tokenizer(chat_template=TEMPLATES["chatml"])
    turns = CONVERSATIONS["lists"]
    joined = [turn("user", as_text(turns[0]["content"]))]
    assert chat_token_ids(tokenizer, turns) == chat_token_ids(tokenizer, joined)
    raw = tokenizer.apply_chat_template(turns, tokenize=False)
    assert "'type'" in raw  # control: what transformers writes of a list that is not joined
    tokenizer.chat_template = TEMPLATES["lists alone"]
    assert "one two" in tokenizer.decode(chat_token_ids(tokenizer, joined))
    raw = tokenizer.apply_chat_template(joined, tokenize=False)
    assert "one two" not in raw  # control: the template passes over a text


def test_a_template_of_a_folder_is_used_and_its_prompt_is_decoded(checkpoints, tmp_path):
    folder = tmp_path / "model"
    checkpoints["causal_lm"].model.save_pretrained(folder)
    save_quietly(byte_tokenizer(chat_template=TEMPLATES["zephyr"]), folder)
    turns, file = CONVERSATIONS["three turns"], tmp_path / "turns.json"
    file.write_text(json.dumps(turns))
    pipe = gen.load("text", model=folder, max_new_tokens=4)
    out = pipe({"messages": file}, temperature=0.0)
    ids = expected("zephyr", turns)
    same = pipe({"tokens": ids}, temperature=0.0)
    assert torch.equal(out.tokens, same.tokens)
    other = pipe({"tokens": expected("openchat", turns)}, temperature=0.0)
    assert not torch.equal(out.tokens, other.tokens)  # control: another template


WRONG = {
    "image": ([{"type": "image"}], "part of type 'image', and the model takes texts alone"),
    "audio": ([{"type": "audio"}], "messages.0.content is 'audio'; expected parts of type 'text'"),
    "media": ([{"type": "image", "url": "a.png"}], "messages.0.content .* expected parts of type"),
    "number": ([{"type": "text", "text": 3}], "messages.0.content .* expected parts of type"),
}


@pytest.mark.parametrize("case", WRONG)
def test_parts_that_a_language_model_does_not_take_are_one_sentence(checkpoints, case):
    content, message = WRONG[case]
    with pytest.raises(GenError, match=message) as caught:
        prompt_of(checkpoints["causal_lm"], {"messages": [turn("user", content)]})
    assert "\n" not in str(caught.value)
