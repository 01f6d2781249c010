"""Times a shared store beside rclone and DVC, against one S3 server that it starts itself: `make bench-store`.

What is timed, each the median of several runs, the tools taking turns:
- push and pull of 2,000 files of 4 KiB, and of one file of 256 MiB. The content is random, each push goes to a prefix
  of its own, and each pull to an empty folder. A pull of cuda-agent is compared with its export: only then are there
  plain files, as after rclone's and DVC's. What comes before the push of cuda-agent and DVC (a run, `dvc add`) is not
  counted.
- a run of 1,000 stages, 10 wide and 100 deep, that finds everything done: with what is on this machine, and on a
  machine with nothing, over a proxy that counts the requests and answers each 30 ms late.

rclone runs with its default flags and with ones that suit the server better; the faster one counts. Nothing here passes
or fails: a figure over its goal is marked, the exit status stays 0. Standard library only, but for the peers.
"""

import argparse
import asyncio
import contextlib
import filecmp
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from typing import Any

from run import BUILD, ROOT, installed, run, seconds_text

BUCKET = "bench"
ACCESS_KEY, SECRET_KEY = "benchaccesskey", "benchsecretkey"
LATENCY = 0.030
RATIO = 1.1
PAYLOADS = {"2,000 × 4 KiB": (2_000, 4 << 10), "256 MiB": (1, 256 << 20)}
WIDE, DEEP = 10, 100


def program(name: str) -> Any:
    """The path of a program that `make venv-dev` installs."""
    path = os.pathsep.join([str(ROOT / ".venv" / "bin"), os.environ.get("PATH", "")])
    found = shutil.which(name, path=path)
    if not found:
        raise SystemExit(f"{name} is neither in .venv/bin nor in PATH: `make venv-dev` installs it")
    return found


