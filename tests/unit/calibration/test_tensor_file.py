"""Tensor files: tensors and JSON are restored, and any fault of a file raises the reader's own error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from emad_ref.calibration.tensor_files import build_from_tensor_file, save_tensors
from emad_ref.errors import BadArgument, EmadError
from emad_ref.files import BadFile

TENSORS = {"a": torch.tensor([0.1, -2.0], dtype=torch.float64), "b": torch.arange(6).reshape(2, 3)}
ABOUT = {"said": "ü", "numbers": [1, 0.1]}


class BadThing(EmadError):
    """The error that this file's reader raises."""


def load(path: Path, make: Any) -> Any:
    return build_from_tensor_file(path, "thing", make, BadThing, writer="emad thing", remedy="make it again")


def both(tensors: dict[str, Tensor], about: dict[str, Any]) -> Any:
    return tensors, about


def refused(tensors: dict[str, Tensor], about: dict[str, Any]) -> Any:
    raise BadArgument("a", 1, "2")


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    save_tensors(tmp_path / "t", "thing", TENSORS, ABOUT)
    tensors, about = load(tmp_path / "t", both)
    assert about == ABOUT
    assert {name: (one.dtype, one.tolist()) for name, one in tensors.items()} == {
        name: (one.dtype, one.tolist()) for name, one in TENSORS.items()
    }


def test_what_is_wrong_says_what_to_do(tmp_path: Path) -> None:
    save_tensors(tmp_path / "t", "thing", TENSORS, ABOUT)
    with pytest.raises(BadThing, match=r"^thing='.*/t': a=1, but expected 2; make it again$"):
        load(tmp_path / "t", refused)
    with pytest.raises(BadThing, match=r"cannot be read \(it has no 'x'\), but expected one that `emad thing` wrote; "):
        load(tmp_path / "t", lambda tensors, about: about["x"])
    (tmp_path / "t").write_bytes(b"no safetensors")
    with pytest.raises(BadThing, match=r"cannot be read .* make it again$"):
        load(tmp_path / "t", both)
    with pytest.raises(BadFile, match="thing="):
        load(tmp_path / "none", both)
