"""GET /docs: the API's documentation, whose scripts this server holds itself, so that no other site is asked."""

from __future__ import annotations

from pathlib import Path

import fastapi_offline
from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles

_SCRIPTS = Path(fastapi_offline.__file__).parent / "static"  # Swagger UI, as that package brings it


def install(app: FastAPI) -> None:
    """Add the page and its scripts."""
    app.mount("/docs/static", StaticFiles(directory=_SCRIPTS), name="documentation")

    @app.get("/docs", include_in_schema=False)
    async def documentation(request: Request) -> HTMLResponse:
        root = str(request.scope.get("root_path", ""))
        return get_swagger_ui_html(
            openapi_url=f"{root}{app.openapi_url}",
            title=f"{app.title}: API",
            swagger_js_url=f"{root}/docs/static/swagger-ui-bundle.js",
            swagger_css_url=f"{root}/docs/static/swagger-ui.css",
            swagger_favicon_url=f"{root}/docs/static/favicon.png",
        )
