"""Muon for the matrices, AdamW for the embedding and the norms, stepped as one."""

from typing import Any

import torch
from torch import Tensor

_MUON_RATE = 0.007
_ADAMW_RATE = 1.5e-3


class Optimizers:
    """Both optimizers over the parameters of the model."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        matrices = [w for name, w in weights.items() if name.endswith("proj.weight")]
        self._rest = [w for name, w in weights.items() if not name.endswith("proj.weight")]
        self._muon = torch.optim.Muon(matrices, lr=_MUON_RATE, weight_decay=0.0)
        self._adamw = torch.optim.AdamW(
            self._rest, lr=_ADAMW_RATE, betas=(0.9, 0.98), weight_decay=0.0
        )

    def step(self, factor: float) -> None:
        """Change the parameters by their gradients, at `factor` times the full rates."""
        torch.nn.utils.clip_grad_norm_(self._rest, 1.0)
        for optimizer, rate in ((self._muon, _MUON_RATE), (self._adamw, _ADAMW_RATE)):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()  # type: ignore[no-untyped-call]
            optimizer.zero_grad()

    def state(self) -> list[dict[str, Any]]:
        """Give everything that the next step depends on besides the parameters."""
        return [self._muon.state_dict(), self._adamw.state_dict()]

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Go on from a `state`."""
        self._muon.load_state_dict(state[0])
        self._adamw.load_state_dict(state[1])
