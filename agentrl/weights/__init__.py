"""Moves new weights from the trainer's shards to the servers.

``gather`` (full tensors of shards) -> ``file_publisher``, ``adapter_publisher`` or ``broadcast_publisher`` (the trainer
sends) -> ``transaction`` (the controller has all servers load) -> ``update_group`` (servers that receive a broadcast).
The manifest that they exchange is data: ``core.weight_manifest``. No module of the controller's side imports torch.
"""
