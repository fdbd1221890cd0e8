"""The dashboard and the docs page have the metrics that the code has, no more and no fewer."""

from __future__ import annotations

import json
import re
from pathlib import Path

from inpage.metrics.catalogue import METRICS

ROOT = Path(__file__).parents[2]
NAMES = {metric.exposed_name for metric in METRICS}
DASHBOARD = json.loads((ROOT / "dashboards" / "inpage.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def named_in(text: str) -> set[str]:
    return set(re.findall(r"\binpage_\w+", text))


def test_every_expression_of_the_dashboard_names_metrics_that_exist():
    expressions = [target["expr"] for panel in PANELS for target in panel["targets"]]
    expressions += [v["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    for expression in expressions:
        assert named_in(expression), expression
        assert named_in(expression) <= NAMES, expression
        assert expression.count("(") == expression.count(")")
        assert expression.count("{") == expression.count("}")


def test_every_metric_is_on_the_dashboard():
    assert {n for panel in PANELS for target in panel["targets"] for n in named_in(target["expr"])} == NAMES


def test_labels_that_the_dashboard_groups_by_exist():
    known = {"engine", "model_name"} | {metric.label for metric in METRICS if metric.label}
    text = json.dumps(PANELS)
    assert set(re.findall(r"by \((\w+)\)", text)) <= known
    assert set(re.findall(r"\{\{(\w+)\}\}", text)) <= known


def test_counters_are_shown_as_rates_and_levels_as_they_are():
    counters = {metric.exposed_name for metric in METRICS if metric.kind == "counter"}
    for panel in PANELS:
        for target in panel["targets"]:
            for name in named_in(target["expr"]):
                assert (f"rate({name}" in target["expr"]) == (name in counters), target["expr"]


def test_panels_do_not_overlap_and_have_ids_of_their_own():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken = set()
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken
        assert grid["x"] + grid["w"] <= 24
        taken |= cells


def test_the_page_explains_every_metric_and_no_other():
    page = (ROOT / "docs" / "metrics.md").read_text()
    table = page.split("## What there is")[1].split("##")[0]
    rows = re.findall(r"^\| `(inpage_\w+)` \| (\w+) \|", table, re.MULTILINE)
    assert dict(rows) == {metric.exposed_name: metric.kind for metric in METRICS}
    assert len(rows) == len(METRICS)
    assert named_in(page) <= NAMES
    for metric in METRICS:
        for value in metric.fields:
            assert not value or f'"{value}"' in table
