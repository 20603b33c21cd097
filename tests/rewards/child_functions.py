"""What `test_isolated.py` calls in a child process; quick to import."""

import os


def power(base: int, exponent: int) -> float:
    print("printing does not mix with the answers")
    return base**exponent


def die_if(really: bool) -> str:
    if really:
        os._exit(7)
    return "alive"


def import_slowly() -> str:
    from tests.rewards import slow_import

    return slow_import.READY
