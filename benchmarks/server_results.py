"""The sections of RESULTS.md about the server: under load, with recorded sessions, with programs of others."""

from __future__ import annotations

from collections import Counter

from benchmarks.markdown import Json, origin, percent, spread, table

CLIENTS = """\
{versions}, headless, against `spark serve` with {model}{layers} and a context of {ctx:,} tokens: {requests:,} requests
of {shapes} shapes (names and types of all fields), at most {at_once} at once, prompts of up to {longest:,} tokens. The
programs were made to call tools {calls} times; {results} requests brought results of tools. A problem is a status of
400 or more, a reply that cannot be read, events out of order, an error in a program's output, an exit code that is not
0; there were {problems}. Two things are none: the refusal of a prompt longer than the context, which each program has
to understand, and the reply to an agent of Codex's that is still coming when Codex ends."""
OTHER_CLIENTS = """\
Programs and libraries, headless, against `spark serve` with {model}{layers}, by every API that each speaks: {runs}
runs, {requests} requests of {shapes} shapes (names and types of all fields). Tools were called {calls} times;
{results} requests brought results of tools. Pictures come in messages and from tools, and each such conversation goes
on. *Left by the client*: cancelled in the middle on purpose, after which the server had to be idle. Two refusals are
expected: 404 for embeddings, and for a reference to what was not kept. Problems, of the kinds above: {problems}."""
LOAD = """\
{minutes:.0f} minutes of {clients} clients that stream from all four APIs, on {model} and the {device}; every fifth
request is left in the middle, and half-way the daemon is killed: {requests:,} requests ({kinds}), {tokens:,} tokens
generated, {rate:,.0f} a second in all. {running} requests ran at the kill; an error of any other is a problem, as are
a stream without an end, a leak and a request that is still there in the end. Problems: {problems}."""
OVERHEAD = """\
The same {at_once} requests at once to the server and to a daemon without one, in turn, {n} times; *overhead* is the
median of what each pair lost. Server, clients and the daemon's threads share the cores of this machine: with fewer
threads the daemon computes no less for a token, and waits for its core while the server has it."""
REPLAY = """\
{sessions} on {model}, {turns} turns through `{path}`, up to {most} tokens a reply: {reused:.0%} of
{prompt:,} prompt tokens were reused. Times are p50 (p95). *Calls*: of the turns whose calls were not cut off by the
bound ({calling}; the recorded model called in {recorded}), those whose calls all name a tool and are JSON objects, and
those that the tools' schemas allow as well, which is the model's merit. Left out: {refused}."""


def seconds_of(values: Json) -> str:
    return f"{values['p50']:.2f} ({values['p95']:.2f}) s" if values["n"] else ""


def load(name: str, made: Json) -> list[str]:
    lines = ["## The server under load", "", *origin(name, made)]
    if run := made.get("load"):
        text = LOAD.format(
            minutes=run["seconds"] / 60, clients=run["clients"], model=made["model"], device=made["device"].upper(),
            requests=run["requests"], kinds=", ".join(f"{n:,} {kind}" for kind, n in run["outcomes"].items()),
            tokens=run["generated_tokens"], rate=run["generated_tokens_per_s"], running=run["running_when_killed"],
            problems="; ".join(run["problems"]) or "none",
        )  # fmt: skip
        lines += [text, ""]
        rates = run.get("decode_tokens_per_s")
        lines += table(["", "p50", "p95", "replies"], [
            *([f"first token, {kind} prompts, s", f"{r['p50']:.2f}", f"{r['p95']:.2f}", r["n"]]
              for kind, r in run["time_to_first_token_s"].items()),
            *([["tokens/s of a reply", f"{rates['p50']:.0f}", f"{rates['p95']:.0f}", rates["n"]]] if rates else []),
        ])  # fmt: skip
        left, grown, blocks = run["left_over"], run["growth_bytes"], run["left_over"]["kv_blocks"]
        grown_text = ", ".join(f"{who} {n / 2**20:+.1f} MiB" for who, n in grown.items() if n is not None)
        lines += [f"Left at the end: {left['connections']} connections, {left['replies']:.0f} replies, "
                  f"{left['queue']:.0f} requests; of {blocks['total']} KV blocks {blocks['free']} are "
                  f"free and {left['prefix_blocks']} hold prefixes. Memory from the second quarter to the last: "
                  f"{grown_text}.", ""]  # fmt: skip
    if costs := made.get("overhead"):
        lines += [OVERHEAD.format(at_once=costs[0]["at_once"], n=costs[0]["overhead"]["n"]), ""]
        lines += table(
            ["threads of the daemon", "server, tokens/s", "daemon alone", "overhead", "server's CPU a token, ms"],
            [[f"{r['threads']} of {r['cores']} cores", spread(r["server_tokens_per_s"]),
              spread(r["daemon_tokens_per_s"]), percent(r["overhead"]["median"]),
              f"{r['server_cpu_ms_per_token']['median']:.3f}"] for r in costs],
        )  # fmt: skip
    return lines


