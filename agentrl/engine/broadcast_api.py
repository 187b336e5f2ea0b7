"""HTTP calls, as SGLang has them, to receive weights through a process group.

The order of the calls is: join, begin, receive bucket by bucket, end, leave.

Guarantees: tensors that do not fit the live model are refused before anything is received; a bucket is received whole
before the first of its values is written; waiting for the sender blocks neither the event loop nor the model.
"""

import asyncio
from typing import Any

import torch
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from agentrl.engine.control_api import service_of, text, version_label
from agentrl.engine.params import BadRequestError, boolean, integer
from agentrl.engine.responses import json_body, json_response
from agentrl.engine.service import Service, settled
from agentrl.engine.weight_store import check_fit
from agentrl.weights.update_group import UpdateGroup, find_store

JOIN_SECONDS = 120.0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


async def init_group(http: HttpRequest) -> Response:
    """Handle ``POST /init_weights_update_group``: join the sender's group, and wait until all members have joined."""
    body, service = await json_body(http), service_of(http)
    name = text("group_name", body.get("group_name"))
    host = text("master_address", body.get("master_address"))
    port = integer("master_port", body.get("master_port"), 1, 65535)
    world_size = integer("world_size", body.get("world_size"), 2, 65536)
    rank = integer("rank_offset", body.get("rank_offset"), 1, world_size - 1)
    backend = body.get("backend", "nccl")
    if backend not in ("gloo", "nccl"):
        raise BadRequestError(f"backend must be gloo or nccl, got {backend!r:.80}")
    if name in service.update_groups:
        raise BadRequestError(f"group {name!r} exists")

    def join() -> UpdateGroup:
        store = find_store(host, port, world_size, JOIN_SECONDS)
        return UpdateGroup(store, name, rank, world_size, backend, JOIN_SECONDS)

    try:
        service.update_groups[name] = await asyncio.to_thread(join)
    except (RuntimeError, ValueError) as error:
        raise BadRequestError(f"cannot join group {name!r} at {host}:{port}: {error}") from error
    return json_response({"success": True, "message": f"Rank {rank} of {world_size} in {name}."})


async def destroy_group(http: HttpRequest) -> Response:
    """Handle ``POST /destroy_weights_update_group {group_name}``."""
    name = text("group_name", (await json_body(http)).get("group_name"))
    group = service_of(http).update_groups.pop(name, None)
    if group is None:
        raise BadRequestError(f"there is no group {name!r}")
    await asyncio.to_thread(group.close)
    return json_response({"success": True, "message": f"Left {name}."})


async def begin_update(http: HttpRequest) -> Response:
    """Handle ``POST /begin_weight_update``."""
    await json_body(http, optional=True)
    service = service_of(http)
    if service.updating:
        raise BadRequestError("a weight update has begun already; end it first")
    service.updating = True
    return json_response({"success": True, "message": "Weight update begun."})


async def end_update(http: HttpRequest) -> Response:
    """Handle ``POST /end_weight_update``."""
    await json_body(http, optional=True)
    service = service_of(http)
    if not service.updating:
        raise BadRequestError("no weight update has begun")
    service.updating = False
    return json_response({"success": True, "message": "Weight update ended."})


async def update_from_distributed(http: HttpRequest) -> Response:
    """Handle ``POST /update_weights_from_distributed {names, dtypes, shapes, group_name, weight_version, ...}``."""
    body, service = await json_body(http), service_of(http)
    if not service.updating:
        raise BadRequestError("no weight update has begun: call /begin_weight_update first")
    name = text("group_name", body.get("group_name"))
    group = service.update_groups.get(name)
    if group is None:
        raise BadRequestError(f"there is no group {name!r}: call /init_weights_update_group first")
    version = version_label(body.get("weight_version"))
    abort_all = boolean("abort_all_requests", body.get("abort_all_requests", False))
    tensors = await _expected(body, service)

    def receive() -> None:
        for tensor in tensors.values():
            group.broadcast(tensor)

    try:
        await asyncio.to_thread(receive)
    except RuntimeError as error:
        service.update_groups.pop(name, None)  # the group is broken: the sender makes another one
        await asyncio.to_thread(group.close)
        raise BadRequestError(f"the broadcast of group {name!r} failed, nothing was changed: {error}") from error
    taken = await settled(service.engine.take(tensors, version, abort_all=abort_all))
    return json_response({"success": True, "message": f"Took {len(tensors)} tensors, {taken} bytes."})


async def _expected(body: dict[str, Any], service: Service) -> dict[str, torch.Tensor]:
    """Allocates empty tensors for a bucket, after a check against the live model."""
    names, dtypes, shapes = (body.get(key) for key in ("names", "dtypes", "shapes"))
    if not (isinstance(names, list) and isinstance(dtypes, list) and isinstance(shapes, list)):
        raise BadRequestError("names, dtypes and shapes must be lists")
    if not len(names) == len(dtypes) == len(shapes) or len(set(map(str, names))) != len(names):
        raise BadRequestError("names, dtypes and shapes must have the same length, and names must be unique")
    unknown = sorted({str(dtype) for dtype in dtypes if dtype not in DTYPES})
    if unknown:
        raise BadRequestError(f"dtypes {unknown} are not known; known: {', '.join(DTYPES)}")
    sizes = [[integer("shapes", size, 0, 2**40) for size in shape] for shape in shapes]
    model = service.loaded.model
    wanted = {str(name): (shape, True) for name, shape in zip(names, sizes, strict=True)}
    await settled(service.engine.call(lambda: check_fit(dict(model.state_dict()), wanted)))
    device = service.loaded.device
    return {
        str(name): torch.empty(shape, dtype=DTYPES[dtype], device=device)
        for name, dtype, shape in zip(names, dtypes, sizes, strict=True)
    }
