namespace task {
// x: float [512, 24, 32, 32], argument 1, read
constexpr long long x_shape[] = {512, 24, 32, 32};
constexpr long long x_size = 12582912;
constexpr int x_rank = 4;
// out: float [512, 24, 32, 32], argument 2, written
constexpr long long out_shape[] = {512, 24, 32, 32};
constexpr long long out_size = 12582912;
constexpr int out_rank = 4;
constexpr int num_features = 24;
}
#define TASK_PARAMETERS const float* x, float* out
