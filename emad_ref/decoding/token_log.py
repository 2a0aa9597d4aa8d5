"""The ``TokenTable`` and signals of a record under construction, in the order of processing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from emad_ref.record import Floats, Ints, TokenTable


class TokenLog:
    """Columns of ``TokenTable`` for one model or several; a rollback turns ``kept`` off."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, ...]] = []
        self._signal: list[Floats] = []
        self._kept: list[bool] = []
        self._held: dict[tuple[int, int], list[int]] = {}  # (sequence, model) → entry of each position in the cache

    def append(self, sequence: int, model: int, token: int, depth: int, cap: int, phase: int, signal: Floats) -> None:
        """The next token of a sequence in one model; ``signal`` [probes]."""
        entries = self._held.setdefault((sequence, model), [])
        self._rows.append((sequence, len(entries), token, depth, cap, phase, model))
        entries.append(len(self._kept))
        self._kept.append(True)
        self._signal.append(signal)

    def extend(
        self, sequence: int, model: int, tokens: Ints, depth: Ints, cap: Ints, phase: Sequence[int], signal: Floats
    ) -> None:
        """The next tokens of a sequence in one model: all [n], ``signal`` [n, probes]."""
        for columns in zip(tokens.tolist(), depth.tolist(), cap.tolist(), phase, signal, strict=True):
            self.append(sequence, model, *columns)

    def relog_deepened_tokens(
        self, sequence: int, model: int, length: int, depth: Ints, cap: Ints, phase: int, signal: Floats
    ) -> None:
        """Log the tokens from position ``length`` on again at a larger depth; mark their earlier rows as not kept."""
        tokens = np.array([self._rows[entry][2] for entry in self._held[sequence, model][length:]], dtype=np.int64)
        self.truncate(sequence, model, length)
        self.extend(sequence, model, tokens, depth, cap, [phase] * len(tokens), signal)

    def truncate(self, sequence: int, model: int, length: int) -> None:
        """Log a rollback: the tokens from position ``length`` on are no longer part of the sequence."""
        entries = self._held[sequence, model]
        for entry in entries[length:]:
            self._kept[entry] = False
        del entries[length:]

    def to_token_table(self) -> TokenTable:
        sequence, position, token, depth, cap, phase, model = np.array(self._rows, dtype=np.int64).T
        return TokenTable(sequence, position, token, depth, cap, phase, model, np.array(self._kept, dtype=bool))

    def to_signal_array(self) -> Floats:
        """[tokens, most probes of any model]; NaN if a model has fewer or read none."""
        widths = {len(values) for values in self._signal}
        widest = max(widths)
        if len(widths) == 1:
            return np.array(self._signal, dtype=np.float64)
        return np.array([np.pad(values, (0, widest - len(values)), constant_values=np.nan) for values in self._signal])
