"""What is asked of the driver, against a driver of our own."""

import pathlib
import shutil
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent)]

from gpu_facts import ATTRIBUTES, DriverError, gpu_facts

DRIVER = r"""
#include <cstddef>
#include <cstring>
extern "C" {
int cuInit(unsigned flags) { return flags; }
int cuDeviceGet(int* device, int index) { *device = 40 + index; return index > 1 ? 101 : 0; }
int cuDeviceGetName(char* name, int size, int device) { strncpy(name, device == 41 ? "One" : "Zero", size); return 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int) { *bytes = 80ull << 30; return 0; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuDeviceGetAttribute(int* value, int number, int device) { *value = 1000 * device + number; return number > 100; }
}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.cpp").write_text(DRIVER)
    subprocess.run(["g++", "-shared", "-fPIC", "driver.cpp", "-o", "driver.so"], cwd=folder, check=True)
    return str(folder / "driver.so")


def test_the_driver_is_asked_for_everything(driver):
    facts = gpu_facts(1, driver)
    assert (facts["name"], facts["memory_bytes"], facts["driver"]) == ("One", 80 << 30, 13000)
    attributes = facts["attributes"]
    assert len(attributes) == ATTRIBUTES and attributes[1] == 41001 and attributes[100] == 41100
    assert attributes[101] == 0, "what the driver doesn't know is 0"
    assert attributes[33] == 0, "the slot tells one card from another"


def test_a_missing_card_is_an_error(driver):
    with pytest.raises(DriverError, match="cuDeviceGet failed with 101"):
        gpu_facts(2, driver)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_card_says_what_torch_says():
    facts, properties = gpu_facts(0), torch.cuda.get_device_properties(0)
    assert facts["name"] == properties.name
    assert facts["memory_bytes"] == properties.total_memory
    assert facts["attributes"][16] == properties.multi_processor_count
    assert facts["attributes"][75:77] == [properties.major, properties.minor]
