"""Host code that leaves its part: system calls, threads, other functions by their addresses, the runner's descriptors and
stack, code that runs when the library is loaded or ended, and choices by what it can't know."""

from .case import CORRECT, REFUSED, WAVE, Case, launched

LAUNCH = "wave<<<blocks, 256, 0, stream>>>(x, out);"
PLAIN = launched()
CALL = """static long call(long number, long a, long b, long c) {
    long result;
    asm volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
    return result;
}
"""
COUNTING = """static int total(int n) {
    int result = 0;
    for (int k = 0; k < n; ++k) result += k % 2;
    return result;
}
"""
HELPED = launched("const int extra = total(4) - 2;\n    wave<<<blocks + extra, 256, 0, stream>>>(x, out);", COUNTING)
STATIC = launched("wave<<<table.blocks, 256, 0, stream>>>(x, out);", "struct Table { int blocks; };\nstatic const Table table{(task::out_size + 255) / 256};")
CHOOSING = launched("if (task::out_size > 1000) wave<<<blocks, 256, 0, stream>>>(x, out);\n    else wave<<<1, 1, 0, stream>>>(x, out);")
CHOICE = "if (task::out_size > 1000)"
THROWING = launched("try { start(x, out, stream); } catch (int) { return cudaErrorUnknown; }", "__global__ void wave(const float*, float*);\nstatic void start(const float* x, float* out, cudaStream_t stream);", ending="return cudaGetLastError();") + """
static void start(const float* x, float* out, cudaStream_t stream) {
    if (x == nullptr) throw 1;
    wave<<<blocks, 256, 0, stream>>>(x, out);
}
"""
WALK = """
#include <cstdint>
static void* found(const void* from, const char* name) {
    uintptr_t page = reinterpret_cast<uintptr_t>(from) & ~4095ul;
    while (*reinterpret_cast<const uint32_t*>(page) != 0x464c457fu) page -= 4096;
    const auto* base = reinterpret_cast<const unsigned char*>(page);
    const uint64_t headers = *reinterpret_cast<const uint64_t*>(base + 32);
    const int count = *reinterpret_cast<const uint16_t*>(base + 56);
    const uint64_t* dynamic = nullptr;
    for (int k = 0; k < count; ++k) {
        const auto* header = base + headers + 56 * k;
        if (*reinterpret_cast<const uint32_t*>(header) == 2) dynamic = reinterpret_cast<const uint64_t*>(base + *reinterpret_cast<const uint64_t*>(header + 16));
    }
    const unsigned char* symbols = nullptr;
    const char* strings = nullptr;
    for (; dynamic != nullptr && dynamic[0] != 0; dynamic += 2) {
        if (dynamic[0] == 5) strings = reinterpret_cast<const char*>(dynamic[1]);
        if (dynamic[0] == 6) symbols = reinterpret_cast<const unsigned char*>(dynamic[1]);
    }
    for (const auto* symbol = symbols; symbol != nullptr && reinterpret_cast<const char*>(symbol) < strings; symbol += 24) {
        const char* own = strings + *reinterpret_cast<const uint32_t*>(symbol);
        int at = 0;
        while (own[at] == name[at] && own[at]) ++at;
        if (own[at] == name[at]) return const_cast<unsigned char*>(base) + *reinterpret_cast<const uint64_t*>(symbol + 8);
    }
    return nullptr;
}
"""


def host(name, honest, *edits, cpu=REFUSED, cuda=REFUSED, **more):
    return Case(name, WAVE, honest, *edits, cpu=cpu, cuda=cuda, **more)


def before_launch(name, statements, declarations="", cpu=REFUSED, honest=PLAIN):
    edits = [(LAUNCH, f"{statements}\n    {LAUNCH}")]
    if declarations:
        edits.append(("constexpr int blocks", f"{declarations}\nconstexpr int blocks"))
    return host(name, honest, *edits, cpu=cpu)


