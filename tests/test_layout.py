"""Who may import whom, how long a file may be, and that every file has its tests. Run by `make check`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "leadline"
FILES = sorted(PACKAGE.rglob("*.py"))

MOST_LINES = 400
MOST_LINES_OF_A_FUNCTION = 60

# Who may import whom --------------------------------------------------------------------------------------------------

ALLOWED = {
    "types": (),
    "errors": (),
    "metrics": (),
    "aliases": (),
    "settings": ("aliases", "settings"),
    "config": ("errors", "config_problems", "settings"),
    "config_problems": ("config",),  # for types only: config.py imports it
    "objective": ("objective",),
    "doctor": ("metrics", "errors", "doctor"),
}
"""Of leadline, by file or folder. The rest may import what it needs, but for the rules below."""

BUILDERS = {"session", "sft", "replay", "dry_run", "cli", "probes"}
"""Where parts are chosen and put together."""

PARTS = {"leadline.engines.hf", "leadline.engines.scripted", "leadline.engines.vllm_http", "leadline.policy.policy"}
"""What is chosen by a setting, or holds the weights: only builders, and the parts themselves, name them."""

LIGHT = {
    "types",
    "errors",
    "metrics",
    "aliases",
    "config",
    "config_problems",
    "recipe",
    "doctor",
    "settings_help",
    "sft.command",
    "sft.config",
    "settings",
}
"""Imported by `leadline --help` and `leadline doctor`, on machines without torch."""

HEAVY = {"torch", "transformers", "datasets", "polars", "safetensors", "peft", "jaxtyping"}


def name_of(path: Path) -> str:
    """`leadline.doctor.rule` of leadline/doctor/rule.py; `leadline.doctor` of its __init__.py."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def part_of(module: str) -> str:
    """`doctor` of leadline.doctor.rule."""
    return module.split(".")[1] if "." in module else ""


