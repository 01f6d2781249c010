"""Tests of `ops/measure`: honest tasks with known facts, and hostile ones that must cost their own row only.

One program measures them all in a row, hostile and honest by turns, as the engine would have it; each test looks at
one answer. Starting the program takes most of the time.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time
import types

import pytest

pytest.importorskip("torch")

HERE = pathlib.Path(__file__).resolve().parent
# Where the engine lets the program look for modules.
FOLDERS = [str(HERE), *(str(HERE.parent.parent / name) for name in ("ops/python", "protocol/python", "torch_runtime"))]
sys.path[:0] = FOLDERS

import columns
import cuda_agent_stage as stage
import slots
import stage_driver
import supervisor


def load_program():
    """The program by its path: its name is also its folder's, which pytest may have imported as a package."""
    specification = importlib.util.spec_from_file_location("measure_program", HERE / "measure.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


measure = load_program()

PARAMS = {
    "device": "auto",
    "compile": True,
    "threads": 1,
    "trials": 5,
    "warmup": 1,
    "timing_s": 2.0,
    "time_limit_s": 20,
    "memory_limit": "1GiB",
    "disk_limit": "64MiB",
    "gpu_memory_limit": "8GiB",
    "settled": 0.0,
    "slow_ms": 0,
    "workers": 0,
    "tasks_per_worker": 0,
}


def task(body="return torch.relu(x)", *, arguments="x", init="pass", inputs="[torch.randn(64, 32)]", top=""):
    """A task from the bodies of forward and __init__."""

    def indented(text):
        return "".join(f"        {line}\n" for line in text.splitlines())

    return (
        f"import torch\nimport torch.nn as nn\n{top}\n\nclass Model(nn.Module):\n"
        f"    def __init__(self):\n        super().__init__()\n{indented(init)}"
        f"    def forward(self, {arguments}):\n{indented(body)}\n"
        f"def get_inputs():\n    return {inputs}\n\ndef get_init_inputs():\n    return []\n"
    )


HONEST = {
    "linear": task("return self.linear(x)", init="self.linear = nn.Linear(32, 16)"),
    "constant": task("return torch.zeros(4, 4) + 3 + 0 * x.sum()"),
    "random": task("return x + torch.rand_like(x)"),
    "ignores": task("return x + 0 * y", arguments="x, y", inputs="[torch.randn(8, 8), torch.randn(8, 8)]"),
    "fixed": task("return x + y", arguments="x, y", inputs="[torch.randn(8, 8), torch.arange(8.0)]"),
    "not_a_number": task("return torch.log(x)"),
    "dropout": task("return self.drop(x)", init="self.drop = nn.Dropout(0.5)"),
    "batch_norm": task("return self.norm(x)", init="self.norm = nn.BatchNorm1d(32)"),
    "in_place": task("x.add_(1)\nreturn x * 2"),
    "attention": task(
        "return nn.functional.scaled_dot_product_attention(x, x, x)", inputs="[torch.randn(2, 4, 16, 8)]"
    ),
    "two_outputs": task("return x.sum(-1), {'a': (x > 0)}"),
    "own_draws": task(inputs="[torch.tensor(list(__import__('os').urandom(64))).float()]"),
    "data_dependent": task("return x[x > 0]"),
}

FAILING = {
    "does_not_load": ("import nothing_of_that_name\n", "load", "exception"),
    "no_model": ("def get_inputs():\n    return []\n", "load", "exception"),
    "does_not_build": (task(init="raise ValueError('no')"), "init", "exception"),
    "no_inputs": (task(inputs="[undefined]"), "inputs", "exception"),
    "wrong_shape": (task("return x @ x"), "forward", "exception"),
    "does_not_compile": (
        task("return x.exp()", top="def broken(*a, **k): raise RuntimeError('no backend')\ntorch.compile = broken\n"),
        "compile",
        "exception",
    ),
}

HOSTILE = {
    "loops": (task("while True: pass"), "timeout"),
    "ignores_signals": (
        task(
            "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n"
            "    except OSError: pass\nwhile True: pass"
        ),
        "timeout",
    ),
    "memory_bomb": (task("kept = []\nwhile True: kept.append(bytearray(1 << 24))"), "memory"),
    "one_allocation": (task("return torch.ones(1 << 33) + x.sum()"), "memory"),
    "memory_in_children": (
        task(
            "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        kept = bytearray(300 << 20)\n"
            "        time.sleep(100)\ntime.sleep(100)"
        ),
        "memory",
    ),
    "fork_bomb": (
        task("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"),
        "processes",
    ),
    "raises_limits": (
        task(
            "import resource\nfor kind in (resource.RLIMIT_DATA, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):\n"
            "    resource.setrlimit(kind, (resource.RLIM_INFINITY,) * 2)"
        ),
        "exception",
    ),
    "exits_at_once": (task("import os\nos._exit(0)"), "exit"),
    "exits": (task("import sys\nsys.exit(0)"), "exit"),
    "closes_descriptors": (task("import os\nos.closerange(0, 10000)\nreturn x"), "exit"),
    "one_large_file": (
        task("with open('big', 'wb') as file:\n    for _ in range(1000): file.write(bytes(1 << 20))\nreturn x"),
        "exception",
    ),
    "many_files": (
        task("for n in range(1000):\n    open(f'part{n}', 'wb').write(bytes(1 << 20))\nreturn x"),
        "exception",
    ),
    "crashes": (task("import ctypes\nctypes.string_at(0)"), "crash"),
    "aborts": (task("import os\nos.abort()"), "crash"),
    "kills_itself": (task("import os\nos.kill(os.getpid(), 9)"), "crash"),
    "kills_itself_in_compile": (
        task(
            "return x.exp()", top="import os\ndef killer(*a, **k): os.kill(os.getpid(), 11)\ntorch.compile = killer\n"
        ),
        "crash",
    ),
    "forges": (task('import os\nos.write(3, b\'{"facts": {"eager_ms": 1.0}}\\n\')\nreturn x'), "garbled"),
    "floods_results": (task("import os\nwhile True: os.write(3, b'x' * 65536)"), "garbled"),
    "writes_outside": (task(f"open({str(HERE / 'evil')!r}, 'w').write('x')\nreturn x"), "exception"),
    "reaches_out": (task("import socket\nsocket.create_connection(('127.0.0.1', 9), 2)\nreturn x"), "exception"),
}

# What leaves something behind or makes noise and is otherwise a good task.
SURVIVING = {
    "outlives": task(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(1000)\n"
        "    os._exit(0)\nreturn x * 2"
    ),
    "noisy": task("import sys\nprint('x' * 3_000_000)\nsys.stderr.write('y' * 3_000_000)\nreturn x * 2"),
    "reads_nothing": task("import sys\nassert sys.stdin.read() == ''\nreturn x * 2"),
    "kills_everyone": task(
        "import os\nfor number in (1, os.getppid(), -1):\n    try: os.kill(number, 9)\n    except OSError: pass\n"
        "return x * 2"
    ),
}


def request(folder, params, device=None, total=0):
    return {
        "protocol": 1,
        "stage": "measured",
        "kind": "ops/measure",
        "params": params,
        "seed": 0,
        "inputs": {},
        "outputs": {"rows": {"type": "table", "path": "outputs/rows.parquet"}},
        "by_row": {"port": "tasks", "columns": ["code"], "window": 1, "total": total},
        "resources": {"cpu": 1, "memory_bytes": 0, "gpus": []},
        "device": device or {"type": "cpu", "model": measure.cpu_model() or "unknown"},
        "deadline_unix_s": None,
        "state_dir": str(folder),
    }


class Driver:
    """Drives the program by hand, as the engine does: one row at a time."""

    def __init__(self, folder, device=None, path=None, **params):
        self.folder = folder
        (folder / "request.json").write_text(json.dumps(request(folder, {**PARAMS, **params}, device)))
        reader, writer = os.pipe()
        environment = {
            "PATH": os.environ["PATH"] if path is None else path,
            "HOME": os.environ.get("HOME", "/"),
            "PYTHONPATH": os.pathsep.join(FOLDERS),
            "CUDA_AGENT_REQUEST": str(folder / "request.json"),
            "CUDA_AGENT_EVENTS_FD": str(writer),
            **stage_driver.bytecode(),
        }
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "measure.py")],
            cwd=folder,
            env=environment,
            pass_fds=[writer],
            stdin=subprocess.PIPE,
            text=True,
        )
        os.close(writer)
        self.events = os.fdopen(reader)

    def measure(self, code, seed=5):
        self.process.stdin.write(json.dumps({"row": "d" * 64, "seed": seed, "columns": {"code": code}}) + "\n")
        self.process.stdin.flush()
        for line in self.events:
            event = json.loads(line)
            if event["event"] == "row":
                assert event["row"] == "d" * 64
                return event
        raise AssertionError(f"the program ended with {self.process.wait()}")

    def close(self):
        self.process.stdin.close()
        code = self.process.wait(timeout=60)
        self.events.close()
        return code

    def error(self):
        """What a program that refuses its request says."""
        self.process.stdin.close()
        assert self.process.wait(timeout=300) == 1
        return json.loads((self.folder / "error.json").read_text())


