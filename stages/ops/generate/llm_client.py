"""Calls a language model over HTTP, in OpenAI's format (which most servers speak) or Anthropic's.

`build_request` and `read_reply` are the two formats; `Client` sends, retries and classifies what goes wrong:

- `EndpointError`: nothing can work (a refused key, an unknown model, a wrong address, no server): the stage fails.
- `CallFailed`: this call did not succeed for a cause outside the request, after all retries: the row is tried again by
  the next run.
- `Refused`: the endpoint answers other requests and refuses this one, which it would do again.

The standard library's HTTP is enough: a call takes seconds, so neither connection reuse nor an event loop would show.
"""

import dataclasses
import http.client
import json
import random
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import cuda_agent_stage as stage

if TYPE_CHECKING:
    from rate_limit import Pace

DEFAULT_URLS = {"openai": "https://api.openai.com/v1", "anthropic": "https://api.anthropic.com"}
ANTHROPIC_VERSION = "2023-06-01"
MOST_BYTES = 32 << 20
ERROR_BYTES = 8192
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
LONGEST_RETRY_AFTER_S = 600.0
# Calls that fail one after another without any success: then it is not the rows.
FAILURES_IN_A_ROW = 3
CHARACTERS_PER_TOKEN = 3  # Low for English and for code, so that a reservation is rather too large.
RETRIED = {408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529}
BUSY = {429, 503, 529}
REFUSED = {400, 413, 422}


class EndpointError(Exception):
    def __init__(self, message: str, hint: str | None = None, kind: stage.ErrorKind = "environment") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint
        self.kind: stage.ErrorKind = kind


class CallFailed(Exception):
    """A call did not succeed, for a cause outside it."""


class Refused(Exception):
    """The endpoint refuses this request in particular."""


class Stopped(Exception):
    """The stage is ending; nothing more is called."""


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Where the model is and how fast it may be called: nothing here changes an answer, so nothing of it is in a
    key."""

    base_url: str
    concurrency: int = 4
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    timeout_s: float = 300.0
    retries: int = 6
    usd_per_million_input: float | None = None
    usd_per_million_output: float | None = None


@dataclasses.dataclass(frozen=True)
class Reply:
    """One answer of the model. Counts are null where the server reports none."""

    text: str
    finish_reason: str | None
    model: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    seconds: float
    retries: int


def parse_endpoint(text: str, api: str) -> Endpoint:
    """`LLM_ENDPOINT`: a URL, or a JSON object with the fields of Endpoint. Empty is the API's own address."""
    hint = "LLM_ENDPOINT is a URL such as http://127.0.0.1:8080/v1, or a JSON object with base_url; docs/generate.md"
    text = (text or "").strip()
    fields = {"base_url": text}
    if text.startswith("{"):
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise stage.StageError(f"LLM_ENDPOINT is not JSON: {error}", kind="params", hint=hint) from error
    known = {field.name: field for field in dataclasses.fields(Endpoint)}
    value: Any
    for name, value in fields.items():
        if name not in known:
            raise stage.StageError(
                f"LLM_ENDPOINT: unknown field {name!r}", kind="params", hint=f"it has {', '.join(known)}"
            )
        wanted: Any = str if name == "base_url" else (int if known[name].type is int else (int, float))
        if isinstance(value, bool) or not isinstance(value, wanted) or (name != "base_url" and value < 0):
            raise stage.StageError(f"LLM_ENDPOINT: {name} can't be {value!r}", kind="params", hint=hint)
    endpoint = Endpoint(**{**fields, "base_url": fields.get("base_url") or DEFAULT_URLS[api]})
    if not 1 <= endpoint.concurrency <= 256:
        raise stage.StageError("LLM_ENDPOINT: concurrency must be from 1 to 256", kind="params")
    if not endpoint.timeout_s > 0:
        raise stage.StageError("LLM_ENDPOINT: timeout_s must be above 0", kind="params")
    return dataclasses.replace(endpoint, base_url=checked_url(endpoint.base_url, hint))


def checked_url(url: str, hint: str) -> str:
    parts = urllib.parse.urlsplit(url)
    try:
        _ = parts.port  # reading it checks it
    except ValueError as error:
        raise stage.StageError(f"LLM_ENDPOINT: {error}", kind="params", hint=hint) from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise stage.StageError("LLM_ENDPOINT is no http or https URL", kind="params", hint=hint)
    if parts.username or parts.query or parts.fragment:
        raise stage.StageError(
            "LLM_ENDPOINT: a URL without user, query and fragment is expected",
            kind="params",
            hint="the key belongs into LLM_API_KEY",
        )
    return url.rstrip("/")


