"""Headers that isolate a page of this server: it loads nothing from elsewhere, and no other site may frame it."""

from __future__ import annotations

# Images that a visitor attaches are data: URLs.
POLICY = "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
# For pages and all that they are made of. That no type is guessed is said of every answer (door/request_id.py).
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}
