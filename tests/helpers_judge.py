"""A judge on the loopback interface that answers, or misbehaves in a way that each question asks for."""

import base64
import io
import json
import socket
import struct
import threading
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from PIL import Image

LONG = 10.0
"""Seconds that a slow answer takes; no test waits for it."""


class JudgeServer(ThreadingHTTPServer):
    """Scores a picture by its brightness; every fault is scripted by words of the prompt.

    A prompt holds ``fault:NAME*COUNT``: its first COUNT requests are answered with that fault (99 for ever).
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.seen: dict[str, int] = defaultdict(int)
        self.requests: list[dict[str, Any]] = []
        self.headers_seen: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.running = 0
        self.most_running = 0
        self.hold_s = 0.0
        self.stop = threading.Event()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that gives up is part of the tests."""

    def __enter__(self) -> "JudgeServer":
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.shutdown()
        self.server_close()


def pictures_of(payload: dict[str, Any]) -> list[np.ndarray]:
    urls = [part["image_url"]["url"] for part in payload["messages"][0]["content"] if part["type"] == "image_url"]
    assert all(url.startswith("data:image/png;base64,") for url in urls)
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))) for url in urls]


def question_of(payload: dict[str, Any]) -> str:
    return next(part["text"] for part in payload["messages"][0]["content"] if part["type"] == "text")


def brightness_score(pictures: list[np.ndarray]) -> float:
    """1 + 4 · mean of all pictures, to four places."""
    return round(1.0 + 4.0 * float(np.mean([p.mean() for p in pictures])) / 255.0, 4)


class Handler(BaseHTTPRequestHandler):
    server: JudgeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Silent."""

    def do_POST(self) -> None:
        with self.server.lock:
            self.server.running += 1
            self.server.most_running = max(self.server.most_running, self.server.running)
        try:
            self.answer()
        finally:
            with self.server.lock:
                self.server.running -= 1

    def answer(self) -> None:
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = question_of(payload)
        with self.server.lock:
            self.server.requests.append(payload)
            self.server.headers_seen.append(dict(self.headers))
            self.server.paths.append(self.path)
            self.server.seen[question] += 1
            count = self.server.seen[question]
        if self.server.hold_s:
            time.sleep(self.server.hold_s)
        fault, _, times = question.partition("fault:")[2].partition("!")[0].partition("*")
        if fault and count <= int(times):
            getattr(self, f"fault_{fault}")(payload)
        else:
            self.say(f"It is bright.\nFinal Score: {brightness_score(pictures_of(payload))}")

    def say(self, text: str | None, reason: str = "stop") -> None:
        self.send_json({"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}]})

    def send_json(self, content: Any) -> None:
        self.send_body(json.dumps(content).encode())

    def send_body(self, body: bytes, status: int = 200, declared: int | None = None, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body) if declared is None else declared))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def fault_slow(self, _: dict[str, Any]) -> None:
        self.server.stop.wait(LONG)

    def fault_drip(self, _: dict[str, Any]) -> None:
        """A byte now and then: no single read of the client ever times out."""
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        for _i in range(int(LONG / 0.05)):
            if self.server.stop.wait(0.05):
                return
            self.wfile.write(b" ")
            self.wfile.flush()

    def fault_error(self, _: dict[str, Any]) -> None:
        self.send_body(b'{"error": "overloaded"}', status=500)

    def fault_busy(self, _: dict[str, Any]) -> None:
        self.send_body(b"{}", status=429, Retry_After="7")

    def fault_denied(self, _: dict[str, Any]) -> None:
        self.send_body(b'{"error": "no such model"}', status=404)

    def fault_garbage(self, _: dict[str, Any]) -> None:
        self.send_body(b"<html>Final Score: 4.0</html>")

    def fault_list(self, _: dict[str, Any]) -> None:
        self.send_json(["Final Score: 4.0"])

    def fault_half(self, _: dict[str, Any]) -> None:
        """Half of the declared body."""
        body = json.dumps({"choices": [{"message": {"content": "Final Score: 4.0"}}]}).encode()
        self.send_body(body, declared=2 * len(body))

    def fault_halfjson(self, _: dict[str, Any]) -> None:
        self.send_body(b'{"choices": [{"message": {"content": "Final Score: 4.0')

    def fault_chunked(self, _: dict[str, Any]) -> None:
        """A chunked body that ends in the middle of a chunk."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b'40\r\n{"choices": [{"mess')
        self.close_connection = True

    def fault_reset(self, _: dict[str, Any]) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def fault_empty(self, _: dict[str, Any]) -> None:
        self.send_json({"choices": []})

    def fault_mute(self, _: dict[str, Any]) -> None:
        self.say(None)

    def fault_cut(self, _: dict[str, Any]) -> None:
        """Cut at the token limit in the middle of the number 4.7."""
        self.say("Final Score: 4", reason="length")

    def fault_vague(self, _: dict[str, Any]) -> None:
        self.say("I would give it a four out of five.")

    def fault_torn(self, _: dict[str, Any]) -> None:
        self.say("Final Score: 2\nOn reflection, Final Score: 4")

    def fault_outside(self, _: dict[str, Any]) -> None:
        self.say("Final Score: 9.5")

    def fault_nan(self, _: dict[str, Any]) -> None:
        self.say("Final Score: nan")
