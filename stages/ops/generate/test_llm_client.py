"""The client of `ops/generate` against a real HTTP server whose answers are scripted, and the rate of its calls.

No test waits for a clock but where a server is slow on purpose, and then for a bound that is far from what is asserted.
"""

import email.utils
import json
import pathlib
import socket
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "protocol" / "python")]

import cuda_agent_stage as stage
import llm_client
from rate_limit import Pace, RateLimit
from scripted_server import KEY, PARAMS, Script, anthropic_reply, failure, openai_reply, serving

serve = pytest.fixture(serving)


def client_for(url, *, api="openai", key=KEY, log=None, **fields):
    endpoint = llm_client.parse_endpoint(json.dumps({"base_url": url, **fields}), api)
    pace = Pace(endpoint.requests_per_minute, endpoint.tokens_per_minute)
    lines = [] if log is None else log
    return llm_client.Client(
        api,
        endpoint,
        {**PARAMS, "api": api},
        key,
        pace,
        lambda message, level="info": lines.append(message),
        threading.Event(),
    )


@pytest.fixture
def quick(monkeypatch):
    """Retries that wait for a hundredth of a second."""
    monkeypatch.setattr(llm_client, "FIRST_WAIT_S", 0.01)


MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "write"}]


def test_an_openai_call_is_sent_and_read(serve):
    script = Script(openai_reply("hello"))
    reply = client_for(serve(script)).chat(MESSAGES, 41)
    assert (reply.text, reply.finish_reason, reply.model) == ("hello", "stop", "scripted-2026")
    assert (reply.prompt_tokens, reply.completion_tokens, reply.retries) == (100, 50, 0)
    (request,) = script.requests
    assert request["path"] == "/v1/chat/completions"
    assert request["headers"]["authorization"] == f"Bearer {KEY}"
    assert request["body"] == {
        "model": "scripted",
        "messages": MESSAGES,
        "temperature": 0.5,
        "max_tokens": 700,
        "seed": 41,
        "stream": False,
    }


def test_an_anthropic_call_is_sent_and_read(serve):
    script = Script(anthropic_reply("hello"))
    reply = client_for(serve(script).removesuffix("/v1"), api="anthropic").chat(MESSAGES, 41)
    assert (reply.text, reply.finish_reason) == ("hello", "end_turn")
    assert (reply.prompt_tokens, reply.completion_tokens) == (100, 50)
    (request,) = script.requests
    assert request["path"] == "/v1/messages"
    assert request["headers"]["x-api-key"] == KEY and request["headers"]["anthropic-version"] == "2023-06-01"
    assert "authorization" not in request["headers"]
    assert request["body"] == {
        "model": "scripted",
        "system": "be brief",
        "messages": MESSAGES[1:],
        "temperature": 0.5,
        "max_tokens": 700,
    }


def test_the_body_can_be_changed_field_by_field():
    endpoint = llm_client.Endpoint("http://x/v1")
    params = {**PARAMS, "top_p": 0.9, "body": {"max_tokens": None, "max_completion_tokens": 9, "temperature": None}}
    _, headers, body = llm_client.build_request("openai", endpoint, params, MESSAGES, 1, None)
    assert body == {
        "model": "scripted",
        "messages": MESSAGES,
        "top_p": 0.9,
        "seed": 1,
        "stream": False,
        "max_completion_tokens": 9,
    }
    assert "authorization" not in headers


@pytest.mark.parametrize(
    "first",
    [
        failure(429, headers={"retry-after": "0.02"}),
        failure(429),
        failure(500),
        failure(529),
        (503, {}, "<html>"),
        (200, {}, "not json"),
        (200, {}, "{}"),
        (200, {}, '{"choices": []}'),
        (200, {"content-length": "999"}, "{"),
    ],
)
def test_what_may_pass_is_tried_again(serve, quick, first):
    log = []
    script = Script(first, first, openai_reply("at last"))
    client = client_for(serve(script), log=log)
    reply = client.chat(MESSAGES, 1)
    assert (reply.text, reply.retries, client.calls, client.retried) == ("at last", 2, 3, 2)
    assert len(log) == 2 and log[0].startswith("retry 1: ")


def test_a_busy_endpoint_is_left_alone_for_as_long_as_it_asks(serve, quick):
    client = client_for(serve(Script(failure(429, headers={"retry-after": "0.5"}), openai_reply("x"))))
    started = time.monotonic()
    client.chat(MESSAGES, 1)
    assert time.monotonic() - started >= 0.5


def test_retry_after_is_seconds_or_a_date():
    date = email.utils.formatdate(1_800_000_060, usegmt=True)
    assert llm_client.retry_after({"retry-after": "7"}) == 7
    assert llm_client.retry_after({"retry-after": date}, now=lambda: 1_800_000_000) == 60
    assert llm_client.retry_after({"retry-after": "soon"}) is None
    assert llm_client.retry_after({}) is None


def test_a_wait_of_an_hour_is_not_waited_for(serve):
    client = client_for(serve(Script(failure(429, "later", headers={"retry-after": "3600"}))))
    with pytest.raises(llm_client.CallFailed, match="later; it asks to wait for 3600 s"):
        client.chat(MESSAGES, 1)


def test_an_answer_that_does_not_come_is_tried_again(serve, quick):
    def slow(_request):
        time.sleep(1.5)
        return openai_reply("too late")

    client = client_for(serve(Script(slow, openai_reply("in time"))), timeout_s=0.3)
    assert client.chat(MESSAGES, 1).text == "in time"


