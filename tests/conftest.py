"""Tests marked `vllm` need a real one: without it they are skipped, unless LEADLINE_REQUIRE_VLLM says that it must be there."""

import importlib.util
import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("vllm")]
    if not marked or importlib.util.find_spec("vllm") is not None:
        return
    if os.environ.get("LEADLINE_REQUIRE_VLLM"):
        raise pytest.UsageError("LEADLINE_REQUIRE_VLLM is set, but vllm cannot be imported: run `make vllm`")
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="vllm is not installed (make vllm)"))
