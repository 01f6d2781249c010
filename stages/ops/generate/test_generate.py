"""`ops/generate`: the rules on files, the process that runs answers, with honest and hostile ones, and the program
against a real HTTP server whose answers are scripted.
"""

import json
import os
import pathlib
import subprocess
import sys
import threading

import pytest

pytest.importorskip("torch")

HERE = pathlib.Path(__file__).resolve().parent
OPS = HERE.parent
STAGES = OPS.parent
# Where the engine lets the program look for modules.
FOLDERS = [
    str(HERE),
    str(OPS / "filter"),
    str(OPS / "python"),
    str(STAGES / "torch_runtime"),
    str(STAGES / "protocol" / "python"),
]
sys.path[:0] = FOLDERS

import answer_rules
import cuda_agent_stage as stage
import stage_driver
from check_server import CheckPool
from prompt_files import fill, load_prompts, opening
from scripted_server import KEY, PARAMS, Script, anthropic_reply, failure, openai_reply, serving

serve = pytest.fixture(serving)

GOOD = '''import torch
import torch.nn as nn


class Model(nn.Module):
    """Applies nn.Linear and then torch.tanh."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x):
        return torch.tanh(self.linear(x))


batch_size = 16
in_features = 32
out_features = 8


def get_inputs():
    return [torch.randn(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features]
'''
OPERATORS = ["nn.Linear", "torch.tanh"]


def changed(old, new, code=GOOD):
    assert old in code
    return code.replace(old, new)


def fenced(code):
    return f"Here is the file:\n```python\n{code}```\n"


# ---- the rules on a file


def test_the_file_is_found_in_an_answer():
    assert answer_rules.extract_code(fenced(GOOD)) == GOOD
    assert answer_rules.extract_code(GOOD) == GOOD
    two = "<think>```python\nclass Model: pass\n```</think>```\nx = 1\n```\n" + fenced(GOOD) + fenced("y = 2\n")
    assert answer_rules.extract_code(two) == GOOD
    assert answer_rules.extract_code("I can't do that.") is None
    assert answer_rules.extract_code("```python\nclass Model: it goes on for e") is None


def test_the_example_of_the_prompt_keeps_the_rules_of_the_prompt():
    prompts = load_prompts()
    example = answer_rules.extract_code(prompts["example.md"])
    messages = opening(prompts, "- `torch.exp`: …", ["torch.exp"])
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert "these 2 operators" in messages[1]["content"] and "`nn.Conv2d`" in messages[1]["content"]
    assert messages[2]["content"] == prompts["example.md"] and "- `torch.exp`: …" in messages[3]["content"]
    assert answer_rules.problems(example, ["nn.Conv2d", "torch.clamp"]) == []


TANH = "return torch.tanh(self.linear(x))"


