"""The command `spark`, also as `python -m spark`: it takes a Ctrl-C before it imports anything that takes long."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType
from typing import NoReturn


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """End as `commands/ending.py` ends a command; nothing has begun that would have to be put away."""
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(130)


def main() -> None:
    """Run the command line."""
    # Not `except KeyboardInterrupt`: one that comes inside the import machinery's own callbacks is printed and lost.
    taken = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # nohup and the like ignore it
    if taken:
        signal.signal(signal.SIGINT, _leave)
    from spark.cli import main as run

    try:
        if taken:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:  # before the command's own handler was there
        _leave(signal.SIGINT, None)


if __name__ == "__main__":
    main()
