// Finds races: two accesses to one place by different threads, at least one of them a write, not both atomic, that nothing
// orders. The compiler calls `__tsan_read4` and its like before each access of the candidate (`-fsanitize=thread`); this
// file is what they call, in place of ThreadSanitizer's library, which knows nothing of barriers within a block.
//
// Time is counted in intervals: one begins with each block and with each barrier that a block passes. Blocks run one after
// the other, so an interval's number tells the block too. Within an interval, a warp's ticks count its meetings
// (__syncwarp, shuffles, votes). Two accesses are ordered
//   - by the end of a launch;
//   - within a block, by a barrier between them;
//   - within a warp, by a meeting between them;
//   - between blocks, if the later block knows of the earlier: a block that has executed __threadfence gives what it
//     knows to each place that it changes atomically, and whoever uses that place atomically learns it.
// A write that leaves the value as it was is no race with another write, so that many threads may store one value.
//
// Not exact: meetings of part of a warp count for all of it, and of a place's readers only two are remembered, those
// that are hardest to be ordered with. Both can hide a race, neither can invent one.
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "runtime.h"

extern "C" char __data_start[], _end[], __start_cuda_cpu_indices[], __stop_cuda_cpu_indices[];

namespace runtime {
namespace {

struct Access {
    uint32_t interval;  // zero: none
    uint32_t thread : 10, tick : 21, atomic : 1;
    uint32_t code;  // low half of the address: the program is linked below four gigabytes
};

// What is remembered of four bytes, or of one where bytes are used apart.
struct Cell {
    Access write, reads[2];
    uint32_t same_value;  // one more than the thread that last stored the value that was there
    uint32_t shared : 1;  // each block has a place of its own here
    uint32_t split : 31;  // one more than the index of the first of four cells, one for each byte
};

struct Shadow {
    uintptr_t begin, bytes;
    Cell* cells;
};

// A write whose value is looked at once it has happened.
struct Suspect {
    Cell* cell;
    Access earlier, own;
    bool earlier_wrote;
    const char* address;
    unsigned bytes;
    char before[4];
};

constexpr uint32_t most_ticks = (1u << 21) - 1;
constexpr size_t split_cells = (size_t)1 << 28;

Shadow tensors_shadow, image_shadow;
Cell* byte_cells;
uint32_t byte_cells_used;
uint32_t interval, block_begin, launch_begin;
uint32_t ticks[32];
uint32_t tick_intervals[32];  // the interval in which a warp's ticks were counted
std::vector<uint64_t> block_numbers;
std::vector<uint32_t> block_begins;
bool active;

Suspect suspects[64];
unsigned suspect_count;

// Knowledge between blocks: ranges of intervals, sorted and apart.
struct Range { uint32_t first, last; };
typedef std::vector<Range> Knowledge;
struct Released { Knowledge knowledge; uint32_t version; };
Knowledge known;
uint32_t fenced;  // the interval of this block's last __threadfence, or zero
std::unordered_map<uintptr_t, Released> released;

Cell* reserve(size_t cells) {
    void* memory = mmap(nullptr, cells * sizeof(Cell), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fault(Kind::Crash, {}, "no memory to look for races");
    return (Cell*)memory;
}

void make_shadow(Shadow& shadow, uintptr_t begin, size_t bytes) {
    if (shadow.cells) munmap(shadow.cells, (shadow.bytes / 4 + 1) * sizeof(Cell));
    shadow = {begin & ~(uintptr_t)3, (bytes + 7) & ~(uintptr_t)3, nullptr};
    shadow.cells = reserve(shadow.bytes / 4 + 1);
}

inline Cell* cell_of(uintptr_t address) {
    if (address - tensors_shadow.begin < tensors_shadow.bytes) return &tensors_shadow.cells[(address - tensors_shadow.begin) / 4];
    if (address - image_shadow.begin < image_shadow.bytes) return &image_shadow.cells[(address - image_shadow.begin) / 4];
    return nullptr;
}

inline uint32_t tick_of(unsigned warp) { return tick_intervals[warp] == interval ? ticks[warp] : 0; }

bool knows(uint32_t other) {
    for (size_t i = known.size(); i-- > 0;)
        if (known[i].first <= other) return other <= known[i].last;
    return false;
}

bool ordered(const Cell& cell, const Access& earlier, unsigned thread) {
    if (earlier.interval < launch_begin) return true;
    if (earlier.interval < block_begin) return cell.shared || knows(earlier.interval);
    if (earlier.interval < interval || earlier.thread == thread) return true;
    return earlier.thread / 32 == thread / 32 && earlier.tick < tick_of(thread / 32);
}

unsigned distance(const Access& a, unsigned thread) {
    if (a.interval < launch_begin) return 0;
    if (a.interval < block_begin) return 4;
    if (a.interval < interval || a.thread == thread) return 1;
    return a.thread / 32 == thread / 32 ? 2 : 3;
}

Text who(const Access& a) {
    size_t block = std::upper_bound(block_begins.begin(), block_begins.end(), a.interval) - block_begins.begin() - 1;
    return coordinates(thread_coordinates(a.thread), block_coordinates(block_numbers[block]));
}

[[noreturn]] void report(const void* address, const Access& own, bool own_writes, const Access& earlier, bool earlier_wrote) {
    Location at = locate(address);
    if (at.where == Where::Outside)
        fault(Kind::OutOfBounds, {(const void*)(uintptr_t)own.code}, "%s %s %s", who(own).characters, own_writes ? "writes" : "reads",
              at.text.characters);
    bool same_block = earlier.interval >= block_begin;
    fault(Kind::Race, {(const void*)(uintptr_t)own.code, 0, (const void*)(uintptr_t)earlier.code},
          "%s %s %s that %s %s, with %s between", who(own).characters, own_writes ? "writes" : "reads",
          at.where == Where::Inside ? at.text.characters : "a device variable", who(earlier).characters,
          earlier_wrote ? "wrote" : "read", same_block ? "no barrier" : "nothing");
}

void settle_suspects() {
    unsigned count = suspect_count;
    suspect_count = 0;
    for (unsigned i = 0; i < count; i++) {
        const Suspect& s = suspects[i];
        if (memcmp(s.address, s.before, s.bytes)) report(s.address, s.own, true, s.earlier, s.earlier_wrote);
        s.cell->same_value = s.own.thread + 1;
    }
}

void suspect(Cell* cell, const Access& earlier, const Access& own, bool earlier_wrote, uintptr_t address, unsigned bytes) {
    if (suspect_count == sizeof suspects / sizeof *suspects) report((const void*)address, own, true, earlier, earlier_wrote);
    Suspect& s = suspects[suspect_count++];
    s = {cell, earlier, own, earlier_wrote, (const char*)address, bytes, {}};
    memcpy(s.before, (const char*)address, bytes);
}

void note_write(Cell* cell, const Access& own, uintptr_t address, unsigned bytes) {
    if (!(cell->write.atomic && own.atomic) && !ordered(*cell, cell->write, own.thread))
        return suspect(cell, cell->write, own, true, address, bytes);
    for (const Access& read : cell->reads)
        if (!ordered(*cell, read, own.thread)) return suspect(cell, read, own, false, address, bytes);
    cell->write = own;
    cell->reads[0].interval = cell->reads[1].interval = 0;
    cell->same_value = 0;
}

void note_read(Cell* cell, const Access& own, uintptr_t address) {
    if (!ordered(*cell, cell->write, own.thread) && cell->same_value != own.thread + 1u)
        report((const void*)address, own, false, cell->write, true);
    Access& latest = cell->reads[0];
    if (latest.thread != own.thread || latest.interval != own.interval)
        if (distance(latest, own.thread) >= distance(cell->reads[1], own.thread)) cell->reads[1] = latest;
    latest = own;
}

inline void note(Cell* cell, const Access& own, bool write, uintptr_t address, unsigned bytes) {
    if (write) note_write(cell, own, address, bytes);
    else note_read(cell, own, address);
}

Cell* byte_cell(Cell* cell, unsigned byte) {
    if (!cell->split) {
        if (!byte_cells) byte_cells = reserve(split_cells);
        if (byte_cells_used + 4 > split_cells) fault(Kind::Unsupported, {}, "too many small elements to look for races");
        for (unsigned i = 0; i < 4; i++) byte_cells[byte_cells_used + i] = *cell;
        cell->split = byte_cells_used + 1;
        byte_cells_used += 4;
    }
    return &byte_cells[cell->split - 1 + byte];
}

void note_access(uintptr_t address, unsigned bytes, bool write, bool atomic, const void* code) {
    if (!active) return;
    if (suspect_count) settle_suspects();
    if (address - (uintptr_t)__start_cuda_cpu_indices < (uintptr_t)(__stop_cuda_cpu_indices - __start_cuda_cpu_indices)) return;
    Cell* cell = cell_of(address);
    if (!cell) return;
    unsigned thread = current_thread_number();
    Access own{interval, thread, tick_of(thread / 32), atomic, (uint32_t)(uintptr_t)code};
    for (uintptr_t at = address, end = address + bytes; at < end; cell++) {
        uintptr_t next = std::min<uintptr_t>((at & ~(uintptr_t)3) + 4, end);
        if (next - at == 4 && !cell->split) {
            note(cell, own, write, at, 4);
            at = next;
        }
        for (; at < next; at++) note(byte_cell(cell, at & 3), own, write, at, 1);
    }
}

void add(Knowledge& to, Range range) {
    Knowledge merged;
    for (const Range& r : to) {
        if (r.last + 1 < range.first || range.last + 1 < r.first) merged.push_back(r);
        else range = {std::min(range.first, r.first), std::max(range.last, r.last)};
    }
    merged.insert(std::upper_bound(merged.begin(), merged.end(), range, [](Range a, Range b) { return a.first < b.first; }), range);
    to.swap(merged);
}

}  // namespace

void race_region_placed() {
    make_shadow(tensors_shadow, (uintptr_t)region_begin(), region_bytes());
    if (image_shadow.cells) return;
    make_shadow(image_shadow, (uintptr_t)__data_start, (size_t)(_end - __data_start));
    for_each_shared_variable([](char* begin, size_t bytes) {
        for (size_t i = 0; i < bytes; i += 4)
            if (Cell* cell = cell_of((uintptr_t)begin + i)) cell->shared = 1;
    });
}

void race_launch_begins(unsigned) {
    launch_begin = ++interval;
    block_begins.clear(), block_numbers.clear();
    released.clear();
    active = true;
}

void race_launch_ends() { active = false; }

void race_block_begins() {
    block_begin = ++interval;
    block_begins.push_back(interval);
    block_numbers.push_back(current_block_number());
    known.clear();
    fenced = 0;
}

void race_barrier_passed() { ++interval; }

void race_warp_met(unsigned warp) {
    uint32_t tick = tick_of(warp);
    ticks[warp] = tick < most_ticks ? tick + 1 : tick;
    tick_intervals[warp] = interval;
}

void race_fence() { fenced = interval; }

void race_atomic(const void* address, unsigned bytes, const void* code) {
    auto found = released.find((uintptr_t)address);
    if (found != released.end())
        for (const Range& range : found->second.knowledge) add(known, range);
    note_access((uintptr_t)address, bytes, true, true, code);
    if (!fenced) return;
    Released& place = found != released.end() ? found->second : released[(uintptr_t)address];
    for (const Range& range : known) add(place.knowledge, range);
    add(place.knowledge, {block_begin, fenced});
}

void race_thread_leaves() {
    if (suspect_count) settle_suspects();
}

}  // namespace runtime

using namespace runtime;

#define HOOKS(bytes)                                                                                              \
    void __tsan_read##bytes(void* p) { note_access((uintptr_t)p, bytes, false, false, CALLER); }                  \
    void __tsan_write##bytes(void* p) { note_access((uintptr_t)p, bytes, true, false, CALLER); }                  \
    void __tsan_unaligned_read##bytes(void* p) { note_access((uintptr_t)p, bytes, false, false, CALLER); }        \
    void __tsan_unaligned_write##bytes(void* p) { note_access((uintptr_t)p, bytes, true, false, CALLER); }        \
    void __tsan_volatile_read##bytes(void* p) { note_access((uintptr_t)p, bytes, false, false, CALLER); }         \
    void __tsan_volatile_write##bytes(void* p) { note_access((uintptr_t)p, bytes, true, false, CALLER); }         \
    void __tsan_unaligned_volatile_read##bytes(void* p) { note_access((uintptr_t)p, bytes, false, false, CALLER); } \
    void __tsan_unaligned_volatile_write##bytes(void* p) { note_access((uintptr_t)p, bytes, true, false, CALLER); }

extern "C" {
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void* p, size_t bytes) { note_access((uintptr_t)p, (unsigned)bytes, false, false, CALLER); }
void __tsan_write_range(void* p, size_t bytes) { note_access((uintptr_t)p, (unsigned)bytes, true, false, CALLER); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
}
