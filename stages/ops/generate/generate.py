"""`ops/generate`: has a language model write each requested task, checks the answer, and has it mended where it is
wrong.

The program that the engine starts. Rows come in, a few threads talk to the endpoint (`llm_client`, within the limits of
`rate_limit`), every answer is judged from its text (`answer_rules`) and by running it in a process with walls
(`check_server`, `task_check`), and the row is answered with the task and with the record of every call. The engine
keeps these answers by row, so that they are the recording: whoever runs the same requests again calls nothing.

Two variables say where the model is, and are secrets to the engine, so that neither is in a key: LLM_ENDPOINT and
LLM_API_KEY.
"""

import json
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import answer_rules
import cuda_agent_stage as stage
import llm_client
from check_server import CheckPool, CheckUnavailable
from prompt_files import fill, load_prompts, opening
from rate_limit import Pace

# The value of LLM_ENDPOINT that says: use what is recorded, call nothing.
REPLAY_ONLY = "replay-only"
CUT_OFF = {"length", "max_tokens"}
REPORT_SECONDS = 30.0
METRIC_SECONDS = 5.0


class Tally:
    """What happened so far, for the log, the metrics and the end; threads share one."""

    def __init__(self, program: stage.Program, clock: Callable[[], float] = time.monotonic) -> None:
        self._program, self._clock, self._lock = program, clock, threading.Lock()
        self._started = self._reported = self._measured = clock()
        self.rows = {"valid": 0, "repaired": 0, "rejected": 0, "failed": 0}
        self.prompt_tokens = self.completion_tokens = 0
        self.cost_usd = None
        self.total = program.by_row.get("total") if program.by_row else None

    def call(self, reply: llm_client.Reply, cost: float | None) -> None:
        with self._lock:
            self.prompt_tokens += reply.prompt_tokens or 0
            self.completion_tokens += reply.completion_tokens or 0
            if cost is not None:
                self.cost_usd = (self.cost_usd or 0.0) + cost
        self._now_and_then()

    def row(self, outcome: str) -> None:
        with self._lock:
            self.rows[outcome] += 1
        self._now_and_then()

    def _now_and_then(self) -> None:
        now = self._clock()
        with self._lock:
            measure, report = now - self._measured > METRIC_SECONDS, now - self._reported > REPORT_SECONDS
            self._measured = now if measure else self._measured
            self._reported = now if report else self._reported
        if measure:
            self.metrics()
        if report:
            self._program.log(self.text())

    def tokens_per_s(self) -> float:
        return self.completion_tokens / max(1e-9, self._clock() - self._started)

    def metrics(self) -> None:
        for name, value in self.rows.items():
            self._program.metric(f"llm/{name}", value)
        self._program.metric("llm/prompt_tokens", self.prompt_tokens)
        self._program.metric("llm/completion_tokens", self.completion_tokens)
        self._program.metric("llm/completion_tokens_per_s", round(self.tokens_per_s(), 2))
        if self.cost_usd is not None:
            self._program.metric("llm/cost_usd", round(self.cost_usd, 6))

    def text(self) -> str:
        done = sum(self.rows.values())
        of = f" of {self.total}" if self.total else ""
        counts = ", ".join(f"{count} {name}" for name, count in self.rows.items() if count)
        cost = "" if self.cost_usd is None else f", {self.cost_usd:.4f} USD"
        return (
            f"{done}{of} requests ({counts or 'none done'}); {self.prompt_tokens} + {self.completion_tokens} tokens, "
            f"{self.tokens_per_s():.1f} written per second{cost}"
        )


class Answer(NamedTuple):
    """What `Program.answer` takes."""

    status: Literal["done", "rejected", "failed"]
    reason: str | None
    detail: str | None
    outputs: dict[str, Any]


