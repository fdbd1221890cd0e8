from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from inpage.errors import ConfigError
from inpage.replay.compare import compare, gain_text, number, render_table
from inpage.replay.report import Section, write_report
from inpage.replay.result import ArmResult

MakeArm = Callable[..., ArmResult]
EVIL = "<script>alert('&\"')</script>"
VOID = {"meta", "path", "use", "br"}


def page(results: Sequence[ArmResult], out: Path, sections: Sequence[Section] = ()) -> str:
    return write_report(results, out, title="Replay", sections=sections).read_text()


def terminal(results: Sequence[ArmResult], width: int = 100) -> str:
    console = Console(width=width, record=True, color_system=None)
    with console.capture() as capture:
        console.print(render_table(results))
    return capture.get()


class Balance(HTMLParser):
    """Checks that tags close in order and that no tag asks for anything from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.asks: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name in ("src", "href", "xlink:href", "action", "data") and not str(value).startswith("#"):
                self.asks.append(f"{tag} {name}={value}")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def test_the_page_is_well_formed_and_asks_for_nothing_from_elsewhere(make_arm: MakeArm, tmp_path: Path) -> None:
    html = page([make_arm("off"), make_arm("in-page", scale=0.5)], tmp_path)
    balance = Balance()
    balance.feed(html)
    assert balance.open == []
    assert balance.asks == []
    assert len(balance.ids) == len(set(balance.ids))
    # The only addresses are those of the servers, as text.
    assert set(re.findall(r"https?:[^<\"' ]+", html)) == {"http://127.0.0.1:1"}
    assert not re.search(r"@import|<script|<link|url\((?!#)", html)
    assert html.count("<svg") == 3


def test_everything_from_outside_is_escaped(make_arm: MakeArm, tmp_path: Path) -> None:
    arm = make_arm(EVIL, model=EVIL, note=EVIL, base_url=EVIL, server_version=EVIL, started_at=EVIL)
    failed = arm.turns[1].model_copy(update={"error": EVIL})
    arm = arm.model_copy(update={"turns": [arm.turns[0], failed]})
    section = Section(EVIL, EVIL, ((EVIL,), ((EVIL,),)))
    html = write_report([arm], tmp_path, title=EVIL, sections=[section]).read_text()
    assert "<script" not in html
    assert "&lt;script&gt;" in html


def test_markup_from_outside_is_text_in_the_terminal(make_arm: MakeArm) -> None:
    assert "[bold red]x[/]: [/] broken" in terminal([make_arm("[bold red]x[/]", note="[/] broken")])


def test_the_plots_lie_beside_the_page_as_png(make_arm: MakeArm, tmp_path: Path) -> None:
    page([make_arm()], tmp_path)
    for name in ("ttft_by_turn", "hit_rate_by_turn", "wall_and_decode"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_is_the_same_for_the_same_results(make_arm: MakeArm, tmp_path: Path) -> None:
    assert page([make_arm()], tmp_path / "a") == page([make_arm()], tmp_path / "b")


def test_gains_are_against_the_first_arm(make_arm: MakeArm, tmp_path: Path) -> None:
    arms = [make_arm("off"), make_arm("in-page", scale=0.25)]
    rows = {row.label: row.cells for row in compare(arms).rows}
    assert rows["wall (s)"] == (("20.0", None), ("5.00", 4.0))
    assert rows["TTFT later, mean (s)"] == (("2.00", None), ("0.500", 4.0))
    assert rows["decode, mean (tok/s)"] == (("25.0", None), ("100", 4.0))
    assert rows["hit rate, later turns"] == (("45.0%", None), ("45.0%", None))
    assert rows["turns done / planned"] == (("4 / 4", None), ("4 / 4", None))
    assert "<td>5.00<small>4.00× faster</small></td>" in page(arms, tmp_path)
    assert "5.00 4.00×" in terminal(arms)


def test_other_transcripts_stand_side_by_side_only_with_a_warning_and_without_gains(
    make_arm: MakeArm, tmp_path: Path
) -> None:
    arms = [make_arm("off"), make_arm("native"), make_arm("in-page", digest="e" * 64)]
    comparison = compare(arms)
    assert comparison.warnings[0].startswith("not the same work: in-page ran other transcripts than off")
    gains = [cells[1:] for row in comparison.rows if (cells := [gain for _, gain in row.cells])]
    assert {in_page for _, in_page in gains} == {None}
    assert any(native for native, _ in gains)
    assert "not the same work: in-page" in page(arms, tmp_path)
    assert "not the same work: in-page" in terminal(arms)


def test_an_arm_that_did_not_finish_is_told_and_has_no_gain(make_arm: MakeArm) -> None:
    arm = make_arm("in-page", note="interrupted")
    arm = arm.model_copy(update={"turns": arm.turns[:3]})
    comparison = compare([make_arm("off"), arm])
    assert comparison.warnings == ("in-page: interrupted", "in-page: 3 of 4 turns done; no ratio is given")
    for order in ([make_arm("off"), arm], [arm, make_arm("off")]):
        assert not any(gain for row in compare(order).rows for _, gain in row.cells)


def test_errors_are_told_with_their_first_message(make_arm: MakeArm) -> None:
    arm = make_arm()
    failed = arm.turns[1].model_copy(update={"error": "HTTP 500: no"})
    arm = arm.model_copy(update={"turns": [arm.turns[0], failed, *arm.turns[2:]]})
    assert compare([arm]).warnings[0] == (
        "off: 1 of 2 sessions ended in an error; the first: session 0, turn 2: HTTP 500: no"
    )


def test_a_hit_rate_that_is_not_reported_says_which_flag_is_missing(make_arm: MakeArm, tmp_path: Path) -> None:
    arm = make_arm()
    silent = [turn.model_copy(update={"cached_tokens": None}) for turn in arm.turns]
    arms = [arm.model_copy(update={"turns": silent}), make_arm("in-page")]
    rows = {row.label: [value for value, _ in row.cells] for row in compare(arms).rows}
    assert rows["hit rate, all turns"] == ["not reported", "40.0%"]
    assert rows["cached tokens, mean"] == ["not reported", "90.0"]
    assert "--enable-prompt-tokens-details" in terminal(arms)
    assert "--enable-prompt-tokens-details" in page(arms, tmp_path)


def test_without_any_hit_rate_there_is_no_plot_of_it_and_no_stale_file(make_arm: MakeArm, tmp_path: Path) -> None:
    arm = make_arm()
    page([arm], tmp_path)
    silent = [turn.model_copy(update={"cached_tokens": None}) for turn in arm.turns]
    assert page([arm.model_copy(update={"turns": silent})], tmp_path).count("<svg") == 2
    assert not (tmp_path / "hit_rate_by_turn.png").exists()


def test_an_arm_without_a_single_turn_still_has_a_report(make_arm: MakeArm, tmp_path: Path) -> None:
    assert "0 of 4 turns done" in page([make_arm(turns=[])], tmp_path)


def test_the_same_arm_twice_is_told_apart(make_arm: MakeArm, tmp_path: Path) -> None:
    assert compare([make_arm(), make_arm(), make_arm("x")]).labels == ("off", "off (2)", "x")
    assert "off (2)" in page([make_arm(), make_arm()], tmp_path)


def test_sections_of_the_caller_are_on_the_page(make_arm: MakeArm, tmp_path: Path) -> None:
    section = Section("Exactness", "One.\n\nTwo.", (("gate", "result"), (("parity", "32/32"),)))
    html = page([make_arm()], tmp_path, [section])
    assert "<h2>Exactness</h2>\n<p>One.</p>\n<p>Two.</p>" in html
    assert "<td>parity</td><td>32/32</td>" in html


def test_a_report_about_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no result to report"):
        write_report([], tmp_path, title="x")


def test_four_arms_fit_a_terminal_of_80_columns(make_arm: MakeArm) -> None:
    lines = terminal([make_arm(a) for a in ("off", "native", "per-block", "in-page")], width=80).splitlines()
    assert sum("TTFT" in line for line in lines) == 6
    assert all("(s)" in line for line in lines if "TTFT" in line)


@pytest.mark.parametrize(
    ("value", "text"), [(1214.4, "1,214"), (31.62, "31.6"), (2.6, "2.60"), (0.0431, "0.043"), (0.0, "0.000")]
)
def test_figures_have_about_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_gains_read_as_words() -> None:
    assert gain_text(4.32, "less") == "4.32× faster"
    assert gain_text(0.5, "less") == "2.00× slower"
    assert gain_text(2.4, "more") == "2.40× higher"
    assert gain_text(0.8, "more") == "1.25× lower"
    assert gain_text(1.004, "more") == "same"