@pytest.mark.parametrize(
    "code, problem",
    [
        (GOOD, None),
        (changed(TANH, "x = self.linear(x)\n        return x.tanh().view(-1, 8)"), None),
        (
            changed(
                TANH, "rows = x.shape[0] * 1\n        return torch.tanh(self.linear(x)).view(rows, len(x[0]) // 4)"
            ),
            None,
        ),
        (changed(TANH, "return torch.tanh(self.linear(x) + 0.5)"), "forward uses add, which"),
        (changed(TANH, "return torch.tanh(x) - self.linear(x)"), "forward uses sub, which"),
        ("class Model(", "does not parse"),
        ("x = 1\n", "defines no class Model"),
        (changed("import torch\n", "import torch\nimport os\n"), "line 2: os is imported"),
        (
            changed("import torch.nn as nn", "from torch.nn import nn"),
            "line 2: torch.nn has no nn; write `import torch.nn as",
        ),
        (changed("import torch\n", "import torch\nfrom numpy import array\n"), "numpy is imported"),
        (changed("batch_size = 16", "batch_size = 16\nprint(batch_size)"), "only imports, constants"),
        (changed(TANH, "return torch.tanh(self.linear(x)) if open('x') else x"), "open can't be used"),
        (changed(TANH, "return torch.tanh(self.linear(x).__class__)"), ".__class__ can't be used"),
        (changed(TANH, "return torch.load('x')"), "torch.load can't be used"),
        (changed(TANH, "return torch.utils.cpp_extension.load(x)"), "can't be used"),
        (changed(TANH, "return self.linear(x)"), "it does not use torch.tanh"),
        (changed(TANH, "return torch.relu(torch.tanh(self.linear(x)))"), "forward uses torch.relu, which is not among"),
        (changed(TANH, "return torch.tanh(self.linear(x)).exp()"), "forward uses .exp(), which"),
        (changed(TANH, "x = torch.tanh(self.linear(x))\n        return x.exp()"), "forward uses .exp(), which"),
        (changed(TANH, "x = torch.tanh(self.linear(x))\n        return x * 2"), "forward uses mul, which"),
        (
            changed("self.linear = nn", "self.drop = nn.Dropout(0.5)\n        self.linear = nn"),
            "__init__ uses torch.nn.Dropout",
        ),
        (changed("batch_size = 16", "rows = 16", changed("(batch_size,", "(rows,")), "no constant `batch_size`"),
        (changed("(batch_size,", "(16,"), "does not use batch_size"),
        (changed("def get_init_inputs", "def initial_inputs"), "get_init_inputs is missing"),
        (changed("Model(nn.Module)", "Model"), "no nn.Module"),
        (changed("forward(self, x)", "forward(self, x, y)"), "forward never reads its argument y"),
        (
            changed("super().__init__()", "super().__init__()\n        self.extra = nn.Linear(2, 2)"),
            "never uses self.extra",
        ),
        (
            changed("nn.Linear(in_features, out_features)", "nn.Linear(in_features, batch_size)"),
            "reads the constant batch_size",
        ),
        (GOOD + "#" * 20_001, "more than 20000 characters"),
    ],
)
def test_rules_on_the_text_of_a_file(code, problem):
    found = "; ".join(answer_rules.problems(code, OPERATORS))
    if problem is None:
        assert found == ""
    else:
        assert problem in found


# ---- running a file


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(FOLDERS))
        patch.setenv("LLM_API_KEY", KEY)
        pool = CheckPool(
            1, tmp_path_factory.mktemp("checks"), lambda *_, **__: None, time_limit_s=10, memory_bytes=1 << 30
        )
    yield pool
    pool.stop()


def test_a_valid_file_passes_with_what_its_call_does(pool):
    facts = pool.check(GOOD, 3)
    assert facts["problem"] is None and facts["batch_size"] == 16
    # addmm: two operations for each weight and sample; twice the batch, twice of it.
    assert facts["work"]["flops"] == [2 * 16 * 32 * 8, 2 * 32 * 32 * 8]
    assert facts["work"]["operators"] == [2, 2]
    assert pool.check(GOOD, 3) == facts


@pytest.mark.parametrize(
    "code, problem",
    [
        (
            changed("in_features = 32", "in_features = missing"),
            "the file fails (line 17: in_features = missing): NameError",
        ),
        (
            changed("return [in_features, out_features]", "return [in_features]"),
            "Model(*get_init_inputs()) fails: TypeError",
        ),
        (
            changed("in_features)]", "in_features + 1)]"),
            "forward fails (line 13: return torch.tanh(self.linear(x))): RuntimeError",
        ),
        (changed("[torch.randn(batch_size, in_features)]", "[]"), "must return a list of tensors"),
        (changed("[torch.randn(batch_size, in_features)]", "[batch_size]"), "must return tensors only"),
        (
            changed("(batch_size, in_features)", "(in_features, batch_size, in_features)"),
            "its first dimension must be batch_size",
        ),
        (changed(TANH, "return torch.tanh(self.linear(x)).sum()"), "the output has the shape ()"),
        (changed(TANH, "return [torch.tanh(self.linear(x))]"), "must return one tensor, not list"),
        (changed(TANH, "return torch.tanh(self.linear(x)).double()"), "must return float32, not float64"),
        (changed(TANH, "return torch.log(torch.tanh(self.linear(x)))"), "not finite"),
        (changed(TANH, "return torch.tanh(self.linear(x)) * 0 + 3"), "constant: every element is about 3"),
        (changed(TANH, "return torch.tanh(self.linear(x)) + torch.rand_like(x[:, :8])"), "forward is random"),
        (changed(TANH, "return torch.tanh(self.linear(x)) + (1.0 if self.training else 0.0)"), "train mode"),
        (changed(TANH, "x.mul_(2)\n        return torch.tanh(self.linear(x))"), "writes into its inputs"),
        (changed(TANH, "return torch.tanh(self.linear(x) * 1e-4 + torch.arange(8))"), "hardly depends on the inputs"),
        (
            changed(
                "in_features)]",
                "in_features), torch.randn(batch_size, 8)]",
                changed(
                    "forward(self, x)",
                    "forward(self, x, y)",
                    changed(TANH, "return torch.tanh(self.linear(x) + y * 1e-9)"),
                ),
            ),
            "hardly depends on input 1",
        ),
        (changed(TANH, "return torch.tanh(self.linear(x)).repeat_interleave(10**9, 1)"), "memory"),
        (changed(TANH, "while True:\n            pass"), "takes longer than 10 s"),
        (
            changed(TANH, "return torch.tanh(self.linear(x)) if __import__('os')._exit(0) else x"),
            "its process ended with code 0",
        ),
        (changed(TANH, "__import__('ctypes').string_at(0)"), "its process ended with code 11"),
        (changed(TANH, "raise ValueError(dict(__import__('os').environ))"), "forward fails"),
    ],
)
def test_what_a_running_file_shows(pool, code, problem):
    found = pool.check(code, 3)["problem"]
    assert problem in found and KEY not in found
    assert pool.check(GOOD, 3)["problem"] is None


