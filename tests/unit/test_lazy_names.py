"""The package offers its names lazily: importing it costs nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

import emad_ref


@pytest.mark.parametrize("name", emad_ref.__all__)
def test_every_name_on_offer_resolves(name):
    assert getattr(emad_ref, name) is not None
    assert name in dir(emad_ref)


def test_a_name_not_on_offer_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'teleport'"):
        _ = emad_ref.teleport


@pytest.mark.parametrize(
    "module", ["emad_ref", "emad_ref.cli", "emad_ref.protocol", "emad_ref.point", "emad_ref.signals"]
)
def test_importing_the_light_modules_loads_nothing_heavy(module):
    heavy = ("torch", "transformers", "hypothesis", "sklearn", "scipy")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
