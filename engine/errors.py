"""All errors that Octavo raises on purpose.

A message names the limit, the value received and the setting to change, so that the reader
can act without reading code.
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base of all errors raised by Octavo."""


class ConfigError(OctavoError, ValueError):
    """A setting of the engine is missing, out of range or contradicts another."""


class ModelLoadError(OctavoError):
    """A checkpoint cannot be loaded: files missing, names or shapes that do not match, wrong format."""


class NotDownloadedError(ModelLoadError):
    """The checkpoint may be on the hub but is not on this machine, and downloading was not allowed."""


class UnsupportedModelError(ModelLoadError):
    """The checkpoint is valid, but its architecture, or a part of it, is not implemented."""


class InvalidRequestError(OctavoError, ValueError):
    """A request asks for something impossible.

    Attributes:
        param: the request field at fault, under its public name, or None.
        code: a short machine-readable reason, or None.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


class AdapterError(OctavoError, ValueError):
    """A low-rank adapter cannot be loaded or unloaded."""


class RequestFailedError(OctavoError):
    """A request was accepted and then failed inside the engine."""


class RankError(OctavoError):
    """Another rank of a divided model failed in the same step."""


class EngineDeadError(OctavoError):
    """The engine has stopped and serves no more requests."""
