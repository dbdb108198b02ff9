"""Counters of a server, for Prometheus.

All that is about experts, drafts, recall, prefixes and the cache is the daemon's own count, asked for when somebody
looks. A daemon that starts again begins at 0, as counters may.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from spark.server.pace import Pace
from spark.speech.conversation import Usage

CONTENT_TYPE = CONTENT_TYPE_LATEST
_TO_FIRST_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300)
_PER_TOKEN_S = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5)


class Metrics:
    """What a server counts; each has a registry of its own. pace: of prompts."""

    def __init__(self) -> None:
        self.pace = Pace()
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "spark_requests", "Requests by API and outcome.", ["api", "outcome"], registry=self._registry
        )
        self._tokens = Counter(
            "spark_tokens",
            "Tokens: read (computed of prompts), reused (of prompts, not computed again), written.",
            ["kind"],
            registry=self._registry,
        )
        self._to_first = Histogram(
            "spark_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            registry=self._registry,
            buckets=_TO_FIRST_S,
        )
        self._per_token = Histogram(
            "spark_time_per_token_seconds",
            "Mean time between the tokens of a reply.",
            registry=self._registry,
            buckets=_PER_TOKEN_S,
        )
        self.replies = Gauge("spark_replies", "Replies that are made or waited for.", registry=self._registry)
        self._queued = Gauge("spark_queue", "Requests that the engine has not finished.", registry=self._registry)
        self._up = Gauge("spark_daemon_up", "1 while the daemon runs.", registry=self._registry)
        self._daemon = _Daemon()
        self._registry.register(self._daemon)

    def request(self, api: str, outcome: str) -> None:
        """Count a request; outcome: ok, left, or the code of an error."""
        self._requests.labels(api, outcome).inc()

    def reply(self, usage: Usage, to_first_s: float | None, decoding_s: float) -> None:
        """Count a reply's tokens and times; to_first_s: None where no token came."""
        self._tokens.labels("read").inc(max(0, usage.prompt - usage.cached))
        self._tokens.labels("reused").inc(usage.cached)
        self._tokens.labels("written").inc(usage.completion)
        if to_first_s is not None:
            self._to_first.observe(to_first_s)
        if usage.completion > 1:
            self._per_token.observe(decoding_s / (usage.completion - 1))

    def text(self, stats: Mapping[str, Any], up: bool, restarts: int, warnings: Mapping[str, int]) -> bytes:
        """All of it as Prometheus reads it; stats: the engine's counters, warnings: the daemons', by reason."""
        unfinished = (stats.get(name, 0) for name in ("running", "queued"))
        self._queued.set(sum(n for n in unfinished if isinstance(n, int)))
        self._up.set(up)
        self._daemon.restarts = restarts
        self._daemon.warnings = warnings
        self._daemon.stats = stats
        self._daemon.tokens_per_s = self.pace.tokens_per_s
        return generate_latest(self._registry)


