"""Two replicas behind one address."""

from __future__ import annotations

import socket

import pytest
from served import Served

from gen.serve.settings import Settings

ray = pytest.importorskip("ray", reason="replicas need the extra ray")
pytest.importorskip("grpc", reason="replicas need ray[serve], which brings grpc")

from ray import serve  # noqa: E402  what follows needs both

from gen.serve.replicas import replicated  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served():
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        settings = Settings(api_keys=("key",))
        serve.run(replicated(2, settings, {"device": "cpu"}, {"num_cpus": 0.5}))
        yield Served(None, port)
    finally:
        serve.shutdown()
        ray.shutdown()


def test_replicas_answer_alike_and_both_work(served):
    client = served.client(api_key="key")
    made = {client.completions.create(prompt="sort 3 1 2 =", model="text", seed=0).choices[0].text
            for _ in range(12)}  # fmt: skip
    assert made == {"1 2 3"}
    parts = client.completions.create(prompt="sort 3 1 2 =", model="text", seed=0, stream=True)
    assert "".join(part.choices[0].text for part in parts) == "1 2 3"
    counted = set()
    for _ in range(40):
        text = served.ask("/metrics", Authorization="Bearer key")[1].decode()
        counted |= {line for line in text.splitlines() if line.startswith("gen_requests_total")}
    assert len(counted) == 2
    assert served.ask("/v1/models")[0] == 401
    assert served.ask("/v1/videos", Authorization="Bearer key")[0] == 404
