// A stand-in of CUDA's runtime that notes what a candidate's host code asks for. There is no GPU in its process: the
// addresses of tensors are made up, and so is the stream. What it knows of the GPU and of the candidate's kernels comes
// on standard input (src/compile/recorder/request.rs); what it noted goes out in one piece at the end
// (src/compile/recorder/recording.rs reads it, and believes nothing).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

namespace recorder {

// One kernel of the candidate's machine code.
struct Kernel {
    std::string symbol;
    uint32_t index;
    int registers, static_shared, local, max_threads;
    std::vector<std::pair<uint32_t, uint32_t>> parameters;  // offset and size of each, in bytes
    uint32_t parameter_bytes;
    // What the candidate set.
    int max_dynamic_shared = -1;  // -1: the usual limit
    int carveout = -1;
    int non_portable_cluster = 0;
};

// A stretch of made-up addresses: a tensor, the scratch buffer, a variable of the machine code.
struct Stretch {
    std::string symbol;  // empty for tensors
    uint64_t base, size;
};

struct Facts {
    std::vector<uint64_t> arguments;  // addresses of the tensors and of the scratch buffer
    std::vector<Kernel> kernels;
    std::vector<Stretch> variables;
    uint64_t lowest, end;  // every made-up address lies in there
    std::vector<int> attributes;  // of the device, by number
    std::string name;
    uint64_t memory;
    int driver;
};

// Read when it is first needed: a candidate's constructors run before main.
Facts& facts();

int attribute(int number);

// The kernel that a host function stands for; none where it stands for none.
Kernel* kernel_of(const void* function);

// Bytes of dynamic shared memory that a launch may ask for.
uint64_t dynamic_shared_limit(const Kernel& kernel);

// Notes why the candidate can't be recorded, and ends the process. `name` is what the source calls.
[[noreturn]] void refuse(const char* name, const std::string& why);

// Remembers an error for cudaGetLastError, as every function of the runtime does.
cudaError_t fail(cudaError_t error);

// What goes out.
class Output {
public:
    void byte(uint8_t value) { put(&value, 1); }
    void u32(uint32_t value) { put(&value, 4); }
    void u64(uint64_t value) { put(&value, 8); }
    void put(const void* data, size_t size);
    void text(const std::string& text) { u32((uint32_t)text.size()), put(text.data(), text.size()); }
    [[noreturn]] void end();

    // Between these two lie attributes of a kernel. They last, so that a later call need not set them again.
    void begin_attribute() { attribute_ = bytes_.size(); }
    void end_attribute();

    // A further call begins, whose notes are only compared with those of the first.
    void begin_again();
    // Whether it noted the same work.
    bool is_same() const { return bytes_ == work_; }
    // Back to the notes of the first.
    void end_again() { bytes_ = first_; }
    // Nothing was noted.
    void clear() { bytes_ = "CARECORD"; }

private:
    std::string bytes_ = "CARECORD";
    std::string work_;   // of the first call, without attributes
    std::string first_;  // all of it
    size_t attribute_ = 0, after_attribute_ = 8;
    bool is_again_ = false;
};

Output& output();

// Kinds of notes; recording.rs has the same.
enum Note : uint8_t { LAUNCH = 1, FILL, COPY, WRITE, ATTRIBUTE, REFUSED, RETURNED };

}  // namespace recorder
