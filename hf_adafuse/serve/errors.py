"""Errors in the form in which OpenAI's API gives them."""

from __future__ import annotations

import json
from typing import Any


class ApiError(Exception):
    """
    An error reply: status, message and code.

    Args:
        status (`int`): of HTTP.
        message (`str`): what is wrong, and what to do.
        code (`str`, *optional*), param (`str`, *optional*): as in OpenAI's API.
        headers (`dict`, *optional*): further ones.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers

    def as_bytes(self) -> tuple[bytes, list[tuple[bytes, bytes]]]:
        """The body and the headers of a reply that closes the connection."""
        body = json.dumps(self.body).encode()
        length = str(len(body)).encode()
        return body, [(b"content-type", b"application/json"), (b"content-length", length), (b"connection", b"close")]

    @property
    def body(self) -> dict[str, Any]:
        """The body of the answer."""
        kinds = {401: "authentication_error", 404: "invalid_request_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
