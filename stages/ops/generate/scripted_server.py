"""For tests: an HTTP server whose answers are scripted, and the key and parameters with which it is called."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

KEY = "sk-test-0123456789"
PARAMS = {
    "api": "openai",
    "model": "scripted",
    "temperature": 0.5,
    "top_p": 1,
    "max_tokens": 700,
    "seed": 0,
    "repair_rounds": 1,
    "body": {},
}

Answer = tuple[int, dict[str, str], str]


class Script:
    """What the server answers, in the order of the calls, and what it was sent. An answer is a status, headers and a
    body, or a function of the request that returns these; the last one is repeated."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.requests = list(answers), []
        self.lock = threading.Lock()

    def next(self, request: dict[str, Any]) -> Any:
        with self.lock:
            answer = self.answers[min(len(self.requests), len(self.answers) - 1)]
            self.requests.append(request)
        return answer(request) if callable(answer) else answer


def openai_reply(text: str, *, finish: str = "stop", prompt: int = 100, completion: int = 50) -> Answer:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    body = {
        "model": "scripted-2026",
        "usage": usage,
        "choices": [{"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text}}],
    }
    return 200, {}, json.dumps(body)


def anthropic_reply(text: str, *, stop: str = "end_turn") -> Answer:
    body = {
        "type": "message",
        "role": "assistant",
        "model": "scripted-2026",
        "stop_reason": stop,
        "content": [{"type": "thinking", "thinking": "…"}, {"type": "text", "text": text}],
        "usage": {"input_tokens": 90, "cache_read_input_tokens": 10, "output_tokens": 50},
    }
    return 200, {}, json.dumps(body)


def failure(status: int, message: str = "no", headers: Any = None, **more: Any) -> Answer:
    return status, headers or {}, json.dumps({"error": {"message": message, **more}})


def serving() -> Iterator[Callable[[Script], str]]:
    """What the fixture `serve` is made of. It starts servers: `serve(script)` returns the base URL."""
    servers = []

    def start(script: Script) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                request = {
                    "path": self.path,
                    "headers": {k.lower(): v for k, v in self.headers.items()},
                    "body": json.loads(body),
                }
                status, headers, content = script.next(request)
                content = content.encode() if isinstance(content, str) else content
                try:
                    self.send_response(status)
                    for name, value in {"content-length": str(len(content)), **headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(content)
                except OSError:
                    pass  # The client has given up.

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/v1"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
