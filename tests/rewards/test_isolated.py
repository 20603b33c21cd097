import threading
import time

import pytest

from leadline.rewards.isolated import Isolated

FUNCTIONS = "tests.rewards.child_functions"


def test_a_call_that_holds_the_interpreter_is_killed_and_the_next_one_works() -> None:
    power = Isolated(f"{FUNCTIONS}:power", timeout_s=0.5)
    assert power(2, 3) == 8
    started = time.perf_counter()
    with pytest.raises(TimeoutError, match=r"no result within 0\.5 s"):
        power(9, 9**9)  # one bytecode: neither a thread nor a Python signal handler could stop it
    assert time.perf_counter() - started < 5
    assert power(3, 2) == 9


def test_an_exception_of_the_function_names_its_type_and_the_child_goes_on() -> None:
    power = Isolated(f"{FUNCTIONS}:power")
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        power(0, -1)
    assert power(3, 2) == 9


def test_a_process_that_dies_is_an_error_and_is_replaced() -> None:
    die = Isolated(f"{FUNCTIONS}:die_if")
    with pytest.raises(RuntimeError, match="died with exit code 7"):
        die(True)
    assert die(False) == "alive"


def test_an_argument_that_cannot_be_pickled_leaves_the_child_usable() -> None:
    power = Isolated(f"{FUNCTIONS}:power")
    with pytest.raises(TypeError, match="pickle"):
        power(threading.Lock(), 1)
    assert power(3, 2) == 9


def test_calls_from_many_threads_get_their_own_answers() -> None:
    power = Isolated(f"{FUNCTIONS}:power")
    answers: dict[int, int] = {}
    threads = [threading.Thread(target=lambda n=n: answers.update({n: power(n, 2)})) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: n * n for n in range(20)}


def test_the_time_of_an_import_is_not_the_time_of_a_call() -> None:
    ready = Isolated(f"{FUNCTIONS}:import_slowly", timeout_s=0.3, imports=["tests.rewards.slow_import"])
    assert ready() == "ready"
    unprepared = Isolated(f"{FUNCTIONS}:import_slowly", timeout_s=0.3)
    with pytest.raises(TimeoutError):
        unprepared()


def test_a_module_that_is_not_installed_is_the_functions_own_error() -> None:
    power = Isolated(f"{FUNCTIONS}:power", imports=["no_such_module"])
    assert power(2, 3) == 8
