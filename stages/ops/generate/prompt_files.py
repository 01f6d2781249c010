"""The prompts: Markdown files with a few places to fill in.

A place is a word in braces that is listed here; other braces stay as they are, since prompts contain Python.
"""

import os

import cuda_agent_stage as stage

HERE = os.path.dirname(os.path.abspath(__file__))
# File -> places that it must have. Every file may use all places of the table below.
FILES = {"system.md": (), "task.md": ("operators",), "repair.md": ("problem",)}
PLACES = {"task.md": ("operators", "ops", "count"), "repair.md": ("problem", "operators", "ops", "count"),
          "system.md": ()}  # fmt: skip


def load_prompts(folder=None):
    """File name -> text. A folder given by the pipeline may replace some of them."""
    prompts = {}
    for name in FILES:
        own = folder and os.path.join(folder, name)
        path = own if own and os.path.exists(own) else os.path.join(HERE, "prompts", name)
        with open(path, encoding="utf-8") as file:
            prompts[name] = file.read().strip()
        for place in FILES[name]:
            if "{" + place + "}" not in prompts[name]:
                raise stage.StageError(f"the prompt {name} has no {{{place}}}", kind="input",
                                       hint="the model would not be told what to write")
    if folder:
        check_names(folder)
    return prompts


def check_names(folder):
    """A misspelt file would be ignored without a word."""
    for name in sorted(os.listdir(folder)):
        if name.endswith(".md") and name not in FILES and name != "README.md":
            raise stage.StageError(f"there is no prompt called {name}", kind="input", hint=f"{', '.join(FILES)}")


def fill(prompts, name, **values):
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
