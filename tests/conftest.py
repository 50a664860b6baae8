"""Tests that need an accelerator are skipped where there is none."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an accelerator (CUDA)")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