def processes_of_workers():
    """Process ids of everything that runs this folder's zygote or one of its workers."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = pathlib.Path("/proc", name, "cmdline").read_bytes()
            status = pathlib.Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if str(HERE / "zygote.py").encode() in command and status != "Z":
            found.append(int(name))
    return set(found)


def workers_left(before):
    """Those that are there beside `before` and stay: processes take a moment to end."""
    for _ in range(200):
        left = processes_of_workers() - before
        if not left:
            break
        time.sleep(0.05)
    return left


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Every task's answer by name, with an honest task measured after each hostile one."""
    folder = tmp_path_factory.mktemp("measure")
    before = processes_of_workers()
    found = {"after": {}}
    driver = Driver(folder)
    for name, code in [*HONEST.items(), *SURVIVING.items()]:
        found[name] = driver.measure(code)
    for name, (code, *_) in FAILING.items():
        found[name] = driver.measure(code)
    assert driver.close() == 0
    # Less time for those that run out of it, and for those that take long.
    driver = Driver(folder, time_limit_s=4, slow_ms=20)
    found["slow"] = driver.measure(task("import time\ntime.sleep(0.05)\nreturn x * 2"))
    found["after"]["slow"] = driver.measure(HONEST["linear"])
    for name, (code, _) in HOSTILE.items():
        found[name] = driver.measure(code)
        found["after"][name] = driver.measure(HONEST["linear"])
    found["running"] = len(processes_of_workers() - before)
    assert driver.close() == 0
    found["left"] = workers_left(before)
    found["files"] = sorted(path.name for path in folder.iterdir())
    return found