def build_request(
    api: str, endpoint: Endpoint, params: dict[str, Any], messages: list[dict[str, str]], seed: int, key: str | None
) -> tuple[str, dict[str, str], dict[str, Any]]:
    """`(url, headers, body)` of one call. `messages` begins with the system's."""
    headers = {"content-type": "application/json", "accept": "application/json", "user-agent": "cuda-agent"}
    body = {"model": params["model"], "max_tokens": params["max_tokens"], "temperature": params["temperature"]}
    if params["top_p"] < 1:
        body["top_p"] = params["top_p"]
    if api == "anthropic":
        below = "/messages" if endpoint.base_url.endswith("/v1") else "/v1/messages"
        headers["anthropic-version"] = ANTHROPIC_VERSION
        if key:
            headers["x-api-key"] = key
        body |= {"system": messages[0]["content"], "messages": messages[1:]}
    else:
        below = "/chat/completions"
        if key:
            headers["authorization"] = f"Bearer {key}"
        body |= {"messages": messages, "seed": seed, "stream": False}
    # A null of `body` takes a field away that a server does not know.
    body = {name: value for name, value in (body | params["body"]).items() if value is not None}
    return endpoint.base_url + below, headers, body


class Answered(NamedTuple):
    """What an answer of either format says."""

    text: str
    finish_reason: str | None
    model: str | None
    prompt_tokens: int | None
    completion_tokens: int | None


def read_reply(api: str, answer: dict[str, Any]) -> Answered:
    """Raises ValueError for what is no answer."""
    try:
        usage = answer.get("usage") or {}
        if api == "anthropic":
            text = "".join(block["text"] for block in answer["content"] if block["type"] == "text")
            # Cached parts of the prompt are counted apart.
            cached = [usage.get(f"cache_{what}_input_tokens") for what in ("creation", "read")]
            prompt = usage.get("input_tokens")
            prompt = prompt if prompt is None else prompt + sum(count or 0 for count in cached)
            return Answered(text, answer.get("stop_reason"), answer.get("model"), prompt, usage.get("output_tokens"))
        choice = answer["choices"][0]
        text = choice["message"].get("content") or ""
        counts = usage.get("prompt_tokens"), usage.get("completion_tokens")
        return Answered(text, choice.get("finish_reason"), answer.get("model"), *counts)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"not an answer in the format of {api} ({type(error).__name__}: {error})") from error


def error_message(content: bytes, key: str | None) -> str:
    """What an error's body says, in one line, without the key (servers quote parts of a refused one)."""
    text = content.decode("utf-8", errors="replace")
    try:
        error = json.loads(text)
        error = error.get("error", error.get("detail", error)) if isinstance(error, dict) else error
        text = error.get("message", json.dumps(error)) if isinstance(error, dict) else str(error)
    except ValueError:
        pass
    text = " ".join(str(text).split())[:300]
    return text.replace(key, "[key]") if key else text


def retry_after(headers: Any, now: Callable[[], float] = time.time) -> float | None:
    """Seconds of the header Retry-After, as a number or a date, or None."""
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        import email.utils

        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - now())
    except (TypeError, ValueError):
        return None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would send the key to another address."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _Retry(Exception):
    """One try did not succeed; another may."""

    def __init__(self, message: str, wait: float | None = None, busy: bool = False) -> None:
        super().__init__(message)
        self.wait, self.busy = wait, busy


