"""GET /docs: the API's documentation. Its scripts come from this server, so no other site is contacted."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from pathlib import Path

import fastapi_offline
from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.types import Scope

from server.door.pages import HEADERS, POLICY

_SCRIPTS = Path(fastapi_offline.__file__).parent / "static"  # Swagger UI from that package


class _Static(StaticFiles):
    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(HEADERS)
        return response


def install(app: FastAPI) -> None:
    """Add the page and its scripts."""
    app.mount("/docs/static", _Static(directory=_SCRIPTS), name="documentation")

    @app.get("/docs", include_in_schema=False)
    async def documentation(request: Request) -> HTMLResponse:
        root = str(request.scope.get("root_path", ""))
        page = get_swagger_ui_html(
            openapi_url=f"{root}{app.openapi_url}",
            title=f"{app.title}: API",
            swagger_js_url=f"{root}/docs/static/swagger-ui-bundle.js",
            swagger_css_url=f"{root}/docs/static/swagger-ui.css",
            swagger_favicon_url=f"{root}/docs/static/favicon.png",
        )
        page.headers.update({**HEADERS, "Content-Security-Policy": policy(bytes(page.body))})
        return page


def policy(page: bytes) -> str:
    """The content security policy of Swagger UI's page; its inline script is allowed by hash."""
    scripts = re.findall(rb"<script>(.*?)</script>", page, re.DOTALL)
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'" for script in scripts]
    return f"{POLICY}; script-src 'self' {' '.join(hashes)}"