def facts(answers, name):
    answer = answers[name]
    assert answer["status"] == "done", answer
    (row,) = answer["outputs"]["rows"]
    assert list(row) == list(columns.FACTS) and columns.refuse(row) is None
    return row


def test_an_honest_task(answers):
    row = facts(answers, "linear")
    assert row["loads"] and row["builds"] and row["executes_eager"] and row["executes_compiled"]
    assert row["error"] is None and row["error_stage"] is None
    assert json.loads(row["inputs"]) == [{"shape": [64, 32], "dtype": "float32"}]
    assert json.loads(row["outputs"]) == [{"shape": [64, 16], "dtype": "float32"}]
    assert row["parameters"] == 32 * 16 + 16
    assert row["finite"] and not row["output_constant"] and not row["mutates_inputs"]
    assert row["output_min"] < row["output_mean"] < row["output_max"] and row["output_std"] > 0
    assert row["repeat_abs"] == 0 and row["reseed_abs"] == 0 and row["random_ops"] == []
    assert row["inputs_fixed"] == [False] and row["inputs_repeatable"]
    assert row["fresh_rel"] > 0.1 and row["sensitivity_rel"] == [row["fresh_rel"]]
    assert row["sensitivity_share"][0] > 0.9 and row["train_abs"] == 0 and not row["shapes_vary"]
    assert row["compiled_tolerance"] < 1e-4 and row["graph_breaks"] == 0
    assert 0 < row["eager_min_ms"] <= row["eager_ms"] and 0 < row["compiled_min_ms"] <= row["compiled_ms"]
    assert row["eager_trials"] == row["compiled_trials"] == 5 and row["compile_s"] > 0 and row["total_s"] > 0


def test_facts_of_the_graph_and_of_other_draws(answers):
    row = facts(answers, "linear")
    assert row["graph_operators"] == ["addmm"] and len(row["graph"]) == 64
    assert 1 <= row["seed_std_ratio"] < 2 and row["output_zero_share"] == 0 and row["output_top_share"] < 0.01
    constant = facts(answers, "constant")
    assert constant["seed_std_ratio"] is None and constant["output_top_share"] == 1
    assert facts(answers, "attention")["graph"] != row["graph"]


