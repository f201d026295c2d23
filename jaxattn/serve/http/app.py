"""The FastAPI application: OpenAI's urls, /health and /metrics."""

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxattn.serve.http.exchange import Exchange
from jaxattn.serve.http.guard import Guard
from jaxattn.serve.http.replies import error_reply, reply
from jaxattn.serve.http.service import Service
from jaxattn.serve.http.settings import ServerSettings
from jaxattn.serve.openai import schemas
from jaxattn.serve.openai.bodies import ChatBody, CompletionBody
from jaxattn.serve.openai.errors import RequestError
from jaxattn.serve.openai.requests import CHAT_COMPLETIONS, COMPLETIONS

_ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 503, 504)


def create_app(service: Service) -> FastAPI:
    """The application of a service; it starts and stops the service with its own lifespan."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        service.start()
        yield
        await service.stop()

    app = FastAPI(
        title="jaxattn",
        summary="Gemma 3 by OpenAI's API.",
        version="1",
        docs_url=None,  # both pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.add_middleware(Guard, service=service)
    _add_error_handlers(app)
    _add_completions(app, service)
    _add_models(app, service)
    _add_monitoring(app, service)
    _add_openapi(app, service.settings)
    return app


def _add_completions(app: FastAPI, service: Service) -> None:
    @app.post(COMPLETIONS, **_documents(CompletionBody, schemas.CompletionResponse))
    async def completions() -> Response:
        """Continue prompts."""
        return Exchange(service, COMPLETIONS)

    @app.post(CHAT_COMPLETIONS, **_documents(ChatBody, schemas.ChatResponse))
    async def chat_completions() -> Response:
        """Answer a conversation."""
        return Exchange(service, CHAT_COMPLETIONS)


def _add_models(app: FastAPI, service: Service) -> None:
    card = {
        "id": service.settings.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "jaxattn",
        "max_model_len": service.llm.engine.max_model_len,
    }

    @app.get("/v1/models", **_answers(schemas.ModelList, 401, 500))
    async def models() -> Response:
        """The model that is served."""
        return reply({"object": "list", "data": [card]})

    @app.get("/v1/models/{model:path}", **_answers(schemas.ModelCard, 401, 404, 500))
    async def model(model: str) -> Response:
        """A model, by its name."""
        service.check_model(model)
        return reply(card)


def _add_monitoring(app: FastAPI, service: Service) -> None:
    @app.get("/health", **_answers(schemas.Health, 500, 503))
    async def health() -> Response:
        """Whether requests are taken; needs no API key."""
        service.check_ready()
        return reply({"status": "ok"})

    text = {"content": {CONTENT_TYPE_LATEST: {"schema": {"type": "string"}}}}

    @app.get("/metrics", responses={200: text, **_errors(401, 500)}, response_class=Response)
    async def metrics() -> Response:
        """Numbers for Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> Response:
        return error_reply(error)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        what = f"{request.method} {request.url.path}"
        message = {404: f"there is no {what}", 405: f"the method of {what} is not allowed"}
        told = RequestError(
            error.status_code,
            message.get(error.status_code, f"{what}: {error.detail}"),
            code={404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code),
        )
        return error_reply(told, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> Response:
        return error_reply(RequestError(500, type(error).__name__, code="internal_error"))


def _documents(body: type[BaseModel], response: type[BaseModel]) -> dict[str, Any]:
    """What OpenAPI says of a url that takes a body; the body is checked by `parse`."""
    content = {"application/json": {"schema": schemas.reference(body)}}
    options = _answers(response, *_ERRORS)
    stream = {"schema": {"description": "With stream: server-sent events, the last is [DONE]."}}
    options["responses"][200]["content"] = {"text/event-stream": stream}
    return options | {"openapi_extra": {"requestBody": {"required": True, "content": content}}}


def _answers(response: type[BaseModel], *statuses: int) -> dict[str, Any]:
    return {
        "response_model": None,
        "responses": {200: {"model": response, "description": "OK"}, **_errors(*statuses)},
    }


def _errors(*statuses: int) -> dict[int | str, Any]:
    return {
        status: {"model": schemas.ErrorBody, "description": HTTPStatus(status).phrase}
        for status in statuses
    }


def _add_openapi(app: FastAPI, settings: ServerSettings) -> None:
    """Bodies that FastAPI does not read are described all the same."""

    def openapi() -> dict[str, Any]:
        if not app.openapi_schema:
            document = get_openapi(
                title=app.title, version=app.version, summary=app.summary, routes=app.routes
            )
            _, bodies = models_json_schema(
                [(CompletionBody, "validation"), (ChatBody, "validation")],
                ref_template="#/components/schemas/{model}",
            )
            for model in (CompletionBody, ChatBody):
                bodies["$defs"][model.__name__]["properties"]["model"]["enum"] = [
                    settings.model_name
                ]
            document["components"]["schemas"] |= bodies["$defs"]
            if settings.api_key is not None:
                bearer = {"type": "http", "scheme": "bearer"}
                document["components"]["securitySchemes"] = {"key": bearer}
                document["security"] = [{"key": []}]
                document["paths"]["/health"]["get"]["security"] = []
            app.openapi_schema = document
        return app.openapi_schema

    setattr(app, "openapi", openapi)  # noqa: B010 (mypy: a method is not assigned to)
