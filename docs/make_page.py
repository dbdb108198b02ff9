"""Writes docs/page.png: the page at `/` while `spark serve` has the bundled model answer a few requests.

python docs/make_page.py

It needs Chromium, the system's or Playwright's. At most 150 KB are written.
"""

from __future__ import annotations

import base64
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[1]
PICTURE = Path(__file__).with_name("page.png")
MOST_BYTES = 150_000
PATIENCE_S = 120.0
SERVE = ("serve", "data/nano/nano.gguf", "--port", "0", "--device", "cpu", "--spark", "--residency", "60")
N_ASKING = 9
# Requests in every state, some that have ended, both parts of the cache in use, every rate known.
READY = """() => {
  const text = (id) => document.getElementById(id).textContent;
  const rows = (id) => [...document.getElementById(id).rows].map((row) => row.cells[7].textContent);
  const share = (part) => parseFloat(document.querySelector(`.meter .${part}`).style.width);
  const has = (state) => rows("open-requests").some((said) => said.startsWith(state));
  return ["writing", "reading", "waiting"].every(has) &&
    rows("ended-requests").length > 5 && share("held") > 5 && share("spare") > 5 && text("hits").endsWith("%") &&
    Number(text("written")) > 0 && Number(text("read")) > 0;
}"""
# The pixels of a PNG; the browser has a decoder, and Python none.
PIXELS = """async (url) => {
  const image = await createImageBitmap(await (await fetch(url)).blob());
  const pen = new OffscreenCanvas(image.width, image.height).getContext("2d");
  pen.drawImage(image, 0, 0);
  const bytes = pen.getImageData(0, 0, image.width, image.height).data;
  let text = "";
  for (let i = 0; i < bytes.length; i += 32768) text += String.fromCharCode(...bytes.subarray(i, i + 32768));
  return [image.width, image.height, btoa(text)];
}"""


def ask(url: str, number: int) -> None:
    """Make one request, another each time; some begin as one before them did."""
    said = f"Task {number % 12}. " + "def f(x):\n    return x + 1\n" * (4 + 37 * (number % 5))
    messages = {"messages": [{"role": "user", "content": said}], "max_tokens": 60 + 70 * (number % 4)}
    path, body = (
        ("/v1/messages", messages),
        ("/v1/chat/completions", messages | {"n": 1 + number % 2, "seed": number}),
        ("/v1/responses", {"input": said, "max_output_tokens": 200}),
        ("/v1/completions", {"prompt": said, "max_tokens": 120}),
    )[number % 4]
    httpx.post(url + path, json={"model": "any", "temperature": 1, **body}, timeout=PATIENCE_S)


def shoot(url: str, shown: Page, decoder: Page) -> bytes:
    """The picture, taken once everything is to be seen."""
    shown.goto(url)
    end_s = time.monotonic() + PATIENCE_S
    while not shown.evaluate(READY):
        if time.monotonic() > end_s:
            sys.exit(f"error: not everything was to be seen within {PATIENCE_S:g} s; run it where less else runs")
        time.sleep(0.05)
    found = base64.b64encode(shown.screenshot(full_page=True)).decode()
    width, height, pixels = decoder.evaluate(PIXELS, f"data:image/png;base64,{found}")
    return png(np.frombuffer(base64.b64decode(pixels), np.uint8).reshape(height, width, 4)[:, :, :3])


def png(pixels: np.ndarray) -> bytes:
    """A PNG of uint8 [height, width, 3] in 256 colors: a third of the browser's, for pictures of few colors."""
    height, width, _ = pixels.shape
    colors, which, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True)
    palette = colors[np.argsort(-counts, kind="stable")[:256]]
    distances = ((colors[:, None].astype(int) - palette[None]) ** 2).sum(axis=2)
    rows = distances.argmin(axis=1).astype(np.uint8)[which].reshape(height, width)
    lines = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0))
    data = chunk(b"PLTE", palette.tobytes()) + chunk(b"IDAT", zlib.compress(lines.tobytes(), 9))
    return b"\x89PNG\r\n\x1a\n" + header + data + chunk(b"IEND", b"")


def main() -> None:
    """Serve, ask, shoot."""
    done = threading.Event()

    def work(first: int, url: str) -> None:
        for number in range(first, 1 << 20, N_ASKING):
            if done.is_set():
                return
            ask(url, number)

    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "spark.cli", *SERVE, "--profile", f"{folder}/p.csv"]
        log = Path(folder, "log")
        with log.open("w") as said, subprocess.Popen(command, cwd=ROOT, env=environment, stderr=said) as server:
            try:
                while "is served at" not in log.read_text():
                    if server.poll() is not None:
                        sys.exit(f"error: the server ended:\n{log.read_text()}")
                    time.sleep(0.05)
                line = next(line for line in log.read_text().splitlines() if "is served at" in line)
                url = line.split()[-1].removesuffix("/v1")
                with sync_playwright() as driver, ThreadPoolExecutor(N_ASKING) as pool:
                    working = [pool.submit(work, first, url) for first in range(N_ASKING)]
                    try:
                        path = shutil.which("chromium") or driver.chromium.executable_path
                        sandbox = [] if os.geteuid() else ["--no-sandbox"]  # which root cannot have
                        browser = driver.chromium.launch(executable_path=path, args=sandbox)
                        shown = browser.new_page(viewport={"width": 1000, "height": 900}, color_scheme="light")
                        made = shoot(url, shown, browser.new_page())
                        browser.close()
                    finally:
                        done.set()
                    for one in working:
                        one.result()
            finally:
                server.send_signal(signal.SIGINT)
    if len(made) > MOST_BYTES:
        sys.exit(f"error: the picture has {len(made)} bytes, more than {MOST_BYTES}: ask for less in docs/make_page.py")
    PICTURE.write_bytes(made)


if __name__ == "__main__":
    main()