def test_a_constant_output(answers):
    row = facts(answers, "constant")
    assert row["output_constant"] and row["fresh_abs"] == 0 and row["output_std"] == 0 and row["output_mean"] == 3


def test_randomness_in_forward(answers):
    row = facts(answers, "random")
    assert row["reseed_abs"] > 0 and row["repeat_abs"] == 0 and any("rand" in name for name in row["random_ops"])


def test_attention_is_not_random(answers):
    assert facts(answers, "attention")["random_ops"] == []


def test_an_input_that_does_not_matter(answers):
    row = facts(answers, "ignores")
    assert row["sensitivity_abs"][0] > 0 and row["sensitivity_abs"][1] == 0 and row["sensitivity_share"][1] == 0


def test_a_fixed_input(answers):
    row = facts(answers, "fixed")
    assert row["inputs_fixed"] == [False, True] and row["sensitivity_abs"][1] is None


def test_not_a_number(answers):
    row = facts(answers, "not_a_number")
    assert not row["finite"] and row["output_mean"] is None and row["executes_compiled"]
    assert row["compiled_abs"] is not None and row["repeat_abs"] == 0


def test_modes_that_differ(answers):
    dropout, batch_norm = facts(answers, "dropout"), facts(answers, "batch_norm")
    assert dropout["train_abs"] > 0 and dropout["train_random_ops"] and dropout["random_ops"] == []
    assert batch_norm["train_abs"] > 0 and batch_norm["train_random_ops"] == []
    # Running statistics that train mode moved were put back before compiling.
    assert batch_norm["compiled_tolerance"] < 1e-4


def test_a_task_that_writes_into_its_inputs(answers):
    row = facts(answers, "in_place")
    assert row["mutates_inputs"] and row["repeat_abs"] == 0 and row["compiled_tolerance"] < 1e-5


def test_outputs_are_flattened(answers):
    row = facts(answers, "two_outputs")
    assert [item["dtype"] for item in json.loads(row["outputs"])] == ["float32", "bool"]


def test_inputs_that_do_not_follow_the_seed(answers):
    assert not facts(answers, "own_draws")["inputs_repeatable"]


def test_shapes_that_depend_on_values(answers):
    row = facts(answers, "data_dependent")
    assert row["shapes_vary"] and row["fresh_abs"] is None


@pytest.mark.parametrize("name", FAILING)
def test_failures_are_facts(answers, name):
    row = facts(answers, name)
    _, where, kind = FAILING[name]
    assert (row["error_stage"], row["error_kind"]) == (where, kind) and row["error"]
    order = ["load", "init", "inputs", "forward", "compile"]
    assert row["loads"] == (order.index(where) > 0) and row["builds"] == (order.index(where) > 1)
    assert row["executes_eager"] == (where == "compile") and row["executes_compiled"] is False
    assert (row["eager_ms"] is not None) == (where == "compile")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_task_costs_its_own_row(answers, name):
    row = facts(answers, name)
    assert row["error_kind"] == HOSTILE[name][1], row["error"]
    assert not row["executes_compiled"]
    next_row = answers["after"][name]["outputs"]["rows"][0]
    assert next_row["executes_compiled"] and next_row["error"] is None


def test_facts_from_before_a_crash_are_kept(answers):
    row = facts(answers, "kills_itself_in_compile")
    assert row["executes_eager"] and row["eager_ms"] > 0 and row["error_stage"] == "compile"


@pytest.mark.parametrize("name", SURVIVING)
def test_noise_and_stray_children_are_no_failure(answers, name):
    row = facts(answers, name)
    assert row["executes_compiled"] and row["error"] is None


def test_nothing_is_left_behind(answers):
    assert answers["running"] == 1, "a worker outlived its row"
    assert answers["left"] == set()
    assert answers["files"] == ["request.json"]
    assert not (HERE / "evil").exists()


