"""``python -m pytest_emad VERB …``: the same as ``emad VERB …``."""

import sys

from pytest_emad.cli import main

sys.exit(main())
