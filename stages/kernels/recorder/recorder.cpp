// The process: what it is told, what it answers, and the one call in between.
#include "recorder.h"

#include <alloca.h>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <unistd.h>

// Made by task.h: it calls the candidate's `launch`.
extern "C" int task_run(void* const* arguments, cudaStream_t stream);

namespace recorder {

namespace {

// More is no recording of a launch.
constexpr size_t MOST_BYTES = 16 << 20;

int out = 1;

// The runner repeats what the first call starts. Host code that starts other work in a later call (counts them, remembers
// addresses, computes once) would mean something else, so it is called some more times, while that takes little time.
constexpr size_t AGAIN = 20;
constexpr clock_t LONGEST = CLOCKS_PER_SEC / 4;

// Words between blanks. Streams would be simpler and make the program four times as large, which has to be linked for each
// candidate.
class Words {
public:
    Words() {
        char piece[65536];
        for (ssize_t count; (count = read(0, piece, sizeof piece)) > 0;) text_.append(piece, (size_t)count);
    }

    std::string word() {
        skip();
        size_t end = at_;
        while (end < text_.size() && text_[end] != ' ' && text_[end] != '\n') ++end;
        if (end == at_) abort();
        std::string word = text_.substr(at_, end - at_);
        at_ = end;
        return word;
    }

    template <class Number> Number number() {
        std::string digits = word();
        return digits[0] == '-' ? (Number)strtoll(digits.c_str(), nullptr, 10) : (Number)strtoull(digits.c_str(), nullptr, 10);
    }

    // What is left of a line.
    std::string line() {
        skip();
        size_t end = text_.find('\n', at_);
        return text_.substr(at_, end - at_);
    }

private:
    void skip() {
        while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
    }

    std::string text_;
    size_t at_ = 0;
};

Facts read_facts() {
    Words in;
    Facts facts;
    auto count_of = [&in]() { return in.word(), in.number<size_t>(); };
    in.word(), facts.lowest = in.number<uint64_t>(), facts.end = in.number<uint64_t>();
    for (size_t count = count_of(); count > 0; --count) facts.arguments.push_back(in.number<uint64_t>());
    for (size_t count = count_of(); count > 0; --count) {
        Kernel kernel;
        kernel.symbol = in.word();
        kernel.index = (uint32_t)facts.kernels.size();
        kernel.registers = in.number<int>(), kernel.static_shared = in.number<int>();
        kernel.local = in.number<int>(), kernel.max_threads = in.number<int>();
        kernel.parameter_bytes = 0;
        for (size_t parameters = in.number<size_t>(); parameters > 0; --parameters) {
            uint32_t offset = in.number<uint32_t>(), size = in.number<uint32_t>();
            kernel.parameters.emplace_back(offset, size);
            if (offset + size > kernel.parameter_bytes) kernel.parameter_bytes = offset + size;
        }
        facts.kernels.push_back(kernel);
    }
    for (size_t count = count_of(); count > 0; --count) {
        Stretch variable;
        variable.symbol = in.word(), variable.base = in.number<uint64_t>(), variable.size = in.number<uint64_t>();
        facts.variables.push_back(variable);
    }
    for (size_t count = count_of(); count > 0; --count) facts.attributes.push_back(in.number<int>());
    in.word(), facts.memory = in.number<uint64_t>();
    in.word(), facts.driver = in.number<int>();
    in.word(), facts.name = in.line();
    return facts;
}

}  // namespace

Facts& facts() {
    static Facts* known = new Facts(read_facts());
    return *known;
}

Output& output() {
    static Output* output = new Output;
    return *output;
}

void Output::put(const void* data, size_t size) {
    if (size > MOST_BYTES || bytes_.size() + size > MOST_BYTES) {
        clear();
        refuse("launch", "what it starts takes more than 16 MiB to note");
    }
    bytes_.append((const char*)data, size);
}

void Output::end_attribute() {
    if (is_again_) {
        bytes_.resize(attribute_);
        return;
    }
    work_.append(bytes_, after_attribute_, attribute_ - after_attribute_);
    after_attribute_ = bytes_.size();
}

void Output::begin_again() {
    if (!is_again_) {
        work_.append(bytes_, after_attribute_, std::string::npos);
        first_ = bytes_;
    }
    is_again_ = true;
    bytes_.clear();
}

void Output::end() {
    for (size_t at = 0; at < bytes_.size();) {
        ssize_t count = write(out, bytes_.data() + at, bytes_.size() - at);
        if (count <= 0) _exit(3);
        at += (size_t)count;
    }
    _exit(0);
}

void refuse(const char* name, const std::string& why) {
    output().clear();
    output().byte(REFUSED), output().text(name), output().text(why);
    output().end();
}

// Results of functions left their values on the stack; what a structure has between its members would be one of those.
static __attribute__((noinline)) void clear_stack() {
    volatile char below[256 << 10];
    for (size_t at = 0; at < sizeof below; ++at) below[at] = 0;
}

// So many pages further down the stack than other calls: what is done must not follow from where it lies.
static __attribute__((noinline)) int call(const std::vector<void*>& arguments, size_t pages) {
    volatile char* room = (volatile char*)alloca(pages * 4096 + 1);
    room[0] = 0;
    clear_stack();
    return task_run(arguments.data(), (cudaStream_t)facts().end);
}

}  // namespace recorder

int main() {
    using namespace recorder;
    // What the candidate prints goes to standard error.
    out = dup(1);
    if (out < 0 || dup2(2, 1) < 0) return 3;
    std::vector<void*> arguments;
    for (uint64_t address : facts().arguments) arguments.push_back((void*)address);
    int code = call(arguments, 0);
    for (size_t times = 1; times <= AGAIN && clock() < LONGEST; ++times) {
        output().begin_again();
        int again = call(arguments, times);
        if (again != code || !output().is_same()) {
            refuse("launch", "it does not start the same work each time: a later call of the same process starts other work");
        }
        output().end_again();
    }
    output().byte(RETURNED), output().u32((uint32_t)code);
    output().end();
}