def test_a_dead_zygote_fails_the_row_and_is_replaced(tmp_path):
    driver = Driver(tmp_path, compile=False)
    before = processes_of_workers()
    assert driver.measure(HONEST["linear"])["outputs"]["rows"][0]["executes_compiled"] is None
    (zygote_process,) = [
        process
        for process in processes_of_workers()
        if f"\nPPid:\t{driver.process.pid}\n" in pathlib.Path("/proc", str(process), "status").read_text()
    ]
    os.kill(zygote_process, 9)
    answer = driver.measure(HONEST["linear"])
    if answer["status"] != "done":
        assert answer["status"] == "failed" and answer["outputs"] == {}
    assert driver.measure(HONEST["linear"])["status"] == "done"
    driver.process.kill()
    driver.process.wait()
    assert not workers_left(before), "a zygote outlived its program"


# What a task can leave behind in a process that goes on.
LEAVING = {
    "replaces a function": task(top="torch.relu = lambda x: x * 0"),
    "replaces a builtin": task(top="import builtins\nbuiltins.len = lambda x: 1"),
    "changes a setting": task(top="torch.set_default_dtype(torch.float64)"),
    "starts a thread": task(
        top="import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"
    ),
    "fails": task("return x @ x"),
}


def test_a_worker_lives_for_many_tasks_until_one_leaves_something_behind(tmp_path):
    driver = Driver(tmp_path, compile=False, tasks_per_worker=50)
    # Process ids are the same in every namespace; the instant at which a process began is not.
    process = task("return x * int(open('/proc/self/stat').read().split()[21])", inputs="[torch.ones(1).double()]")

    def began():
        (row,) = driver.measure(process)["outputs"]["rows"]
        assert row["error"] is None, row["error"]
        return row["output_max"]

    first = began()
    honest = driver.measure(HONEST["linear"])["outputs"]["rows"][0]
    assert honest["error"] is None and honest["output_std"] > 0 and began() == first
    for name, code in LEAVING.items():
        before = began()
        driver.measure(code)
        assert began() != before, f"a task that {name} left its worker alive"
        again = driver.measure(HONEST["linear"])["outputs"]["rows"][0]
        assert again["output_std"] == honest["output_std"] and again["graph"] == honest["graph"]
    assert driver.close() == 0


def test_a_task_is_not_to_blame_for_those_before_it(tmp_path):
    driver = Driver(tmp_path, compile=False, tasks_per_worker=50)
    mark = task(top="import sys\nsys.modules['marker'] = sys")
    trip = task(top="import os, sys\nif 'marker' in sys.modules: os.abort()")
    for code in (mark, trip, HOSTILE["aborts"][0], mark):
        (row,) = driver.measure(code)["outputs"]["rows"]
        assert row["error_kind"] == ("crash" if code is HOSTILE["aborts"][0] else None), row["error"]
    assert driver.close() == 0


def test_several_tasks_at_a_time_are_each_answered(tmp_path):
    driver = Driver(tmp_path, compile=False, workers=3)
    names = list(HONEST)
    for number, name in enumerate(names):
        row = {"row": f"{number:064d}", "seed": 5, "columns": {"code": HONEST[name]}}
        driver.process.stdin.write(json.dumps(row) + "\n")
    driver.process.stdin.flush()
    events = (json.loads(line) for line in driver.events)
    found = {}
    while len(found) < len(names):
        event = next(events)
        if event["event"] == "row":
            found[names[int(event["row"])]] = event["outputs"]["rows"][0]
    assert driver.close() == 0
    assert set(found) == set(names)
    assert found["linear"]["parameters"] == 32 * 16 + 16 and found["not_a_number"]["finite"] is False


class Recorder:
    """The supervisor's side of a gate: lets everybody in at once and keeps the order."""

    def __init__(self):
        self.said = []

    def send(self, gate):
        self.said.append(gate)

    def line(self):
        return b"enter"


def test_a_compiled_model_is_alone_from_its_first_run_to_its_last(monkeypatch):
    import torch

    import task_worker

    # Its model runs on the CPU, but everything goes the way that it goes on a GPU.
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    recorder = Recorder()
    gate = task_worker.Gate(recorder, recorder)
    task = types.SimpleNamespace(device=torch.device("cuda"), gate=gate)
    compiled = torch.compile(torch.nn.Linear(4, 4), **task_worker.compiler(task))
    with torch.no_grad():
        compiled(torch.randn(2, 4))
        assert recorder.said == ["alone"]
        with gate.alone():
            compiled(torch.randn(2, 4))
            with gate.apart():
                pass
    assert recorder.said == ["alone", "leave"]
    with gate.shared(), gate.apart():
        pass
    assert recorder.said[2:] == ["shared", "leave", "alone", "leave", "shared", "leave"]


