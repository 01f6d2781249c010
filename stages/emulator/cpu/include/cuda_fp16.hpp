// Everything is in cuda_cpu.h.
#pragma once
#include "cuda_cpu.h"
