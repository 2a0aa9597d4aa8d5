"""The audit is for decoders without torch too."""

from __future__ import annotations

import subprocess
import sys


def test_the_audit_imports_neither_torch_nor_transformers() -> None:
    heavy = ("torch", "transformers", "hypothesis")
    code = f"import sys, emad_ref.audit; print([name for name in {heavy} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
