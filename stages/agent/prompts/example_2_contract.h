namespace task {
// x: float [512, 16, 1000], argument 1, read
constexpr long long x_shape[] = {512, 16, 1000};
constexpr long long x_size = 8192000;
constexpr int x_rank = 3;
// out: float [512, 16, 1000], argument 2, written
constexpr long long out_shape[] = {512, 16, 1000};
constexpr long long out_size = 8192000;
constexpr int out_rank = 3;
}
#define TASK_PARAMETERS const float* x, float* out
