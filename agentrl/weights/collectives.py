"""What rank 0 knows, on every rank: collectives of the trainer beside the gradients."""

import torch
import torch.distributed as dist


def shared_decision(decision: bool, device: torch.device) -> bool:
    """Rank 0's decision, on every rank."""
    flag = torch.tensor([int(decision)], device=device)
    dist.broadcast(flag, src=0)
    return bool(flag.item())


def broadcast_bytes(payload: bytes, device: torch.device) -> bytes:
    """Rank 0's bytes on every rank."""
    size = torch.tensor([len(payload)], dtype=torch.long, device=device)
    dist.broadcast(size, src=0)
    data = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    if dist.get_rank() == 0:
        data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    dist.broadcast(data, src=0)
    return data.cpu().numpy().tobytes()
