"""``python -m emad_ref VERB …``: the same as ``emad VERB …``."""

import sys

from emad_ref.cli import main

sys.exit(main())