def test_a_file_cannot_write_outside_its_scratch(pool, tmp_path):
    target = tmp_path / "written"
    code = changed(TANH, f"open({str(target)!r}, 'w').write('x')\n        {TANH}")
    pool.check(code, 3)
    if "namespaces" in walls():
        assert not target.exists()


def test_missing_walls_are_told_once(tmp_path, monkeypatch):
    said = []
    pool = CheckPool(1, tmp_path, lambda message, level="info": said.append((level, message)))
    monkeypatch.setattr("check_server.CheckServer.check", lambda *_: {"problem": None, "walls": False})
    assert pool.check(GOOD, 1) == pool.check(GOOD, 2) == {"problem": None}
    assert len(said) == 1 and said[0][0] == "warning" and "namespaces are not available" in said[0][1]


def walls():
    """Which walls this machine allows, as a child that tries them says."""
    probe = "import isolation; print('namespaces' if isolation.enter_namespaces() else 'limits')"
    return subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(FOLDERS)},
    ).stdout


# ---- the prompts


def test_a_pipeline_can_replace_a_prompt(tmp_path):
    (tmp_path / "repair.md").write_text("Mend it: {problem} {unknown}")
    prompts = load_prompts(str(tmp_path))
    values = {"operators": "-", "ops": "a, b", "count": 2}
    assert fill(prompts, "repair.md", problem="{ops} is wrong", **values) == "Mend it: {ops} is wrong {unknown}"
    assert "these 2 operators" in fill(prompts, "task.md", **values)


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("task.md", "write something", "the prompt task.md has no {operators}"),
        ("tasks.md", "{operators}", "there is no prompt called tasks.md"),
    ],
)
def test_a_prompt_that_can_not_work_is_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(stage.StageError, match=message.replace("{", r"\{")):
        load_prompts(str(tmp_path))


# ---- the program


def request_row(number, ops=OPERATORS):
    text = "\n".join(f"- `{name}`" for name in ops)
    return {
        "row": f"{number:064x}",
        "seed": 1000 * number,
        "columns": {"task_id": f"llm-0-{number}", "ops": json.dumps(ops), "operators": text},
    }


class Ended:
    def __init__(self, folder, code, events, log):
        self.code, self.log = code, log
        self.rows = {event["row"]: event for event in events if event["event"] == "row"}
        self.metrics = {event["name"]: event["value"] for event in events if event["event"] == "metric"}
        self.messages = [event["message"] for event in events if event["event"] == "log"]
        path = folder / "error.json"
        self.error = json.loads(path.read_text()) if path.exists() else None

    def row(self, number):
        return self.rows[f"{number:064x}"]


