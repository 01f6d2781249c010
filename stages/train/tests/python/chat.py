"""Chat templates, ids and decoded text as transformers has them, for tests/text.rs.

usage: chat.py write TEMPLATES FOLDER     a folder for each template with a small tokenizer, and expected.json
       chat.py model MODEL EXPECTED       the same with the tokenizer and template of a model's folder
"""

import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "profile",
            "description": 'Times a kernel; <b>"quick"</b> & exact, in µs',
            "parameters": {
                "type": "object",
                "properties": {
                    "runs": {"type": "integer", "default": 10},
                    "limit": {"type": "number", "maximum": 1e-05},
                },
                "required": [],
            },
        },
    }
]
CALL = {
    "type": "function",
    "function": {"name": "profile", "arguments": {"runs": 3, "tags": ["é", None, True], "limit": 2.0}},
}
USER = {"role": "user", "content": "  Write a softmax kernel.\n\n__global__ void f(float* x) { x[0] = 1e-3f; }  "}
CONVERSATIONS: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    ([USER], {}),
    (
        [
            {"role": "system", "content": "You write CUDA. 你好 👩‍🔬 ǆ é"},
            USER,
            {"role": "assistant", "content": "ok\n"},
            {"role": "user", "content": "ﬁ 2³"},
        ],
        {},
    ),
    (
        [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "3.5 µs"}],
        {"tools": TOOLS},
    ),
    (
        [
            {"role": "system", "content": "s"},
            USER,
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nDone."},
            USER,
            {"role": "assistant", "content": "x", "reasoning_content": "why\n"},
        ],
        {},
    ),
    ([USER], {"enable_thinking": False, "date_string": "1 Jan 2030"}),
]
TEXTS = [
    "",
    " ",
    "int main() {\n    return 0;\n}\n\n\n",
    "I'll we'VE don't 1234567 x=3.14e-10;\t\ttabs  and   spaces   \n  \n",
    "naïve é (e + combining acute: e\u0301), Ω, 中文字符, 👩‍🔬🏽, \u200b zero width, \x00 nul",
    "<|start|>user\nspecial <|end|> in text<|endoftext|> <tool_call>",
    "\r\n\r\n mixed \r endings \n",
]


def small_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of a few hundred merges, laid out as Qwen's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|start|>", "<|end|>", "<|end_role|>", "<|bos|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    bos = tokenizer.token_to_id("<|bos|>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", bos)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|end|>", clean_up_tokenization_spaces=False
    )


def expected(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    chats = []
    for messages, settings in CONVERSATIONS:
        for prompt in (True, False):
            tools = settings.get("tools")
            others = {name: value for name, value in settings.items() if name != "tools"}
            arguments = {"conversation": messages, "tools": tools, "add_generation_prompt": prompt, **others}
            text = tokenizer.apply_chat_template(**arguments, tokenize=False)
            ids = tokenizer.apply_chat_template(**arguments, tokenize=True, return_dict=False)
            chats.append({"messages": messages, "settings": settings, "prompt": prompt, "text": text, "ids": ids})
    texts = []
    for text in TEXTS + [chat["text"] for chat in chats]:
        ids = tokenizer(text)["input_ids"]
        decoded, plain = tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=True)
        texts.append({"text": text, "ids": ids, "decoded": decoded, "plain": plain})
    return {"chats": chats, "texts": texts}


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", templates, folder]:
            tokenizer = small_tokenizer()
            for template in sorted(Path(templates).glob("*.jinja")):
                target = Path(folder) / template.stem
                tokenizer.chat_template = template.read_text()
                tokenizer.save_pretrained(target)
                (target / "expected.json").write_text(json.dumps(expected(tokenizer)))
        case ["model", model, target]:
            Path(target).write_text(json.dumps(expected(AutoTokenizer.from_pretrained(model))))
        case _:
            sys.exit(__doc__)
