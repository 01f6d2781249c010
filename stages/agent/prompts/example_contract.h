namespace task {
// x: float [1024, 4096], argument 1, read
constexpr long long x_shape[] = {1024, 4096};
constexpr long long x_size = 4194304;
constexpr int x_rank = 2;
// out: float [1024, 4096], argument 2, written
constexpr long long out_shape[] = {1024, 4096};
constexpr long long out_size = 4194304;
constexpr int out_rank = 2;
}
#define TASK_PARAMETERS const float* x, float* out
