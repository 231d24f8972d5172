"""The load of ``tests/support/load.py`` in a short form, and what it would notice."""

from __future__ import annotations

import asyncio
import json

import load
import pytest
from served import serving


@pytest.mark.slow
def test_a_short_load_finds_no_wrong_answer(tmp_path, capsys):
    words = ["--requests", "40", "--clients", "20", "--lines", "12", "--max-waiting", "24"]
    status = load.main([*words, "--out", str(tmp_path / "figures.json")])
    found = json.loads((tmp_path / "figures.json").read_text())
    assert (status, found["wrong"]) == (0, [])
    outcomes = found["outcomes"]
    answered = ("whole: as alone", "stream: as alone", "slow reader: as alone", "bounds: as alone")
    assert all(outcomes[how] > 0 for how in answered)
    assert outcomes["half body: 408"] and outcomes["slow head: closed"] and outcomes["leaver: left"]
    assert outcomes["line of a batch across a restart: as alone"] == 12
    assert "| 20 | 40 |" in capsys.readouterr().out


def test_control_another_answer_and_a_failed_request_are_noticed():
    with serving() as served:

        async def run() -> load.Load:
            made = load.Load(load.Server(None, served.port))
            made.requests = [
                ("/v1/completions", {"model": "text", "prompt": "sort 3 1 2 =", "seed": seed})
                for seed in (1, 2)
            ]
            made.requests.append(("/v1/completions", {"model": "text", "prompt": 7}))
            async with made.client:
                made.reference = [await made.send(0), [(0, "another text", "stop")], None]
                for number in range(3):
                    await made.check("whole", number)
                await made.check("stream", 0, stream=True)
            return made

        made = asyncio.run(run())
    assert made.outcomes == {
        "whole: as alone": 1,
        "stream: as alone": 1,
        "whole: another answer": 1,
        "whole: failed": 1,
    }
    assert len(made.wrong) == 2
