"""Headers that isolate a page of this server: it loads nothing from other sites, and no other site may frame it."""

from __future__ import annotations

# Attached images and Swagger UI's icons are data: URLs.
POLICY = "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
# For pages and all their files. Every response forbids browsers to guess a type (door/request_id.py).
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}