class _Daemon(Collector):
    """Counters that are read elsewhere."""

    def __init__(self) -> None:
        self.restarts = 0
        self.warnings: Mapping[str, int] = {}
        self.stats: Mapping[str, Any] = {}
        self.tokens_per_s: float | None = None

    def collect(self) -> list[CounterMetricFamily | GaugeMetricFamily]:
        """What is known of the daemon."""
        made: list[CounterMetricFamily | GaugeMetricFamily] = [
            CounterMetricFamily("spark_daemon_restarts", "Starts after the first.", value=self.restarts)
        ]
        warned = CounterMetricFamily("spark_daemon_warnings", "What daemons went on without.", labels=["reason"])
        for reason, n in sorted(self.warnings.items()):
            warned.add_metric([reason], n)
        made.append(warned)
        if self.tokens_per_s is not None:
            text = "Tokens of prompts that were read a second, of all since the start."
            made.append(GaugeMetricFamily("spark_prefill_tokens_per_second", text, value=self.tokens_per_s))
        for name in ("hits", "misses"):
            if isinstance(self.stats.get(name), int):
                text = f"Active experts: {name} in fast memory."
                made.append(CounterMetricFamily(f"spark_expert_{name}", text, value=self.stats[name]))
        cpu = self.stats.get("cpu_experts")
        if isinstance(cpu, Mapping) and cpu:
            text = "Missed experts handed to the CPU: computed there whole or in part, or taken back by the GPU."
            handed = CounterMetricFamily("spark_expert_jobs", text, labels=["outcome"])
            for outcome in ("computed", "divided", "taken_back"):
                handed.add_metric([outcome], cpu[outcome])
            text = "Seconds that layers waited for experts of the CPU."
            waited = CounterMetricFamily("spark_expert_wait_seconds", text, value=cpu["waited_s"])
            text = "1 while missed experts are handed to the CPU, of steps of one token or of several."
            is_on = cpu["state"] == "on" or (cpu.get("several") or {}).get("state") == "on"
            made += [handed, waited, GaugeMetricFamily("spark_expert_jobs_on", text, value=is_on)]
        guesses = self.stats.get("guesses")
        if isinstance(guesses, Mapping) and guesses:
            text = "Missed experts that were guessed before their layer asked: missed indeed, or not."
            guessed = CounterMetricFamily("spark_expert_guesses", text, labels=["outcome"])
            text = "Bytes of guesses: taken by their layer, or brought for nothing."
            brought = CounterMetricFamily("spark_expert_guess_bytes", text, labels=["outcome"])
            for outcome in ("useful", "wasted"):
                guessed.add_metric([outcome], guesses[outcome])
                brought.add_metric([outcome], guesses[f"{outcome}_bytes"])
            made += [guessed, brought]
            if "on" in guesses:
                text = "1 while most steps of one token have guesses, as they are faster so."
                made.append(GaugeMetricFamily("spark_expert_guesses_on", text, value=guesses["on"]))
        waits = self.stats.get("waits")
        if isinstance(waits, Mapping):
            waited = CounterMetricFamily("spark_waits", "Requests that had to wait, by what for.", labels=["reason"])
            for reason, n in sorted(waits.items()):
                waited.add_metric([reason], n)
            made.append(waited)
        drafts = self.stats.get("drafts")
        if isinstance(drafts, Mapping) and drafts:
            text = "Tokens that were drafted: accepted (and written), rejected."
            drafted = CounterMetricFamily("spark_draft_tokens", text, labels=["source", "outcome"])
            for source, n in sorted(drafts["tokens"].items()):
                drafted.add_metric([source, "accepted"], n["accepted"])
                drafted.add_metric([source, "rejected"], n["drafted"] - n["accepted"])
            made.append(drafted)
        recall = self.stats.get("recall")
        if isinstance(recall, Mapping) and recall:
            text = "KV blocks that written tokens had before them (--kv-recall-blocks, --kv-recall): read, or left out."
            recalled = CounterMetricFamily("spark_recall_blocks", text, labels=["outcome"])
            recalled.add_metric(["read"], recall["read"])
            recalled.add_metric(["left_out"], recall["blocks"] - recall["read"])
            text = "Tokens that were written so."
            made += [recalled, CounterMetricFamily("spark_recall_tokens", text, value=recall["tokens"])]
            text = "Shares of softmax mass that were left out, as estimated: the sum of these tokens' means."
            made.append(CounterMetricFamily("spark_recall_left_out", text, value=recall["left_out_sum"]))
            text = "The largest share of softmax mass that was left out, as estimated, of any token, layer and head."
            made.append(GaugeMetricFamily("spark_recall_left_out_max", text, value=recall["left_out_max"]))
            text = "The mean of these tokens' means."
            mean = recall["left_out_sum"] / max(recall["tokens"], 1)
            made.append(GaugeMetricFamily("spark_recall_left_out_mean", text, value=mean))
        blocks = self.stats.get("kv_blocks")
        if isinstance(blocks, Mapping) and isinstance(blocks.get("moved_bytes"), Mapping):
            text = "Bytes of KV blocks that left the pool for their homes, and that came back."
            moved = CounterMetricFamily("spark_kv_moved_bytes", text, labels=["to"])
            for to, n in sorted(blocks["moved_bytes"].items()):
                moved.add_metric(["pool" if to == "back" else to], n)
            made.append(moved)
            text = "KV blocks that are at home, in host memory, and not in the pool."
            made.append(GaugeMetricFamily("spark_kv_blocks_away", text, value=blocks["away"]))
        if isinstance(self.stats.get("released_bytes"), int):
            text = "Bytes of slots and cache that went back while nothing came (--idle-release)."
            made.append(GaugeMetricFamily("spark_released_bytes", text, value=self.stats["released_bytes"]))
        prefixes = self.stats.get("prefixes")
        if isinstance(prefixes, Mapping) and isinstance(prefixes.get("inexact_tokens"), int):
            text = "Tokens of replies that prompts reused before they were computed again as a prompt."
            made.append(CounterMetricFamily("spark_prefix_inexact_tokens", text, value=prefixes["inexact_tokens"]))
        if isinstance(prefixes, Mapping) and isinstance(prefixes.get("missed_files"), int):
            text = "Files of prefixes that a slow or full disk missed, to be written in idle time."
            made.append(GaugeMetricFamily("spark_prefix_missed_files", text, value=prefixes["missed_files"]))
        return made