def run_program(folder, endpoint, rows, *, params=None, inputs=None, close_input=True):
    """Run the program as the engine does: rows over standard input, events over a pipe."""
    folder.mkdir(parents=True)
    request = {
        "protocol": 1,
        "stage": "generated",
        "kind": "ops/generate",
        "params": {**PARAMS, **(params or {})},
        "seed": 0,
        "inputs": inputs or {},
        "outputs": {},
        "resources": {"cpu": 1, "memory_bytes": 0, "gpus": []},
        "device": None,
        "by_row": {"port": "requests", "columns": [], "window": 256, "total": len(rows)},
        "deadline_unix_s": None,
        "state_dir": str(folder),
    }
    (folder / "request.json").write_text(json.dumps(request))
    reader, writer = os.pipe()
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(FOLDERS),
        **stage_driver.bytecode(),
        "CUDA_AGENT_REQUEST": str(folder / "request.json"),
        "CUDA_AGENT_EVENTS_FD": str(writer),
        "LLM_API_KEY": KEY,
        "LLM_ENDPOINT": endpoint if isinstance(endpoint, str) else json.dumps(endpoint),
        "HOME": str(folder),
    }
    program = subprocess.Popen(
        [sys.executable, str(HERE / "generate.py")],
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[writer],
        text=True,
    )
    os.close(writer)
    program.stdin.write("".join(json.dumps(row) + "\n" for row in rows))
    program.stdin.flush()
    if close_input:
        program.stdin.close()
    with os.fdopen(reader, encoding="utf-8") as lines:
        events = [json.loads(line) for line in lines]
    log = program.stderr.read()
    code = program.wait(timeout=60)
    program.stderr.close()
    return Ended(folder, code, events, log)


