"""A server's `/metrics`, as far as the gates and the doctor read it: Prometheus text in, numbers and labels out."""

from __future__ import annotations

import re
from collections.abc import Mapping

_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\S+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Metrics:
    """One reading of `/metrics`."""

    def __init__(self, text: str) -> None:
        self._samples: list[tuple[str, dict[str, str], float]] = []
        for line in text.splitlines():
            match = None if line.startswith("#") else _LINE.fullmatch(line.strip())
            if match:
                labels = dict(_LABEL.findall(match[2] or ""))
                try:
                    self._samples.append((match[1], labels, float(match[3])))
                except ValueError:
                    continue

    def total(self, name: str, **labels: str) -> float | None:
        """The sum over all engines of a metric with these labels; None when the server has no such metric."""
        values = [value for found, has, value in self._samples if found == name and labels.items() <= has.items()]
        return sum(values) if values else None

    def labels(self, name: str) -> Mapping[str, str]:
        """The labels of the first sample of a metric, empty when there is none: vLLM's `_info` metrics."""
        return next((labels for found, labels, _ in self._samples if found == name), {})

    def names(self, prefix: str) -> list[str]:
        """The metrics whose name starts with `prefix`, each once, sorted."""
        return sorted({name for name, _, _ in self._samples if name.startswith(prefix)})
