namespace task {
// x: float [64, 256, 32, 32], argument 1, read
constexpr long long x_shape[] = {64, 256, 32, 32};
constexpr long long x_size = 16777216;
constexpr int x_rank = 4;
// out: float [64, 32, 32], argument 2, written
constexpr long long out_shape[] = {64, 32, 32};
constexpr long long out_size = 65536;
constexpr int out_rank = 3;
}
#define TASK_PARAMETERS const float* x, float* out
