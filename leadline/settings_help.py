"""Every setting with its docstring, for `leadline train --help` and docs/config.md. Generated from `config.py`."""

from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from leadline.config import SECTIONS, Section


def settings_help() -> str:
    """Plain text, one paragraph a setting."""
    return "\n\n".join(_section_text(name, section) for name, section in SECTIONS.items())


def settings_markdown() -> str:
    """The page docs/config.md."""
    parts = ["# Settings", "", "Generated from `leadline/config.py` by `make docs`; do not edit.", ""]
    for name, section in SECTIONS.items():
        parts += [f"## `[{_header(name)}]`", "", (section.__doc__ or "").strip(), ""]
        parts += ["| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
        parts += [
            f"| `{field}` | {_type_name(info.annotation)} | `{_default(info)}` | {_meaning(info)} |".replace(
                " || ", " \\| "
            )
            for field, info in section.model_fields.items()
        ]
        parts.append("")
    return "\n".join(parts)


def _section_text(name: str, section: type[Section]) -> str:
    lines = [f"[{_header(name)}]  {(section.__doc__ or '').strip()}"]
    for field, info in section.model_fields.items():
        lines.append(f"{field}: {_type_name(info.annotation)} = {_default(info)} -- {_meaning(info)}")
    return "\n\n".join(lines)


def _header(name: str) -> str:
    return f"[{name}]" if name == "rewards" else name


def _meaning(info: FieldInfo) -> str:
    return " ".join((info.description or "").split())


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "(required)"
    value = info.get_default(call_default_factory=True)
    return "none" if value is None else str(value) if value != "" else '""'


def _type_name(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return " or ".join(str(value) for value in get_args(annotation))
    if origin in (Union, UnionType):
        return " or ".join(_type_name(part) for part in get_args(annotation) if part is not NoneType)
    if origin is tuple:
        return f"list of {_type_name(get_args(annotation)[0])}"
    if origin is dict:
        return "table"
    return getattr(annotation, "__name__", str(annotation))


if __name__ == "__main__":
    print(settings_markdown())
