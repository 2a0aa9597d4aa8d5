"""The one hook of this plugin: who provides the decoder under test.

Usable as it stands, in a ``conftest.py`` or in a plugin of an accelerator team::

    from emad_ref.protocol import Unsupported
    from mylib import MyDecoder          # offers emad_ref.protocol.Decoder

    def pytest_emad_make_decoder(config, request):
        if request.point.schedule != "monotone":
            raise Unsupported("mylib only lowers depth")   # the claim becomes: not applicable (mylib only lowers depth)
        return MyDecoder(request.model.name, request.point, seed=request.seed, max_rows=request.max_rows)

Packaged, it is chosen by the name of its entry point, ``pytest suites/ --emad-backend mylib``::

    [project.entry-points.pytest11]
    mylib = "mylib.pytest_plugin"
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # it brings NumPy, which a run that judges nothing need not wait for
    from emad_ref.protocol import Decoder, Request


@pytest.hookspec(firstresult=True)
def pytest_emad_make_decoder(config: pytest.Config, request: Request) -> Decoder | None:
    """A decoder for ``request.model`` at ``request.point``, or None to leave the request to the next provider.

    ``request.model.load()`` is a copy for the decoder alone; the judge's own model is held against its seal whenever a
    decoder is closed, and a change of it fails the test.

    Ours answers last, and a run in which it answered for somebody else fails (unless ``--emad-waive decoder=REASON``):
    raise Unsupported for what cannot be served. Two foreign providers in one run are a usage error unless
    ``--emad-backend`` names one; then only that one is asked, and None from it is an error.

    Raises:
        emad_ref.protocol.Unsupported: the decoder cannot serve this request; the claim becomes ``not applicable``.
    """
