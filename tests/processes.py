"""The command line in processes of their own, which a test may kill.

They are forked from a server that has imported everything but run nothing: a start costs milliseconds, not seconds.
"""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["leadline.session", "leadline.screen", "reasoning_gym", "polars"])


def start(output: Path, *arguments: str) -> BaseProcess:
    """`leadline ARGUMENTS`, under way; what it prints goes to the file `output`."""
    process = CONTEXT.Process(target=_main, args=(output, arguments))
    process.start()
    return process


def leadline(output: Path, *arguments: str) -> tuple[int, str]:
    """The exit code of `leadline ARGUMENTS`, and what it printed."""
    process = start(output, *arguments)
    process.join(120)
    assert process.exitcode is not None, "it did not end"
    return process.exitcode, output.read_text()


def wait_for(process: BaseProcess, condition: Callable[[], bool]) -> bool:
    """Returns as soon as the condition holds; False if the process ended before."""
    while process.is_alive():
        if condition():
            return True
        time.sleep(0.0005)
    return False


def lines(path: Path) -> int:
    """Whole lines of a file; 0 if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes().count(b"\n")
    return 0


def _main(output: Path, arguments: tuple[str, ...]) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = ["leadline", *arguments]
    from leadline.cli import main

    main()


def interrupted_while_it_loads(place: Path, command: str, module: str) -> tuple[int, str]:
    """Exit code and what is said on stderr of `leadline COMMAND recipe.toml`, whose `load_model` in `module` hangs."""
    hanging = (
        f"import sys, time; import {module}; sys.argv = ['leadline', {command!r}, 'recipe.toml']; "
        f"{module}.load_model = lambda *_: (print('loading', flush=True), time.sleep(60)); "
        "from leadline.cli import main; main()"
    )
    arguments = [sys.executable, "-c", hanging]
    process = subprocess.Popen(arguments, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        while "loading" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
    return process.returncode, err
