"""Every setting with its docstring, for `leadline train --help` and docs/config.md. Generated from `settings/`."""

import json
import textwrap
from collections.abc import Collection, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from leadline.config import SECTIONS
from leadline.rewards import REWARDS
from leadline.settings.section import Section
from leadline.sft.config import MEANT, SFT_SECTIONS

NO_LIMIT: Mapping[str, Collection[str]] = {}


def settings_help(
    width: int = 100,
    sections: Mapping[str, type[Section]] = SECTIONS,
    meant: Mapping[str, Collection[str]] = NO_LIMIT,
) -> str:
    """Plain text of lines no longer than `width`: a line for each setting, its meaning indented below.

    `meant` limits a section of its name to some settings.
    """
    rewards = textwrap.wrap(f"Built-in rewards: {', '.join(REWARDS)}.", width)
    texts = [_section_text(name, section, width, meant.get(name)) for name, section in sections.items()]
    return "\n".join([*texts, *rewards, ""])


def settings_markdown() -> str:
    """The page docs/config.md."""
    parts = ["# Settings", "", "Generated from `leadline/settings/` by `make docs`; do not edit.", ""]
    for name, section in SECTIONS.items():
        parts += _section_table(name, section)
    parts += ["## Built-in rewards", ""]
    parts += [f"- `{name}`: {_first_line(function.__doc__)}" for name, function in REWARDS.items()]
    parts += ["", "# Settings of `leadline sft`", "", f"Its sections are {', '.join(map(_code, SFT_SECTIONS))}.", ""]
    parts += _section_table("sft", SFT_SECTIONS["sft"])
    for name, fields in MEANT.items():
        known = [field for field in SFT_SECTIONS[name].model_fields if field in fields]
        parts.append(f"- Of `[{name}]` it has {', '.join(map(_code, known))}.")
    return "\n".join([*parts, ""])


def _section_table(name: str, section: type[Section]) -> list[str]:
    lines = [f"## `{_header(name)}`", "", _doc(section), ""]
    lines += ["| setting | default | type | meaning |", "| --- | --- | --- | --- |"]
    for field, info in section.model_fields.items():
        cells = [f"`{field}`", f"`{_default(info)}`", _type_name(info.annotation), _meaning(info)]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return [*lines, ""]


def _code(name: str) -> str:
    return f"`{name}`"


def _section_text(name: str, section: type[Section], width: int, meant: Collection[str] | None) -> str:
    lines = [*textwrap.wrap(f"{_header(name)}  {_doc(section)}", width), ""]
    for field, info in section.model_fields.items():
        if meant is not None and field not in meant:
            continue
        head = f"{field} = {_default(info)}   # {_type_name(info.annotation)}"
        lines += textwrap.wrap(head, width, initial_indent="  ", subsequent_indent="      ")
        lines += textwrap.wrap(_meaning(info), width, initial_indent="      ", subsequent_indent="      ")
    return "\n".join([*lines, ""])


def _header(name: str) -> str:
    return "[[rewards]]" if name == "rewards" else f"[{name}]"


def _doc(section: type[Section]) -> str:
    return " ".join((section.__doc__ or "").split())


def _first_line(doc: str | None) -> str:
    return (doc or "").strip().split("\n\n")[0].replace("\n", " ").strip()


def _meaning(info: FieldInfo) -> str:
    return " ".join((info.description or "").split())


def _default(info: FieldInfo) -> str:
    """As a recipe would write it; `none` cannot be written, it is what a setting is that is left out."""
    if info.is_required():
        return "(required)"
    value = info.get_default(call_default_factory=True)
    return "none" if value is None else repr(value) if isinstance(value, float) else json.dumps(value)


def _type_name(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _type_name(get_args(annotation)[0])
    if origin is Literal:
        return " or ".join(str(value) for value in get_args(annotation))
    if origin in (Union, UnionType):
        return " or ".join(_type_name(part) for part in get_args(annotation) if part is not NoneType)
    if origin is tuple:
        return f"list of {_type_name(get_args(annotation)[0])}"
    if origin is dict:
        return "table"
    names = {str: "string", int: "integer", float: "number", bool: "true or false"}
    return names.get(annotation, str(annotation))


if __name__ == "__main__":
    print(settings_markdown(), end="")
