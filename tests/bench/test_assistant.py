"""The comparison on a published language model: equal tokens, a file that resumes, the table."""

import json

import byte_folders
import pytest

from gen.bench import assistant


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return byte_folders.causal(tmp_path_factory.mktemp("model"))


def test_samplers_give_the_tokens_of_generate_and_a_second_call_adds_nothing(folder, tmp_path):
    out = tmp_path / "measured.jsonl"
    call = ["measure", "--model", str(folder), "--out", str(out), "--per-kind", "1"]
    call += ["--dtype", "float64", "--max-new-tokens", "6", "--samplers", "prompt_lookup", "wedlm"]
    assistant.main(call)
    found = assistant.records(out)
    tokens = {
        name: {r["request"]: r["tokens"] for r in found if r["system"] == name and "tokens" in r}
        for name in (assistant.PLAIN, assistant.LOOKUP, "autoregressive", "prompt_lookup")
    }
    assert len(tokens[assistant.PLAIN]) == 6
    assert all(rows == tokens[assistant.PLAIN] for rows in tokens.values())
    assert [r["system"] for r in found if "refused" in r] == ["wedlm"]
    assistant.main(call)
    timed = [r for r in assistant.records(out) if "seconds" in r]
    assert timed == [r for r in found if "seconds" in r]


def test_the_table_counts_the_requests_whose_tokens_differ(capsys, tmp_path):
    file = tmp_path / "measured.jsonl"
    rows = [
        ("generate", "a", [1, 2], 2.0),
        ("generate", "b", [3], 2.0),
        ("autoregressive", "a", [1, 2], 1.0),
        ("autoregressive", "b", [4], 1.0),
    ]
    file.write_text(
        "\n".join(
            json.dumps(
                {"system": s, "kind": "chat", "request": q, "seconds": x}
                | {"count": len(t), "tokens": t, "passes": 1}
            )
            for s, q, t, x in rows
        )
    )
    assistant.main(["table", str(file)])
    printed = capsys.readouterr().out.splitlines()
    assert printed[2] == "| `generate` | 0.8 | 2.00 | 2.00 | 0.75 | 2 of 2 | 1 of 2 |"
    assert printed[3] == "| `autoregressive` | 1.5 | 1.00 | 1.00 | 0.75 | 1 of 2 | 2 of 2 |"


def test_every_kind_has_ten_requests_and_none_comes_twice():
    asked = assistant.requests()
    assert len(set(asked)) == 60 and {k for k, _ in asked[:6]} == {k for k, _ in asked}
