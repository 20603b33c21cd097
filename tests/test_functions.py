from pathlib import Path

import pytest

from leadline.functions import function_named


def test_a_function_of_a_module_and_of_a_file_is_found(tmp_path: Path) -> None:
    assert function_named("math:sqrt")(9) == 3
    (tmp_path / "mine.py").write_text("def twice(x): return 2 * x\n")
    assert function_named(f"{tmp_path / 'mine.py'}:twice")(3) == 6


def test_what_cannot_be_found_is_a_fact_to_put_after_but(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"^'math' has no function 'sqr'; it has sqrt"):
        function_named("math:sqr")
    with pytest.raises(ImportError, match=r"^importing 'no_such' raises ModuleNotFoundError"):
        function_named("no_such:f")
    (tmp_path / "bad.py").write_text("1 / 0\n")
    with pytest.raises(ImportError, match="raises ZeroDivisionError: division by zero"):
        function_named(f"{tmp_path / 'bad.py'}:f")
