namespace task {
// x: float [512, 24, 32, 32], argument 1, read
constexpr long long x_shape[] = {512, 24, 32, 32};
constexpr long long x_size = 12582912;
constexpr int x_rank = 4;
// norm_weight: float [24], argument 2, read
constexpr long long norm_weight_shape[] = {24};
constexpr long long norm_weight_size = 24;
constexpr int norm_weight_rank = 1;
// norm_bias: float [24], argument 3, read
constexpr long long norm_bias_shape[] = {24};
constexpr long long norm_bias_size = 24;
constexpr int norm_bias_rank = 1;
// out: float [512, 24, 32, 32], argument 4, written
constexpr long long out_shape[] = {512, 24, 32, 32};
constexpr long long out_size = 12582912;
constexpr int out_rank = 4;
constexpr int num_features = 24;
}
#define TASK_PARAMETERS const float* x, const float* norm_weight, const float* norm_bias, float* out
