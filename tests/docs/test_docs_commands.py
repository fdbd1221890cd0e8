"""Every command that the documentation shows exists with these options, and every link leads somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import typer

from inpage.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"^(?:\s{4})?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(inpage|make) ((?!(?:worker|scheduler):).+)$")


def code_lines(page: Path) -> list[str]:
    """Lines of fenced and indented code, those that end in a backslash joined with the next."""
    lines, fenced = [], False
    for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            lines.append(line)
    return lines


def commands(program: str) -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for line in code_lines(page):
            match = COMMAND.match(line)
            if match and match[1] == program:
                found.append((page.name, re.split(r"\s{2,}#|\s#\s", match[2])[0].strip()))
    return found


INPAGE = [(page, line) for page, line in commands("inpage") if "|" not in line]
MAKE = commands("make")


def test_there_are_commands_to_look_at():
    assert len(INPAGE) > 20
    assert len(MAKE) > 5


@pytest.mark.parametrize(("page", "line"), INPAGE, ids=lambda value: value[:60])
def test_a_command_of_the_documentation_is_understood(page, line):
    group = typer.main.get_command(app)
    name, *arguments = shlex.split(line.replace("...", ""))
    command = group.get_command(click.Context(group), name)
    assert command is not None, f"{page} shows `inpage {name}`, which there is not"
    context = command.context_class(command, info_name=name, **command.context_settings)
    command.make_parser(context).parse_args(arguments)


@pytest.mark.parametrize(("page", "line"), MAKE, ids=lambda value: value[:60])
def test_a_make_target_of_the_documentation_exists(page, line):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert shlex.split(line)[0] in targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in slugs, f"{page.name} links to {target}; there are {slugs}"
