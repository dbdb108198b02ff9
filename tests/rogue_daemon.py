"""Daemons that misbehave, each a function: `rogue_daemon.py NAME`."""

import os
import signal
import subprocess
import sys
import time


def say(text: str) -> None:
    os.write(1, text.encode() + b"\n")


def complain(text: str) -> None:
    os.write(2, text.encode() + b"\n")


def become_ready(info: str = "") -> None:
    say('{"event":"hello","protocol":1}')
    say('{"event":"ready","ctx_tokens":64' + info + "}")


def read_request() -> None:
    sys.stdin.buffer.readline()


def finish() -> None:
    say(
        '{"id":1,"event":"done","usage":{"prompt_tokens":1,"completion_tokens":1},'
        '"timing":{"prefill_s":0,"decode_s":0},"residency":{}}'
    )
    sys.stdin.buffer.read()


def silent() -> None:
    time.sleep(600)


def loads_for_ever() -> None:
    say('{"event":"hello","protocol":1}')
    while True:
        say('{"event":"loading","stage":"loading","done":1,"total":2}')
        time.sleep(0.05)


def dies_at_once() -> None:
    complain("first words")
    complain("cannot go on: r\xe9sum\xe9")
    sys.exit(3)


def speaks_another_protocol() -> None:
    say('{"event":"hello","protocol":2}')
    time.sleep(600)


def silent_after_a_token() -> None:
    become_ready()
    read_request()
    say('{"id":1,"event":"tokens","tokens":[5]}')
    complain("thinking very hard")
    time.sleep(600)


def talks_for_ever() -> None:
    become_ready()
    read_request()
    while True:
        say('{"id":1,"event":"tokens","tokens":[5]}')
        time.sleep(0.005)


def dies_in_a_request() -> None:
    become_ready()
    read_request()
    say('{"id":1,"event":"tokens","tokens":[5]}')
    complain("last words")
    os._exit(9)


def is_killed_in_a_request() -> None:
    become_ready()
    read_request()
    os.kill(os.getpid(), signal.SIGKILL)


def some_garbage() -> None:
    say("loading the model, please wait")
    become_ready()
    read_request()
    say("what a fine day")
    say('{"id":1,"event":"tokens","tokens":"five"}')
    say('{"id":1,"event":"tokens","tokens":[5]}')
    say("")
    finish()


def garbage_for_ever() -> None:
    become_ready()
    read_request()
    while True:
        say("garbage")


def a_line_without_end() -> None:
    become_ready()
    read_request()
    while True:
        os.write(1, b"x" * 65536)


def not_utf8() -> None:
    become_ready()
    read_request()
    os.write(1, b"\xff\xfe\xfd\n")
    os.write(1, b'{"id":1,"event":"error","code":"capacity","message":"caf\xe9 is full","hint":""}\n')
    os.write(2, b"\xff\xfe caf\xe9\n")
    sys.stdin.buffer.read()


def closes_stdout() -> None:
    become_ready()
    read_request()
    os.close(1)
    time.sleep(600)


def floods_stderr() -> None:
    for _ in range(200):
        os.write(2, b"warning: " + b"w" * 65536 + b"\n")
    become_ready()
    read_request()
    for _ in range(200):
        os.write(2, b"warning: " + b"w" * 65536 + b"\n")
    complain("the last line")
    say('{"id":1,"event":"tokens","tokens":[5]}')
    finish()


def reads_nothing() -> None:
    become_ready()
    time.sleep(600)


def ignores_everything() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    become_ready()
    time.sleep(600)


def _spawn() -> str:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    return f',"grandchild":{subprocess.Popen([sys.executable, "-c", code]).pid}'


def has_a_child() -> None:
    become_ready(_spawn())
    time.sleep(600)


def leaves_a_child_behind() -> None:
    """Dies in a request, while its child holds stdout and stderr open."""
    become_ready(_spawn())
    read_request()
    complain("last words")
    os._exit(9)


def leaves_a_child_behind_when_idle() -> None:
    become_ready(_spawn())
    time.sleep(0.2)
    os._exit(9)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
