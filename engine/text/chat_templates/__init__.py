"""Chat templates for models whose tokenizer has none: well-known ones by name, and templates from files."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from engine.errors import ConfigError

NAMES = tuple(sorted(file.stem for file in Path(__file__).parent.glob("*.jinja")))
_MOST_BYTES = 1 << 20
# Tags that transformers adds to Jinja.
_GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")


def read_template(given: str) -> str:
    """The template that a setting means: the name of one in `NAMES`, a file, or the template itself. Raises ConfigError
    if the setting is none of these, or not a Jinja template."""
    if given in NAMES:
        return (Path(__file__).parent / f"{given}.jinja").read_text(encoding="utf-8")
    if "{{" in given or "{%" in given:
        return _checked(given, "chat_template")
    path = Path(given).expanduser()
    if not path.is_file():
        near = difflib.get_close_matches(given.lower(), NAMES, n=1)
        advice = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"chat_template must be a file or one of {', '.join(NAMES)}, got {given!r}.{advice}")
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(
                f"chat_template: {path} has {path.stat().st_size} bytes; at most {_MOST_BYTES} are allowed."
            )
        return _checked(path.read_text(encoding="utf-8"), f"chat_template: {path}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: {path} cannot be read: {error}.") from error


def _checked(template: str, name: str) -> str:
    from jinja2 import Environment, TemplateSyntaxError

    if not template.strip():
        raise ConfigError(f"{name} is empty.")
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", template))
    except TemplateSyntaxError as error:
        raise ConfigError(f"{name} is not a valid Jinja template: line {error.lineno}: {error.message}.") from error
    return template
