namespace task {
// x: float [64, 96, 32, 128], argument 1, read
constexpr long long x_shape[] = {64, 96, 32, 128};
constexpr long long x_size = 25165824;
constexpr int x_rank = 4;
// out: float [64, 96, 32], argument 2, written
constexpr long long out_shape[] = {64, 96, 32};
constexpr long long out_size = 196608;
constexpr int out_rank = 3;
}
#define TASK_PARAMETERS const float* x, float* out
