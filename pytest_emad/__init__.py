"""The pytest plugin: options, fixtures, hooks and reports around ``emad_ref``; importing it imports no torch."""

from pathlib import Path

# A wheel holds the suites inside this package; a checkout has them next to it. So that `--pyargs pytest_emad.suites`
# also finds them after `pip install -e .`, submodules are then looked up in the checkout too.
if not Path(__file__).with_name("suites").is_dir():
    __path__.append(str(Path(__file__).resolve().parents[1]))
