"""An S3 on this machine: moto's server, and settings with which this process and its children find it."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest


@contextlib.contextmanager
def object_store(bucket: str) -> Iterator[Any]:
    """A file system that speaks to a fresh server, on which there is a bucket."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    # What servers hold is the process's: an earlier one's is still there.
    reset = urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")
    urllib.request.urlopen(reset, timeout=30).close()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in settings.items():
                patch.setenv(name, value)
            kind = fsspec.get_filesystem_class("s3")
            kind.clear_instance_cache()
            store = fsspec.filesystem("s3")
            store.mkdir(bucket)
            yield store
            kind.clear_instance_cache()
    finally:
        server.stop()
