"""The sections of RESULTS.md about calibration on a cluster, and about logs of many users."""

from __future__ import annotations

import statistics

from benchmarks.markdown import Json, origin, table

SCALE = """\
The real driver, its reading and its checkpoints, on {workers:,} simulated workers of {tokens_per_s_of_a_worker:,.0f}
tokens/s and {windows:,} windows; what Ray costs the driver for a lease is left out."""
CPU = """\
{tokens:,} tokens of the bundled model, in turn; tokens/s once all daemons are ready. The profiles are the same."""
GPU = """\
{tokens:,} tokens, the sample sessions under many ids, one model file; {gpus}. Each run is a `spark calibrate`; all
{same_profiles} profiles are the same. *Tokens/s*: from the first worker that is ready to the last window. *Of workers*:
what each did by the time in which it could have had work, added up. *In all*: by the time of the command."""
KILLS = """\
A calibration of {tokens:,} tokens on two nodes. *The same*: profile and trace are those of one machine, byte for byte.
*Named*: two kills met one window, which alone is left out, by name. *Nothing left*: no process, no folder."""
HOMES = """\
{megabytes:,.0f} MB of logs of {users} users in {files:,} files. The object store is moto's server on the same cores:
putting the files there took {upload_s:.0f} s, fetching alone {fetch_ms:.1f} ms a file."""


def scale(name: str, made: Json) -> list[str]:
    rows = [
        ["driver, cores", f"{made['driver_cores']:.2f}"],
        ["driver, us a window", f"{made['driver_us_per_window']:.0f}"],
        ["workers idle", f"{100 * made['idle_share']:.3f}%"],
        ["memory at most, GB", f"{made['max_bytes'] / 1e9:.2f}"],
        ["checkpoint, MB", f"{made['checkpoint_bytes'] / 1e6:.2f}"],
        ["leases", f"{made['leases']:,}"],
        ["the run, h", f"{made['run_s'] / 3600:.2f}"],
    ]
    heading = "## A cluster of a thousand workers, simulated"
    return [heading, "", *origin(name, made), SCALE.format(**made), "", *table(["", ""], rows)]


def cpu(name: str, made: Json) -> list[str]:
    rows = [
        [who, f"{statistics.median(rates):,.0f}", f"{min(rates):,.0f} to {max(rates):,.0f}"]
        for who, rates in made["tokens_per_s"].items()
    ]
    rows.append(["share, of medians and of the best", f"{made['share']:.2f}", f"{made['share_of_best']:.2f}"])
    heading = "## Two workers against one daemon"
    return [heading, "", *origin(name, made), CPU.format(**made), "", *table(["", "tokens/s", "extremes"], rows)]


def gpu(name: str, made: Json) -> list[str]:
    names = made["gpus"]
    about = GPU.format(**made | {"gpus": f"{len(names)} x {names[0]}" if names else "CPUs"})
    rows, keys = [], ("tokens_per_s", "own_tokens_per_s", "tokens_per_s_in_all")
    for found in made["summary"]:
        speeds = [
            f"{found[key]:,.0f}" + (f" ({found[f'{key}_of_one']:.2f}x)" if f"{key}_of_one" in found else "")
            if key in found else ""
            for key in keys
        ]  # fmt: skip
        idle = f"{100 * found['idle_share']:.1f}%" if "idle_share" in found else ""
        rows.append([int(found["workers"]) or "no cluster", found["runs"], *speeds, idle, f"{found['ready_s']:.1f}"])
    columns = ["workers", "runs", "tokens/s", "of workers", "in all", "idle", "ready after, s"]
    shares = [
        f"{each['workers']} workers: {', '.join(f'{100 * share:.1f}%' for share in each['shares'])}"
        for each in made["rows"]
        if each["workers"] > 1
    ]
    heading = f"## Calibration by {len(names)} GPUs of one host" if names else "## Calibration by workers of one host"
    parts = f"Each one's part of the tokens: {'; '.join(shares)}. {made.get('note', '')}".strip()
    return [heading, "", *origin(name, made), about, "", *table(columns, rows), parts, ""]


def kills(name: str, made: Json) -> list[str]:
    killed = ", ".join(f"{n} {what}s" for what, n in sorted(made["kills"].items()))
    rows = [
        [f"{killed} at random times", made["runs"], made["same"], made["named"], made["left_nothing"]],
        ["the driver, which is then gone on from", made["drivers"], made["drivers_same"], 0,
         made["drivers_left_nothing"]],
    ]  # fmt: skip
    columns = ["killed", "runs", "the same", "named", "nothing left"]
    return [
        "## Calibration on a cluster, killed", "", *origin(name, made), KILLS.format(**made), "", *table(columns, rows)
    ]  # fmt: skip


def homes(name: str, made: Json) -> list[str]:
    about = HOMES.format(megabytes=made["bytes"] / 1e6, fetch_ms=1e3 * made["fetch_s_per_file"], **made)
    rows = []
    for key in ("file", "s3"):
        found = made[key]
        sessions = sum(found["sessions"].values())
        rows.append([f"{key}://", f"{found['seconds']:.0f}", f"{found['mb_per_s']:.1f}", f"{sessions:,}"])
    one = made["one_home"]
    for key, seconds in one.items():
        if key.startswith("seconds_on_"):
            n = int(key.rpartition("_")[2])
            what = f"one home of {one['bytes'] / 1e6:,.0f} MB, {n} core{'s' if n > 1 else ''}"
            rows.append([what, f"{seconds:.1f}", f"{one['bytes'] / 1e6 / seconds:.1f}", ""])
    columns = ["", "s", "MB/s", "sessions"]
    return ["## Logs of many users", "", *origin(name, made), about, "", *table(columns, rows)]


SECTIONS = {
    "cluster_gpu.json": gpu,
    "cluster_gpu-4.json": gpu,
    "cluster_cpu.json": cpu,
    "cluster_kills.json": kills,
    "cluster_scale.json": scale,
    "cluster_homes.json": homes,
}
