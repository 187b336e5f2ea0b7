"""Rank 0's decisions on every rank."""

import json
from typing import Any

import torch
import torch.distributed as dist


def shared_decision(decision: bool, device: torch.device) -> bool:
    """Rank 0's decision, on every rank."""
    flag = torch.tensor([int(decision)], device=device)
    dist.broadcast(flag, src=0)
    return bool(flag.item())


def shared_data(data: Any, device: torch.device) -> Any:
    """Rank 0's plain data, on every rank; it travels as JSON."""
    payload = json.dumps(data).encode() if dist.get_rank() == 0 else b""
    size = torch.tensor([len(payload)], dtype=torch.long, device=device)
    dist.broadcast(size, src=0)
    buffer = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    if payload:
        buffer.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    dist.broadcast(buffer, src=0)
    return json.loads(buffer.cpu().numpy().tobytes())