class Writer:
    """Turns one request into one answer of the stage."""

    def __init__(
        self,
        params: dict[str, Any],
        prompts: dict[str, str],
        client: llm_client.Client,
        checks: CheckPool,
        tally: Tally,
    ) -> None:
        self.params, self.prompts = params, prompts
        self.client, self.checks, self.tally = client, checks, tally

    def write(self, row: stage.Row) -> Answer:
        """`(status, reason, detail, outputs)` of a row, after at most 1 + repair_rounds calls."""
        columns = row["columns"]
        operators = json.loads(columns["ops"])
        values = {"operators": columns["operators"], "ops": ", ".join(operators), "count": len(operators)}
        messages = opening(self.prompts, columns["operators"], operators)
        calls = []
        for attempt in range(1 + self.params["repair_rounds"]):
            seed = (row["seed"] + attempt) % (1 << 31)
            reply = self.client.chat(messages, seed)
            code, facts = self.judge(reply, operators, seed)
            calls.append(self.record(attempt, messages[-1]["content"], reply, facts["problem"]))
            if facts["problem"] is None:
                return Answer("done", None, None, {"tasks": [self.task(code, facts, calls)], "answers": calls})
            messages = [
                *messages,
                {"role": "assistant", "content": reply.text or "(no answer)"},
                {"role": "user", "content": fill(self.prompts, "repair.md", **values, problem=facts["problem"])},
            ]
        return Answer("rejected", "invalid", calls[-1]["problem"], {"answers": calls})

    def judge(self, reply: llm_client.Reply, operators: list[str], seed: int) -> tuple[str | None, dict[str, Any]]:
        """`(code, facts)`; facts["problem"] is null where the answer is a task."""
        code = answer_rules.extract_code(reply.text)
        if reply.finish_reason in CUT_OFF and code is None:
            return None, {"problem": f"the answer was cut off after {self.params['max_tokens']} tokens; write less"}
        if code is None:
            return None, {"problem": "the answer has no ```python block with a class Model"}
        found = answer_rules.problems(code, operators)
        if found:
            return code, {"problem": "; ".join(found)}
        return code, self.checks.check(code, seed)

    def record(self, attempt: int, request: str, reply: llm_client.Reply, problem: str | None) -> dict[str, Any]:
        cost = cost_of(self.client.endpoint, reply)
        self.tally.call(reply, cost)
        return {
            "attempt": attempt,
            "request": request,
            "response": reply.text,
            "finish_reason": reply.finish_reason,
            "served_by": reply.model,
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": reply.completion_tokens,
            "cost_usd": cost,
            "seconds": round(reply.seconds, 3),
            "retries": reply.retries,
            "problem": problem,
        }

    def task(self, code: str | None, facts: dict[str, Any], calls: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "code": code,
            "estimate_ms": None,
            "batch_size": facts["batch_size"],
            "origin": f"llm:{self.params['model']}",
            "work": json.dumps(facts["work"]),
            "attempts": len(calls),
            "llm_prompt_tokens": total(calls, "prompt_tokens"),
            "llm_completion_tokens": total(calls, "completion_tokens"),
            "llm_cost_usd": total(calls, "cost_usd"),
        }


def total(calls: list[dict[str, Any]], name: str) -> int | None:
    """The sum over a row's calls; null where one is not known."""
    values = [call[name] for call in calls]
    return None if None in values else sum(values)


def cost_of(endpoint: llm_client.Endpoint, reply: llm_client.Reply) -> float | None:
    """What a call cost in US dollars, or null where the endpoint has no prices or reports no tokens."""
    price_in, price_out = endpoint.usd_per_million_input, endpoint.usd_per_million_output
    tokens_in, tokens_out = reply.prompt_tokens, reply.completion_tokens
    if price_in is None or price_out is None or tokens_in is None or tokens_out is None:
        return None
    return (price_in * tokens_in + price_out * tokens_out) / 1e6


def read_rows(inbox: queue.SimpleQueue[Any], descriptor: int = 0) -> None:
    """Put each row that comes over standard input into the inbox. Not through sys.stdin: a thread that waits in it
    would keep the interpreter from ending."""
    rest = b""
    while part := os.read(descriptor, 1 << 16):
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            inbox.put(("row", json.loads(line)))
    inbox.put(("end", None))


