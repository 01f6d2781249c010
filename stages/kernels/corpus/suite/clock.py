"""Host code that moves work out of sight of the clock, or makes time of its own. The CPU device takes no times."""

from .case import CORRECT, REFUSED, UNSUPPORTED, WAVE, Case, launched

ANY_ON_CPU = REFUSED + CORRECT
LAUNCH = "wave<<<blocks, 256, 0, stream>>>(x, out);"
TWO = launched("""wave<<<blocks, 256, 0, stream>>>(x, out);
    again<<<blocks, 256, 0, stream>>>(x, out);""", """
__global__ void again(const float* x, float* out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < task::out_size) out[i] += x[i];
}""", kernel="out[i] = sinf(x[i]);")  # fmt: skip
CONFIGURED = launched("""cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(256);
    config.stream = stream;
    cudaLaunchKernelEx(&config, wave, x, out);""")  # fmt: skip
DEPENDENT = launched("""wave<<<blocks, 256, 0, stream>>>(x, out);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(256);
    config.stream = stream;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    cudaLaunchKernelEx(&config, again, x, out);""", """
__global__ void again(const float* x, float* out) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    cudaGridDependencySynchronize();
    if (i < task::out_size) out[i] += x[i];
}""", kernel="out[i] = sinf(x[i]);")  # fmt: skip
FIRST_EARLY = """wave<<<blocks, 256, 0, stream>>>(x, out);
    cudaLaunchConfig_t config"""


def host(name, honest, *edits, cpu=ANY_ON_CPU, cuda=REFUSED, **more):
    return Case(name, WAVE, honest, *edits, cpu=cpu, cuda=cuda, **more)


CASES = [
    host("per_thread_stream", launched(), ("0, stream>>>", "0, (cudaStream_t)2>>>")),
    host("legacy_stream", launched(), ("0, stream>>>", "0, (cudaStream_t)1>>>"), cuda=ANY_ON_CPU),
    host("no_stream", launched(), ("0, stream>>>", "0, (cudaStream_t)7>>>")),
    host("the_second_on_another_stream", TWO, ("again<<<blocks, 256, 0, stream>>>", "again<<<blocks, 256, 0, (cudaStream_t)2>>>")),
    host("a_copy_on_another_stream", launched("wave<<<blocks, 256, 0, stream>>>(x, (float*)scratch);\n    cudaMemcpyAsync(out, scratch, sizeof(float) * task::out_size, cudaMemcpyDeviceToDevice, stream);", "TASK_SCRATCH(sizeof(float) * task::out_size);"),
         ("cudaMemcpyDeviceToDevice, stream)", "cudaMemcpyDeviceToDevice, (cudaStream_t)2)")),
    host("configured_for_another_stream", CONFIGURED, ("config.stream = stream;", "config.stream = (cudaStream_t)2;"), twin_cpu=CORRECT + UNSUPPORTED),
    host("a_stream_of_its_own", launched(), (LAUNCH, "cudaStream_t own;\n    cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking);\n    wave<<<blocks, 256, 0, own>>>(x, out);")),
    host("a_callback_on_the_host", launched(), (LAUNCH, LAUNCH + "\n    cudaLaunchHostFunc(stream, [](void*) { for (volatile int n = 0; n < 1000; n = n + 1); }, nullptr);")),
    host("a_graph", launched(), (LAUNCH, "cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed);\n    wave<<<blocks, 256, 0, stream>>>(x, out);\n    cudaGraph_t graph;\n    cudaStreamEndCapture(stream, &graph);\n    cudaGraphExec_t exec;\n    cudaGraphInstantiate(&exec, graph, 0);\n    cudaGraphLaunch(exec, stream);")),
    host("an_event", launched(), (LAUNCH, "cudaEvent_t event;\n    cudaEventCreate(&event);\n    wave<<<blocks, 256, 0, stream>>>(x, out);\n    cudaEventRecord(event, stream);\n    cudaStreamWaitEvent(stream, event, 0);")),
    host("dependent_before_its_time", DEPENDENT, ("wave<<<blocks, 256, 0, stream>>>(x, out);\n", ""), ("cudaLaunchKernelEx(&config, again, x, out);", "cudaLaunchKernelEx(&config, wave, x, out);\n    cudaLaunchKernelEx(&config, again, x, out);"), ("    cudaGridDependencySynchronize();\n", "    if (i == 0) cudaGridDependencySynchronize();\n"), cuda=ANY_ON_CPU, twin_cpu=CORRECT + UNSUPPORTED),
    host("a_window_kept_in_the_cache", CONFIGURED, ("cudaLaunchKernelEx(", "cudaLaunchAttribute attribute = {};\n    attribute.id = cudaLaunchAttributeAccessPolicyWindow;\n    attribute.val.accessPolicyWindow.base_ptr = (void*)x;\n    attribute.val.accessPolicyWindow.num_bytes = sizeof(float) * task::out_size;\n    attribute.val.accessPolicyWindow.hitRatio = 1.0f;\n    attribute.val.accessPolicyWindow.hitProp = cudaAccessPropertyPersisting;\n    config.attrs = &attribute;\n    config.numAttrs = 1;\n    cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, 1 << 24);\n    cudaLaunchKernelEx("), twin_cpu=CORRECT + UNSUPPORTED),
    host("a_stream_out_of_the_air", launched(), ("0, stream>>>", "0, (cudaStream_t)((char*)stream + 64)>>>")),
    host("timed_by_the_host", launched(), (LAUNCH, "unsigned low, high;\n    asm volatile(\"rdtsc\" : \"=a\"(low), \"=d\"(high));\n    static unsigned before;\n    if (low - before > 100u) wave<<<blocks, 256, 0, stream>>>(x, out);\n    before = low | 1u;"), cpu=ANY_ON_CPU, cuda=ANY_ON_CPU),
]  # fmt: skip
