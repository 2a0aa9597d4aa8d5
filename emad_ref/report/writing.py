"""Reports are written as every file is: see ``emad_ref.files``."""

from __future__ import annotations

from emad_ref.files import write_atomically

__all__ = ["write_atomically"]
