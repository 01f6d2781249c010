//! What was compiled is kept, whoever asks for it, and a measurement of how fast the compilers are.

use cuda_agent_emulator::HostToolchain;

use super::*;

#[test]
fn what_was_compiled_is_not_compiled_again() {
    let bench = Bench::new();
    let first = bench.kernel(RELU).unwrap();
    assert_eq!(bench.kernel(RELU).unwrap(), first, "even the seconds are those of then");
    let renamed = Candidate { name: "another".to_owned(), ..candidate(Format::Kernel, RELU) };
    assert_eq!(bench.compiler.compile(&renamed, &relu_task(), &gpu()).unwrap().unwrap(), first);
    let path = first.artifact.files()[0].1.to_path_buf();
    std::fs::write(&path, "damaged").unwrap();
    let again = bench.kernel(RELU).unwrap();
    assert!(std::fs::read(&path).unwrap().starts_with(b"\x7fELF"));
    assert_eq!(again.program, first.program);
}

#[test]
fn another_task_or_architecture_is_another_result() {
    let bench = Bench::new();
    let candidate = candidate(Format::Kernel, RELU);
    let first = bench.kernel(RELU).unwrap();
    let mut task = relu_task();
    task.inputs[0].shape[0] = 128;
    let larger = bench.compiler.compile(&candidate, &task, &gpu()).unwrap().unwrap();
    assert_eq!(launched(&larger)[0].1, [500, 1, 1]);
    let other = target("sm_80");
    let older = bench.compiler.compile(&candidate, &relu_task(), &other).unwrap().unwrap();
    assert_ne!(older.artifact, first.artifact);
}

#[test]
fn threads_that_ask_at_once_share_one_build() {
    let bench = Bench::new();
    let seconds: Vec<f64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..6).map(|_| scope.spawn(|| bench.kernel(RELU).unwrap().seconds)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(seconds.iter().all(|second| *second == seconds[0]), "{seconds:?}");
}

#[test]
fn a_missing_toolkit_is_the_evaluators_error() {
    let folder = tempfile::tempdir().unwrap();
    let toolkit = Toolkit::among(Vec::new());
    let compiler = CudaCompiler::with_worker(toolkit, folder.path(), 1, worker_command(), Limits::default()).unwrap();
    for format in [Format::Kernel, Format::Launch] {
        let error = compiler.compile(&candidate(format, RELU), &relu_task(), &gpu()).unwrap_err();
        assert!(error.hint.unwrap().contains("make venv"));
    }
}

#[test]
fn the_cpu_device_gets_the_same_header_and_cache() {
    let folder = tempfile::tempdir().unwrap();
    let here = std::env::current_exe().unwrap();
    let toolchain = HostToolchain::find(&here.with_file_name("cpu-runtimes")).expect("the tests need g++");
    let compiler = CpuCompiler::new(toolchain, folder.path(), 1).unwrap();
    let compile = |task: &TaskSpec| compiler.compile(&candidate(Format::Kernel, RELU), task).unwrap().unwrap();
    let mut task = relu_task();
    let first = compile(&task);
    assert_eq!(compile(&task), first, "even the seconds are those of then");
    assert_eq!(launched(&first)[0].1, [250, 1, 1], "the header says how many elements there are");
    assert!(first.artifact.files().iter().all(|(_, path)| path.starts_with(folder.path())));
    task.inputs[0].shape[0] = 128;
    assert_eq!(launched(&compile(&task))[0].1, [500, 1, 1]);
}

/// Prints how many sources a second are compiled; `cargo test … throughput -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn throughput() {
    let workers = std::thread::available_parallelism().map_or(2, usize::from);
    let folder = tempfile::tempdir().unwrap();
    let compiler =
        CudaCompiler::with_worker(Toolkit::find(), folder.path(), workers, worker_command(), Limits::default())
            .unwrap();
    let run = |what: &str, format: Format, source_of: &(dyn Fn(usize) -> String + Sync), count: usize| {
        let next = std::sync::atomic::AtomicUsize::new(0);
        let start = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(|| {
                    loop {
                        let number = next.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                        if number >= count {
                            break;
                        }
                        let _ = compiler.compile(&candidate(format, &source_of(number)), &relu_task(), &gpu()).unwrap();
                    }
                });
            }
        });
        println!("{what}: {:.1} a second with {workers} workers", count as f64 / start.elapsed().as_secs_f64());
    };
    run("start", Format::Kernel, &|n| format!("{RELU}// {n}\n"), workers);
    run("kernel, broken", Format::Kernel, &|n| kernel_source("", &format!("out[{n}] = sigmoid(x[0]);")), 400);
    run("kernel, right", Format::Kernel, &|n| format!("{RELU}// right {n}\n"), 200);
    run("kernel, right, cached", Format::Kernel, &|n| format!("{RELU}// right {n}\n"), 200);
    run("launch, broken", Format::Launch, &|n| launch_source("", &format!("missing({n});")), 8);
    run("launch, right", Format::Launch, &|n| launch_source("", &format!("int a = {n}; (void)a;")), 8);
}
