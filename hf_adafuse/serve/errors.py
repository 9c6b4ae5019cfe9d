"""`ApiError`: an error in the form in which OpenAI's API reports it."""

from __future__ import annotations

import json
from typing import Any


class ApiError(Exception):
    """
    An error that becomes a reply.

    Args:
        status (`int`): the HTTP status, like 429.
        message (`str`): what is wrong, and what to do.
        code (`str`, *optional*): a word for programs, like `"queue_full"`.
        param (`str`, *optional*): the field of the request that is wrong.
        headers (`dict`, *optional*): further headers of the reply.
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
        usual = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        headers = {**usual, **(self.headers or {})}
        return body, [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    @property
    def body(self) -> dict[str, Any]:
        """The body of the reply: `{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}`."""
        kinds = {401: "authentication_error", 404: "invalid_request_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
