"""What a candidate's host code may ask about the GPU, as the driver says it.

That code runs where no GPU is (`src/compile/recorder`), so its questions are answered from here.
"""

import ctypes
from typing import Any

# Attributes are numbered from 1; what newer drivers add is not asked for.
ATTRIBUTES = 150
# Which slot a card is in: it differs between cards that are the same in all else.
OF_ONE_CARD = (
    33,
    34,
    50,
    85,
    130,
    131,
    134,
    139,
    140,
)  # PCI bus, device, domain; a board's group; NUMA; PCI identifiers


class DriverError(RuntimeError):
    pass


def gpu_facts(index: Any, library: str = "libcuda.so.1") -> dict[str, Any]:
    """Name, memory, driver and attributes of the visible GPU with this index. Makes no context."""
    driver = ctypes.CDLL(library)

    def call(name: Any, *arguments: Any) -> None:
        status = getattr(driver, name)(*arguments)
        if status != 0:
            raise DriverError(f"{name} failed with {status}")

    call("cuInit", 0)
    device, memory, version = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    call("cuDeviceGet", ctypes.byref(device), index)
    call("cuDeviceGetName", name, len(name), device)
    call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    call("cuDriverGetVersion", ctypes.byref(version))
    attributes = [0] * ATTRIBUTES
    for number in range(1, ATTRIBUTES):
        value = ctypes.c_int()
        # One that it doesn't know is not an error.
        known = driver.cuDeviceGetAttribute(ctypes.byref(value), number, device) == 0
        attributes[number] = value.value if known and number not in OF_ONE_CARD else 0
    return {
        "name": name.value.decode(errors="replace"),
        "memory_bytes": memory.value,
        "driver": version.value,
        "attributes": attributes,
    }