def environment(endpoint: Any) -> dict[str, Any]:
    """With what every client reaches the server."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "RCLONE_CONFIG": os.devnull,
        "RCLONE_CONFIG_BENCH_TYPE": "s3",
        "RCLONE_CONFIG_BENCH_PROVIDER": "SeaweedFS",
        "RCLONE_CONFIG_BENCH_ENV_AUTH": "true",
        "RCLONE_CONFIG_BENCH_ENDPOINT": endpoint,
    }


def free_ports(count: int) -> list[int]:
    """Ports below those that the system gives to outgoing connections."""
    while True:
        start = random.randrange(10_000, 30_000)
        with contextlib.ExitStack() as stack:
            try:
                for port in range(start, start + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return list(range(start, start + count))


class Server:
    """A SeaweedFS of our own with one bucket."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.ports = folder, free_ports(8)
        self.endpoint = f"http://127.0.0.1:{self.ports[0]}"

    def __enter__(self) -> Any:
        data = self.folder / "data"
        data.mkdir(parents=True)
        identity = {
            "name": "bench",
            "actions": ["Admin"],
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        }
        (self.folder / "s3.json").write_text(json.dumps({"identities": [identity]}), encoding="utf-8")
        names = ["s3", "s3", "master", "master", "volume", "volume", "filer", "filer"]
        ports = [
            f"-{name}.port{'.grpc' * (index % 2)}={port}"
            for index, (name, port) in enumerate(zip(names, self.ports, strict=True))
        ]
        command = [
            program("weed"),
            "-logtostderr=true",
            "server",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-s3",
            *ports,
            f"-dir={data}",
            f"-s3.config={self.folder / 's3.json'}",
            *(f"-{name}.localSocket={self.folder / name}.sock" for name in ("s3", "filer")),
            "-master.volumeSizeLimitMB=8000",
            "-volume.max=1000",
            "-volume.minFreeSpace=1MiB",
            "-master.telemetry=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ]
        with open(self.folder / "log", "wb") as log:
            self.process = subprocess.Popen(command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            filer = f"http://127.0.0.1:{self.ports[6]}"
            # The filer takes a file only when a volume is there for it.
            self.wait(lambda: status("PUT", f"{filer}/ready", b"x") == 201 and status("GET", self.endpoint) == 403)
            if status("POST", f"{filer}/buckets/{BUCKET}/") != 201:
                raise SystemExit("SeaweedFS does not make a bucket")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        self.process.wait()
        # SeaweedFS makes sockets with names of its own choice.
        for port in self.ports:
            for litter in pathlib.Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                litter.unlink(missing_ok=True)

    def wait(self, ready: Any) -> None:
        start = time.monotonic()
        while not ready():
            if self.process.poll() is not None or time.monotonic() - start > 60:
                log = (self.folder / "log").read_text(encoding="utf-8", errors="replace")
                raise SystemExit("SeaweedFS does not start:\n" + "\n".join(log.splitlines()[-8:]))
            time.sleep(0.05)


def status(method: Any, url: Any, body: Any = None) -> Any:
    """The status of the answer, or None."""
    try:
        request = urllib.request.Request(url, data=body, method=method)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


class Proxy:
    """Passes requests on, counts them, and holds each up for `latency` seconds, as a server far away does. A new
    connection costs one round trip more. Bytes are passed on as they are, so signatures stay right.
    """

    def __init__(self, port: int, latency: Any) -> None:
        self.port, self.latency, self.requests, self.connections = port, latency, 0, 0
        self.loop = asyncio.new_event_loop()

    def __enter__(self) -> Any:
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        start = asyncio.start_server(self.serve, "127.0.0.1", 0, limit=1 << 20, backlog=1024)
        self.server = asyncio.run_coroutine_threadsafe(start, self.loop).result()
        self.endpoint = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: Any) -> None:
        asyncio.run_coroutine_threadsafe(self.end(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def end(self) -> None:
        self.server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def reset(self) -> None:
        self.requests = self.connections = 0

    async def serve(self, reader: Any, writer: Any) -> None:
        self.connections += 1
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        back = asyncio.ensure_future(self.copy(other_reader, writer))
        try:
            await asyncio.sleep(self.latency)
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.requests += 1
                await asyncio.sleep(self.latency)
                other_writer.write(head)
                await self.body(head.lower(), reader, other_writer)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            back.cancel()
            other_writer.close()
            writer.close()

    @staticmethod
    async def copy(reader: Any, writer: Any) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            writer.close()

    @staticmethod
    async def body(head: Any, reader: Any, writer: Any) -> None:
        lengths = [line for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
        left = int(lengths[0].split(b":")[1]) if lengths else 0
        while left:
            data = await reader.read(min(left, 1 << 16))
            if not data:
                raise asyncio.IncompleteReadError(b"", left)
            left -= len(data)
            writer.write(data)
            await writer.drain()


class CudaAgent:
    name = "cuda-agent"

    def __init__(self, binary: str | pathlib.Path, server: Any) -> None:
        self.binary = str(pathlib.Path(binary).resolve())
        self.environment = environment(server.endpoint)

    def call(self, folder: pathlib.Path, *arguments: Any) -> float:
        return run([self.binary, *arguments], folder, environment=self.environment)[0]

    def make(self, folder: pathlib.Path, count: int, size: str) -> pathlib.Path:
        """The source of all tools: a stage makes the files, and they are copied out."""
        write = f"import random; r = random.Random(7); b = {min(size, 1 << 20)}"
        write += f"""
import os
os.mkdir('outputs/files')
for i in range({count}):
    with open(f'outputs/files/{{i:04}}', 'wb') as file:
        for _ in range({size} // b):
            file.write(r.randbytes(b))"""
        stage = {"uses": "run", "run": [sys.executable, "-c", write], "outputs": {"files": "tree"}}
        text = json.dumps({"name": "payload", "stages": {"make": stage}})
        (folder / "payload.yaml").write_text(text, encoding="utf-8")
        self.call(folder, "run", "payload.yaml", "--offline", "--store", self.url("none"))
        self.call(folder, "export", "make.files", "plain", "--offline", "--store", self.url("none"))
        self.source = folder
        return folder / "plain"

    @staticmethod
    def url(prefix: Any) -> str:
        return f"s3://{BUCKET}/{prefix}"

    def prepare(self, _folder: Any, _files: Any) -> None:
        pass

    def push(self, prefix: Any) -> dict[str, float]:
        return {"push": self.call(self.source, "push", "--store", self.url(prefix))}

    def pull(self, prefix: Any, folder: pathlib.Path) -> tuple[dict[str, float], pathlib.Path]:
        shutil.copy(self.source / "payload.yaml", folder)
        options = ("--pipeline", "payload.yaml", "--store", self.url(prefix))
        pull = self.call(folder, "pull", *options)
        export = self.call(folder, "export", "make.files", "files", *options)
        return {"pull": pull + export, "pull without export": pull}, folder / "files"


class Rclone:
    def __init__(self, name: str, server: Any, push: Any = (), pull: Any = ()) -> None:
        self.name, self.flags = name, {"push": push, "pull": pull}
        self.binary, self.environment = program("rclone"), environment(server.endpoint)

    def prepare(self, folder: pathlib.Path, files: Any) -> None:
        self.folder, self.files = folder, files

    def copy(self, what: Any, source: str, target: Any) -> float:
        return run(
            [self.binary, "copy", str(source), str(target), *self.flags[what]],
            self.folder,
            environment=self.environment,
        )[0]

    def push(self, prefix: Any) -> dict[str, float]:
        return {"push": self.copy("push", self.files, f"bench:{BUCKET}/{prefix}")}

    def pull(self, prefix: Any, folder: pathlib.Path) -> tuple[dict[str, float], pathlib.Path]:
        return {"pull": self.copy("pull", f"bench:{BUCKET}/{prefix}", folder / "files")}, folder / "files"


# Fewer looks before and after, the checksums stay on; more at a time than rclone dares by default.
MANY = ["--transfers", "16", "--checkers", "16"]
PUSH_FLAGS = [*MANY, "--s3-no-check-bucket", "--s3-no-head", "--s3-upload-concurrency", "8", "--s3-chunk-size", "8M"]
PULL_FLAGS = [*MANY, "--s3-no-head-object", "--multi-thread-cutoff", "32M", "--multi-thread-streams", "8"]


class Dvc:
    name = "DVC"

    def __init__(self, binary: str | pathlib.Path, server: Any) -> None:
        self.binary, self.server = binary, server
        self.environment = environment(server.endpoint)

    def call(self, folder: pathlib.Path, *arguments: Any) -> float:
        return run([self.binary, *arguments, "--quiet"], folder, environment=self.environment)[0]

    def prepare(self, folder: pathlib.Path, files: Any) -> None:
        self.folder = folder
        self.call(folder, "init", "--no-scm")
        self.call(folder, "config", "core.analytics", "false")
        self.call(folder, "config", "core.site_cache_dir", str(folder / "site"))
        self.call(folder, "remote", "add", "--default", "bench", f"s3://{BUCKET}/none")
        self.call(folder, "remote", "modify", "bench", "endpointurl", self.server.endpoint)
        shutil.copytree(files, folder / "files")
        self.call(folder, "add", "files")

    def push(self, prefix: Any) -> dict[str, float]:
        self.call(self.folder, "remote", "modify", "bench", "url", f"s3://{BUCKET}/{prefix}")
        return {"push": self.call(self.folder, "push")}

    def pull(self, _prefix: Any, folder: pathlib.Path) -> tuple[dict[str, float], pathlib.Path]:
        (folder / ".dvc").mkdir()
        shutil.copy(self.folder / ".dvc" / "config", folder / ".dvc")
        shutil.copy(self.folder / "files.dvc", folder)
        return {"pull": self.call(folder, "pull")}, folder / "files"


def transfers(folder: pathlib.Path, tools: Any, repeats: int) -> dict[str, Any]:
    """Seconds by payload, tool and direction."""
    results = {}
    for payload, (count, size) in PAYLOADS.items():
        place = folder / f"{count}x{size}"
        place.mkdir()
        files = tools[0].make(place, count, size)
        for number, tool in enumerate(tools):
            (place / str(number)).mkdir()
            tool.prepare(place / str(number), files)
        times = {tool.name: {} for tool in tools}
        for repeat in range(repeats):
            # Each is first once: what one leaves behind, in memory and on the disk, helps or hinders the next.
            turn = repeat % len(tools)
            for number, tool in [*enumerate(tools)][turn:] + [*enumerate(tools)][:turn]:
                prefix, target = f"{count}/{number}/{repeat}", place / f"pulled-{number}-{repeat}"
                target.mkdir()
                # What others wrote must not reach the disk in this one's time.
                os.sync()
                found = tool.push(prefix)
                os.sync()
                pulled, copies = tool.pull(prefix, target)
                same_files(files, copies, tool.name)
                # Of many small files nothing is deleted: ext4 places new ones slowly for a while after that.
                if count == 1:
                    shutil.rmtree(target)
                for what, seconds in {**found, **pulled}.items():
                    times[tool.name].setdefault(what, []).append(seconds)
            told = ", ".join(
                f"{name} {seconds_text(found['push'][-1])} / {seconds_text(found['pull'][-1])}"
                for name, found in times.items()
            )
            print(f"  {payload} push / pull, {repeat + 1} of {repeats}: {told}", file=sys.stderr)
        results[payload] = times
    return results


def same_files(expected: Any, copies: Any, name: str) -> None:
    names = sorted(path.name for path in expected.iterdir())
    _, differing, missing = filecmp.cmpfiles(expected, copies, names, shallow=False)
    if differing or missing:
        raise SystemExit(f"{name} did not bring back what went up: {(differing + missing)[:5]}")


def write_stages(folder: pathlib.Path) -> None:
    """Stages that each read two of the level before."""
    stages = {}
    for level in range(DEEP):
        for place in range(WIDE):
            stage = {"uses": "run", "run": f"echo {level} {place} > outputs/out", "outputs": {"out": "tree"}}
            if level:
                before = [f"s{level - 1}_{place}.out", f"s{level - 1}_{(place + 1) % WIDE}.out"]
                stage["inputs"] = dict(zip("ab", before, strict=True))
                stage["run"] = f"cat inputs/a inputs/b | cksum > outputs/out; echo {level} {place} >> outputs/out"
            stages[f"s{level}_{place}"] = stage
    (folder / "stages.yaml").write_text(json.dumps({"name": "stages", "stages": stages}), encoding="utf-8")


def no_ops(folder: pathlib.Path, binary: str | pathlib.Path, server: Any, repeats: int) -> dict[str, Any]:
    """Seconds, requests and connections of runs that find everything done."""
    binary, url = str(pathlib.Path(binary).resolve()), f"s3://{BUCKET}/stages"
    first = folder / "first"
    first.mkdir()
    write_stages(first)

    def once(place: Any, endpoint: Any):
        command = [binary, "run", "stages.yaml", "--store", url]
        return run(command, place, environment=environment(endpoint))[0]

    def new_machine(number: Any):
        place = folder / f"new-{number}"
        place.mkdir()
        write_stages(place)
        return place

    def without_hint(number: Any):
        delete = [program("rclone"), "delete", f"bench:{BUCKET}/stages/v1/hints"]
        run(delete, folder, environment=environment(server.endpoint))
        return new_machine(number)

    seconds = once(first, server.endpoint)
    print(f"  {WIDE * DEEP} stages executed and shared: {seconds_text(seconds)}", file=sys.stderr)
    numbers = iter(range(1000))
    kinds = [
        ("no-op, warm", 0.0, lambda _: first),
        ("no-op, warm, 30 ms", LATENCY, lambda _: first),
        ("no-op, cold", 0.0, new_machine),
        ("no-op, cold, 30 ms", LATENCY, new_machine),
        ("no-op, cold, 30 ms, no hint", LATENCY, without_hint),
    ]
    results = {}
    for label, latency, machine in kinds:
        with Proxy(server.ports[0], latency) as proxy:
            found = []
            for _ in range(repeats):
                place = machine(next(numbers))
                proxy.reset()
                seconds = once(place, proxy.endpoint)
                found.append({"seconds": seconds, "requests": proxy.requests, "connections": proxy.connections})
                made = list((place / ".cuda-agent" / "state").glob("attempts/*"))
                if made:
                    raise SystemExit(f"{label}: something was executed: {made[:3]}")
        results[label] = found
        print(f"  {label}: {found}", file=sys.stderr)
    return results


def median(values: Any) -> Any:
    return statistics.median(values) if values else None


def transfer_table(results: Any, tools: Any) -> str:
    names = [tool.name for tool in tools]
    lines = [["", *names, "of rclone's", "goal"]]
    for payload, times in results.items():
        for what in ("push", "pull", "pull without export"):
            values = [median(times[name].get(what, [])) for name in names]
            rclone = min(median(times[name][what.split()[0]]) for name in names if name.startswith("rclone"))
            ratio = values[0] / rclone
            goal = "" if what.endswith("export") else f"≤ {RATIO}" + (" over" if ratio > RATIO else "")
            cells = ["–" if value is None else seconds_text(value) for value in values]
            lines.append([f"{what}, {payload}", *cells, f"{ratio:.2f}", goal])
    return aligned(lines)


def no_op_table(results: Any) -> str:
    goals = {"no-op, warm": (None, 10), "no-op, warm, 30 ms": (None, 10), "no-op, cold, 30 ms": (5.0, None)}
    lines = [["", "time", "requests", "connections", "goal"]]
    for label, found in results.items():
        seconds, requests, connections = (
            median([run[what] for run in found]) for what in ("seconds", "requests", "connections")
        )
        limit, most = goals.get(label, (None, None))
        goal = f"≤ {limit:.0f} s" if limit else f"≤ {most} requests" if most else ""
        over = (limit and seconds > limit) or (most and requests > most)
        lines.append([label, seconds_text(seconds), f"{requests:g}", f"{connections:g}", goal + " over" * bool(over)])
    return aligned(lines)


def aligned(lines: Any) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if column else text.ljust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", default=ROOT / "target" / "release" / "cuda-agent")
    parser.add_argument("--quick", action="store_true", help="without DVC, and 2 repeats")
    parser.add_argument("--repeats", type=int, help="runs of each, of which the median counts [default: 5]")
    parser.add_argument("--only", choices=["transfers", "no-ops"], help="half of it")
    arguments = parser.parse_args()
    repeats = arguments.repeats or (2 if arguments.quick else 5)
    # A terminated script ends its server too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    BUILD.mkdir(parents=True, exist_ok=True)
    results = {"repeats": repeats, "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory(dir=BUILD) as name, Server(pathlib.Path(name) / "server") as server:
        folder = pathlib.Path(name)
        tools = [
            CudaAgent(arguments.binary, server),
            Rclone("rclone", server),
            Rclone("rclone tuned", server, PUSH_FLAGS, PULL_FLAGS),
        ]
        if not arguments.quick and (dvc := installed("dvc", "dvc[s3]==3.67.1", "dvc-s3")):
            tools.append(Dvc(dvc, server))
        print(f"Median of {repeats}, {os.cpu_count()} cores, SeaweedFS on this machine.")
        if arguments.only != "no-ops":
            results["transfers"] = transfers(folder, tools, repeats)
            print(
                f"\n{transfer_table(results['transfers'], tools)}\n\nA pull of cuda-agent counts with its export, "
                "since only then there are plain files; `of rclone's` is the share of the faster rclone's time."
            )
        if arguments.only != "transfers":
            results["no_ops"] = no_ops(folder, arguments.binary, server, repeats)
            print(
                f"\n{WIDE * DEEP:,} stages, {WIDE} wide and {DEEP} deep; `cold` is a machine with nothing, `30 ms` is "
                f"how late each request is answered\n\n{no_op_table(results['no_ops'])}"
            )
    (BUILD / "store.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