def imports(path: Path, *, at_start: bool = False) -> set[str]:
    """The modules that a file imports; with `at_start`, only those that importing the file imports."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in _at_start(tree) if at_start else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _at_start(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from _at_start(child)


def ours(path: Path) -> set[str]:
    modules = {name_of(other) for other in FILES}
    return {module for module in imports(path) if module in modules and module != "leadline"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_inner_parts_know_nothing_of_the_outer_ones(path: Path) -> None:
    allowed = ALLOWED.get(part_of(name_of(path)))
    if allowed is None:
        return
    assert {part_of(module) for module in ours(path)} <= set(allowed)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_the_builders_choose_engines_and_policies(path: Path) -> None:
    name = name_of(path)
    if part_of(name) in BUILDERS or name in PARTS or name.startswith("leadline.engines."):
        return
    assert ours(path) & PARTS == set()


def test_the_loop_knows_engines_by_their_promises_only() -> None:
    assert {module for module in ours(PACKAGE / "train.py") if part_of(module) == "engines"} == {
        "leadline.engines.base"
    }


def is_light(path: Path) -> bool:
    name = name_of(path).removeprefix("leadline.")
    return bool({name, name.split(".")[0]} & LIGHT)


@pytest.mark.parametrize("path", list(filter(is_light, FILES)), ids=name_of)
def test_what_runs_without_torch_does_not_import_it(path: Path) -> None:
    assert {module.split(".")[0] for module in imports(path, at_start=True)} & HEAVY == set()
    assert "torch" not in {module.split(".")[0] for module in imports(path)}


def test_the_command_line_starts_without_torch() -> None:
    assert {module.split(".")[0] for module in imports(PACKAGE / "cli.py", at_start=True)} & HEAVY == set()


def test_the_rules_above_are_about_files_that_exist() -> None:
    there = {part for path in FILES for part in (part_of(name_of(path)), name_of(path).removeprefix("leadline."))}
    assert ALLOWED.keys() | BUILDERS | LIGHT <= there
    assert {module for module in PARTS if not (ROOT / f"{module.replace('.', '/')}.py").exists()} == set()


# Size and names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_fits_into_a_head(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_function_fits_on_a_screen(path: Path) -> None:
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, FUNCTION)]
    long = {node.name: lines for node in functions if (lines := _length(node)) > MOST_LINES_OF_A_FUNCTION}
    assert long == {}


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_a_name_says_what_is_inside() -> None:
    vague = ("util", "helper", "manager", "common", "misc")
    assert [path.name for path in FILES if any(word in path.stem for word in vague)] == []


# Docstrings -----------------------------------------------------------------------------------------------------------

FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def public_without_docstring(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, FUNCTION | ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node):
            yield node.name


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_public_function_and_class_says_what_it_is(path: Path) -> None:
    assert list(public_without_docstring(path)) == []


# Tests ----------------------------------------------------------------------------------------------------------------

TESTED_ELSEWHERE = {
    "__init__.py": "test_cli.py",
    "__main__.py": "test_cli.py",
    "errors.py": "test_cli.py",
    "model_sources.py": "test_models.py",
    "sft/__init__.py": "sft/test_command.py",
    "sft/dry_run.py": "sft/test_command.py",
    "sources.py": "test_data.py",
    "doctor/": "doctor/test_rules.py",
    "doctor/rules/": "doctor/test_rules.py",
    "doctor/readers/": "doctor/readers/",
    "doctor/reports/": "doctor/reports/",
    "engines/base.py": "engines/test_contract.py",
    "engines/hf_decode.py": "engines/test_hf.py",
    "engines/hf_forward.py": "engines/test_hf.py",
    "engines/serve_command.py": "engines/test_vllm_real.py",
    "engines/vllm_adapter.py": "engines/test_vllm_real_adapter.py",
    "engines/vllm_core.py": "engines/test_vllm_inprocess.py",
    "engines/vllm_link.py": "engines/test_vllm_http.py",
    "engines/vllm_main.py": "engines/test_vllm_real.py",
    "engines/vllm_newest.py": "engines/test_vllm_real.py",
    "engines/vllm_pool.py": "engines/test_vllm_http.py",
    "engines/vllm_server.py": "engines/test_vllm_real.py",
    "engines/vllm_spans.py": "engines/test_vllm_wire.py",
    "engines/vllm_weights.py": "engines/test_vllm_real.py",
    "engines/vllm_worker.py": "engines/test_vllm_real.py",
    "integrations/": "integrations/",
    "loop/__init__.py": "test_train.py",
    "loop/interrupt.py": "test_resume.py",
    "materials/__init__.py": "materials/test_rows.py",
    "objective/__init__.py": "test_layout.py",
    "policy/__init__.py": "policy/test_policy.py",
    "probes/": "probes/test_command.py",
    "probes/engine/": "probes/engine/",
    "objective/ratios.py": "objective/test_losses.py",
    "probes/code/": "probes/code/",
    "probes/trainer/": "probes/trainer/",
    "probes/preflight/": "probes/preflight/",
    "probes/run_command.py": "probes/preflight/test_flight.py",
    "replay/": "replay/",
    "rewards/__init__.py": "rewards/test_resolve.py",
    "rewards/component.py": "rewards/test_scorer.py",
    "rewards/exact_match.py": "rewards/test_builtins.py",
    "rewards/format_tags.py": "rewards/test_builtins.py",
    "rewards/length.py": "rewards/test_builtins.py",
    "rewards/math_answer.py": "rewards/test_builtins.py",
    "rewards/overlong.py": "rewards/test_builtins.py",
    "rewards/reasoning_gym.py": "rewards/test_builtins.py",
    "settings/": "test_config.py",
}
"""Files (and folders, of which one suite tests every file) without a test file of their own name, and what covers them."""


def own_test(path: Path) -> Path:
    """tests/doctor/test_rule.py of leadline/doctor/rule.py."""
    inside = path.relative_to(PACKAGE)
    return ROOT / "tests" / inside.with_name(f"test_{inside.name}")


def covered_by(path: Path) -> Path:
    """Its own test, or the one listed for it, or for the innermost folder listed."""
    inside = path.relative_to(PACKAGE)
    names = [str(inside), *(f"{folder}/" for folder in inside.parents)]
    listed = [TESTED_ELSEWHERE[name] for name in names if name in TESTED_ELSEWHERE]
    return ROOT / "tests" / listed[0] if listed and not own_test(path).exists() else own_test(path)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_file_has_a_test_file(path: Path) -> None:
    cover = covered_by(path)
    assert cover.is_file() or list(cover.rglob("test_*.py")), f"write {own_test(path)}, or list what covers it"


def test_the_list_of_exceptions_holds_nothing_that_is_gone_or_has_a_test_of_its_own() -> None:
    for inside in TESTED_ELSEWHERE:
        assert (PACKAGE / inside).exists(), inside
        assert inside.endswith("/") or not own_test(PACKAGE / inside).exists(), inside
