"""Element types that a candidate can be given, and tensors as the bytes they are made of."""

import torch

NAMES = {
    torch.bool: "bool",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

PATTERNS = (0xFF, 0x5A)
"""The bytes that poison memory. 0xFF makes every float type NaN; 0x5A makes it finite and odd (1.5e16 in float32 and
bfloat16, 203 in float16). Neither is a boolean."""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as integers of the same size, flat. Bytes that are no boolean survive this."""
    return tensor.reshape(-1).view(_WORDS[tensor.dtype.itemsize])


def pattern_word(dtype: torch.dtype, byte: int) -> int:
    """What `bits` shows of an element that consists of one byte, repeated."""
    return int.from_bytes(bytes([byte]) * dtype.itemsize, "little", signed=dtype.itemsize > 1)


def pattern_number(dtype: torch.dtype, byte: int) -> float:
    """The same as a number of its type: NaN of 0xFF."""
    return torch.tensor([byte] * dtype.itemsize, dtype=torch.uint8).view(dtype).double().item()


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as the largest integers that they fill: fewer to compare."""
    flat = tensor.reshape(-1).view(torch.uint8)
    return flat.view(torch.int64) if flat.numel() % 8 == 0 and flat.storage_offset() % 8 == 0 else bits(tensor)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype and bool(torch.equal(bits(first), bits(second)))


def is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and tensor.layout == torch.strided
