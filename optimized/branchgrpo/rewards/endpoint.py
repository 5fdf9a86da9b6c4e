"""One JSON request to an OpenAI-compatible endpoint, bounded in time and size, every failure named."""

import http.client
import json
import socket
import threading
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from branchgrpo.reference.errors import OptionError

RETRYABLE_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
LARGEST_ANSWER = 8 << 20
"""Bytes of an answer; a score takes a few hundred."""

EXCERPT = 200
"""Characters of a faulty answer that an error quotes."""


class EndpointFailure(Exception):
    """A request without a usable answer.

    Attributes:
        reason: what happened.
        retryable: whether the same request may succeed later.
        wait_s: seconds that the server asked to wait, if it did.
    """

    def __init__(self, reason: str, retryable: bool, wait_s: float | None = None) -> None:
        self.reason = reason
        self.retryable = retryable
        self.wait_s = wait_s
        super().__init__(reason)


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server.

    Attributes:
        base_url: up to and without ``/chat/completions``, e.g. ``http://127.0.0.1:8000/v1``.
        model: name of the model there.
        timeout_s: whole time of one attempt, from connecting to the last byte, > 0.
        api_key: sent as a bearer token if given; never printed.
    """

    base_url: str
    model: str
    timeout_s: float = 60.0
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise OptionError("endpoint.base_url", self.base_url, "an http(s) URL without user name or query")
        if not self.model:
            raise OptionError("endpoint.model", self.model, "not empty")
        if not self.timeout_s > 0:
            raise OptionError("endpoint.timeout_s", self.timeout_s, "> 0")

    def connect(self) -> http.client.HTTPConnection:
        """A connection that is not open yet."""
        parts = urlsplit(self.base_url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        assert parts.hostname is not None
        return kind(parts.hostname, parts.port, timeout=self.timeout_s)

    def post(self, path: str, payload: dict[str, Any]) -> dict[str, Any]:
        """The JSON object that the server answers with.

        A watchdog shuts the socket down when the attempt's time is over, so that a server which sends a byte now and
        then cannot hold it longer.

        Raises:
            EndpointFailure: no connection, too slow, a status other than 200, half an answer, or not a JSON object.
        """
        connection = self.connect()
        expired = threading.Event()
        watchdog = threading.Timer(self.timeout_s, cut, (connection, expired))
        watchdog.daemon = True
        watchdog.start()
        try:
            connection.connect()
            if expired.is_set():
                raise TimeoutError
            status, wait, body = self.exchange(connection, urlsplit(self.base_url).path.rstrip("/") + path, payload)
        except (OSError, http.client.HTTPException) as error:
            late = expired.is_set() or isinstance(error, TimeoutError)
            reason = f"no answer within {self.timeout_s:g} s" if late else f"{type(error).__name__}: {error}"
            raise EndpointFailure(reason, retryable=True) from error
        finally:
            watchdog.cancel()
            connection.close()
        if expired.is_set():
            raise EndpointFailure(f"no complete answer within {self.timeout_s:g} s", retryable=True)
        return read_answer(status, wait, body)

    def exchange(
        self, connection: http.client.HTTPConnection, path: str, payload: dict[str, Any]
    ) -> tuple[int, str | None, bytes]:
        """Status, Retry-After header and body of one request."""
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Connection": "close"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        connection.request("POST", path, json.dumps(payload).encode(), headers)
        response = connection.getresponse()
        body = response.read(LARGEST_ANSWER + 1)
        if response.length and len(body) <= LARGEST_ANSWER:
            raise http.client.IncompleteRead(body, response.length)
        return response.status, response.getheader("Retry-After"), body


def cut(connection: http.client.HTTPConnection, expired: threading.Event) -> None:
    """End a connection from outside: a read that waits on it returns at once."""
    expired.set()
    sock = connection.sock
    if sock is not None:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return


def read_answer(status: int, wait: str | None, body: bytes) -> dict[str, Any]:
    """The JSON object of a complete answer.

    Raises:
        EndpointFailure: a status other than 200, an answer that is too long, or not a JSON object.
    """
    text = body[:EXCERPT].decode("utf-8", "replace")
    if status != http.client.OK:
        seconds = float(wait) if wait is not None and wait.isdecimal() else None
        raise EndpointFailure(f"status {status}: {text!r}", status in RETRYABLE_STATUS, seconds)
    if len(body) > LARGEST_ANSWER:
        raise EndpointFailure(f"answer longer than {LARGEST_ANSWER} bytes", retryable=False)
    try:
        answer = json.loads(body)
    except ValueError as error:
        raise EndpointFailure(f"malformed JSON ({error}): {text!r}", retryable=True) from error
    if not isinstance(answer, dict):
        raise EndpointFailure(f"not a JSON object: {text!r}", retryable=True)
    return answer
