"""torch.compile as a baseline on the CPU device: slow, so it has one test of its own."""

import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

from reference_client import Failure, Reference, make_task, model

CODE = model("x: return torch.relu(x) * 2 + 1", "[torch.randn(64, 64)]")
BROKEN = model("x: return x * 2 if not torch.compiler.is_compiling() else x.nothing()", "[torch.randn(4)]")


def test_compiling_timing_and_a_cache_for_the_next(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    # Else the compiler asks for each vector instruction in a child of its own that imports torch: 20 s.
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "0")
    process = Reference()
    try:
        with process.connect() as connection:
            (arguments,) = connection.begin(make_task(CODE))
            arguments.draw()
            first = connection.ask("prepare", which="compile")
            assert first["error"] is None and first["cache"]
            assert connection.ask("time", which="compile", set=0)["ms"] > 0
        with process.connect() as connection:
            again = connection.ask("prepare", which="compile", cache=first["cache"], task=make_task(CODE))
            assert again["error"] is None and again["cache"]
            # What breaks only under the compiler is said, and does not break eager.
            (arguments,) = connection.begin(make_task(BROKEN))
            arguments.draw()
            assert "nothing" in connection.ask("prepare", which="compile")["error"]
            with pytest.raises(Failure, match=r"torch\.compile failed"):
                connection.ask("time", which="compile", set=0)
            assert connection.ask("time", which="eager", set=0)["ms"] > 0
            print(f"first {first['seconds']:.1f} s, with the cache {again['seconds']:.1f} s")
    finally:
        process.close()
