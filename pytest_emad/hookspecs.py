"""The hook of this plugin: it provides the decoder under test.

Implement it in a ``conftest.py`` or in a plugin of your own::

    from emad_ref.protocol import Unsupported
    from mylib import MyDecoder          # offers emad_ref.protocol.Decoder

    def pytest_emad_make_decoder(config, request):
        if request.point.schedule != "monotone":
            raise Unsupported("mylib only lowers depth")   # the claim becomes: not applicable (mylib only lowers depth)
        return MyDecoder(request.model.name, request.point, seed=request.seed, max_rows=request.max_rows)

A packaged decoder is selected by the name of its entry point, ``pytest suites/ --emad-backend mylib``::

    [project.entry-points.pytest11]
    mylib = "mylib.pytest_plugin"
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # imports NumPy, which a run without these tests does not need
    from emad_ref.protocol import Decoder, Request


@pytest.hookspec(firstresult=True)
def pytest_emad_make_decoder(config: pytest.Config, request: Request) -> Decoder | None:
    """Return a decoder for ``request.model`` at ``request.point``, or None to pass the request to the next provider.

    ``request.model.load()`` returns a copy that the decoder may change. The plugin checks its own copy whenever a
    decoder is closed; a change fails the test.

    The reference decoder answers last. If it answers in place of yours, the run fails, unless it has ``--emad-waive
    decoder=REASON``. So raise Unsupported for a request that you cannot serve. Two foreign providers in one run are a
    usage error unless ``--emad-backend`` names one. Then only that provider is called, and None from it is an error.

    Raises
    ------
    emad_ref.protocol.Unsupported
        The decoder cannot serve this request. The claim becomes ``not applicable``.
    """
