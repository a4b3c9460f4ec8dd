"""A user-defined optimizer: Muon for the matrices of the layers, AdamW for all other weights.

    fastppo train --optimizer examples/optimizer.py:MuonAdamW --learning_rate 1.0e-5 …

Muon (Jordan et al. 2024) orthogonalizes the momentum of a matrix. `match_rms_adamw` scales its
update to the size of AdamW's (Moonshot AI 2025, arXiv:2502.16982), so both share one learning rate.
Needs torch 2.9.
"""

from typing import Any

import torch


class MuonAdamW(torch.optim.Optimizer):
    """Muon and AdamW over FastPPO's parameter groups, which have the names of their weights."""

    def __init__(self, groups: list[dict[str, Any]], momentum=0.95, betas=(0.9, 0.95)) -> None:
        parts: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for group in groups:
            for is_muon, part in parts.items():
                pairs = zip(group["params"], group["param_names"], strict=True)
                chosen = [(p, n) for p, n in pairs if (p.ndim == 2 and "layers." in n) == is_muon]
                if chosen:
                    weights, names = map(list, zip(*chosen, strict=True))
                    part.append({**group, "params": weights, "param_names": names})
        self.made = {}
        if parts[True]:
            self.made[True] = torch.optim.Muon(
                parts[True], momentum=momentum, adjust_lr_fn="match_rms_adamw"
            )
        if parts[False]:
            self.made[False] = torch.optim.AdamW(parts[False], betas=betas)
        for is_muon, optimizer in self.made.items():
            for group in optimizer.param_groups:
                group["is_muon"] = is_muon
        super().__init__([g for made in self.made.values() for g in made.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for is_muon, optimizer in self.made.items():
            # Loading a checkpoint replaces both.
            optimizer.param_groups = [g for g in self.param_groups if g["is_muon"] == is_muon]
            optimizer.state = self.state
            optimizer.step()
