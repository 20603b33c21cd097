"""Scoring in a child process that the operating system kills when it takes too long.

A model that is asked for a number will one day write 9^9^9. Evaluating it holds the interpreter lock for minutes: in
a thread, no timeout fires and the whole run stands still. A process can be killed.
"""

import atexit
import contextlib
import importlib
import os
import pickle
import queue
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

CHILDREN = max(2, min(4, (os.cpu_count() or 2) // 2))
"""Most child processes per function; they start when they are needed."""


class Isolated:
    """The function `target` ("module:function"), called in a child process. Arguments and result are pickled.

    `imports` are modules that the function imports when it is first called: the child has them before the clock of a call
    runs, for on a busy machine an import alone may take longer than a call is allowed to.

    Raises TimeoutError after `timeout_s` (a usual call takes 0.02 s), RuntimeError for what the function raised or if
    the child died. POSIX only: the limit is an interval timer of the child.
    """

    def __init__(self, target: str, timeout_s: float = 5.0, imports: Sequence[str] = ()) -> None:
        self._target, self._timeout_s, self._imports = target, timeout_s, tuple(imports)
        self._children: queue.LifoQueue[_Child | None] = queue.LifoQueue()
        for _ in range(CHILDREN):
            self._children.put(None)

    def __call__(self, *args: Any) -> Any:
        child = self._children.get()
        try:
            if child is None:
                child = _Child(self._target, self._timeout_s, self._imports)
            return child.ask(args)
        finally:
            self._children.put(child if child and child.alive else None)


class _Child:
    def __init__(self, target: str, timeout_s: float, imports: Sequence[str]) -> None:
        self._timeout_s = timeout_s
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from leadline.rewards.isolated import serve; "
            f"serve({target!r}, {timeout_s!r}, {imports!r})"
        )
        self._process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        atexit.register(self._close)
        self._answer()  # sent once the function is imported

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, args: tuple[Any, ...]) -> Any:
        request = pickle.dumps(args)  # before anything is written: an argument may refuse
        with contextlib.suppress(BrokenPipeError):  # the child died since the last call; reading says how
            self._requests.write(request)
            self._requests.flush()
        return self._answer()

    def _answer(self) -> Any:
        try:
            result, error = pickle.load(self._answers)
        except EOFError:
            self._close()
            if self._process.returncode == -signal.SIGALRM:
                raise TimeoutError(f"no result within {self._timeout_s:g} s") from None
            raise RuntimeError(f"the scoring process died with exit code {self._process.returncode}") from None
        if error is not None:
            raise RuntimeError(error)
        return result

    def _close(self) -> None:
        atexit.unregister(self._close)
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        self._answers.close()


def serve(target: str, timeout_s: float, imports: Sequence[str]) -> None:
    """The child: answers pickled argument tuples on standard input until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the function prints must not mix with the answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, whatever the interpreter is busy with
    module, name = target.split(":")
    function = getattr(importlib.import_module(module), name)
    for needed in imports:
        with contextlib.suppress(ImportError):  # the function says it better, call by call
            importlib.import_module(needed)
    _send(answers, None, None)
    while True:
        try:
            args = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            result, error = function(*args), None
        except Exception as raised:
            result, error = None, f"{type(raised).__name__}: {raised}"
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(answers, result, error)


def _send(answers: Any, result: Any, error: str | None) -> None:
    pickle.dump((result, error), answers)
    answers.flush()