def test_a_slow_task_is_not_measured_further(answers):
    slow = facts(answers, "slow")
    assert (slow["error_stage"], slow["error_kind"]) == ("eager_timing", "slow") and slow["eager_ms"] > 20
    assert slow["executes_eager"] and not slow["executes_compiled"] and slow["repeat_abs"] is None
    assert answers["after"]["slow"]["outputs"]["rows"][0]["error"] is None


def test_another_device_is_refused(tmp_path):
    error = Driver(tmp_path, device={"type": "cpu", "model": "another CPU"}, compile=False).error()
    assert error["kind"] == "device" and "another CPU" in error["message"]


def test_a_device_parameter_that_contradicts_the_grant_is_refused():
    program = type("P", (), {"device": {"type": "cpu", "model": "x"}, "params": {"device": "cuda"}})
    with pytest.raises(stage.StageError) as caught:
        measure.device_type(program)
    assert caught.value.kind == "device" and "gpu: 1" in caught.value.hint


def test_a_missing_compiler_is_said_before_the_first_row(tmp_path):
    error = Driver(tmp_path, path=str(tmp_path)).error()
    assert error["kind"] == "environment" and "C++ compiler" in error["message"] and "g++" in error["hint"]


def test_without_namespaces_strays_are_ended_and_limits_hold(tmp_path):
    supervisor.isolation.adopt_orphans()
    server = supervisor.Zygote(
        str(tmp_path),
        compile=False,
        environment={**os.environ, "PYTHONPATH": os.pathsep.join(FOLDERS)},
        log=lambda *_, **__: None,
    )
    server.start()
    try:
        server.walls = False
        params = {**PARAMS, "compile": False}
        setup = {
            "action": "measure",
            "device": "cpu",
            "memory_limit": 1 << 30,
            "disk_limit": 1 << 26,
            "params": params,
            "lives_on": False,
        }
        job = {"seed": 1, "time_limit_s": 30.0, "memory_limit": 1 << 30, "params": params}
        slot = slots.Slot(server, 0, slots.Company(), 1)

        def measured(code):
            return slot.measure(setup, {**job, "code": code})[0]

        for name in ("outlives", "noisy"):
            row = measured(SURVIVING[name])
            assert row["error"] is None, row["error"]
        for name in ("memory_bomb", "memory_in_children", "exits_at_once", "raises_limits", "crashes"):
            row = measured(HOSTILE[name][0])
            assert row["error_kind"] == HOSTILE[name][1], (name, row["error"])
        assert os.listdir(tmp_path / "scratch-0") == []
        assert supervisor.zygote.children_of(server.process.pid) == []
        row = measured(HONEST["linear"])
        assert row["executes_eager"] and row["error"] is None
    finally:
        server.stop()


@pytest.mark.parametrize("text, expected", [("4GiB", 4 << 30), ("1.5 KB", 1500), ("12", 12), (7, 7)])
def test_sizes(text, expected):
    assert measure.parse_bytes(text, "memory_limit") == expected


@pytest.mark.parametrize("text", ["", "4 gigs", "GiB", "-1", "1..2GB"])
def test_sizes_that_are_none(text):
    with pytest.raises(stage.StageError):
        measure.parse_bytes(text, "memory_limit")


@pytest.mark.parametrize(
    "forged", [[], {"unknown": 1}, {"eager_ms": "1"}, {"finite": 1}, {"parameters": True}, {"random_ops": [1]}]
)
def test_facts_of_another_form_are_refused(forged):
    assert columns.refuse(forged)


def test_the_manifest_declares_what_the_program_records():
    yaml = pytest.importorskip("yaml")
    manifest = yaml.safe_load((HERE / "stage.yaml").read_text())
    declared = manifest["outputs"]["rows"]["columns"]
    assert {column["name"]: column["type"] for column in declared} == columns.FACTS
    assert [column["name"] for column in declared] == list(columns.FACTS)
    assert all(column["doc"] for column in declared)
    assert set(manifest["params"]) == set(PARAMS)
    beside = {path.name for path in HERE.glob("*.py") if not path.name.startswith("test_")}
    assert {source for source in manifest["sources"] if "/" not in source} == beside