def serve(program: stage.Program, writer: Writer, tally: Tally, stop: threading.Event, concurrency: int) -> None:
    """Answer rows until the engine has no more. An error that no row is at fault for ends all of it."""
    inbox, jobs = queue.SimpleQueue(), queue.SimpleQueue()
    threading.Thread(target=read_rows, args=(inbox,), daemon=True).start()
    for _ in range(concurrency):
        threading.Thread(target=work_off, args=(program, writer, tally, jobs, inbox), daemon=True).start()
    waiting, ended = 0, False
    while waiting or not ended:
        what, value = inbox.get()
        if what == "row":
            waiting += 1
            jobs.put(value)
        elif what == "answered":
            waiting -= 1
        elif what == "end":
            ended = True
        else:
            stop.set()
            raise value


def work_off(
    program: stage.Program, writer: Writer, tally: Tally, jobs: queue.SimpleQueue[Any], inbox: queue.SimpleQueue[Any]
) -> None:
    """One thread: takes rows, answers them, and reports what stops the stage."""
    while True:
        row = jobs.get()
        try:
            answer_row(program, writer, tally, row)
            inbox.put(("answered", None))
        except llm_client.Stopped:
            return
        except llm_client.EndpointError as error:
            # Before the main thread hears of it: no other thread shall call in the meantime.
            writer.client.stop.set()
            inbox.put(("error", stage.StageError(error.message, kind=error.kind, hint=error.hint)))
        except BaseException as error:
            inbox.put(("error", error))


def answer_row(program: stage.Program, writer: Writer, tally: Tally, row: stage.Row) -> None:
    try:
        answer = writer.write(row)
    except llm_client.CallFailed as error:
        answer = Answer("failed", "endpoint", str(error), {})
    except llm_client.Refused as error:
        answer = Answer("rejected", "refused by the endpoint", str(error), {})
    except CheckUnavailable as error:
        answer = Answer("failed", "check", str(error), {})
    program.answer(row, answer.outputs, status=answer.status, reason=answer.reason, detail=answer.detail)
    outcome: str = answer.status
    if answer.status == "done":
        outcome = "valid" if answer.outputs["tasks"][0]["attempts"] == 1 else "repaired"
    tally.row(outcome)


def find_endpoint(params: dict[str, Any]) -> llm_client.Endpoint:
    text = os.environ.get("LLM_ENDPOINT", "")
    if text.strip() == REPLAY_ONLY:
        raise stage.StageError(
            "some requests have no recorded answer, and nothing may be called",
            kind="params",
            hint="run with the parameters and the prompts of the recording, "
            "or give LLM_ENDPOINT the address of a model",
        )
    return llm_client.parse_endpoint(text, params["api"])


def check_params(params: dict[str, Any]) -> None:
    if not params["model"].strip():
        raise stage.StageError(
            "the parameter model is empty", kind="params", hint="the name that the endpoint knows the model by"
        )
    clash = {"messages", "system", "stream"} & set(params["body"])
    if clash:
        raise stage.StageError(
            f"body can't set {', '.join(sorted(clash))}",
            kind="params",
            hint="the prompts are files: see the input `prompts`",
        )


def work(program: stage.Program) -> None:
    params = program.params
    check_params(params)
    prompts = load_prompts(program.input_path("prompts"))
    endpoint = find_endpoint(params)
    key = os.environ.get("LLM_API_KEY", "").strip() or None
    stop, tally = threading.Event(), Tally(program)
    pace = Pace(endpoint.requests_per_minute, endpoint.tokens_per_minute)
    client = llm_client.Client(params["api"], endpoint, params, key, pace, program.log, stop)
    with tempfile.TemporaryDirectory(prefix="generate-", dir=os.getcwd(), ignore_cleanup_errors=True) as folder:
        checks = CheckPool(max(1, program.resources["cpu"]), folder, program.log)
        try:
            serve(program, Writer(params, prompts, client, checks, tally), tally, stop, endpoint.concurrency)
        finally:
            stop.set()
            checks.stop()
            tally.metrics()
            program.metric("llm/calls", client.calls)
            program.metric("llm/retries", client.retried)
            program.log(tally.text())
            sys.stderr.flush()


if __name__ == "__main__":
    stage.main(work)
