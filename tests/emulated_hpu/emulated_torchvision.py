"""Lets PyPI's torchvision, a CUDA build, be imported beside a CPU build of torch.

Its operators do not load there, but it registers fakes for two of them while it is imported: their schemas are
declared just before. Qwen3.5 needs torchvision only to be importable.
"""

from __future__ import annotations

import sys
from typing import Any


class _BeforeTorchvision:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            import torch

            _BeforeTorchvision.library = torch.library.Library("torchvision", "DEF")  # type: ignore[attr-defined]
            for operator in ("nms", "qnms"):
                _BeforeTorchvision.library.define(  # type: ignore[attr-defined]
                    f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )


sys.meta_path.insert(0, _BeforeTorchvision())  # type: ignore[arg-type]