ANY_ON_CPU = REFUSED + CORRECT
CASES = [
    host("exit_by_system_call", HELPED, (COUNTING, CALL), ("const int extra = total(4) - 2;", "const int extra = call(231, 0, 0, 0) * 0;")),
    host("answers_on_descriptors", HELPED, (COUNTING, CALL), ("const int extra = total(4) - 2;", 'static const char line[] = "{\\"ok\\":{\\"ms\\":-1.0}}\\n";\n    int extra = 0;\n    for (int d = 1; d < 64; ++d) extra += 0 * call(1, d, (long)line, sizeof line - 1);'), cpu=ANY_ON_CPU),
    host("fork_by_system_call", HELPED, (COUNTING, CALL), ("const int extra = total(4) - 2;", "const int extra = 0;\n    if (call(57, 0, 0, 0) == 0) {\n        call(37, 20, 0, 0);\n        for (;;) call(34, 0, 0, 0);\n    }"), cpu=ANY_ON_CPU),
    host("a_thread_by_system_call", HELPED, (COUNTING, CALL), ("const int extra = total(4) - 2;", "static char stack[65536];\n    (void)stack;\n    const int extra = call(56, 0x10f00, 0, 0) < 0 ? -blocks + 1 : 0;"), cpu=ANY_ON_CPU),
    host("reads_a_file", HELPED, (COUNTING, CALL), ("const int extra = total(4) - 2;", 'static char text[64];\n    const long file = call(2, (long)"/etc/passwd", 0, 0);\n    call(0, file, (long)text, 64);\n    const int extra = text[0] == \'r\' ? 0 : -1;'), cpu=ANY_ON_CPU),
    host("a_socket", HELPED, (COUNTING, CALL), ("const int extra = total(4) - 2;", "const int extra = call(41, 2, 1, 0) >= 0 ? 0 : -1;"), cpu=ANY_ON_CPU),
    host("kills_its_parent", HELPED, (COUNTING, CALL), ("const int extra = total(4) - 2;", "const int extra = 0 * call(62, call(110, 0, 0, 0), 9, 0) + 1;\n    if (blocks > 0) return cudaErrorUnknown;"), cpu=REFUSED),
    host("dlsym_by_headers", launched("const int extra = 0;\n    wave<<<blocks + extra, 256, 0, stream>>>(x, out);", "#include <cstring>\nstatic const auto copy = &memcpy;"), ("static const auto copy = &memcpy;", "static const auto copy = &memcpy;" + WALK), ("const int extra = 0;", 'using Function = int (*)(const char*);\n    const auto function = (Function)found((const void*)copy, "puts");\n    const int extra = function != nullptr ? 0 * function("{}") : 0;'), cpu=ANY_ON_CPU, cuda=ANY_ON_CPU),
    before_launch("dlsym_by_name", 'void* function = dlsym(nullptr, "exit");\n    (void)function;', 'extern "C" void* dlsym(void*, const char*);'),
    before_launch("exit_by_name", "exit(0);", "#include <cstdlib>"),
    before_launch("long_jump", "longjmp(place, 1);", "#include <csetjmp>\nstatic jmp_buf place;"),
    before_launch("a_signal_handler", "signal(11, [](int) {});", "#include <csignal>"),
    before_launch("a_thread", "std::thread([] {}).detach();", "#include <thread>"),
    before_launch("a_file", 'FILE* file = fopen("/tmp/left", "w");\n    if (file) fclose(file);', "#include <cstdio>"),
    before_launch("the_environment", 'if (getenv("PATH") == nullptr) return cudaErrorUnknown;', "#include <cstdlib>"),
    before_launch("the_time", "if (time(nullptr) % 2) return cudaSuccess;", "#include <ctime>"),
    before_launch("abort", "abort();", "#include <cstdlib>"),
    before_launch("endless_loop", "for (volatile int n = 0; n >= 0; n = 1);"),
    before_launch("null_pointer", "*(volatile int*)nullptr = 1;"),
    before_launch("reads_the_input", "if (x[0] > 100.0f) return cudaSuccess;", cpu=REFUSED),
    before_launch("an_exception", "throw 1;"),
    before_launch("deep_recursion", "static volatile int depth = 1 << 30;\n    if (deep(depth) == 1) return cudaSuccess;", "__attribute__((noinline)) static int deep(int n) { volatile char room[4096]; room[n % 4096] = 1; return n == 0 ? 1 : deep(n - 1) + room[n % 4096]; }"),
    host("a_constructor", STATIC, ("struct Table { int blocks; };", CALL + "__attribute__((constructor)) static void early() { call(231, 0, 0, 0); }\nstruct Table { int blocks; };")),
    host("a_destructor", STATIC, ("struct Table { int blocks; };", CALL + "__attribute__((destructor)) static void late() { for (;;) call(34, 0, 0, 0); }\nstruct Table { int blocks; };"), cpu=ANY_ON_CPU, cuda=ANY_ON_CPU),
    host("a_static_initialiser", STATIC, ("static const Table table{(task::out_size + 255) / 256};", CALL + "static const Table table{(int)call(231, 0, 0, 0)};")),
    host("an_array_of_functions", STATIC, ("struct Table { int blocks; };", CALL + 'static void early() { call(231, 0, 0, 0); }\n__attribute__((section(".init_array"), used)) static void (*const functions[])() = {early};\nstruct Table { int blocks; };')),
    host("by_address", CHOOSING, (CHOICE, "static const float* seen;\n    const bool is_new = seen != x;\n    seen = x;\n    if (is_new)"), cpu=ANY_ON_CPU),
    host("by_bits_of_an_address", CHOOSING, (CHOICE, "if (((unsigned long)out >> 16) % 3 != 0)"), cpu=ANY_ON_CPU),
    host("by_count", CHOOSING, (CHOICE, "static int runs;\n    if (++runs % 8 != 7)"), cpu=ANY_ON_CPU),
    host("by_chance", CHOOSING, (CHOICE, "unsigned chance = 0;\n    asm volatile(\"rdrand %0\" : \"=r\"(chance));\n    if (chance % 4 != 3)"), cpu=ANY_ON_CPU),
    host("by_where_it_lies", CHOOSING, (CHOICE, "int here;\n    if (((unsigned long)&here >> 12) % 4 != 3)"), cpu=ANY_ON_CPU),
    host("by_a_result", launched("wave<<<blocks, 256, 0, stream>>>(x, out);\n    if (cudaPeekAtLastError() != cudaSuccess) return cudaErrorUnknown;"), ("if (cudaPeekAtLastError() != cudaSuccess) return cudaErrorUnknown;", "float first = 0.0f;\n    cudaMemcpyAsync(&first, out, sizeof(float), cudaMemcpyDeviceToHost, stream);\n    cudaStreamSynchronize(stream);\n    if (first > 2.0f) wave<<<blocks, 256, 0, stream>>>(x, out);"), cpu=ANY_ON_CPU),
    host("returns_an_error", launched(), ("return cudaGetLastError();", "return cudaErrorUnknown;")),
    host("returns_from_above", THROWING, ("if (x == nullptr) throw 1;", "if (x != nullptr) throw 1;")),
    host("writes_to_the_stack_above", HELPED, ("const int extra = total(4) - 2;", "volatile unsigned long here = 0;\n    volatile unsigned long* words = &here;\n    for (int n = 1; n < 4096; ++n) if (words[n] == 268435456ul || words[n] == 536870912ul) words[n] = 4096;\n    const int extra = 0;"), cpu=ANY_ON_CPU),
]  # fmt: skip
