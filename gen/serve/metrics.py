"""Figures for Prometheus, in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gen.engine.engine import Engine, EngineStats
from gen.engine.ticket import Ticket

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
# attribute of EngineStats, name and help of the figure
GAUGES = (
    ("waiting", "gen_items_waiting", "Items that wait for a row."),
    ("running", "gen_items_running", "Items that have a row."),
)
COUNTERS = (
    ("tokens", "gen_tokens", "Committed tokens."),
    ("steps", "gen_forward_passes", "Forward passes of batches."),
    ("nfe", "gen_item_forward_passes", "Forward passes of items; a batch counts every row."),
    ("drafted", "gen_draft_tokens", "Verified drafts."),
    ("accepted", "gen_accepted_draft_tokens", "Accepted drafts."),
)


class EngineFigures(Collector):
    """Counts of an engine, read when somebody asks for them."""

    def __init__(self, stats: EngineStats):
        self.stats = stats

    def collect(self) -> Iterator[Metric]:
        """Yield the figures."""
        values = vars(self.stats)
        for attribute, name, text in GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["model"])
            for model, value in dict(values[attribute]).items():
                gauge.add_metric([model], value)
            yield gauge
        for attribute, name, text in COUNTERS:
            counter = CounterMetricFamily(name, text, labels=["model"])
            for model, value in dict(values[attribute]).items():
                counter.add_metric([model], value)
            yield counter
        ended = CounterMetricFamily("gen_requests", "Ended requests.", labels=["model", "state"])
        for (model, state), value in dict(self.stats.requests).items():
            ended.add_metric([model, state], value)
        yield ended


class Metrics:
    """Figures of one server.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: Engine):
        self.registry = CollectorRegistry()
        self.registry.register(EngineFigures(engine.stats))
        self.latency = Histogram(
            "gen_request_seconds",
            "Seconds from submission to the end of a request.",
            ["model"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.first_chunk = Histogram(
            "gen_first_chunk_seconds",
            "Seconds from submission to the first part of the media of a streamed request.",
            ["model"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.responses = Counter(
            "gen_http_responses",
            "Responses by route and status.",
            ["route", "status"],
            registry=self.registry,
        )

    def observe(self, ticket: Ticket) -> None:
        """Count a request that ended."""
        ended = ticket.ended if ticket.ended is not None else monotonic()
        self.latency.labels(ticket.model).observe(ended - ticket.submitted)
        if ticket.first_chunk is not None:
            self.first_chunk.labels(ticket.model).observe(ticket.first_chunk - ticket.submitted)

    def text(self) -> bytes:
        """Return all figures in the text format of Prometheus."""
        return generate_latest(self.registry)
