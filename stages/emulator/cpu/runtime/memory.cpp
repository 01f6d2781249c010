// Where tensors and shared memory lie, and what an address is.
//
// Each tensor begins on a page of its own after pages that nobody may touch, and ends before such pages; in the memory build
// AddressSanitizer also guards the rest of the last page. So an access past either end is noticed at the byte.
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <vector>

#include "runtime.h"

#ifdef CUDA_CPU_ASAN
extern "C" void __asan_poison_memory_region(const volatile void* address, size_t bytes);
extern "C" void __asan_unpoison_memory_region(const volatile void* address, size_t bytes);
#define GUARD(address, bytes) __asan_poison_memory_region(address, bytes)
#define UNGUARD(address, bytes) __asan_unpoison_memory_region(address, bytes)
#else
#define GUARD(address, bytes) ((void)(address))
#define UNGUARD(address, bytes) ((void)(address))
#endif

constexpr size_t dynamic_bytes_reserved = 256 * 1024;
extern "C" alignas(1024) unsigned char cuda_cpu_dynamic_shared[dynamic_bytes_reserved];
alignas(1024) unsigned char cuda_cpu_dynamic_shared[dynamic_bytes_reserved];

namespace runtime {
namespace {

constexpr size_t gap = 4 << 20;

struct Shared {
    char* begin;
    size_t bytes;
};

std::vector<Tensor>& tensors() {
    static std::vector<Tensor> all;
    return all;
}

std::vector<Shared>& shared_variables() {
    static std::vector<Shared> all;
    return all;
}

char* region;
size_t region_size, dynamic_size;
long long opted_in = -1;

size_t page_round(size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
}

// Memory is filled word by word: an intercepted memset would take the red zones in it for a fault.
__attribute__((optimize("no-tree-loop-distribute-patterns"))) void fill(char* begin, size_t bytes) {
    uint64_t pattern = random_bits() | 1;
    size_t words = bytes / sizeof pattern;
    for (size_t i = 0; i < words; i++) ((uint64_t*)begin)[i] = pattern;
    for (size_t i = words * sizeof pattern; i < bytes; i++) ((volatile char*)begin)[i] = (char)pattern;
}

// Each tensor has pages of its own.
void protect_tensors(int protection) {
    for (const Tensor& t : tensors())
        if (t.begin && t.bytes) mprotect(t.begin, page_round(t.bytes), protection);
}

Location near_tensor(const char* address) {
    Location best{Where::Nowhere, {}};
    size_t nearest = gap;
    for (const Tensor& t : tensors()) {
        if (!t.begin) continue;
        bool after = address >= t.begin + t.bytes;
        size_t distance = after ? (size_t)(address - (t.begin + t.bytes)) + 1 : (size_t)(t.begin - address);
        if (address >= t.begin && !after) {
            size_t element = (size_t)(address - t.begin) / t.element_bytes;
            snprintf(best.text.characters, sizeof best.text.characters, "%s[%zu]", t.name, element);
            return {Where::Inside, best.text};
        }
        if (distance > nearest) continue;
        nearest = distance;
        best.where = Where::Outside;
        if (after) snprintf(best.text.characters, sizeof best.text.characters, "%zu bytes past the end of %s", distance - 1, t.name);
        else snprintf(best.text.characters, sizeof best.text.characters, "%zu bytes before %s", distance, t.name);
    }
    return best;
}

Location near_shared(const char* address) {
    const char* dynamic = (const char*)cuda_cpu_dynamic_shared;
    Location found{Where::Nowhere, {}};
    if (address >= dynamic && address < dynamic + dynamic_bytes_reserved) {
        size_t offset = (size_t)(address - dynamic);
        found.where = offset < dynamic_size ? Where::Inside : Where::Outside;
        if (offset < dynamic_size) snprintf(found.text.characters, sizeof found.text.characters, "byte %zu of dynamic shared memory", offset);
        else
            snprintf(found.text.characters, sizeof found.text.characters, "%zu bytes past the %zu bytes of dynamic shared memory",
                     offset - dynamic_size, dynamic_size);
        return found;
    }
    for (const Shared& s : shared_variables()) {
        if (address >= s.begin && address < s.begin + s.bytes) {
            snprintf(found.text.characters, sizeof found.text.characters, "byte %zu of shared memory", (size_t)(address - s.begin));
            return {Where::Inside, found.text};
        }
        if (address >= s.begin - 256 && address < s.begin + s.bytes + 256) {
            bool after = address >= s.begin;
            snprintf(found.text.characters, sizeof found.text.characters, "%zu bytes %s a shared variable of %zu bytes",
                     after ? (size_t)(address - s.begin - s.bytes) : (size_t)(s.begin - address), after ? "past the end of" : "before",
                     s.bytes);
            return {Where::Outside, found.text};
        }
    }
    return found;
}

}  // namespace

void name_tensors(const char* names, const unsigned* element_bytes) {
    if (!tensors().empty()) return;
    for (const char* at = names; *at;) {
        at += strspn(at, " ,");
        size_t length = strcspn(at, " ,");
        if (!length) break;
        Tensor t{{}, *element_bytes++, nullptr, 0};
        memcpy(t.name, at, length < sizeof t.name ? length : sizeof t.name - 1);
        tensors().push_back(t);
        at += length;
    }
    tensors().push_back(Tensor{"the scratch buffer", 1, nullptr, 0});
}

unsigned tensor_count() { return tensors().empty() ? 0 : (unsigned)tensors().size() - 1; }
Tensor& tensor(unsigned index) { return tensors()[index]; }
char* region_begin() { return region; }
void hide_tensors() { protect_tensors(PROT_NONE); }
void show_tensors() { protect_tensors(PROT_READ | PROT_WRITE); }
size_t region_bytes() { return region_size; }

void place_tensors(const size_t* bytes, unsigned count) {
    bool same = region != nullptr;
    for (unsigned i = 0; i < count; i++) same = same && tensor(i).bytes == bytes[i];
    if (same) return;
    if (region) UNGUARD(region, region_size), munmap(region, region_size);
    region_size = gap;
    for (unsigned i = 0; i < count; i++) region_size += page_round(bytes[i]) + gap;
    void* memory = mmap(nullptr, region_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fault(Kind::Crash, {}, "no memory for the tensors");
    region = (char*)memory;
    char* at = region + gap;
    for (unsigned i = 0; i < count; i++) {
        Tensor& t = tensor(i);
        t.begin = at, t.bytes = bytes[i];
        GUARD(at + bytes[i], page_round(bytes[i]) - bytes[i]);
        at += page_round(bytes[i]) + gap;
    }
    show_tensors();
    race_region_placed();
}

void begin_launch_memory(size_t bytes) {
    long long allowed = opted_in < 0 ? dynamic_without_opt_in : opted_in;
    if (bytes > dynamic_limit)
        fault(Kind::Launch, {}, "launch refused: %zu bytes of dynamic shared memory; the most is %u", bytes, dynamic_limit);
    if ((long long)bytes > allowed && bytes > dynamic_without_opt_in)
        fault(Kind::Launch, {},
              "launch refused: %zu bytes of dynamic shared memory; more than %u needs cudaFuncSetAttribute("
              "kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)", bytes, dynamic_without_opt_in);
    dynamic_size = bytes;
    UNGUARD(cuda_cpu_dynamic_shared, dynamic_bytes_reserved);
    GUARD(cuda_cpu_dynamic_shared + bytes, dynamic_bytes_reserved - bytes);
}

void fill_shared_with_garbage() {
    if (dynamic_size) fill((char*)cuda_cpu_dynamic_shared, dynamic_size);
    for (const Shared& s : shared_variables()) fill(s.begin, s.bytes);
}

void for_each_shared_variable(void (*visit)(char* begin, size_t bytes)) {
    visit((char*)cuda_cpu_dynamic_shared, dynamic_bytes_reserved);
    for (const Shared& s : shared_variables()) visit(s.begin, s.bytes);
}

Text overhang(const void* address, size_t bytes) {
    Text text = {};
    const char* from = (const char*)address;
    auto measure = [&](const char* begin, size_t size, const char* name) {
        const char* end = begin + size;
        if (from >= begin && from < end && bytes > (size_t)(end - from))
            snprintf(text.characters, sizeof text.characters, "%zu of them past the end of %s", bytes - (size_t)(end - from), name);
    };
    for (const Tensor& t : tensors())
        if (t.begin) measure(t.begin, t.bytes, t.name);
    for (const Shared& s : shared_variables()) measure(s.begin, s.bytes, "a shared variable");
    measure((const char*)cuda_cpu_dynamic_shared, dynamic_size, "dynamic shared memory");
    return text;
}

bool in_shared_memory(const void* address) { return near_shared((const char*)address).where == Where::Inside; }

Location locate(const void* address) {
    Location location = near_shared((const char*)address);
    if (location.where == Where::Nowhere) location = near_tensor((const char*)address);
    return location;
}

}  // namespace runtime

extern "C" void cuda_cpu_register_shared(void* begin, unsigned long long bytes, unsigned red_zone) {
    runtime::shared_variables().push_back({(char*)begin, bytes});
    GUARD((char*)begin - red_zone, red_zone);
    GUARD((char*)begin + bytes, red_zone);
}

extern "C" void cuda_cpu_copy(void* to, const void* from, unsigned long long bytes) {
    if (!runtime::in_kernel()) runtime::show_tensors();
    memmove(to, from, bytes);
    if (!runtime::in_kernel()) runtime::hide_tensors();
}

extern "C" void cuda_cpu_fill(void* to, int value, unsigned long long bytes) {
    if (!runtime::in_kernel()) runtime::show_tensors();
    memset(to, value, bytes);
    if (!runtime::in_kernel()) runtime::hide_tensors();
}

extern "C" void cuda_cpu_opt_in(long long bytes) {
    if (bytes > runtime::opted_in) runtime::opted_in = bytes;
}
