"""The Starlette application: routes, and the HTTP status of each exception.

Guarantees: bad input is 400, a pause that another client holds 409, a full queue or a loading model 503, a failed model
step 500; all with ``{"error": {"message": ...}}``, and none stops the engine.
"""

from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from agentrl.engine import broadcast_api, control_api, generate_api, openai_api
from agentrl.engine.engine import QueueFullError
from agentrl.engine.params import BadRequestError
from agentrl.engine.pause_lease import HeldError
from agentrl.engine.responses import error_response
from agentrl.engine.service import NotReadyError, Service, StepFailedError

STATUS: dict[type[Exception], int] = {
    BadRequestError: 400,
    ClientDisconnect: 400,
    QueueFullError: 503,
    NotReadyError: 503,
    CancelledError: 503,
    HeldError: 409,
    StepFailedError: 500,
    Exception: 500,
}
Handler = Callable[[HttpRequest], Awaitable[Response]]
ROUTES: tuple[tuple[str, Handler, tuple[str, ...]], ...] = (
    ("/generate", generate_api.generate, ("POST", "PUT")),
    ("/v1/chat/completions", openai_api.chat, ("POST",)),
    ("/v1/completions", openai_api.completions, ("POST",)),
    ("/v1/models", openai_api.models, ("GET",)),
    ("/pause_generation", control_api.pause, ("POST",)),
    ("/renew_pause", control_api.renew, ("POST",)),
    ("/continue_generation", control_api.resume, ("POST",)),
    ("/abort_request", control_api.abort, ("POST",)),
    ("/update_weights_from_disk", control_api.update_from_disk, ("POST",)),
    ("/init_weights_update_group", broadcast_api.init_group, ("POST",)),
    ("/destroy_weights_update_group", broadcast_api.destroy_group, ("POST",)),
    ("/begin_weight_update", broadcast_api.begin_update, ("POST",)),
    ("/update_weights_from_distributed", broadcast_api.update_from_distributed, ("POST",)),
    ("/end_weight_update", broadcast_api.end_update, ("POST",)),
    ("/update_weight_version", control_api.update_version, ("POST",)),
    ("/weights_checker", control_api.weights_checker, ("POST",)),
    ("/get_weights_by_name", control_api.get_weights, ("POST", "GET")),
    ("/flush_cache", control_api.flush_cache, ("GET", "POST")),
    ("/health", control_api.health, ("GET",)),
    ("/ready", control_api.ready, ("GET",)),
    ("/model_info", control_api.model_info, ("GET",)),
    ("/server_info", control_api.server_info, ("GET",)),
)


def build_app(service: Service) -> Starlette:
    """The application over a service.

    Args:
        service: Over a started engine, whose model may still be loading.
    """
    app = Starlette(
        routes=[Route(path, handler, methods=list(methods)) for path, handler, methods in ROUTES],
        exception_handlers={
            **dict.fromkeys(STATUS, _answer),
            HTTPException: _answer_http,
            Exception: _answer,  # Starlette answers with it and still logs the traceback
        },
    )
    app.state.service = service
    return app


async def _answer(http: HttpRequest, error: Exception) -> Response:
    status = next(status for kind, status in STATUS.items() if isinstance(error, kind))
    return error_response(str(error) or type(error).__name__, status)


async def _answer_http(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(f"{error.detail}: {http.method} {http.url.path}", error.status_code)
