"""The prompts: Markdown files with a few places to fill in, and the conversation that they make.

The conversation begins with an example: the request for the operators of example_operators.md, and example.md as its
answer. Small models take the form of an answer from that, and copy an example that is part of their own request.

A place is a word in braces that is listed here; other braces stay as they are, since prompts contain Python.
"""

import os
import re
from typing import Any

import cuda_agent_stage as stage

HERE = os.path.dirname(os.path.abspath(__file__))
# File -> places that it must have. Every file may use all places of the table below.
FILES = {
    "system.md": (),
    "task.md": ("operators",),
    "repair.md": ("problem",),
    "example_operators.md": (),
    "example.md": (),
}
PLACES = {"task.md": ("operators", "ops", "count"), "repair.md": ("problem", "operators", "ops", "count")}
NAME_OF_ITEM = re.compile(r"^- `([^`]+)`", re.MULTILINE)


def load_prompts(folder: Any = None) -> dict[str, Any]:
    """File name -> text. A folder given by the pipeline may replace some of them."""
    prompts = {}
    for name in FILES:
        own = folder and os.path.join(folder, name)
        path = own if own and os.path.exists(own) else os.path.join(HERE, "prompts", name)
        with open(path, encoding="utf-8") as file:
            prompts[name] = file.read().strip()
        for place in FILES[name]:
            if "{" + place + "}" not in prompts[name]:
                raise stage.StageError(
                    f"the prompt {name} has no {{{place}}}",
                    kind="input",
                    hint="the model would not be told what to write",
                )
    if folder:
        check_names(folder)
    return prompts


def check_names(folder: str) -> None:
    """A misspelt file would be ignored without a word."""
    for name in sorted(os.listdir(folder)):
        if name.endswith(".md") and name not in FILES and name != "README.md":
            raise stage.StageError(f"there is no prompt called {name}", kind="input", hint=f"{', '.join(FILES)}")


def opening(prompts: dict[str, str], operators: str, ops: list[str]) -> list[dict[str, str]]:
    """The conversation up to the request for a task: `operators` is the description, `ops` the list of names."""
    messages = [{"role": "system", "content": prompts["system.md"]}]
    if prompts["example.md"]:
        names = NAME_OF_ITEM.findall(prompts["example_operators.md"])
        messages += [
            {"role": "user", "content": task_message(prompts, prompts["example_operators.md"], names)},
            {"role": "assistant", "content": prompts["example.md"]},
        ]
    return [*messages, {"role": "user", "content": task_message(prompts, operators, ops)}]


def task_message(prompts: dict[str, str], operators: str, ops: list[str]) -> str:
    return fill(prompts, "task.md", operators=operators, ops=", ".join(ops), count=len(ops))


def fill(prompts: dict[str, str], name: str, **values: int | str) -> str:
    """A prompt with its places filled in, each once: a value that has braces of its own is left alone."""
    text, parts = prompts[name], []
    places = {"{" + place + "}": str(values[place]) for place in PLACES[name]}
    while text:
        found = [(text.find(place), place) for place in places if place in text]
        if not found:
            break
        at, place = min(found)
        parts += [text[:at], places[place]]
        text = text[at + len(place) :]
    return "".join([*parts, text])