def agent_replay(name: str, made: Json) -> list[str]:
    total, grown = made["total"], made.get("synthetic_tokens")
    judged = total["calls"]
    title = f"A session of {grown:,} tokens, turn by turn" if grown else "Recorded sessions, turn by turn"
    sessions = "A session grown from the samples" if grown else f"{made['sessions']} recorded sessions"
    text = REPLAY.format(
        sessions=sessions, model=made["model"], turns=total["turns"], most=made["max_tokens"],
        path="/v1/messages" if made["api"] == "messages" else "/v1/chat/completions", prompt=total["prompt_tokens"],
        reused=total["reused_tokens"] / total["prompt_tokens"], recorded=total["recorded_calls"],
        calling=sum(judged.get(word, 0) for word in ("valid", "unfit", "broken")),
        refused=", ".join(f"{n} turns {why}" for why, n in made["refused"].items()) or "none",
    )  # fmt: skip
    lines = [f"## {title}", "", *origin(name, made), text, ""]
    rows = [
        [label, r["turns"], seconds_of(r["first_s"]), seconds_of(r["end_s"]),
         f"{r['computed_a_turn']['p50']:,.0f} ({r['computed_a_turn']['p95']:,.0f})",
         percent(r["reused_tokens"] / r["prompt_tokens"]),
         f"{r['whole_tokens_per_s']:.0f}",
         "" if r["valid_share"] is None else f"{percent(r['well_formed_share'])}, {percent(r['valid_share'])}"]
        for label, r in [*((f"{b['from_tokens']:,} to {b['to_tokens']:,}", b) for b in made["bands"]), ("all", total)]
    ]  # fmt: skip
    columns = ["prompt tokens", "turns", "first token", "whole reply", "computed", "reused"]
    columns.append("tokens/s, prompt included")
    return lines + table([*columns, "calls: well-formed, allowed"], rows)


def requests_of(made: Json) -> list[str]:
    """A table of what programs asked for, and what became of it."""
    asked: dict[tuple[str, str], list[Json]] = {}
    for found in made["shapes"]:
        asked.setdefault((found["program"], f"{found['method']} {found['path']}"), []).append(found)
    return table(
        ["request", "program", "shapes", "requests", "outcomes"],
        [[f"`{request}`", program, len(found), sum(s["count"] for s in found),
          ", ".join(f"{n} x {status}" for status, n in sum((Counter(s["outcomes"]) for s in found), Counter()).items())]
         for (program, request), found in asked.items()],
    )  # fmt: skip


def other_clients(name: str, made: Json) -> list[str]:
    rows = made["rows"]
    text = OTHER_CLIENTS.format(
        model=made["model"], layers="" if made["layers"] is None else f" (its first {made['layers']} layers)",
        runs=len(rows), requests=sum(s["count"] for s in made["shapes"]), shapes=len(made["shapes"]),
        calls=sum(r["calls"] for r in rows), results=sum(r["results"] for r in rows),
        problems=made["problems"] or "none",
    )  # fmt: skip
    lines = ["## Other clients", "", *origin(name, made), text, "", *requests_of(made)]
    for program, version in made["programs"].items():
        lines += [f"{version}: {'; '.join(r['scenario'] for r in rows if r['program'] == program)}.", ""]
    return lines


def clients(name: str, made: Json) -> list[str]:
    text = CLIENTS.format(
        versions=" and ".join(f"{program} {said.split()[-1] if program == 'codex' else said.split()[0]}"
                              for program, said in made["programs"].items()),
        model=made["model"], layers="" if made["layers"] is None else f" (its first {made['layers']} layers)",
        ctx=made["ctx_tokens"], requests=sum(s["count"] for s in made["shapes"]), shapes=len(made["shapes"]),
        at_once=made["most_at_once"], longest=max(made["longest_prompt_tokens"].values()),
        calls=sum(r["calls"] for r in made["rows"]), results=sum(r["results"] for r in made["rows"]),
        problems=made["problems"] or "none",
    )  # fmt: skip
    lines = ["## Claude Code and Codex", "", *origin(name, made), text, "", *requests_of(made)]
    for program in made["programs"]:
        names = [r["scenario"] for r in made["rows"] if r["program"] == program and "at once" not in r["scenario"]]
        n = sum(r["program"] == program for r in made["rows"]) - len(names)
        lines += [f"Runs of {program}: {', '.join(names)}; {n} at once with those of the other.", ""]
    return lines
