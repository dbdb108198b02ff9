"""How this program was installed, so that a hint can say how to add an extra to it."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from urllib.parse import unquote, urlsplit

_NAME = "spark-moe"


def requirement(extra: str) -> str:
    """What `pip install` takes to add an extra, as a shell reads it: from where this was installed, or by its name."""
    try:
        origin = json.loads(metadata.distribution(_NAME).read_text("direct_url.json") or "{}")  # PEP 610
    except metadata.PackageNotFoundError:
        origin = {}
    url = origin.get("url", "")
    if "dir_info" in origin:
        tree = shlex.quote(f"{unquote(urlsplit(url).path)}[{extra}]")
        return f"-e {tree}" if origin["dir_info"].get("editable") else tree
    if "vcs_info" in origin:
        url = f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    return shlex.quote(f"{_NAME}[{extra}] @ {url}" if url else f"{_NAME}[{extra}]")