class Client:
    """Threads share one. `stop` is set when nothing more is to be called."""

    def __init__(
        self,
        api: str,
        endpoint: Endpoint,
        params: dict[str, Any],
        key: str | None,
        pace: "Pace",
        log: Callable[..., Any],
        stop: threading.Event,
    ) -> None:
        self.api, self.endpoint, self.params, self.key = api, endpoint, params, key
        self.pace, self.log, self.stop = pace, log, stop
        self._opener = urllib.request.build_opener(_NoRedirects())
        self._lock = threading.Lock()
        self._answered, self._failures = False, 0
        self.calls = self.retried = 0
        parts = urllib.parse.urlsplit(endpoint.base_url)
        self._host = f"{parts.hostname}:{parts.port or {'http': 80, 'https': 443}[parts.scheme]}"

    def chat(self, messages: list[dict[str, str]], seed: int) -> Reply:
        """One answer of the model, with all retries. Raises EndpointError, CallFailed, Refused or Stopped."""
        url, headers, body = build_request(self.api, self.endpoint, self.params, messages, seed, self.key)
        data = json.dumps(body).encode()
        tokens = len(data) // CHARACTERS_PER_TOKEN + self.params["max_tokens"]
        jitter = random.Random(seed)
        for tried in range(self.endpoint.retries + 1):
            wait, reservation = self.pace.reserve(tokens)
            self._sleep(wait)
            started = time.monotonic()
            try:
                found = self._once(url, headers, data)
            except _Retry as failure:
                if tried == self.endpoint.retries:
                    self._give_up(failure)
                self._wait_before_retry(failure, tried, jitter)
                continue
            if found.prompt_tokens is not None and found.completion_tokens is not None:
                self.pace.settle(reservation, found.prompt_tokens + found.completion_tokens)
            return Reply(*found, time.monotonic() - started, tried)
        raise AssertionError("the last try returns or raises")

    def _sleep(self, seconds: float) -> None:
        if self.stop.wait(max(0.0, seconds)):
            raise Stopped

    def _wait_before_retry(self, failure: _Retry, tried: int, jitter: random.Random) -> None:
        backoff = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**tried) * jitter.uniform(0.75, 1.25)
        wait = backoff if failure.wait is None else failure.wait
        if wait > LONGEST_RETRY_AFTER_S:
            raise CallFailed(f"{failure}; it asks to wait for {wait:.0f} s")
        with self._lock:
            self.retried += 1
            number = self.retried
        if number <= 5 or number % 100 == 0:
            self.log(f"retry {number}: {failure}; waiting for {wait:.1f} s", level="warning")
        if failure.busy:
            self.pace.hold(wait)
        self._sleep(wait)

    def _give_up(self, failure: _Retry) -> None:
        with self._lock:
            self._failures += 1
            failures = self._failures
        if failures >= FAILURES_IN_A_ROW:
            raise EndpointError(
                f"the last {failures} calls all failed after {self.endpoint.retries} retries each ({failure})",
                "what was answered is kept; run again once the endpoint is well",
            )
        raise CallFailed(f"{failure}, after {self.endpoint.retries} retries")

    def _once(self, url: str, headers: dict[str, str], data: bytes) -> Answered:
        with self._lock:
            self.calls += 1
        request = urllib.request.Request(url, data=data, headers=headers, method="POST")
        try:
            with self._opener.open(request, timeout=self.endpoint.timeout_s) as response:
                content = self._read(response)
        except urllib.error.HTTPError as error:
            with error:
                self._refused(error.code, error.headers, self._read_error(error))
        except urllib.error.URLError as error:
            self._unreachable(error.reason)
        except (OSError, http.client.HTTPException) as error:
            self._unreachable(error)
        try:
            reply = read_reply(self.api, json.loads(content))
        except ValueError as error:
            raise _Retry(f"the endpoint's answer can't be read: {error}") from error
        with self._lock:
            self._answered, self._failures = True, 0
        return reply

    def _read(self, response: Any) -> bytes:
        """The body, within the time limit as a whole: the socket's own limit starts anew with each packet."""
        deadline = time.monotonic() + self.endpoint.timeout_s
        parts, length = [], 0
        while part := response.read1(1 << 16):
            parts.append(part)
            length += len(part)
            if length > MOST_BYTES:
                raise _Retry(f"the endpoint's answer has more than {MOST_BYTES} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError
        return b"".join(parts)

    @staticmethod
    def _read_error(error: Any) -> bytes:
        try:
            return error.read(ERROR_BYTES)
        except (OSError, http.client.HTTPException):
            return b""

    def _unreachable(self, reason: Any) -> None:
        """No answer at all. Before the first success, what no waiting cures fails at once."""
        if isinstance(reason, TimeoutError):
            raise _Retry(f"no answer within {self.endpoint.timeout_s:g} s")
        message = f"{self._host} can't be reached: {getattr(reason, 'strerror', None) or reason}"
        is_lasting = isinstance(reason, (ConnectionRefusedError, socket.gaierror))
        if is_lasting and not self._answered:
            raise EndpointError(
                message, "LLM_ENDPOINT says where the model is; is the server running? What was answered before is kept"
            )
        if "CERTIFICATE_VERIFY_FAILED" in str(reason):
            raise EndpointError(message, "SSL_CERT_FILE names the certificates that are trusted")
        raise _Retry(message)

    def _refused(self, status: int, headers: Any, content: bytes) -> None:
        """The endpoint answered with an error status."""
        said = error_message(content, self.key)
        message = f"{self._host} answers {status}: {said}" if said else f"{self._host} answers {status}"
        if status == 429 and b"insufficient_quota" in content:
            raise EndpointError(message, "the account has no credit left; what was answered is kept", "params")
        if status in RETRIED:
            raise _Retry(message, wait=retry_after(headers), busy=status in BUSY)
        if status in (401, 403):
            hint = "is LLM_API_KEY the key of this endpoint, and may it use this model?"
            raise EndpointError(message, hint, "params")
        if status in REFUSED and self._answered:
            raise Refused(message)
        hints = {
            404: f"the model is {self.params['model']!r}; a base_url in OpenAI's format usually ends in /v1",
            **dict.fromkeys(
                REFUSED,
                "it refuses the first request: see the parameters model, temperature, max_tokens "
                "and body (a null in `body` takes a field away that the endpoint does not know)",
            ),
            **dict.fromkeys(
                (301, 302, 303, 307, 308), "redirects are not followed: give LLM_ENDPOINT the final address"
            ),
        }
        raise EndpointError(
            message, hints.get(status, "LLM_ENDPOINT and the parameter api must belong together"), "params"
        )
