from functools import partial
from pathlib import Path

import pytest

from leadline.errors import RewardError
from leadline.rewards.exact_match import exact_match
from leadline.rewards.resolve import function_name, resolve


class Judge:
    def __call__(self, completion: str) -> float:
        return 1.0


def brevity(completion: str, limit: int = 3) -> float:
    return float(len(completion) <= limit)


def test_a_built_in_a_module_and_a_file_are_found(tmp_path: Path) -> None:
    assert resolve("exact_match") is exact_match
    assert resolve(f"{__name__}:brevity") is brevity
    path = tmp_path / "mine.py"
    path.write_text("CALLS = []\ndef first(completion): return 1\ndef second(completion): return 2\n")
    first, second = resolve(f"{path}:first"), resolve(f"{path}:second")
    assert (first("x"), second("x")) == (1, 2)
    assert first.__globals__ is second.__globals__  # the file runs once


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"def name(completion): return {folder!r}\n")
    assert [resolve(f"{tmp_path / folder / 'mine.py'}:name")("x") for folder in ("a", "b")] == ["a", "b"]


def test_partials_and_callable_objects_have_a_name() -> None:
    assert function_name(brevity) == "brevity"
    assert function_name(partial(brevity, limit=2)) == "brevity"
    assert function_name(Judge()) == "Judge"
    assert function_name(partial(Judge())) == "Judge"


def test_an_unknown_built_in_is_an_error_that_lists_them() -> None:
    with pytest.raises(RewardError, match=r"Did you mean exact_match\? Use one of exact_match, format_tags, length"):
        resolve("exact_mach")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{__name__}:brevty", "has no function 'brevty'; it has brevity"),
        ("no.such.module:f", "importing 'no.such.module' raises ModuleNotFoundError"),
        ("nowhere.py:f", "importing 'nowhere.py' raises FileNotFoundError"),
    ],
)
def test_a_reference_that_leads_nowhere_is_an_error(name: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        resolve(name)


def test_a_file_that_raises_on_import_is_an_error_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("1 / 0\n")
    with pytest.raises(RewardError, match="raises ZeroDivisionError: division by zero"):
        resolve(f"{tmp_path / 'bad.py'}:f")
