"""The table of products of a run: measured once, stored, read back by other processes, and never changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from emad_ref.files import BadFile
from emad_ref.models.fast import product_table
from emad_ref.models.fast.product_table import TABLE_VARIABLE, choose_product, chosen_products, share_product_table

OFFERED = ("linear", "blas")


@pytest.fixture(autouse=True)
def _fresh_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_table, "_known", {})
    monkeypatch.delenv(TABLE_VARIABLE, raising=False)


def measuring(name: str, calls: list[str] | None = None) -> Callable[[], str]:
    def measure() -> str:
        if calls is not None:
            calls.append(name)
        return name

    return measure


def unmeasured() -> str:
    raise AssertionError("the run's table has this class")


def test_without_a_file_a_process_measures_a_class_once() -> None:
    calls: list[str] = []
    assert [choose_product("a", OFFERED, measuring(name, calls)) for name in OFFERED] == ["linear", "linear"]
    assert calls == ["linear"]
    assert chosen_products() == {"a": "linear"}


def test_another_process_reads_what_the_first_has_measured() -> None:
    assert choose_product("before", OFFERED, measuring("blas")) == "blas"
    with share_product_table():
        assert choose_product("a", OFFERED, measuring("blas")) == "blas"
        program = (
            "from emad_ref.models.fast.product_table import choose_product, chosen_products\n"
            "def measure(): raise AssertionError('measured again')\n"
            "for kind in ('a', 'before'): assert choose_product(kind, ('linear', 'blas'), measure) == 'blas'\n"
            "choose_product('b', ('linear',), lambda: 'linear')\n"
            "import sys; assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        )
        subprocess.run([sys.executable, "-c", program], check=True)
        assert chosen_products() == {"a": "blas", "b": "linear", "before": "blas"}
        assert choose_product("b", OFFERED, unmeasured) == "linear"
        with share_product_table():
            assert choose_product("c", OFFERED, measuring("linear")) == "linear"
        assert "c" in chosen_products()
        file = Path(os.environ[TABLE_VARIABLE])
    assert TABLE_VARIABLE not in os.environ
    assert not file.exists()


def test_the_first_of_two_processes_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "products.jsonl"
    monkeypatch.setenv(TABLE_VARIABLE, str(file))

    def meanwhile() -> str:
        file.write_text('{"a": "blas"}\n', encoding="utf-8")
        return "linear"

    assert choose_product("a", OFFERED, meanwhile) == "blas"
    assert choose_product("a", OFFERED, unmeasured) == "blas"
    assert file.read_text(encoding="utf-8") == '{"a": "blas"}\n{"a": "linear"}\n'
    with file.open("a", encoding="utf-8") as being_written:
        being_written.write('{"b": "li')
    assert chosen_products() == {"a": "blas"}


def test_a_recorded_table_replaces_that_of_this_process() -> None:
    choose_product("a", OFFERED, measuring("linear"))
    with share_product_table(), share_product_table({"a": "blas"}):
        lines = Path(os.environ[TABLE_VARIABLE]).read_text(encoding="utf-8").splitlines()
        assert [json.loads(line) for line in lines] == [{"a": "blas"}]


@pytest.mark.parametrize("line", ['{"a": "gemm"}', '{"a": 1}', "no JSON", "[]", '"a"', "{}"])
def test_a_table_with_other_content_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    file = tmp_path / "products.jsonl"
    file.write_text(line + "\n", encoding="utf-8")
    monkeypatch.setenv(TABLE_VARIABLE, str(file))
    with pytest.raises(BadFile, match=rf"{TABLE_VARIABLE}=.*products.jsonl.*expected .*unset {TABLE_VARIABLE}"):
        choose_product("a", OFFERED, unmeasured)


def test_a_table_that_cannot_be_written_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TABLE_VARIABLE, str(tmp_path / "no folder" / "products.jsonl"))
    with pytest.raises(BadFile, match="a file that this process can write"):
        choose_product("a", OFFERED, measuring("linear"))
