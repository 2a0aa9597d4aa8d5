"""The paper's cost of using two models: tokens weighted by parameters (EAD, abstract).

    cost = (n_S · P_S + n_L · P_L) / (n · P_L)

Symbols: P_S, P_L parameters of the small and the large model; n_S, n_L tokens each *processed*; n tokens emitted. The
headline counts one processed token per emitted one, n_S + n_L = n, so that with the large model's share s it is
s + (1 − s) · P_S / P_L. Tokens read to catch up make n_S + n_L larger (EAD-H2); the prompt is left to the caller.

A count of parameters is no measurement: attention, readouts and time are in ``flops`` and ``clock``.
"""

from __future__ import annotations

from emad_ref.errors import BadArgument


def relative_cost(
    small_tokens: float, large_tokens: float, emitted: float, *, small_parameters: float, large_parameters: float
) -> float:
    """Parameter-weighted tokens processed by both models, over those of the large model alone.

    Raises:
        BadArgument: negative token counts, none emitted, parameters ≤ 0.
    """
    if min(small_tokens, large_tokens) < 0:
        raise BadArgument("small_tokens, large_tokens", (small_tokens, large_tokens), "token counts ≥ 0")
    if not emitted > 0:
        raise BadArgument("emitted", emitted, "at least one emitted token")
    if not min(small_parameters, large_parameters) > 0:
        raise BadArgument("parameters", (small_parameters, large_parameters), "parameter counts > 0")
    return (small_tokens * small_parameters + large_tokens * large_parameters) / (emitted * large_parameters)


def token_share_cost(large_share: float, *, small_parameters: float, large_parameters: float) -> float:
    """The headline's cost, s + (1 − s) · P_S / P_L, of the large model alone; the saving is 1 minus it.

    >>> round(token_share_cost(0.43, small_parameters=3e9, large_parameters=11e9), 4)
    0.5855

    Raises:
        BadArgument: a share outside 0–1, parameters ≤ 0.
    """
    if not 0 <= large_share <= 1:
        raise BadArgument("large_share", large_share, "a share in 0–1", "43 % is 0.43")
    return relative_cost(
        1 - large_share, large_share, 1.0, small_parameters=small_parameters, large_parameters=large_parameters
    )
