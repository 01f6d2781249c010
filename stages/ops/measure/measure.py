"""`ops/measure`: runs each task in a worker process and records facts about it. It judges nothing.

This is the program that the engine starts: it checks the request against the machine, then answers rows. `supervisor`
watches workers, `zygote` forks them, `task_worker` measures inside one, `isolation` is the walls, `columns` the facts.
"""

import importlib.metadata
import os
import platform
import re
import shutil
import tempfile

import cuda_agent_stage as stage
import supervisor

UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
UNITS.update({f"{letter}iB": 1024 ** (power + 1) for power, letter in enumerate("KMGT")})

COMPILER_HINT = (
    "torch.compile needs a C++ compiler (g++ or clang++; the variable CXX names another) and Python's headers; "
    "`compile: false` measures eager execution only"
)


def parse_bytes(text, name):
    """A size such as 4GiB, or a plain number of bytes."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2] not in UNITS or match[1].count(".") > 1 or match[1] == ".":
        raise stage.StageError(f"{name}: {text!r} is not a size such as 4GiB", kind="params")
    return int(float(match[1]) * UNITS[match[2]])


def cpu_model():
    """The CPU as /proc/cpuinfo names it, or None where it does not."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return None


def driver_version():
    """The NVIDIA driver's version, or None where the system does not show it."""
    try:
        with open("/sys/module/nvidia/version", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


def check_compiler():
    """Fail before the first row where torch.compile can't work at all."""
    named = os.environ.get("CXX")
    if not any(shutil.which(name) for name in ([named] if named else ["g++", "clang++", "c++"])):
        missing = f"the C++ compiler {named!r}" if named else "a C++ compiler"
        raise stage.StageError(f"{missing} is not installed", kind="environment", hint=COMPILER_HINT)


def device_type(program):
    """`cpu` or `cuda`: what the engine files the results under, which the parameter must not contradict."""
    declared, wanted = program.device["type"], program.params["device"]
    if wanted not in ("auto", declared):
        hint = "give the stage `resources: { gpu: 1 }`" if wanted == "cuda" else "take `gpu` off its resources"
        raise stage.StageError(
            f"the parameter device is {wanted}, but the stage was given a device of type {declared}",
            kind="device",
            hint=hint,
        )
    return declared


def check_device(program, server, device):
    """The declared device must be the one that measurements will be taken on."""
    if device == "cpu":
        found = cpu_model()
    else:
        answer = server.probe("probe_cuda", device="cuda") or {}
        found = answer.get("device_name")
        if found is None:
            raise stage.StageError("torch sees no CUDA device", kind="device", hint="`cuda-agent doctor` says why")
        driver = driver_version()
        if driver and driver != program.device["driver"]:
            raise stage.StageError(
                f"the NVIDIA driver is {driver}, but results would be filed under {program.device['driver']}",
                kind="device",
            )
    if found is not None and found != program.device["model"]:
        raise stage.StageError(
            f"this is a {found}, but results would be filed under {program.device['model']}", kind="device"
        )


def check_threads(program):
    threads, granted = program.params["threads"], max(1, program.resources["cpu"])
    if threads > granted:
        raise stage.StageError(
            f"threads is {threads}, but the stage was granted {granted} CPU cores",
            kind="params",
            hint=f"set `resources: {{ cpu: {threads} }}`",
        )


def worker_environment():
    """What workers see of the environment: nothing of the engine's."""
    return {name: value for name, value in os.environ.items() if not name.startswith("CUDA_AGENT_")}


def start(server, *, compile):
    try:
        return server.start()
    except supervisor.WorkerUnavailable as error:
        hint = COMPILER_HINT if compile else None
        raise stage.StageError(f"torch does not start: {error}", kind="environment", hint=hint) from error


def job_for(program, row, device, limits):
    return {
        "action": "measure",
        "device": device,
        "code": row["columns"]["code"],
        "seed": row["seed"],
        "time_limit_s": float(program.params["time_limit_s"]),
        "params": {
            name: program.params[name] for name in ("compile", "threads", "trials", "warmup", "timing_s")
        },
        **limits,
    }


def provenance(program):
    """What every row was measured with, so that a published row says it by itself."""
    model = program.device["model"] if program.device else platform.processor()
    return {"device": model, "torch": importlib.metadata.version("torch"), "threads": program.params["threads"]}


def answer_row(program, server, row, device, limits):
    """Measure one row. Where no worker could be had, say so and go on with a new zygote: the task is not to blame."""
    if not isinstance(row["columns"].get("code"), str):
        program.answer(row, status="rejected", reason="no code", detail="the column code is null")
        return
    try:
        if not server.alive():
            start(server, compile=program.params["compile"])
        facts = supervisor.measure_task(server, job_for(program, row, device, limits)) | provenance(program)
    except supervisor.WorkerUnavailable as error:
        server.stop()
        program.answer(row, status="failed", reason="no worker", detail=str(error))
        return
    program.answer(row, {"rows": [facts]})


def work(program):
    if platform.system() != "Linux":
        raise stage.StageError(f"tasks are measured on Linux, not on {platform.system()}", kind="environment")
    params = program.params
    limits = {name: parse_bytes(params[name], name) for name in ("memory_limit", "disk_limit")}
    device = device_type(program)
    check_threads(program)
    if params["compile"]:
        check_compiler()
    supervisor.hide_from_tasks()
    with tempfile.TemporaryDirectory(prefix="measure-", dir=os.getcwd(), ignore_cleanup_errors=True) as folder:
        server = supervisor.Zygote(
            folder, compile=params["compile"], environment=worker_environment(), log=program.log,
            device=device,
        )  # fmt: skip
        try:
            found = start(server, compile=params["compile"])
            check_device(program, server, device)
            program.log(f"ready: {found}, isolated by {'namespaces' if server.walls else 'limits'}", level="debug")
            for row in program.rows():
                answer_row(program, server, row, device, limits)
        finally:
            server.stop()


if __name__ == "__main__":
    stage.main(work)