def test_after_all_retries_the_call_fails_and_after_three_calls_the_stage(serve, quick):
    client = client_for(serve(Script(failure(500, "broken"))), retries=2)
    for _ in range(2):
        with pytest.raises(llm_client.CallFailed, match="answers 500: broken, after 2 retries"):
            client.chat(MESSAGES, 1)
    with pytest.raises(llm_client.EndpointError, match="the last 3 calls all failed") as raised:
        client.chat(MESSAGES, 1)
    assert "run again" in raised.value.hint and client.calls == 9


@pytest.mark.parametrize(
    "answer, message, hint",
    [
        (failure(401, f"Incorrect API key: {KEY}"), "answers 401: Incorrect API key: [key]", "LLM_API_KEY"),
        (failure(403, "no access"), "answers 403: no access", "LLM_API_KEY"),
        (failure(404, "model `scripted` does not exist"), "answers 404: model `scripted`", "ends in /v1"),
        (failure(400, "temperature is not supported"), "answers 400: temperature", "a null in `body`"),
        (failure(402, "pay"), "answers 402: pay", "belong together"),
        (failure(429, "quota", code="insufficient_quota"), "answers 429: quota", "no credit"),
        ((307, {"location": "http://elsewhere.invalid/"}, ""), "answers 307", "redirects are not followed"),
    ],
)
def test_what_cannot_work_is_said_at_the_first_call(serve, answer, message, hint):
    script = Script(answer)
    with pytest.raises(llm_client.EndpointError) as raised:
        client_for(serve(script)).chat(MESSAGES, 1)
    assert message in raised.value.message and hint in raised.value.hint and raised.value.kind == "params"
    assert KEY not in raised.value.message and len(script.requests) == 1


def test_a_request_that_is_refused_after_others_were_answered_is_refused_alone(serve):
    client = client_for(serve(Script(openai_reply("fine"), failure(400, "too long"), openai_reply("fine"))))
    client.chat(MESSAGES, 1)
    with pytest.raises(llm_client.Refused, match="answers 400: too long"):
        client.chat(MESSAGES, 1)
    assert client.chat(MESSAGES, 1).text == "fine"


def test_a_server_that_is_not_there_is_said_at_once():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # Bound and not listening: connections are refused, and nobody else gets the port.
        with pytest.raises(llm_client.EndpointError, match="can't be reached: Connection refused") as raised:
            client_for(f"http://127.0.0.1:{taken.getsockname()[1]}/v1").chat(MESSAGES, 1)
    assert "is the server running" in raised.value.hint


@pytest.mark.parametrize(
    "text, message",
    [
        ("ftp://x/v1", "no http or https URL"),
        ("127.0.0.1:8080", "no http or https URL"),
        ("http://me:secret@x/v1", "without user"),
        ("http://x:port/v1", "LLM_ENDPOINT: "),
        ("{", "is not JSON"),
        ('{"url": "http://x"}', "unknown field 'url'"),
        ('{"base_url": "http://x", "concurrency": 0}', "concurrency must be from 1"),
        ('{"base_url": "http://x", "concurrency": "many"}', "concurrency can't be 'many'"),
        ('{"base_url": "http://x", "timeout_s": 0}', "timeout_s must be above 0"),
        ('{"base_url": "http://x", "retries": -1}', "retries can't be -1"),
    ],
)
def test_a_wrong_endpoint_is_refused(text, message):
    with pytest.raises(stage.StageError) as raised:
        llm_client.parse_endpoint(text, "openai")
    assert message in raised.value.message and raised.value.kind == "params"


def test_without_an_address_the_api_has_its_own():
    assert llm_client.parse_endpoint("", "openai").base_url == "https://api.openai.com/v1"
    assert llm_client.parse_endpoint('{"concurrency": 9}', "anthropic").base_url == "https://api.anthropic.com"


# ---- the rate


@settings(deadline=None)
@given(st.integers(1, 20), st.lists(st.tuples(st.floats(0, 30), st.integers(1, 25)), max_size=60))
def test_no_minute_has_more_than_the_limit_and_no_call_waits_without_need(limit, calls):
    rate, now, started = RateLimit(limit), 0.0, []
    for gap, units in calls:
        now += gap
        start = rate.earliest(now, units)
        rate.reserve(start, units)
        started.append((start, min(units, limit)))
    for start, _ in started:
        assert sum(units for begun, units in started if start - 60 + 1e-6 < begun <= start) <= limit
    for number, (start, units) in enumerate(started):
        due = max(sum(gap for gap, _ in calls[: number + 1]), started[number - 1][0] if number else 0)
        before = started[:number]
        used = sum(spent for begun, spent in before if begun > start - 60 - 1e-6)
        # Either it starts when it comes, or a moment earlier there was no room.
        assert start == pytest.approx(due) or used + units > limit


def test_threads_wait_for_the_rate_and_for_a_pause():
    clock = [0.0]
    pace = Pace(2, 0, clock=lambda: clock[0])
    assert [pace.reserve(1)[0] for _ in range(5)] == [0, 0, 60, 60, 120]
    clock[0] = 200.0
    pace.hold(7)
    assert pace.reserve(1)[0] == 7


def test_tokens_that_were_not_needed_are_given_back():
    clock = [0.0]
    pace = Pace(0, 1000, clock=lambda: clock[0])
    wait, reservation = pace.reserve(900)
    assert wait == 0 and pace.reserve(900)[0] == 60
    pace = Pace(0, 1000, clock=lambda: clock[0])
    _, reservation = pace.reserve(900)
    pace.settle(reservation, 100)
    assert pace.reserve(900)[0] == 0
