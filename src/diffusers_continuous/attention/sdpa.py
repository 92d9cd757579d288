"""The reference backend: torch's scaled_dot_product_attention, rows of equal length together, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ..devices import broadcasts_masks

if TYPE_CHECKING:
    from ..models.interface import JointRows, Run


class SDPABackend:
    """One kernel call per run of equal-length rows, with a mask only where a batch is padded."""

    name = "sdpa"
    isolates_rows = True

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: JointRows) -> torch.Tensor:
        """(tokens, heads, head_dim) each -> (tokens, heads * head_dim)."""
        if len(rows.runs) == 1:
            return _attend(q, k, v, rows.runs[0], _key_mask(rows)).flatten(0, 1).flatten(1)
        out = torch.empty_like(q)
        for run in rows.runs:
            out[run.start : run.stop].view(run.num_rows, run.length, *q.shape[1:]).copy_(_attend(q, k, v, run))
        return out.flatten(1)


def _key_mask(rows: JointRows) -> torch.Tensor | None:
    """(rows, 1, 1, length) bool, False at padding. None where nothing is padded: any mask takes a slower kernel."""
    if rows.valid is None:
        return None
    if "key_mask" not in rows.kept:
        length = rows.runs[0].length
        key_mask = rows.valid.view(-1, 1, 1, length)
        rows.kept["key_mask"] = key_mask if broadcasts_masks(key_mask.device) else key_mask.expand(-1, -1, length, -1)
    mask: torch.Tensor = rows.kept["key_mask"]
    return mask


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, run: Run, key_mask: torch.Tensor | None = None
) -> torch.Tensor:
    def rows(x: torch.Tensor) -> torch.Tensor:
        """(tokens, heads, head_dim) of everybody -> this run's (rows, heads, length, head_dim), a view."""
        view = x[run.start : run.stop].unflatten(0, (run.num_rows, run.length))
        return view.transpose(1, 2)  # (rows, heads, length, head_dim)

    return F.scaled_dot_product_attention(rows(q), rows(k), rows(v), attn_mask=key_mask).transpose(1, 2)