def test_answers_are_kept_repaired_or_rejected(serve, tmp_path):
    invalid = changed(TANH, "return torch.relu(self.linear(x))")
    answers = {0: [GOOD], 1: [invalid, GOOD], 2: [invalid, invalid]}
    asked = []

    def reply(request):
        seed = request["body"]["seed"]
        asked.append(request["body"])
        return openai_reply(fenced(answers[seed // 1000][seed % 1000]))

    url = serve(Script(reply))
    endpoint = {"base_url": url, "concurrency": 1, "usd_per_million_input": 2.0, "usd_per_million_output": 10.0}
    ended = run_program(tmp_path / "a", endpoint, [request_row(number) for number in range(3)])
    assert ended.code == 0, ended.log
    first, second, third = (ended.row(number) for number in range(3))
    (task,) = first["outputs"]["tasks"]
    assert task["code"] == GOOD and task["origin"] == "llm:scripted" and task["attempts"] == 1
    assert task["estimate_ms"] is None and task["batch_size"] == 16
    assert task["llm_cost_usd"] == pytest.approx((100 * 2 + 50 * 10) / 1e6)
    (task,) = second["outputs"]["tasks"]
    assert task["attempts"] == 2 and (task["llm_prompt_tokens"], task["llm_completion_tokens"]) == (200, 100)
    calls = second["outputs"]["answers"]
    assert [call["attempt"] for call in calls] == [0, 1]
    assert "it does not use torch.tanh" in calls[0]["problem"] and calls[1]["problem"] is None
    assert calls[0]["response"] == fenced(invalid) and "`nn.Linear`" in calls[0]["request"]
    # The repair goes on with the conversation, and says what is wrong.
    repair = asked[2]["messages"]
    assert [message["role"] for message in repair] == ["system", *["user", "assistant"] * 2, "user"]
    assert repair[4]["content"] == fenced(invalid) and calls[0]["problem"] in repair[5]["content"]
    assert third["status"] == "rejected" and third["reason"] == "invalid" and "torch.tanh" in third["detail"]
    assert len(third["outputs"]["answers"]) == 2 and "tasks" not in third["outputs"]
    assert ended.metrics["llm/calls"] == 5 and ended.metrics["llm/repaired"] == 1
    assert ended.metrics["llm/completion_tokens"] == 250
    assert ended.messages[-1].startswith("3 of 3 requests (1 valid, 1 repaired, 1 rejected); 500 + 250 tokens")


def test_answers_do_not_depend_on_how_many_are_written_at_a_time(serve, tmp_path):
    gate, state = threading.Condition(), {"now": 0, "most": 0}

    def reply(request):
        with gate:
            state["now"] += 1
            state["most"] = max(state["most"], state["now"])
            gate.notify_all()
            # Nobody is answered before three are waiting, until three have been seen.
            gate.wait_for(lambda: state["most"] >= 3, timeout=20)
            state["now"] -= 1
        return openai_reply(fenced(GOOD.replace("out_features", f"features_{request['body']['seed']}")))

    rows = [request_row(number, OPERATORS) for number in range(9)]
    many = run_program(tmp_path / "many", {"base_url": serve(Script(reply)), "concurrency": 3}, rows)
    assert many.code == 0, many.log
    assert state["most"] == 3
    state["most"] = 3
    one = run_program(tmp_path / "one", {"base_url": serve(Script(reply)), "concurrency": 1}, rows)

    def kept(ended):
        def comparable(event):
            calls = [{**call, "seconds": None} for call in event["outputs"]["answers"]]
            return event["status"], event["outputs"]["tasks"], calls

        return {row: comparable(event) for row, event in ended.rows.items()}

    assert kept(many) == kept(one) and len(many.rows) == 9


def test_a_refused_key_ends_the_stage_at_once_with_a_hint(serve, tmp_path):
    script = Script(failure(401, "no such key"))
    endpoint = {"base_url": serve(script), "concurrency": 2}
    # The engine waits for answers and does not close the input: the program must end by itself.
    ended = run_program(tmp_path / "a", endpoint, [request_row(n) for n in range(50)], close_input=False)
    assert ended.code == 1 and not ended.rows and len(script.requests) <= 2
    assert ended.error["kind"] == "params" and "answers 401: no such key" in ended.error["message"]
    assert "LLM_API_KEY" in ended.error["hint"] and KEY not in ended.log
    assert "Fatal Python error" not in ended.log


def test_rows_that_the_endpoint_failed_are_left_for_the_next_run(serve, tmp_path):
    script = Script(openai_reply(fenced(GOOD)), failure(500, "broken"), openai_reply(fenced(GOOD)))
    endpoint = {"base_url": serve(script), "concurrency": 1, "retries": 0}
    ended = run_program(tmp_path / "a", endpoint, [request_row(number) for number in range(3)])
    assert ended.code == 0, ended.log
    assert [ended.row(number)["status"] for number in range(3)] == ["done", "failed", "done"]
    assert ended.row(1)["reason"] == "endpoint" and not ended.row(1)["outputs"]


def test_an_answer_that_was_cut_off_is_told_so(serve, tmp_path):
    script = Script(openai_reply("```python\nclass Model(nn.Mod", finish="length"), openai_reply(fenced(GOOD)))
    ended = run_program(tmp_path / "a", serve(script), [request_row(0)])
    calls = ended.row(0)["outputs"]["answers"]
    assert calls[0]["problem"] == "the answer was cut off after 700 tokens; write less"
    assert ended.row(0)["status"] == "done"


def test_anthropics_format_end_to_end(serve, tmp_path):
    invalid = anthropic_reply("I'd rather not.")
    script = Script(invalid, anthropic_reply(fenced(GOOD)))
    ended = run_program(tmp_path / "a", serve(script), [request_row(0)], params={"api": "anthropic"})
    assert ended.code == 0, ended.log
    assert ended.row(0)["outputs"]["tasks"][0]["attempts"] == 2
    assert [message["role"] for message in script.requests[1]["body"]["messages"]] == [
        *["user", "assistant"] * 2,
        "user",
    ]


@pytest.mark.parametrize(
    "endpoint, params, message, hint",
    [
        ("replay-only", {}, "no recorded answer", "the parameters and the prompts of the recording"),
        ("nowhere", {}, "no http or https URL", "http://127.0.0.1:8080/v1"),
        ("http://127.0.0.1:9/v1", {"model": " "}, "the parameter model is empty", "knows the model by"),
        ("http://127.0.0.1:9/v1", {"body": {"messages": []}}, "body can't set messages", "prompts"),
    ],
)
def test_what_is_wrong_with_the_settings_is_said_before_the_first_call(tmp_path, endpoint, params, message, hint):
    ended = run_program(tmp_path / "a", endpoint, [request_row(0)], params=params, close_input=False)
    assert ended.code == 1 and ended.error["kind"] == "params"
    assert message in ended.error["message"] and hint in ended.error["hint"]
